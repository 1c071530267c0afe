"""What a person reads whose machine cannot build the project."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "check_environment.py"


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
