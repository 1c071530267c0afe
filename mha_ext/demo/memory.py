"""How much memory a piece of work needs at its worst moment, beyond what was resident before it.

The number is the growth of the process's largest resident set. Linux lets a process reset that mark
(``/proc/self/clear_refs``); elsewhere the mark of the whole life of the process is used, which is right as long as
nothing before the work was larger. Memory that the allocator kept from earlier work hides growth, so a measurement
belongs into a process of its own.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no field {field}")


def _lifetime_peak_bytes() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_extra_bytes(work: Callable[[], object]) -> int:
    """Runs the work and returns the growth of the largest resident set while it ran, in bytes."""
    gc.collect()
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        before = _status_bytes("VmRSS")
        work()
        return max(0, _status_bytes("VmHWM") - before)
    except OSError:
        before = _lifetime_peak_bytes()
        work()
        return max(0, _lifetime_peak_bytes() - before)


def measure_in_child(module: str, request: Mapping[str, object]) -> int:
    """Runs ``python -m module`` with the request as JSON and returns the number of bytes it prints."""
    command = [sys.executable, "-m", module, json.dumps(request)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"{module} failed with {request}:\n{finished.stderr.strip()}")
    return int(finished.stdout.split()[-1])
