"""No kernel reads or writes past the end of any buffer, or before its start: its neighbours are pages that may not be
touched, and whoever touches them is killed.

Inputs, masks, parameters, incoming gradients and what forward leaves to backward are cut to the byte
(tests/guarded.py); results, intermediate results and scratch, which torch allocates, to its alignment of 64 bytes, with
a pattern in between (tests/guarded_allocator.c).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from guarded import ALLOCATOR
from guarded_worker import FAULTS

import mha_ext

CAPABILITIES = mha_ext.available_cpu_capabilities()
WORKER = Path(__file__).with_name("guarded_worker.py")


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The allocator as a library to preload."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a C compiler is missing")
    library = tmp_path_factory.mktemp("guarded") / "guarded_allocator.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, ALLOCATOR], check=True)
    return library


def work(allocator: Path, capability: str, number: int, *groups: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": str(allocator)}
    command = [sys.executable, str(WORKER), capability, str(number), *groups]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=570)


def assert_passes(allocator: Path, capability: str, number: int, *groups: str) -> None:
    result = work(allocator, capability, number, *groups)
    named = result.stdout.splitlines()
    ended = signal.Signals(-result.returncode).name if result.returncode < 0 else f"exit status {result.returncode}"
    assert result.returncode == 0, f"{ended} in: {named[-1] if named else 'nothing'}\n{result.stderr}"
    assert len(named) > 4


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nothing_beyond_any_buffer_is_touched(allocator: Path, capability: str) -> None:
    assert_passes(allocator, capability, 0, "many", "few", "products", "layers")


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nothing_beyond_any_buffer_is_touched_in_random_cases(allocator: Path, capability: str) -> None:
    assert_passes(allocator, capability, 100, "random", "all layers")


def test_deliberate_faults_are_caught(allocator: Path) -> None:
    """By a signal; reading what nobody wrote by a comparison."""
    lines = work(allocator, "default", 0, "every fault").stdout.splitlines()
    ended = dict(zip(lines[::2], map(int, lines[1::2]), strict=True))
    touched = dict.fromkeys(FAULTS, -signal.SIGSEGV)
    pattern = {name: -signal.SIGABRT for name in FAULTS if name.startswith("write") and name.endswith("an allocation")}
    assert ended == touched | pattern | {"read what was not written": 3}


def test_the_case_that_was_running_is_named(allocator: Path) -> None:
    fault = "read past the end"
    with pytest.raises(AssertionError, match=f"SIGSEGV in: {fault}"):
        assert_passes(allocator, "default", 0, fault)
