"""Gradients of every parameter, Python threads and fork: right values or a clear refusal, never wrong ones."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from cases import ops
from layer_cases import make, sequence
from switches import threads
from tolerances import assert_within, double_limit
from torch import Tensor
from torch.func import functional_call


def same(got: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        assert_within(got, want, double_limit(want, 1000))
    else:
        for a, b in zip(got, want, strict=True):
            same(a, b)


@pytest.mark.parametrize(
    "options",
    [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 4, "vdim": 6}, {"bias": False}, {"num_kv_heads": 1}],
    ids=str,
)
@pytest.mark.parametrize("need_weights", [True, False])
def test_gradcheck_of_every_parameter(options: dict[str, Any], need_weights: bool) -> None:
    module = make(embed_dim=6, num_heads=2, **options)
    sizes = ((3, 6), (4, module.kdim), (4, module.vdim))
    inputs = [sequence(1, n, width, seed).requires_grad_() for seed, (n, width) in enumerate(sizes)]
    names = [n for n, _ in module.named_parameters()]
    mask = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, m: Tensor, *p: Tensor) -> tuple[Tensor, ...]:
        parameters = dict(zip(names, p, strict=True))
        results = functional_call(module, parameters, (q, k, v), {"attn_mask": m, "need_weights": need_weights})
        return tuple(r for r in results if r is not None)

    leaves = [p.detach().requires_grad_() for p in module.parameters()]
    assert torch.autograd.gradcheck(call, (*inputs, mask, *leaves))


# ------------------------------------------------------------------------------------------------------------- export
# ----------------------------------------------------------------------------------------------------- threads and fork
def cpu_seconds_by_thread() -> dict[int, float]:
    seconds = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        seconds[int(task)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


@pytest.mark.parametrize("backward", [False, True])
def test_two_threads_share_the_work(backward: bool) -> None:
    """The processor time of every thread, read from the kernel: a second one does a good part of the work."""
    q = torch.randn(4, 8, 512, 64, requires_grad=backward)
    with threads(2):
        out = ops.attention(q, q, q)[0]
        before = cpu_seconds_by_thread()
        spent: list[float] = [0.0]
        while spent[0] < 0.3:
            if backward:
                torch.autograd.grad(out.sum(), q, retain_graph=True)
            else:
                ops.attention(q, q, q)
            now = cpu_seconds_by_thread()
            spent = sorted((now[t] - before.get(t, 0.0) for t in now), reverse=True)
    assert spent[1] > 0.3 * spent[0], spent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_python_threads_at_once(dtype: torch.dtype) -> None:
    module = make(embed_dim=64, dtype=dtype)
    inputs = [sequence(2, 30 + 7 * i, 64, i, dtype) for i in range(6)]

    def once(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        out = module(leaf, leaf, leaf, need_weights=False, is_causal=True)[0]
        return out.detach(), torch.autograd.grad(out.sum(), leaf)[0]

    wanted = [once(x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(15):
            if not all(torch.equal(a, b) for a, b in zip(once(inputs[i]), wanted[i], strict=True)):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_forked_child_with_one_thread_works() -> None:
    """What a data loader's worker does after its parent has used the thread pool."""
    module, x = make(embed_dim=64, dtype=torch.float32), sequence(8, 128, 64, dtype=torch.float32)
    with threads(2), torch.no_grad():
        want = module(x, x, x, need_weights=False)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            with torch.no_grad():
                status = 0 if torch.equal(module(x, x, x, need_weights=False)[0], want) else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pid, result = os.waitpid(child, os.WNOHANG)
        if pid:
            assert result == 0
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hung")
