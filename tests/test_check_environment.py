"""What a person reads whose machine cannot build the project, or whose build is for another torch."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "check_environment.py"


@pytest.fixture
def check() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_nothing_is_missing_where_the_tests_run(check: dict[str, Any]) -> None:
    assert check["compiler_problem"]() is None


@pytest.mark.parametrize(
    ("compiler", "message"), [("no-such-g++", "no-such-g++ is missing"), ("g++ -bogus", "g++ -bogus cannot compile")]
)
def test_compiler(check: dict[str, Any], monkeypatch: pytest.MonkeyPatch, compiler: str, message: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert message in check["compiler_problem"]()


def test_old_python(check: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert check["python_problem"]().startswith("Python 3.10 or newer is needed, found 3.9")


def test_no_venv_module(check: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "apt install python3." in check["python_problem"]()


def test_no_headers(check: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert check["python_problem"]().startswith("Python.h is missing")


def test_one_line_and_no_stack_trace() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={"CXX": "no-such-g++", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("mha_ext cannot be built here: ")
    assert result.stderr.count("\n") == 1


def test_an_extension_for_another_torch_is_refused_before_it_loads(tmp_path: Path) -> None:
    """It might load all the same, and crash later."""
    package = shutil.copytree(ROOT / "mha_ext", tmp_path / "mha_ext", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "_build_info.json").write_text('{"torch": "2.0.1"}')
    command = [sys.executable, "-c", "import mha_ext"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"was built for torch 2.0.1, but torch {torch.__version__} is running; rebuild it" in result.stderr
