"""Where NaN goes and where it does not, pair by pair, and other values at the edge of what arithmetic allows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import DTYPES, Case, Problem, attention_weights, build, check, exact, kept, ops, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_within, attention_limits, growth, roundoff
from torch import Tensor

from mha_ext import functional, reference

TENSORS = ("query", "key", "value", "grad_out", "grad_lse", "attn_mask")


# ---------------------------------------------------------------------------------------------------- NaN, pair by pair
def nan_patterns(problem: Problem) -> dict[str, tuple[Tensor, Tensor]]:
    """Where results are NaN: ours, and by the equations summed over visible pairs only."""
    case = problem.case
    options = {
        "key_padding_mask": problem.key_padding_mask,
        "is_causal": case.causal > 0,
        "causal_alignment": "lower_right" if case.causal == 2 else "upper_left",
        "keep": kept(case, problem.dropout_seed),
        "dropout_p": case.dropout_p,
        "num_appended_keys": case.appended,
    }
    tensors = [x.double() for x in (problem.query, problem.key, problem.value)]
    out, lse, _ = reference.attention(*tensors, problem.attn_mask, **options)
    sent = {"grad_lse": problem.grad_lse.double()}
    grads = reference.attention_backward(problem.grad_out.double(), *tensors, problem.attn_mask, **sent, **options)
    our_out, our_lse, our_grads = run(problem)
    patterns = {"out": (our_out, out), "lse": (our_lse, lse)}
    patterns |= {name: (our_grads[name], getattr(grads, name)) for name in our_grads}
    return {name: (ours.isnan(), theirs.isnan()) for name, (ours, theirs) in patterns.items()}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(["none", "bool:BHTS", "bool:11TS", "float32:B1TS"]),
    st.sampled_from(["none", "bool"]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([0, 2]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([(3, 600), (5, 7), (20, 40), (70, 33)]),
    st.lists(st.tuples(st.sampled_from(TENSORS), st.integers(0, 10**6)), min_size=1, max_size=3),
)
def test_nan_goes_where_the_equations_take_it(
    mask: str,
    padding: str,
    causal: int,
    appended: int,
    dropout_p: float,
    sizes: tuple[int, int],
    places: list[tuple[str, int]],
) -> None:
    """NaN in up to three places of inputs, incoming gradients and float masks: the results are NaN in the same
    places. With dropout a gradient may be spared where the pair that would carry the NaN was dropped."""
    problem = build(Case(2, 2, 1, *sizes, 5, 4, torch.float32, mask, padding, causal, appended, dropout_p))
    for name, place in places:
        tensor = getattr(problem, name)
        if tensor is not None and tensor.is_floating_point():
            tensor.flatten()[place % tensor.numel()] = math.nan
    for name, (ours, theirs) in nan_patterns(problem).items():
        spared = dropout_p > 0 and name not in ("out", "lse")
        right = not (ours & ~theirs).any() if spared else torch.equal(ours, theirs)
        assert right, f"{name}: {int(ours.sum())} NaN, the equations give {int(theirs.sum())}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dropped_pair_is_still_a_seen_one(dtype: torch.dtype) -> None:
    """Dropout multiplies by zero: it hides no NaN, forward or backward; and every row that sees the key is NaN."""
    problem = build(Case(1, 2, 2, 40, 70, 8, dtype=dtype, causal=2, dropout_p=0.5))
    problem.value[:, :, 60] = math.nan
    out, _, _ = run(problem)
    assert torch.equal(out.isnan().all(-1), (torch.arange(40) >= 30).expand(1, 2, 40))
    assert torch.equal(out.isnan().any(-1), out.isnan().all(-1))


@pytest.mark.parametrize("average", [False, True])
def test_weights_are_zero_behind_masks_and_nan_only_where_a_nan_is_seen(average: bool) -> None:
    problem = build(Case(2, 2, 2, 20, 70, 8, mask="bool:B1TS", causal=2))
    problem.key[:, :, 33] = math.nan
    visible = problem.attn_mask & (torch.arange(70) <= torch.arange(20)[:, None] + 50)
    weights = attention_weights(problem.query, problem.key, problem.attn_mask, causal=2, average=average)
    sees = visible[..., 33].expand(2, 2, 20)
    want = (sees[..., None] & visible).any(1) if average else sees[..., None] & visible
    assert torch.equal(weights.isnan(), want)
    hidden = ~visible.expand(2, 2, 20, 70)
    assert not weights[hidden.all(1) if average else hidden].any()


def test_nan_behind_masks_passes_no_second_derivative_either() -> None:
    problem = build(Case(2, 2, 2, 9, 20, 4, dtype=torch.float64, causal=1))
    problem.key_padding_mask = (torch.arange(20) > 12).expand(2, 20)
    results = []
    for filling in (0.0, math.nan):
        leaves = [problem.query, problem.key.clone(), problem.value.clone()]
        leaves[1][:, :, 13:], leaves[2][:, :, 13:] = filling, filling
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = ops.attention(*leaves, None, problem.key_padding_mask, causal=1)[0]
        first = torch.autograd.grad(out, leaves, problem.grad_out, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)])
    for clean, dirty in zip(*results, strict=True):
        assert_within(dirty, clean, 1e-12 * max(1.0, float(clean.detach().abs().max())))


# -------------------------------------------------------------------------------------------------- edges of arithmetic
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 1e-30, -0.5, 7.0])
def test_any_scale(dtype: torch.dtype, scale: float) -> None:
    check(build(Case(2, 2, 1, 20, 37, 8, dtype=dtype, causal=1, scale=scale)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_infinite_scores_of_seen_pairs_are_nan_or_the_one_key(dtype: torch.dtype) -> None:
    """+inf in a score wins or makes NaN as in a softmax; -inf from an infinite key (not from a mask) has weight
    zero."""
    key = torch.tensor([-math.inf, 1.0, 2.0], dtype=dtype).view(1, 1, 3, 1)
    query, value = torch.ones(1, 1, 1, 1, dtype=dtype), torch.tensor([5.0, 1.0, 3.0], dtype=dtype).view(1, 1, 3, 1)
    out, _ = ops.attention(query, key, value, scale=1.0)
    want = (1.0 + 3.0 * math.e) / (1 + math.e)
    assert_within(out, torch.full((1, 1, 1, 1), want, dtype=torch.float64), 8 * roundoff(dtype) * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e4, 1e12])
def test_tiny_and_large_values_pass_through(dtype: torch.dtype, size: float) -> None:
    """Output and gradients are linear in the values and the incoming gradient, whatever their size."""
    problem = build(Case(1, 2, 2, 17, 40, 8, dtype=dtype))
    problem.value, problem.grad_out = problem.value * size, problem.grad_out / size
    problem.grad_lse = torch.zeros_like(problem.grad_lse)
    check(problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("low", ["min", "twice min", -1e30])
def test_rows_far_below_zero_attend_to_all_alike_also_backward(dtype: torch.dtype, low: str | float) -> None:
    """Beside a huge negative mask (or two, whose sum is no number any more) scores vanish: every weight is 1/S, hidden
    none.

    P = 1/S, dV = P^T dO, dS = P (dO.V - delta), dQ = scale dS K, whatever digits the log-sum-exp has lost.
    """
    problem = build(Case(1, 2, 2, 20, 70, 8, dtype=dtype))
    problem.grad_lse = torch.zeros_like(problem.grad_lse)
    size = torch.finfo(dtype).min if isinstance(low, str) else low
    problem.attn_mask = torch.full((1, 1, 20, 70), size, dtype=dtype)
    if low == "twice min":
        problem.key_padding_mask = torch.full((1, 70), size, dtype=dtype)
    out, lse, grads = run(problem)
    key, value, grad_out = problem.key.double(), problem.value.double(), problem.grad_out.double()
    mean = value.mean(2, keepdim=True).expand_as(value[:, :, :20])
    d_weights = grad_out @ value.mT
    d_scores = (d_weights - (grad_out * mean).sum(-1, keepdim=True)) / 70
    want = {
        "query": d_scores @ key / 8**0.5,
        "key": d_scores.mT @ problem.query.double() / 8**0.5,
        "value": (grad_out / 70).sum(2, keepdim=True).expand_as(value),
    }
    share = 200 * roundoff(torch.float64 if dtype == torch.float64 else torch.float32) + 8 * roundoff(dtype)
    assert_within(out, mean, share * float(value.abs().max()), "out")
    assert bool(lse.isfinite().all())
    for name, grad in want.items():
        assert_within(grads[name], grad, share * float(grad.abs().max()), name)


def test_scores_of_all_sizes_in_one_row() -> None:
    """Scores from -1e30 to 1e4: only the largest counts; the rest underflows to zero without NaN."""
    scores = torch.tensor([-1e30, -1e10, -1e4, -100.0, 0.0, 100.0, 1e4, 9990.0])
    bias = scores.view(1, 1, 1, 8).expand(1, 1, 3, 8)
    value = torch.arange(8.0).view(1, 1, 8, 1)
    q, k = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 8, 4)
    out, lse = ops.attention(q, k, value, bias)
    share = 1 / (1 + math.exp(-10))
    assert_within(out, torch.full((1, 1, 3, 1), 6 * share + 7 * (1 - share)), 1e-5)
    assert_within(lse, torch.full((1, 1, 3), 1e4 - math.log(share)), 1e-3)


def test_long_rows_lose_no_small_weights() -> None:
    """A million equal keys: log-sum-exp is log of their number, the output their mean."""
    keys = 1_000_000
    value = (torch.arange(keys) % 7).float().view(1, 1, keys, 1)
    out, lse = ops.attention(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4).expand(1, 1, keys, 4), value)
    limit = growth(keys, torch.float32) + 4 * roundoff(torch.float32)
    assert_within(lse, torch.full((1, 1, 1), math.log(keys), dtype=torch.float64), limit + 1e-5)
    assert_within(out, value.double().mean(2, keepdim=True), 2 * 3.0 * limit)


# ------------------------------------------------------------------------------------------------------- odd but legal
def test_only_appended_keys() -> None:
    """Masks and padding with no columns at all."""
    problem = build(Case(2, 2, 2, 5, 2, 4, appended=2, causal=1))
    problem.attn_mask = torch.zeros(2, 1, 5, 0, dtype=torch.bool)
    problem.key_padding_mask = torch.zeros(2, 0)
    check(problem)


@pytest.mark.parametrize("p", [1e-12, 1e-6, 0.999, 1 - 1e-7])
def test_extreme_dropout_probabilities(p: float) -> None:
    problem = build(Case(1, 2, 2, 33, 70, 4, dtype=torch.float64, dropout_p=p))
    check(problem)
    share = float(kept(problem.case, problem.dropout_seed).double().mean())
    assert abs(share - (1 - p)) < 6 * math.sqrt(p * (1 - p) / 4620) + 1e-9


def test_one_mask_entry_for_everything() -> None:
    q, k, v = (torch.randn(2, 2, n, 4) for n in (5, 9, 9))
    plain = ops.attention(q, k, v)[0]
    assert torch.equal(ops.attention(q, k, v, torch.ones(1, 1, 1, 1, dtype=torch.bool))[0], plain)
    assert not ops.attention(q, k, v, torch.zeros(1, 1, 1, 1, dtype=torch.bool))[0].any()
    assert not ops.attention(q, k, v, torch.full((1, 1, 1, 1), -math.inf))[0].any()


def test_batch_and_heads_broadcast_in_the_functional_call() -> None:
    """Leading sizes of 1 in key, value or query stretch, as in PyTorch."""
    for shapes in itertools.product(((2, 3), (1, 3), (2, 1), (1, 1)), repeat=2):
        q = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
        k, v = (torch.randn(*s, 7, 8, dtype=torch.float64, requires_grad=True) for s in shapes)
        got = functional.scaled_dot_product_attention(q, k, v)
        want = torch.softmax(q @ k.mT / 8**0.5, -1) @ v
        assert_within(got, want, 1e-13)
        grad = torch.randn_like(got)
        for a, b in zip(
            torch.autograd.grad(got, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad), strict=True
        ):
            assert_within(a, b, 1e-12)


def test_very_large_head_sizes_and_many_small_problems() -> None:
    check(build(Case(1, 1, 1, 5, 9, 1031, 1500)))
    check(build(Case(300, 7, 7, 1, 2, 3)))
    check(build(Case(1, 64, 1, 2, 33, 4, mask="bool:1H1S")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_mode_and_other_default_dtypes_change_nothing(dtype: torch.dtype) -> None:
    problem = build(Case(2, 2, 1, 33, 70, 8, dtype=dtype, mask="float32:11TS"))
    truth = exact(problem)
    out, _, grads = run(problem)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    try:
        again, _, grads_again = run(problem)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out, again) and all(torch.equal(grads[n], grads_again[n]) for n in grads)
    assert_within(out, truth.out, attention_limits(truth, dtype, 1)["out"])
