"""Function transforms, Python threads and fork: right values or a clear refusal, never wrong ones."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from cases import Case, build, kept, merged_bias, ops
from layer_cases import exact_layer, last_hidden, make, sequence
from switches import threads
from tolerances import assert_within, double_limit
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from mha_ext import reference

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": 1, "mask": "bool:B1TS"},
    {"mask": "float64:1HTS", "padding": "bool", "causal": 2},
    {"dropout_p": 0.3},
    {"H_kv": 1, "appended": 1},
]


def functions(options: dict[str, Any]) -> tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]:
    """Ours and the reference as functions of query, key and value, and those."""
    problem = build(Case(**{**Case(2, 2, None, 4, 6, 4, 3, torch.float64).__dict__, **options}))
    bias, keep = (
        merged_bias(problem.case, problem.attn_mask, problem.key_padding_mask),
        kept(problem.case, problem.dropout_seed),
    )
    rest = (problem.attn_mask, problem.key_padding_mask, problem.dropout_seed)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, *rest, **problem.options)[0]

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, bias, keep=keep, dropout_p=problem.case.dropout_p)[0]

    return ours, theirs, (problem.query, problem.key, problem.value)


def same(got: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        assert_within(got, want, double_limit(want, 1000))
    else:
        for a, b in zip(got, want, strict=True):
            same(a, b)


# ------------------------------------------------------------------------------------------------------- torch.func
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_mode(options: dict[str, Any]) -> None:
    ours, theirs, inputs = functions(options)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    same(jvp(ours, inputs, tangents), jvp(theirs, inputs, tangents))
    with forward_ad.dual_level():
        for i in range(3):
            duals = [
                forward_ad.make_dual(x, t) if i == j else x
                for j, (x, t) in enumerate(zip(inputs, tangents, strict=True))
            ]
            got, want = forward_ad.unpack_dual(ours(*duals)), forward_ad.unpack_dual(theirs(*duals))
            same(got.tangent, want.tangent)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reverse_mode_and_jacobians(options: dict[str, Any]) -> None:
    ours, theirs, inputs = functions(options)
    cotangent = torch.randn_like(ours(*inputs))
    same(vjp(ours, *inputs)[1](cotangent), vjp(theirs, *inputs)[1](cotangent))
    want = jacrev(theirs, (0, 1, 2))(*inputs)
    same(jacrev(ours, (0, 1, 2))(*inputs), want)
    same(jacfwd(ours, (0, 1, 2))(*inputs), want)


def test_hessian_and_forward_over_reverse() -> None:
    small = tuple(torch.randn(1, 1, 3, 2, dtype=torch.float64) for _ in range(3))
    visible = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, causal=1)[0].square().sum()

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, visible)[0].square().sum()

    same(hessian(ours)(*small), hessian(theirs)(*small))
    tangents = tuple(torch.ones_like(x) for x in small)
    same(jvp(grad(ours, (0, 1, 2)), small, tangents), jvp(grad(theirs, (0, 1, 2)), small, tangents))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("axes", [(0, 0, 0), (None, 0, 0), (2, None, None)], ids=str)
def test_vmap_without_a_fallback(options: dict[str, Any], axes: tuple[int | None, ...]) -> None:
    ours, _, inputs = functions(options)
    many = [x if a is None else torch.stack([x, 2 * x, -x], a) for x, a in zip(inputs, axes, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = vmap(ours, axes)(*many)
    same(
        got,
        torch.stack(
            [ours(*[x if a is None else x.select(a, i) for x, a in zip(many, axes, strict=True)]) for i in range(3)]
        ),
    )


@pytest.mark.parametrize("need_weights", [True, False])
def test_gradients_per_example(need_weights: bool) -> None:
    """vmap over grad of a functional call with padding, against one example at a time."""
    module, x, hidden = make(), sequence(3, 5), last_hidden(3, 5)
    parameters = {n: p.detach() for n, p in module.named_parameters()}

    def loss(p: dict[str, Tensor], example: Tensor, padding: Tensor) -> Tensor:
        y = example[None]
        return (
            functional_call(module, p, (y, y, y), {"need_weights": need_weights, "key_padding_mask": padding[None]})[0]
            .square()
            .sum()
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = vmap(grad(loss), (None, 0, 0))(parameters, x, hidden)
    for i in range(3):
        y = x[i : i + 1]
        twin = make()
        twin(y, y, y, key_padding_mask=hidden[i : i + 1])[0].square().sum().backward()
        for name, parameter in twin.named_parameters():
            assert_within(got[name][i], parameter.grad, double_limit(parameter.grad, 100), name)


@pytest.mark.parametrize("need_weights", [True, False])
def test_module_under_forward_mode_and_double_backward(need_weights: bool) -> None:
    module, x, tangent = make(), sequence(2, 5), sequence(2, 5, seed=9)

    def call(y: Tensor) -> Tensor:
        return module(y, y, y, need_weights=need_weights)[0]

    out, moved = jvp(call, (x,), (tangent,))
    step = 1e-6
    same(out, exact_layer(module, (x, x, x)).out)
    assert_within(moved, (call(x + step * tangent) - call(x - step * tangent)) / (2 * step), 1e-8)
    assert torch.autograd.gradcheck(
        call, (x[:1, :3].clone().requires_grad_(),), check_forward_ad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(call, (x[:1, :2].clone().requires_grad_(),))


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


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["transform", "second"])
def test_unseen_inputs_may_hold_anything_on_every_road(need_weights: bool, kind: str) -> None:
    """NaN in the padding of a memory: torch.func.grad and second derivatives see zeros there."""
    module, query, memory, hidden = make(), sequence(2, 3), sequence(2, 5, seed=2), last_hidden(2, 5)
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    results = []
    for filling in (0.0, float("nan")):
        key = memory.masked_fill(hidden[..., None], filling)
        options = {"key_padding_mask": hidden, "need_weights": need_weights}
        inputs = (query, key, key)
        if kind == "transform":
            got = grad(lambda p, x, o: functional_call(module, p, x, o)[0].square().sum())(parameters, inputs, options)
            results.append(list(got.values()))
        else:
            leaf = query.clone().requires_grad_()
            (first,) = torch.autograd.grad(module(leaf, key, key, **options)[0].square().sum(), leaf, create_graph=True)
            wanted = [leaf, module.in_proj_weight, module.in_proj_bias, module.out_proj.weight]
            results.append(torch.autograd.grad(first.square().sum(), wanted))
    same(results[1], results[0])


def test_backward_operator_is_differentiable_in_the_incoming_gradients_alone() -> None:
    """It is linear in them: its derivative along a direction is its value there."""
    problem = build(Case(1, 2, 1, 4, 6, 3, dtype=torch.float64, causal=1))
    out, lse = ops.attention(*problem.tensors, causal=1)
    sent = [problem.grad_out.clone().requires_grad_(), problem.grad_lse.clone().requires_grad_()]

    def backward(grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
        wanted = [True, True, True, False, False, False, False]
        return ops.attention_backward(
            grad_out, grad_lse, *problem.tensors, out, lse, **problem.options, output_mask=wanted
        )[:3]

    assert torch.autograd.gradcheck(backward, sent)


def test_log_sum_exp_alone_has_second_derivatives_and_none_for_values() -> None:
    query, key, value = (torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    lse = ops.attention(query, key, value)[1]
    got = torch.autograd.grad(lse.square().sum(), (query, key, value), create_graph=True, allow_unused=True)
    want = torch.autograd.grad((query @ key.mT / 3**0.5).logsumexp(-1).square().sum(), (query, key), create_graph=True)
    same(got[:2], want)
    assert got[2] is None or not got[2].any()
    second = torch.autograd.grad(sum(g.square().sum() for g in got[:2]), (query, key))
    same(second, torch.autograd.grad(sum(g.square().sum() for g in want), (query, key)))


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
