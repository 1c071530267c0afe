"""Text generation as an example: the command line, and what it says about the cache."""

from __future__ import annotations

import dataclasses
import doctest
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

import mha_ext.generate
from mha_ext.demo.model import ModelConfig
from mha_ext.generate import memory, report, speed
from mha_ext.generate.__main__ import main
from mha_ext.generate.agreement import compare
from mha_ext.generate.model import WindowedModel, build_windowed_model
from mha_ext.generate.sampling import Drawn, greedy, write

TIMEOUT = 300  # seconds; a quiet machine needs a tenth, but a test must not fail because others share it
CONFIG = ModelConfig(11, batch=2, context=32, width=32, heads=8, layers=2)
WINDOW = 5

Run = tuple[subprocess.CompletedProcess[str], Path]


def lively_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> WindowedModel:
    """Untrained, with weights so large that characters depend on those before them."""
    model = build_windowed_model(CONFIG, 2, WINDOW, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("generate")
    options = [
        "--quick",
        "--steps",
        "8",
        "--threads",
        "1",
        "--length",
        "50",
        "--top-k",
        "5",
        "--output",
        str(directory),
    ]
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    finished = subprocess.run(
        [sys.executable, "-m", "mha_ext.generate", *options],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=TIMEOUT,
        env={**variables, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    return finished, directory


def test_quick_run_succeeds(quick_run: Run) -> None:
    finished, _ = quick_run
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stderr == ""
    assert "FAILED" not in finished.stdout
    assert "…" not in finished.stdout  # nothing was cut off
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", finished.stdout)


def test_every_part_is_printed_and_reported(quick_run: Run) -> None:
    finished, directory = quick_run
    parts = (
        "Loss on held-out text",
        "cached logits are those of re-running, within the bound: ok",
        "Characters a second after a text of some length",
        "torch.nn.MultiheadAttention",
        "bytes are those of the formula: ok",
        "A text that the model wrote",
    )
    written = (directory / "report.md").read_text(encoding="utf-8")
    for part in parts:
        assert part in finished.stdout, part
        assert part in written, part
    assert "all checks: ok" in finished.stdout


def test_cached_text_is_that_of_re_running(quick_run: Run) -> None:
    finished, _ = quick_run
    for name in ("whole text kept", "rolling"):
        row = re.search(rf"^{name} +(\d+) of (\d+) +(\S+) +(\S+)$", finished.stdout, re.MULTILINE)
        assert row is not None
        assert row[1] == row[2] == "100"
        assert float(row[3]) < 1e-4


def test_every_length_has_its_speeds(quick_run: Run) -> None:
    _, directory = quick_run
    rows = re.findall(r"^\| (\d+) \|((?: \d+ \(\d+-\d+\) \|){3})", (directory / "report.md").read_text(), re.MULTILINE)
    assert [row[0] for row in rows] == ["128", "256", "512"]


def test_bytes_in_the_report_are_those_of_the_formula(quick_run: Run) -> None:
    _, directory = quick_run
    number = r" (\S+) \|"
    pattern = rf"^\| (\w+), H_kv = (\d) \|{4 * number}$"
    rows = re.findall(pattern, (directory / "report.md").read_text(), re.MULTILINE)
    assert len(rows) == 9
    layers, batch, head_dim = 2, 1, 8
    for storage, kv_heads, *sizes in rows:
        vector = {"float32": head_dim * 4, "bfloat16": head_dim * 2, "int8": head_dim * 1 + 4}[storage]
        for length, size in zip((128, 256, 512, 2 * 32), sizes, strict=True):
            assert float(size) == 2 * layers * batch * int(kv_heads) * length * vector / 1024


def test_picture_is_saved_where_the_output_says(quick_run: Run) -> None:
    pytest.importorskip("matplotlib")
    finished, directory = quick_run
    path = re.search(r"^picture: (.+)$", finished.stdout, re.MULTILINE)
    assert path is not None
    assert Path(path[1]).parent == directory.resolve()
    assert Path(path[1]).read_bytes().startswith(b"\x89PNG")
    assert f"]({Path(path[1]).name})" in (directory / "report.md").read_text()


def test_the_sample_has_the_length_that_was_asked_for(quick_run: Run) -> None:
    _, directory = quick_run
    section = (directory / "report.md").read_text().split("## A text that the model wrote\n\n")[1].split("\n\n![")[0]
    text = "\n".join(line[4:] for line in section.split("\n"))
    assert text.startswith("The ")
    assert 50 <= len(text) <= len("The ") + 50  # a newline at the end is lost


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--top-k", "-1"], "--top-k must be at least 1, got -1"),
        (["--kv-heads", "3"], "--kv-heads must divide the model's 8 heads, got 3"),
        (["--window", "0"], "--window must be at least 1, got 0"),
        (["--temperature", "-0.5"], "--temperature must be 0 or more and finite, got -0.5"),
        (["--temperature", "nan"], "--temperature must be 0 or more and finite, got nan"),
        (["--prompt", ""], "--prompt must be characters of the training text, got nothing"),
        (["--prompt", "Ça"], "--prompt must be characters of the training text, got 'Ça', of which the text lacks 'Ç'"),
        (["--seed", str(2**64)], "--seed must be from -2**63 to 2**64 - 1, got 18446744073709551616"),
        (["--dtype", "fp8"], "argument --dtype: invalid choice: 'fp8'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--quick", *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_example_in_the_documentation_runs() -> None:
    results = doctest.testmod(mha_ext.generate)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_caches_pass(dtype: torch.dtype, seed: int) -> None:
    found = compare(lively_model(dtype, seed), torch.arange(11), 30)
    assert found.passed
    assert [entry.name for entry in found.exact] == ["whole text kept", "rolling"]
    if dtype == torch.float32:
        assert all(entry.same == entry.total == 30 for entry in found.exact)


class ForgetfulCache(mha_ext.KVCache):
    """It holds less than it says."""

    @property
    def window(self) -> int:
        return WINDOW


class ForgetfulModel(WindowedModel):
    """Its caches roll too early."""

    def make_caches(self, max_length: int | None, storage: str | None = None) -> list[mha_ext.KVCache]:
        caches = super().make_caches(max_length, storage)
        return caches if max_length else [ForgetfulCache(1, 2, None, 4, window=WINDOW // 2) for _ in caches]


def test_a_cache_that_forgets_fails() -> None:
    model = ForgetfulModel(CONFIG, 2, WINDOW).eval()
    model.load_state_dict(lively_model().state_dict())
    found = compare(model, torch.arange(11), 30)
    assert not found.passed
    whole, rolling = found.exact
    assert whole.apart <= found.bound < rolling.apart


def test_re_running_that_is_wrong_fails() -> None:
    """An error that only float32 has is not taken for rounding."""
    model = lively_model()
    model.head.register_forward_hook(lambda _, __, out: out + 1e-2 if out.dtype == torch.float32 else out)
    found = compare(model, torch.arange(11), 10)
    assert not found.passed
    assert all(entry.apart <= found.bound for entry in found.exact)


def test_characters_before_the_receptive_field_do_not_matter() -> None:
    model, reach = lively_model(torch.float64), CONFIG.layers * (WINDOW - 1) + 1
    codes = torch.arange(reach + 1).remainder(11)
    with torch.no_grad():
        expected = model(codes[None])[0, -1]
        for place, differs in ((0, False), (1, True)):
            changed = codes.clone()
            changed[place] += 2
            assert (float((model(changed[None])[0, -1] - expected).abs().max()) > 1e-9) is differs


def test_writing_goes_on_greedily_from_every_prefix() -> None:
    model = lively_model(torch.float64)
    prompt = torch.tensor([3, 1, 4])
    written = write(model, prompt, 12, greedy, model.make_caches(None))
    assert torch.equal(written.codes[:3], prompt)
    with torch.no_grad():
        for place in range(3, 15):
            logits = model(written.codes[None, :place])[0, -1]
            torch.testing.assert_close(written.logits[place - 3], logits, rtol=0, atol=1e-11)
            assert written.codes[place] == max(range(11), key=lambda index: float(logits[index]))


def test_drawing_follows_the_probabilities_of_the_likeliest() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])
    choose, count = Drawn(0.5, 3, torch.Generator().manual_seed(0)), 4000
    drawn = torch.cat([choose(logits) for _ in range(count)])
    weights = [0.0, 2.718281828459045**4, 2.718281828459045**2, 0.0, 2.718281828459045**3]
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        # five standard deviations of a binomial share
        assert abs(float((drawn == index).double().mean()) - share) <= 5 * (share * (1 - share) / count) ** 0.5
    everything = Drawn(1.0, None, torch.Generator().manual_seed(0))
    assert {int(everything(logits)) for _ in range(400)} == set(range(5))
    assert int(Drawn(1e-310, None, torch.Generator())(logits)) == 1
    assert int(Drawn(1.0, 1, torch.Generator())(logits)) == 1


def test_rates_and_gains_are_medians_of_rounds() -> None:
    entry = speed.Speeds(8)
    entry.seconds[speed.CACHE] = [0.1, 0.2, 0.1, 0.5, 0.25]
    entry.seconds[speed.AGAIN] = [0.2, 0.8, 0.3, 0.5, 2.5]
    assert entry.rate(speed.CACHE) == (4.0, 5.0, 10.0)
    assert entry.gain(speed.AGAIN) == pytest.approx(3.0)


def test_measuring_has_all_ways_in_every_round_and_restores_the_setting() -> None:
    model, shown = lively_model(), []
    plan = speed.Measured((3, 9), rounds=2, count=2)
    results = speed.measure(model, torch.arange(9), plan, lambda done, text: shown.append((done, text)))
    assert [entry.length for entry in results] == [3, 9]
    for entry in results:
        assert [len(seconds) for seconds in entry.seconds.values()] == [2, 2, 2]
        assert len(entry.prefill) == 2
    assert [done for done, _ in shown] == [1, 2, 3, 4]
    assert torch.backends.mha.get_fastpath_enabled()


def test_bytes_that_are_not_those_of_the_formula_fail() -> None:
    lengths = (7, 20)
    held = memory.cache_bytes(CONFIG, WINDOW, lengths)
    assert [entry.whole for entry in held[:3]] == [(2 * 2 * g * 7 * 4 * 4, 2 * 2 * g * 20 * 4 * 4) for g in (8, 2, 1)]
    console = Console(width=100, file=io.StringIO())
    assert report.report_bytes(report.Report(console), held, lengths, WINDOW)
    held[4] = dataclasses.replace(held[4], whole=(held[4].whole[0] + 1, held[4].whole[1]))
    assert not report.report_bytes(report.Report(console), held, lengths, WINDOW)


def test_layers_are_what_the_run_says() -> None:
    for layer in lively_model().attention_layers():
        assert (layer.num_kv_heads, layer.window, layer.rope is None) == (2, (WINDOW - 1, 0), False)
