"""The demonstration runs from the command line, in a plain pipe, and says what it should."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

import torch
from rich.console import Console

from mha_ext.demo import half, report
from mha_ext.demo.__main__ import main
from mha_ext.demo.model import ModelConfig
from mha_ext.demo.text import draw_batch
from mha_ext.demo.training import make_learner

TIMEOUT = 300  # seconds; a quiet machine needs a tenth, but a test must not fail because others share it


def run_demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mha_ext.demo", *arguments]
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=TIMEOUT,
        env={**variables, "PYTHONIOENCODING": "utf-8", **environment},
        check=False,
    )


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    directory = tmp_path_factory.mktemp("demo")
    return run_demo("--quick", "--steps", "16", "--threads", "1", "--output", str(directory)), directory


def test_quick_run_succeeds(quick_run):
    finished, _ = quick_run
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stderr == ""
    assert "FAILED" not in finished.stdout


def test_every_part_is_printed(quick_run):
    finished, _ = quick_run
    parts = (
        "initial values of all models, bit for bit: ok",
        "held-out text",
        "time (median)",
        "peak extra memory",
        "input and all parameters, causal: ok",
        "gradient of in_proj_weight",
        "eq. 20.4",
        "eq. 20.5",
        "(8, 4, 64, 64)",
        "trained in bfloat16 to the same loss: ok",
        "mha_ext.convert(model) trains to the same loss: ok",
        "written by the mha_ext model",
        "all checks: ok",
    )
    for part in parts:
        assert part in finished.stdout, part


def test_losses_of_both_models_agree(quick_run):
    finished, _ = quick_run
    row = re.search(r"^1-2 +(\S+) +(\S+) +(\S+)$", finished.stdout, re.MULTILINE)
    assert row is not None
    assert abs(float(row[3])) < 1e-4


def test_training_in_bfloat16_ends_within_the_bound_that_is_printed(quick_run):
    finished, _ = quick_run
    row = re.search(r"^held-out text, nats per character +(\S+) +(\S+) +(\S+) +(\S+)$", finished.stdout, re.MULTILINE)
    assert row is not None
    whole, rounded, apart, bound = map(float, row.groups())
    assert 0 < abs(apart) <= bound < 0.1
    assert abs(rounded - whole - apart) <= 2e-4  # the losses are printed with four places


@pytest.mark.parametrize(("apart", "agree"), [(0.02, True), (-0.02, True), (0.04, False), (-0.04, False)])
def test_a_loss_beyond_the_bound_fails(apart, agree):
    config = ModelConfig(5, batch=2, context=4, width=8, heads=2, layers=1)
    rounded = half.make_half_learner(config, 1, seed=0)
    whole = make_learner("mha_ext", config, 1, seed=0)
    for learner in (whole, rounded):
        learner.step(torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64))
    console = Console(width=100, record=True, file=io.StringIO())
    losses = {"mha_ext": 2.0, "mha_ext bf16": 2.0 + apart}
    assert report.print_half(console, (whole, rounded), losses, 0.03) is agree
    assert ("FAILED" in console.export_text()) is not agree


def test_the_bound_is_what_a_rounding_of_the_logits_can_do():
    """No rounding of logits moves the mean loss further, and one against every target moves it nearly so far."""
    config = ModelConfig(5, batch=3, context=6, width=8, heads=2, layers=1)
    learner = make_learner("mha_ext", config, 1, seed=0)
    codes = torch.randint(5, (40,), generator=torch.Generator().manual_seed(1))
    bound = half.loss_bound(learner, codes, seed=2)
    batch, following = draw_batch(codes, 3, 6, torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = learner.model(batch)
        away = 1 - 2 * torch.nn.functional.one_hot(following, 5)
        moved = logits + logits.abs().amax(-1, keepdim=True) / 256 * away
        losses = [torch.nn.functional.cross_entropy(x.flatten(0, 1), following.flatten()) for x in (logits, moved)]
    assert 0.5 * bound < float(losses[1] - losses[0]) < bound


def test_the_model_in_bfloat16_computes_in_it_and_keeps_float32_parameters():
    config = ModelConfig(5, batch=2, context=4, width=8, heads=2, layers=1)
    learner, seen = half.make_half_learner(config, 1, seed=0), []
    layer = learner.model.attention_layers()[0]
    layer.register_forward_hook(lambda module, arguments, result: seen.append(result[0].dtype))
    learner.step(torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64))
    assert seen == [torch.bfloat16]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in learner.model.parameters())


def test_no_control_characters_in_a_pipe(quick_run):
    finished, _ = quick_run
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", finished.stdout)


def test_picture_is_saved_where_the_output_says(quick_run):
    pytest.importorskip("matplotlib")
    finished, directory = quick_run
    path = re.search(r"^picture: (.+)$", finished.stdout, re.MULTILINE)
    assert path is not None
    assert Path(path[1]).parent == directory.resolve()
    assert Path(path[1]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--steps", "--threads"])
def test_sizes_must_be_positive(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--quick", option, "0"])
    assert stopped.value.code == 2
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err
