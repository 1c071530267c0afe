"""Where and with what a run was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

import mha_ext
from benchmarks.processors import Allotment

_LIBRARIES = ("onnxruntime", "openvino", "jax")


def processor() -> str:
    """Returns the processor's own name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def load() -> float:
    """Returns how many processes wanted to run, on average over the last minute."""
    return os.getloadavg()[0]


def _libraries() -> dict[str, str]:
    """Versions of the other libraries that are here."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(allotment: Allotment) -> dict[str, object]:
    """Returns everything about the machine and the software that a reader needs in order to judge a result."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": processor(),
        "processors_available": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": allotment.threads,
        "bound_to": list(allotment.processors),
        "load_before": load(),
        "cpu_capability": mha_ext.cpu_capability(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mha_ext": mha_ext.__version__,
        "torch": torch.__version__,
        "libraries": _libraries(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
