"""First and second derivatives: sizes, dtypes, masks' own gradients, log-sum-exp, weights, partial requests."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    DTYPES,
    HEAD_DIMS,
    LAYOUTS,
    SIZES,
    Case,
    attention_weights,
    build,
    check,
    exact,
    kept,
    merged_bias,
    ops,
    run,
)
from switches import threads
from tolerances import assert_within, attention_limits
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from mha_ext import functional, reference


# -------------------------------------------------------------------------------------------------------------- by hand
def test_two_keys_by_hand() -> None:
    """T = 1, S = 2, D = D_v = 1, scale 1, P = (3/4, 1/4), dO = 1: dP = V = (4, 0), delta = 3, dS = P (dP - delta) =
    (3/4, -3/4)."""
    query = torch.tensor([1.0], dtype=torch.float64).view(1, 1, 1, 1).requires_grad_()
    key = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64).view(1, 1, 2, 1).requires_grad_()
    value = torch.tensor([4.0, 0.0], dtype=torch.float64).view(1, 1, 2, 1).requires_grad_()
    mask = torch.zeros(1, 1, 1, 2, dtype=torch.float64, requires_grad=True)
    out, _ = ops.attention(query, key, value, mask, scale=1.0)
    out.sum().backward()
    assert_within(value.grad.flatten(), torch.tensor([0.75, 0.25]), 1e-15)
    assert_within(mask.grad.flatten(), torch.tensor([0.75, -0.75]), 1e-15)
    assert_within(key.grad.flatten(), torch.tensor([0.75, -0.75]), 1e-15)
    assert_within(query.grad.flatten(), torch.tensor([0.75 * math.log(3.0)], dtype=torch.float64), 1e-15)


def test_log_sum_exp_by_hand() -> None:
    """d lse / d score is the weight."""
    query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    key = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64).view(1, 1, 2, 1).requires_grad_()
    lse = ops.attention(query, key, torch.zeros(1, 1, 2, 1, dtype=torch.float64), scale=1.0)[1]
    lse.sum().backward()
    assert_within(key.grad.flatten(), torch.tensor([0.75, 0.25]), 1e-15)


# ------------------------------------------------------------------------------------------------------------- the grid
def grid() -> list[Case]:
    cases = [Case(1, 2, None, t, SIZES[(i * 5 + 3) % len(SIZES)], 16 + i, causal=i % 3) for i, t in enumerate(SIZES)]
    cases += [Case(1, 2, None, SIZES[(i * 3 + 5) % len(SIZES)], s, 32, 8 + i) for i, s in enumerate(SIZES)]
    cases += [Case(1, 2, None, 19, 35, d, causal=2) for d in HEAD_DIMS]
    cases += [Case(1, 2, None, 33, 18, 20, d) for d in HEAD_DIMS]
    cases += [Case(2, 6, h, 17, 40, 24, 40, mask="bool:B1TS") for h in (1, 2, 3, 6)]
    return cases


@pytest.mark.parametrize("case", grid(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients(case: Case, dtype: torch.dtype) -> None:
    check(build(Case(**{**case.__dict__, "dtype": dtype})))


@pytest.mark.parametrize("case", grid()[1::3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision(case: Case, dtype: torch.dtype) -> None:
    check(build(Case(**{**case.__dict__, "dtype": dtype})))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [1024, 1090, 2111])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": 2, "dropout_p": 0.2},
        {"mask": "float32:1HT1", "padding": "float32", "appended": 2},
        {"mask": "bool:11TS", "padding": "bool", "causal": 2},
        {"mask": "float64:11TS", "B": 1, "H_kv": 2},
    ],
    ids=str,
)
def test_many_keys(dtype: torch.dtype, keys: int, options: dict[str, object]) -> None:
    """Enough keys that the work on one head may be cut along them, for any number of threads the same bits."""
    case = Case(**{**Case(1, 2, 1, 21, keys, 8, 5, dtype).__dict__, **options})
    problem = build(case)
    check(problem)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            out, lse, grads = run(problem)
        results.append([out, lse, *grads.values()])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_layouts(layout: str, dtype: torch.dtype) -> None:
    problem = build(Case(2, 4, 2, 37, 50, 24, 20, dtype, mask="float32:1HTS", layout=layout))
    check(problem)


def test_expanded_inputs_and_an_expanded_incoming_gradient() -> None:
    problem = build(Case(2, 4, 4, 9, 33, 8))
    problem.query, problem.key = problem.query[:1, :1].expand(2, 4, 9, 8), problem.key[..., :1].expand(2, 4, 33, 8)
    problem.grad_out = torch.ones(1, 1, 1, 1).expand(2, 4, 9, 8)
    problem.grad_lse = torch.ones(1, 1, 1).expand(2, 4, 9)
    check(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_gradients_with_dropout(dtype: torch.dtype, p: float) -> None:
    check(build(Case(2, 4, 2, 35, 66, 24, 20, dtype, "float32:11TS", "bool", 2, 0, p)))


def test_gradient_without_the_log_sum_exp_and_only_through_it() -> None:
    problem = build(Case(2, 2, 1, 20, 37, 8, dtype=torch.float64, causal=1))
    no_lse, no_out = build(problem.case), build(problem.case)
    no_lse.grad_lse, no_out.grad_out = torch.zeros_like(problem.grad_lse), torch.zeros_like(problem.grad_out)
    got = run(problem, with_lse_grad=False)[2]
    for name, want in exact(no_lse).grads.items():
        assert_within(got[name], want, 1e-12)
    leaves = [x.detach().requires_grad_() for x in (problem.query, problem.key, problem.value)]
    lse = ops.attention(*leaves, causal=1)[1]
    through = torch.autograd.grad(lse, leaves, problem.grad_lse, allow_unused=True)
    for grad, want in zip(through, exact(no_out).grads.values(), strict=True):
        assert_within(torch.zeros_like(want) if grad is None else grad, want, 1e-12)


# ------------------------------------------------------------------------------------------------------ mask gradients
@pytest.mark.parametrize("shape", ["11TS", "1HTS", "B11S", "1111", "BHTS", "B1T1", "1H1S"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_float_mask_gradient_in_its_own_shape(shape: str, dtype: torch.dtype) -> None:
    """Reduced while streaming, over several tiles, with keys appended and causality cutting rows."""
    case = Case(2, 4, 2, 70, 134, 16, dtype=dtype, mask=f"float32:{shape}", padding="float32", causal=2, appended=2)
    check(build(case))


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (2, 1, 1, 7), (1, 1, 5, 7), (1, 1, 1, 1), (7,)], ids=str)
def test_functional_mask_gradient_has_the_shape_given(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda m: functional.scaled_dot_product_attention(q, k, v, m), (mask,))


def test_only_the_mask_needs_a_gradient() -> None:
    problem = build(Case(2, 2, 2, 9, 12, 8, mask="float32:1HTS", padding="float32"))
    truth = exact(problem)
    for name in ("attn_mask", "key_padding_mask"):
        tensors = {n: getattr(problem, n) for n in ("query", "key", "value", "attn_mask", "key_padding_mask")}
        tensors[name] = tensors[name].detach().requires_grad_()
        out, lse = ops.attention(*tensors.values())
        (got,) = torch.autograd.grad((out, lse), tensors[name], (problem.grad_out, problem.grad_lse))
        assert_within(got, truth.grads[name], 1e-4, name)


@pytest.mark.parametrize(
    "wanted", [("query",), ("key",), ("value",), ("query", "value"), ("key", "value")], ids="+".join
)
@pytest.mark.parametrize("mask", ["none", "bool:B1TS"])
def test_partial_requests_give_the_same_bits(wanted: tuple[str, ...], mask: str) -> None:
    problem = build(Case(2, 4, 2, 40, 70, 16, mask=mask))
    full = run(problem)[2]
    tensors = {n: getattr(problem, n).detach().clone() for n in ("query", "key", "value")}
    for name in wanted:
        tensors[name].requires_grad_()
    out, lse = ops.attention(*tensors.values(), problem.attn_mask)
    got = torch.autograd.grad((out, lse), [tensors[n] for n in wanted], (problem.grad_out, problem.grad_lse))
    for name, grad in zip(wanted, got, strict=True):
        assert_within(grad, full[name], 1e-6 * float(full[name].abs().max()), name)


def test_no_gradient_asked_for_leaves_no_graph() -> None:
    q = torch.randn(1, 1, 3, 4)
    assert not ops.attention(q, q, q)[0].requires_grad
    with torch.no_grad():
        assert not ops.attention(q.clone().requires_grad_(), q, q)[0].requires_grad
    with torch.inference_mode():
        assert ops.attention(q, q, q)[0].is_inference()


def test_an_input_changed_after_the_forward_is_noticed() -> None:
    q, k, v = (torch.randn(1, 1, 5, 4, requires_grad=True) for _ in range(3))
    key = k * 1
    out = ops.attention(q, key, v)[0]
    key.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_graph_is_freed_and_can_be_kept() -> None:
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    out = ops.attention(q, q, q)[0]
    out.sum().backward(retain_graph=True)
    first, q.grad = q.grad, None
    out.sum().backward()
    assert torch.equal(first, q.grad)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


# ---------------------------------------------------------------------------------------------------------- the weights
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": 1, "mask": "bool:B1TS"},
        {"mask": "float64:1HTS", "padding": "float64", "causal": 2, "appended": 1},
        {"dropout_p": 0.4},
        {"H_kv": 1, "padding": "bool"},
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(5, 7), (33, 70)], ids=str)
def test_weights_and_their_gradients(average: bool, options: dict[str, object], sizes: tuple[int, int]) -> None:
    case = Case(**{**Case(2, 4, None, *sizes, 8, dtype=torch.float64).__dict__, **options})
    problem = build(case)
    names = ("query", "key", "attn_mask", "key_padding_mask")
    leaves = {
        n: x.detach().requires_grad_()
        for n in names
        if (x := getattr(problem, n)) is not None and x.is_floating_point()
    }
    tensors = [leaves.get(n, getattr(problem, n)) for n in names]
    weights = attention_weights(*tensors, problem.dropout_seed, **problem.options, average=average)
    truth = exact(problem)
    want = truth.weights * truth.drop
    assert_within(weights, want.mean(1) if average else want, 1e-12, "weights")
    grad = torch.randn_like(weights)
    got = torch.autograd.grad(weights, list(leaves.values()), grad)
    twins = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
    bias = merged_bias(
        case, twins.get("attn_mask", problem.attn_mask), twins.get("key_padding_mask", problem.key_padding_mask)
    )
    key = twins["key"].repeat_interleave(4 // case.heads_kv, 1)
    value = torch.zeros(*key.shape[:3], 1, dtype=torch.float64)
    keep = kept(case, problem.dropout_seed)
    exact_weights = reference.attention(twins["query"], key, value, bias, keep=keep, dropout_p=case.dropout_p)[2]
    wanted = torch.autograd.grad(exact_weights.mean(1) if average else exact_weights, list(twins.values()), grad)
    for name, a, b in zip(leaves, got, wanted, strict=True):
        assert_within(a, b, 1e-11, f"grad of {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_in_other_dtypes_sum_to_one_and_match(dtype: torch.dtype) -> None:
    problem = build(Case(2, 4, 2, 33, 70, 16, dtype=dtype, causal=1))
    truth = exact(problem)
    limit = float(attention_limits(truth, dtype, 2, grads=False)["lse"].max()) * 2 + torch.finfo(dtype).eps
    for average in (False, True):
        weights = attention_weights(problem.query, problem.key, causal=1, average=average)
        assert_within(weights, truth.weights.mean(1) if average else truth.weights, limit, "weights")
        sums = weights.double().sum(-1)
        assert_within(sums, torch.ones_like(sums), 70 * limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(
    "options", [{"causal": 1}, {"mask": "float32:1HTS", "padding": "bool"}, {"dropout_p": 0.3}], ids=str
)
def test_gradients_of_the_weights_in_every_dtype(dtype: torch.dtype, average: bool, options: dict[str, object]) -> None:
    """The weights are the output for values that are the identity: the same limits hold."""
    problem = build(Case(**{**Case(1, 2, 1, 70, 130, 16, 130, dtype).__dict__, **options}))
    problem.value = torch.eye(130, dtype=dtype).expand(1, 1, 130, 130)
    problem.grad_lse = torch.zeros_like(problem.grad_lse)
    if average:
        problem.grad_out = (problem.grad_out[:, :1] / 2).expand_as(problem.grad_out)
    truth = exact(problem)
    limits = attention_limits(truth, dtype, 1)
    query, key = (x.detach().requires_grad_() for x in (problem.query, problem.key))
    rest = (problem.attn_mask, problem.key_padding_mask, problem.dropout_seed)
    weights = attention_weights(query, key, *rest, **problem.options, average=average)
    want, limit = truth.out, limits["out"]
    assert_within(weights, want.mean(1) if average else want, limit.amax(1) if average else limit)
    sent = problem.grad_out[:, 0] * 2 if average else problem.grad_out
    for name, grad in zip(("query", "key"), torch.autograd.grad(weights, (query, key), sent), strict=True):
        assert_within(grad, truth.grads[name], limits[name], name)


# ------------------------------------------------------------------------------------------- numerical differentiation
def doubles(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


OPTIONS = [
    {},
    {"causal": 1},
    {"causal": 2, "num_appended_keys": 1},
    {"dropout_p": 0.4},
    {"scale": -0.7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masked", ["none", "bool", "float"])
def test_gradcheck_and_gradgradcheck(options: dict[str, object], masked: str) -> None:
    """Of out and lse together with respect to query, key, value and the float masks; forward mode where it is
    offered."""
    columns = 5 - int(options.get("num_appended_keys", 0))
    query, key, value = doubles(2, 2, 3, 4), doubles(2, 1, 5, 4, seed=1), doubles(2, 1, 5, 2, seed=2)
    seed = torch.tensor([5]) if "dropout_p" in options else None
    inputs: tuple[Tensor, ...] = (query, key, value)
    visible = torch.rand(1, 2, 3, columns, generator=torch.Generator().manual_seed(3)) > 0.3
    visible[..., 0] = True
    if masked == "float":
        inputs += (doubles(1, 2, 3, columns, seed=4), doubles(2, columns, seed=5))

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, *masks = tensors
        mask, padding = masks or ((visible, None) if masked == "bool" else (None, None))
        return ops.attention(q, k, v, mask, padding, seed, **options)

    assert gradcheck(call, inputs, check_batched_grad=False)
    assert gradgradcheck(call, inputs, check_batched_grad=False)


@pytest.mark.parametrize("average", [False, True])
def test_gradcheck_and_gradgradcheck_of_the_weights(average: bool) -> None:
    query, key, mask, padding = (
        doubles(2, 2, 3, 4),
        doubles(2, 1, 5, 4, seed=1),
        doubles(1, 2, 3, 5, seed=4),
        doubles(2, 5, seed=5),
    )

    def call(q: Tensor, k: Tensor, m: Tensor, p: Tensor) -> Tensor:
        return attention_weights(q, k, m, p, average=average)

    assert gradcheck(call, (query, key, mask, padding))
    assert gradgradcheck(call, (query, key, mask, padding))


@pytest.mark.parametrize("count", [1, 2])
def test_central_differences_in_a_direction_over_many_tiles(count: int) -> None:
    """Longer than gradcheck can be: the directional derivative by differences, error O(step^2)."""
    problem = build(Case(1, 4, 2, 150, 200, 16, 24, torch.float64, "float64:11TS", causal=1))
    problem.attn_mask = problem.attn_mask.nan_to_num(neginf=-3.0)
    with threads(count):
        grads = run(problem, with_lse_grad=False)[2]
    step = 1e-5
    for name, grad in grads.items():
        start, direction = getattr(problem, name), torch.randn_like(grad)
        values = []
        for sign in (1, -1):
            setattr(problem, name, start + sign * step * direction)
            values.append((ops.attention(*problem.tensors, causal=1)[0] * problem.grad_out).sum())
        setattr(problem, name, start)
        want = (values[0] - values[1]) / (2 * step)
        assert_within((grad * direction).sum(), want, 1e-6 * max(1.0, float(want.abs())), name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [3, 40])
def test_nearly_one_hot_rows_of_half_types(dtype: torch.dtype, queries: int) -> None:
    """dS is a small difference of dP and delta there: the rounding of the output in delta would be most of it."""
    problem = build(Case(1, 2, 2, queries, 70, 32, dtype=dtype))
    problem.query *= 8
    check(problem)
