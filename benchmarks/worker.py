"""A process of the benchmark that computes: ``python -m benchmarks.worker '{"threads": 2, "processors": [0, 1]}'``.

It answers requests, one line of JSON each, that `benchmarks.processes` writes to its standard input. What libraries
print goes to standard error, so that nothing but answers is on standard output. It computes only while it answers.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks import processors

PRODUCTS = "library products"
_TRIALS = 2  # a second run can fail where the first did not; better before the others are timed


class Bench:
    """The operations of a worker, by the names that requests give; each takes and returns plain values."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._works: dict[str, Callable[[], object]] = {}

    def check(self, case: dict[str, Any], peer: str, path: str) -> dict[str, Any]:
        """Runs a peer once and saves everything that it computed."""
        import torch

        from benchmarks.cases import Case
        from benchmarks.peers import find_peer
        from benchmarks.work import results

        wanted = Case(**case)
        torch.save(results(wanted, find_peer(wanted.level, peer)), path)
        return {}

    def prepare(self, case: dict[str, Any], peer: str) -> dict[str, Any]:
        """Makes a peer ready to be timed, or the library's own products."""
        from benchmarks.cases import Case
        from benchmarks.inputs import make_inputs
        from benchmarks.peers import find_peer
        from benchmarks.roofs import library_products
        from benchmarks.work import timed_work

        wanted = Case(**case)
        if peer == PRODUCTS:
            products = library_products(wanted)
            self._works[peer] = products.run
            return {"operations": products.operations}
        inputs = make_inputs(wanted)
        work = timed_work(wanted, find_peer(wanted.level, peer).build(wanted, inputs), inputs)
        for _ in range(_TRIALS):
            work()
        self._works[peer] = work
        return {}

    def time(self, peer: str, repeats: int) -> dict[str, Any]:
        """Runs what was prepared some times."""
        from benchmarks.timing import run_timed

        return asdict(run_timed(self._works[peer], repeats))

    def rest(self) -> dict[str, Any]:
        """Waits until no thread of this process computes or spins."""
        return {"resting": processors.rest()}

    def release(self) -> dict[str, Any]:
        """Forgets what was prepared."""
        self._works.clear()
        gc.collect()
        return {}

    def roofs(self, dtypes: list[str]) -> dict[str, Any]:
        """Measures the machine."""
        from benchmarks.roofs import measure_roofs

        return asdict(measure_roofs(dtypes))


def answer(bench: object, line: str) -> dict[str, Any]:
    """Does what one request asks; an exception becomes an answer too."""
    request = json.loads(line)
    try:
        result: dict[str, Any] = getattr(bench, request.pop("operation"))(**request)
        return result
    except Exception as error:  # whatever a library raises: the benchmark reports it and goes on
        lines = str(error).strip().splitlines()
        return {"error": f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__}


def serve(make_bench: Callable[[], object]) -> None:
    """Answers requests until standard input ends.

    Answers alone go to standard output; whatever libraries print there goes to standard error.
    """
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        bench = make_bench()
        for line in sys.stdin:
            print(json.dumps(answer(bench, line)), file=output, flush=True)


def main() -> None:
    """Takes what the command line allots, then works."""
    settings = json.loads(sys.argv[1])
    processors.take(processors.Allotment(settings["threads"], tuple(settings["processors"])))
    serve(Bench)


if __name__ == "__main__":
    main()
