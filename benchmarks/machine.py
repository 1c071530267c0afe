"""Where and with what a run was made."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch

import mha_ext


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


def describe() -> dict[str, object]:
    """Returns everything about the machine and the software that a reader needs in order to judge a result."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": processor(),
        "processors_available": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": load(),
        "cpu_capability": mha_ext.cpu_capability(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mha_ext": mha_ext.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
