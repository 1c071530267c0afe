"""Which processors a measurement uses, and how the threads of a process are kept on them.

Libraries with thread pools of their own put two threads on one processor as soon as nothing forbids it, and a product
that takes 0.4 ms then takes 8. So every process of the benchmark gets the same processors and the same number of
threads, and each library binds its pool to them in its own way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_LOOK = 5e-3  # seconds; the kernel adds a running thread's time up every 1 to 4 ms
_BUSY = 0.1  # share of a processor above which a process is not resting
_taken: list[Allotment] = []


@dataclass(frozen=True)
class Allotment:
    """What one process may use.

    Attributes:
        threads: how many threads compute at a time, in every library.
        processors: numbers of the processors; empty where a system cannot bind threads.
    """

    threads: int
    processors: tuple[int, ...]

    def place(self, number: int) -> int:
        """Returns the processor of a thread, by the thread's number."""
        return self.processors[number % len(self.processors)]


def _siblings(processor: int) -> str:
    path = Path(_SIBLINGS.format(processor))
    return path.read_text().strip() if path.exists() else str(processor)


def one_per_core_first(siblings: Mapping[int, str]) -> list[int]:
    """Orders processors so that the first ones share no core.

    Args:
        siblings: for each processor what names its core, the same text for all that share it.
    """
    ranks: dict[str, int] = {}
    order = []
    for processor, core in sorted(siblings.items()):
        ranks[core] = ranks.get(core, -1) + 1
        order.append((ranks[core], processor))
    return [processor for _, processor in sorted(order)]


def allot(threads: int) -> Allotment:
    """Returns as many processors of those that this process may use as there are threads, or all if they are fewer."""
    if not hasattr(os, "sched_getaffinity"):
        return Allotment(threads, ())
    order = one_per_core_first({processor: _siblings(processor) for processor in os.sched_getaffinity(0)})
    return Allotment(threads, tuple(order[:threads]))


def current() -> Allotment:
    """Returns what this process was given by `take`; threads that are not bound if it never was."""
    return _taken[0] if _taken else Allotment(os.cpu_count() or 1, ())


def take(allotment: Allotment) -> None:
    """Makes an allotment this process's own, before it makes any thread."""
    _taken[:] = [allotment]
    confine(allotment.processors)


def environment(allotment: Allotment, with_openmp: bool) -> dict[str, str]:
    """Returns the variables for a process in which PyTorch computes (with OpenMP's threads), or only prepares data.

    Where another library computes, OpenMP must not bind the first thread: threads that are made later would inherit
    its one processor.
    """
    if not with_openmp:
        return {"OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"}
    variables = {"OMP_NUM_THREADS": str(allotment.threads)}
    if allotment.processors:
        places = ",".join(f"{{{processor}}}" for processor in allotment.processors)
        variables |= {"OMP_PROC_BIND": "true", "OMP_PLACES": places}
    return variables


def confine(processors: Sequence[int]) -> None:
    """Keeps the calling thread, and the threads it will make, on some processors."""
    if processors and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, processors)


def rest(longest: float = 0.5) -> bool:
    """Waits until no thread of this process computes or spins; returns whether that came within some seconds."""
    end = time.monotonic() + longest
    while time.monotonic() < end:
        before = time.process_time()
        time.sleep(_LOOK)
        if time.process_time() - before < _BUSY * _LOOK:
            return True
    return False
