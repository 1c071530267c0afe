"""The demonstration runs from the command line, in a plain pipe, and says what it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

from mha_ext.demo.__main__ import main

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
        "initial values of both models, bit for bit: ok",
        "held-out text",
        "time (median)",
        "peak extra memory",
        "input and all parameters, causal: ok",
        "gradient of in_proj_weight",
        "eq. 20.4",
        "eq. 20.5",
        "(8, 4, 64, 64)",
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
