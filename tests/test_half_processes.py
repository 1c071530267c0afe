"""bfloat16 and float16 in several Python threads at once and in processes that were forked: what a kernel sets up for a
thread or a process (tiles, permissions, scratch) is there wherever it runs, and no bit differs from a call alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import Case, Problem, build, run
from layer_cases import make, sequence
from switches import cpu_capability, threads
from torch import Tensor

import mha_ext

HALVES = (torch.bfloat16, torch.float16)
CAPABILITIES = mha_ext.available_cpu_capabilities()
CASES = [
    Case(1, 2, 2, 130, 130, 64, 64, causal=1),
    Case(2, 4, 2, 33, 65, 17, 31, mask="bool:B1TS"),
    Case(1, 4, 1, 2, 700, 64, 63, dropout_p=0.2),
]


def attention(problem: Problem) -> list[Tensor]:
    out, lse, grads = run(problem)
    return [out, lse, *grads.values()]


def layer(module: Any, x: Tensor, need_weights: bool) -> list[Tensor]:
    x = x.detach().requires_grad_()
    results = [y for y in module(x, x, x, need_weights=need_weights, is_causal=True) if y is not None]
    loss = sum(y.float().square().sum() for y in results)
    return [*(y.detach() for y in results), *torch.autograd.grad(loss, [x, *module.parameters()])]


def calls() -> list[Callable[[], list[Tensor]]]:
    """Forward and backward, for many queries and few, as a layer and with weights. All that is random is drawn here."""
    work: list[Callable[[], list[Tensor]]] = []
    for dtype in HALVES:
        work += [partial(attention, build(replace(case, dtype=dtype))) for case in CASES]
        module, x = make(embed_dim=64, dtype=dtype), sequence(2, 65, 64, dtype=dtype)
        work += [partial(layer, module, x, need_weights) for need_weights in (False, True)]
    return work


def differing(wanted: list[list[Tensor]], work: list[Callable[[], list[Tensor]]]) -> list[int]:
    """Which of the calls give other bits than they should."""
    pairs = zip(work, wanted, strict=True)
    return [i for i, (call, want) in enumerate(pairs) if not all(map(torch.equal, call(), want))]


def differing_in_threads(wanted: list[list[Tensor]], count: int, rounds: int) -> list[int]:
    """Likewise, from so many Python threads that start together, each in another order."""
    work, found, start = calls(), list[int](), threading.Barrier(count)

    def body(first: int) -> None:
        order = [(first + i) % len(work) for i in range(len(work))]
        start.wait()
        for _ in range(rounds):
            try:
                found.extend(differing([wanted[i] for i in order], [work[i] for i in order]))
            except BaseException:
                found.append(-1)
                raise

    workers = [threading.Thread(target=body, args=(3 * i,)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("pool", [1, 2])
def test_python_threads(capability: str, pool: int) -> None:
    with cpu_capability(capability), threads(pool):
        wanted = [call() for call in calls()]
        assert not differing_in_threads(wanted, 4, 2)


def exit_status(body: Callable[[], bool]) -> int:
    """Of a child that was forked here: 0 where ``body`` holds; it is killed after a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            status = 0 if body() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_child_of_a_process_whose_threads_ran(capability: str) -> None:
    """With one thread, as OpenMP's own are not there any more, and then with Python's."""
    with cpu_capability(capability):
        with threads(2):
            wanted = [call() for call in calls()]

        def body() -> bool:
            torch.set_num_threads(1)
            return not differing(wanted, calls()) and not differing_in_threads(wanted, 2, 1)

        assert exit_status(body) == 0
        assert not differing(wanted, calls())  # and the parent goes on


FRESH = """
import os, sys
import torch
from test_half_processes import CAPABILITIES, calls, differing, exit_status
import mha_ext

def every(check):
    for name in CAPABILITIES:
        mha_ext.set_cpu_capability(name)
        check(name)

def in_child():
    results = {}
    every(lambda name: results.setdefault(name, [call() for call in calls()]))
    torch.save(results, sys.argv[1])
    return True

torch.set_num_threads(2)
assert exit_status(in_child) == 0
wanted = torch.load(sys.argv[1])
every(lambda name: print(name, differing(wanted[name], calls())))
"""


def test_a_child_of_a_process_that_had_not_computed(tmp_path: os.PathLike[str]) -> None:
    """Two threads each: what the child was the first to set up, its parent sets up for itself."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FRESH, os.path.join(tmp_path, "results.pt")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"{name} []" for name in CAPABILITIES]
