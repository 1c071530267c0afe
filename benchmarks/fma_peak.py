"""How many multiply-adds a second the processor does when it does nothing else: one loop on each thread.

The loop is compiled by the compiler that the extension is built with, for the instruction set that our kernels use.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import mha_ext
from benchmarks import processors

_SOURCE = Path(__file__).with_suffix(".cpp")
_AVX512 = ["-mavx512f", "-mfma", "-DVECTOR_BYTES=64"]
_FLAGS = {"amx": _AVX512, "avx512_bf16": _AVX512, "avx512": _AVX512, "avx2": ["-mavx2", "-mfma", "-DVECTOR_BYTES=32"]}
_SIZES = {"fp32": 4, "fp64": 8}
_STEPS = 500_000  # a few milliseconds
_REPEATS = 20


def compile_loop(target: Path, *kind: str) -> None:
    """Runs the compiler; ``kind`` says what is made (``-shared``, ``-S``)."""
    flags = ["-O2", "-ffp-contract=fast", "-fPIC", *_FLAGS[mha_ext.cpu_capability()], *kind]
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    subprocess.run([*compiler, *flags, str(_SOURCE), "-o", str(target)], check=True, capture_output=True)


def build(directory: Path) -> ctypes.CDLL:
    """Compiles the loop for the instruction set that our kernels use, and loads it.

    Raises:
        OSError: there is no compiler.
        subprocess.CalledProcessError: it failed.
    """
    library = directory / "fma_peak.so"
    compile_loop(library, "-shared")
    return ctypes.CDLL(str(library))


def _flops(library: ctypes.CDLL, name: str) -> float:
    allotment = processors.current()
    loop = getattr(library, f"fma_{name}")
    loop.argtypes, loop.restype = [ctypes.c_long], ctypes.c_double
    start = Barrier(allotment.threads)

    def seconds(thread: int) -> float:
        if allotment.processors:
            processors.confine([allotment.place(thread)])
        best = float("inf")
        for _ in range(_REPEATS):
            start.wait()
            began = time.perf_counter()
            loop(_STEPS)
            best = min(best, time.perf_counter() - began)
        return best

    operations = _STEPS * library.fma_step_operations(_SIZES[name])
    with ThreadPoolExecutor(allotment.threads) as pool:
        return sum(operations / taken for taken in pool.map(seconds, range(allotment.threads)))


def fma_flops(dtypes: Iterable[str]) -> dict[str, float]:
    """Returns floating-point operations a second of all threads together, by dtype.

    Dtypes other than fp32 and fp64 are left out; all are where no compiler is or where no vector kernels run.
    """
    wanted = [name for name in dtypes if name in _SIZES]
    if mha_ext.cpu_capability() not in _FLAGS:
        return {}
    with tempfile.TemporaryDirectory() as directory:
        try:
            library = build(Path(directory))
        except (OSError, subprocess.CalledProcessError):
            return {}
        return {name: _flops(library, name) for name in wanted}
