"""The operators as PyTorch sees them: schemas, fake and meta tensors, autograd registration, autocast, other roads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import Case, build, exact, lies_like, ops, run
from layer_cases import sequence
from operator_cases import layer_tensors
from tolerances import assert_within, attention_limits, roundoff

NAMES = (
    "attention",
    "attention_backward",
    "attention_for_backward",
    "attention_weights_backward",
    "attention_with_weights",
    "multi_head_attention",
    "multi_head_attention_backward",
)
CASES = [
    Case(2, 4, 2, 5, 7, 8, 6),
    Case(2, 4, 2, 5, 7, 8, 6, mask="bool:B1TS", padding="bool", causal=1),
    Case(2, 4, 4, 5, 7, 8, 6, torch.float64, "float64:1HTS", "float64", 2, 1),
    Case(2, 4, 2, 5, 7, 8, dropout_p=0.3),
    Case(1, 2, 2, 6, 6, 8, dtype=torch.bfloat16, causal=1, layout="bthd"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("weights", [0, 1, 2])
def test_results_for_backward_are_the_operators_own(case: Case, weights: int) -> None:
    problem = build(case)
    out, lse, matrix, _ = ops.attention_for_backward(*problem.tensors, **problem.options, weights=weights)
    if weights:
        want = ops.attention_with_weights(*problem.tensors, **problem.options, average=weights == 1)
        assert all(torch.equal(a, b) for a, b in zip((out, lse, matrix), want, strict=True))
    else:
        want = ops.attention(*problem.tensors, **problem.options)
        assert all(torch.equal(a, b) for a, b in zip((out, lse), want, strict=True))
        assert matrix.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [0, 1, 2])
@pytest.mark.parametrize("queries", [3, 33])
def test_output_and_rounding_together_are_the_output(dtype: torch.dtype, weights: int, queries: int) -> None:
    """To bfloat16's precision of what rounding took; the kernels' and the composition's."""
    problem = build(Case(1, 2, 2, queries, 40, 16, 24, dtype=dtype, causal=1, layout="bthd"))
    kernels = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    for call in (ops.attention_for_backward, partial(ops.attention_for_backward.default.redispatch, kernels)):
        out, *_, rounding = call(*problem.tensors, **problem.options, weights=weights)
        assert rounding.dtype == torch.bfloat16 and rounding.stride() == out.stride()
        whole, want = out.double() + rounding.double(), exact(problem).out
        limit = attention_limits(exact(problem), torch.float32, 2, grads=False)["out"]
        assert_within(whole, want, limit + roundoff(torch.bfloat16) * roundoff(dtype) * want.abs())


# ---------------------------------------------------------------------------------------------------- meta and schemas
def test_every_operator_has_a_kernel_for_every_key_that_matters() -> None:
    """CPU, Meta, gradients and other devices, whether registered for that key or for a group of keys."""
    for name in NAMES:
        operator = getattr(ops, name).default
        assert not operator._schema.is_mutable
        for key in ("CPU", "Meta", "AutogradCPU", "AutogradCUDA", "CUDA", "AutocastCPU", "FuncTorchBatched"):
            if key not in ("AutocastCPU", "FuncTorchBatched") or not name.endswith("backward"):
                assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), key), (name, key)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_output_lies_as_the_query_does(order: tuple[int, ...], device: str) -> None:
    sizes = (2, 4, 5, 8)
    q = torch.empty([sizes[i] for i in order], device=device).permute([order.index(i) for i in range(4)])
    out, lse = ops.attention(q, q, q)
    assert out.stride() == q.stride() and lse.is_contiguous()


def test_inputs_are_never_written() -> None:
    problem = build(Case(2, 4, 2, 33, 70, 8, mask="float32:1HTS", padding="float32", causal=1, layout="packed"))
    names = ("query", "key", "value", "grad_out", "grad_lse", "attn_mask", "key_padding_mask")
    before = {n: getattr(problem, n).clone() for n in names}
    run(problem)
    assert all(torch.equal(getattr(problem, n), x) for n, x in before.items())


def test_only_the_gradients_asked_for_come_back() -> None:
    problem = build(Case(2, 2, 2, 5, 7, 8, mask="float32:11TS"))
    out, lse = ops.attention(*problem.tensors)
    for i in range(4):
        wanted = [i == j for j in range(7)]
        got = ops.attention_backward(
            problem.grad_out, None, *problem.tensors, out, lse, **problem.options, output_mask=wanted
        )
        assert [g is not None and g.numel() > 0 for g in got] == wanted


# ------------------------------------------------------------------------------------------------------------- autocast
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_in_the_lower_dtype(dtype: torch.dtype) -> None:
    problem = build(Case(2, 4, 2, 9, 14, 8, mask="float32:11TS"))
    with torch.autocast("cpu", dtype):
        out, lse = ops.attention(*problem.tensors)
    lowered = [x.to(dtype) for x in (problem.query, problem.key, problem.value)]
    want, want_lse = ops.attention(*lowered, problem.attn_mask)
    assert out.dtype == dtype and torch.equal(out, want) and torch.equal(lse, want_lse)
    weights = layer_tensors()
    x = torch.randn(2, 5, 12)
    with torch.autocast("cpu", dtype):
        out = ops.multi_head_attention(x, x, x, *weights, num_heads=4, num_kv_heads=2, shared_inputs=2)[0]
    assert out.dtype == dtype
    out.float().sum().backward()
    assert all(w.grad.dtype == torch.float32 and w.grad.any() for w in weights)


def test_autocast_brings_different_dtypes_together() -> None:
    q = torch.randn(1, 2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.attention(q, q.bfloat16(), q)[0]
    assert out.dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"key must .*got"):
        ops.attention(q, q.bfloat16(), q)


# ---------------------------------------------------------------------------------- the other roads to the same numbers
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_composition_for_other_devices_gives_the_same_numbers(case: Case) -> None:
    """The kernel that other devices use, run here on CPU tensors, forward and backward."""
    problem = build(case)
    truth = exact(problem)
    limits = attention_limits(truth, case.dtype, case.heads_kv)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    out, lse = ops.attention.default.redispatch(keys, *problem.tensors, **problem.options)
    assert_within(out, truth.out, limits["out"])
    assert_within(lse, truth.lse, limits["lse"])
    assert lies_like(out, problem.tensors[0])
    wanted = [True, True, True, False, False, False, False]
    grads = ops.attention_backward.default.redispatch(
        keys, problem.grad_out, problem.grad_lse, *problem.tensors, out, lse, **problem.options, output_mask=wanted
    )
    for name, grad in zip(("query", "key", "value"), grads[:3], strict=True):
        assert_within(grad, truth.grads[name], limits[name], name)


def test_layer_operator_returns_what_its_backward_needs() -> None:
    """q, k, v hold the projections once: packed when inputs are shared."""
    weights = [w.detach().double() for w in layer_tensors()]
    x, memory = sequence(2, 5, 12), sequence(2, 7, 12, 2)
    for shared, inputs, shapes in (
        (2, (x, x, x), [(2, 5, 24), (0,), (0,)]),
        (1, (x, memory, memory), [(2, 5, 12), (2, 7, 12), (0,)]),
        (0, (x, memory, memory.clone()), [(2, 5, 12), (2, 7, 6), (2, 7, 6)]),
    ):
        out, q, k, v, context, lse, rounding = ops.multi_head_attention(
            *inputs, *weights, num_heads=4, num_kv_heads=2, shared_inputs=shared
        )
        assert [tuple(t.shape) for t in (q, k, v)] == shapes
        assert context.shape == (2, 5, 12) and lse.shape == (2, 4, 5) and rounding.shape == (0,)
        assert_within(torch.nn.functional.linear(context, weights[2], weights[3]), out, 1e-12)
