"""Runs functions of ``distributed_checks`` in two processes that share a gloo group, and reports what failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("distributed_worker.py")


def run_in_two(directory: Path, *names: str) -> None:
    """Every function is called in both processes with the mesh of both; one that raises fails the caller."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(directory / "group")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), *names], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        reports = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, report in zip(processes, reports, strict=True):
        assert process.returncode == 0, "\n".join(reports)
        done = [line for line in report.splitlines() if line in names]  # each says its name when it is done
        assert done == list(names), report
