"""Dropout on the weights: the documented generator bit by bit, its statistics, and the same mask wherever it is
used."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from cases import DTYPES, LAYOUTS, Case, attention_weights, build, check, dropout_hash, ops, run
from switches import threads
from tolerances import assert_within, roundoff
from torch import Tensor

import mha_ext
from mha_ext import functional, reference

SEEDS = [0, 1, -1, 2**62 + 12345, -(2**63), 2**63 - 1]


def keep_of_forward(seed: int, batch: int, heads: int, queries: int, keys: int, p: float, dtype: torch.dtype) -> Tensor:
    """What the operator keeps: equal scores and an identity for the values return the kept weights themselves."""
    zeros = torch.zeros(batch, heads, 1, 1, dtype=dtype)
    value = torch.eye(keys, dtype=dtype).expand(batch, heads, keys, keys)
    q, k = zeros.expand(batch, heads, queries, 1), zeros.expand(batch, heads, keys, 1)
    return ops.attention(q, k, value, dropout_seed=torch.tensor([seed]), dropout_p=p)[0]


# ------------------------------------------------------------------------------------------------------- the generator
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_reference_and_specification_agree_bit_by_bit(seed: int, p: float) -> None:
    want = torch.from_numpy(dropout_hash(seed, 2, 3, 17, 70).astype("float64") >= p * 2.0**32)
    assert torch.equal(reference.dropout_keep(seed, 2, 3, 17, 70, p), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 17, 70), (1, 2, 65, 33), (3, 1, 130, 257)], ids=str)
def test_forward_keeps_exactly_what_the_generator_says(dtype: torch.dtype, seed: int, sizes: tuple[int, ...]) -> None:
    for p in (0.1, 0.5):
        got = keep_of_forward(seed, *sizes, p, dtype)
        keep = reference.dropout_keep(seed, *sizes, p)
        assert torch.equal(got != 0, keep)
        want = keep.double() / ((1 - p) * sizes[-1])
        assert_within(got, want, 8 * roundoff(dtype) / ((1 - p) * sizes[-1]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_backward_uses_the_same_mask(dtype: torch.dtype) -> None:
    """With equal scores and an identity as incoming gradient, the gradient of the values is the kept weights,
    transposed."""
    for queries, keys in ((17, 70), (66, 130)):
        zeros = torch.zeros(2, 3, 1, 1, dtype=dtype)
        value = torch.randn(2, 3, keys, queries).to(dtype).requires_grad_()
        seed = torch.tensor([1234567])
        q, k = zeros.expand(2, 3, queries, 1), zeros.expand(2, 3, keys, 1)
        out, _ = ops.attention(q, k, value, dropout_seed=seed, dropout_p=0.4)
        (grad,) = torch.autograd.grad(out, value, torch.eye(queries, dtype=dtype).expand(2, 3, queries, queries))
        assert torch.equal(grad.mT != 0, reference.dropout_keep(1234567, 2, 3, queries, keys, 0.4))


@pytest.mark.parametrize("average", [False, True])
def test_the_returned_weights_are_those_used(average: bool) -> None:
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (20, 70, 70))
    seed = torch.tensor([99])
    out, lse = ops.attention(q, k, v, dropout_seed=seed, dropout_p=0.3, causal=1)
    weights = attention_weights(q, k, None, None, seed, dropout_p=0.3, causal=1, average=average)
    keep = reference.dropout_keep(99, 2, 4, 20, 70, 0.3)
    per_head = torch.exp(q @ k.mT / 8**0.5 - lse[..., None]).tril().where(keep, 0) / 0.7
    assert_within(weights, per_head.mean(1) if average else per_head, 1e-13)
    assert_within(out, per_head @ v, 1e-12)


def test_position_decides_not_layout_masks_or_shared_heads() -> None:
    """Pair (b, h, i, j) is kept or dropped alike whatever else the call says; j counts appended keys too."""
    keep = reference.dropout_keep(7, 2, 4, 33, 70, 0.3)
    for layout in LAYOUTS:
        for heads_kv, mask, causal, appended in ((4, "none", 0, 0), (2, "bool:B1TS", 1, 2), (1, "float64:11TS", 2, 1)):
            problem = build(
                Case(
                    2, 4, heads_kv, 33, 70, 8, 70, torch.float64, mask, causal=causal, appended=appended, layout=layout
                )
            )
            problem.value = LAYOUTS[layout](torch.eye(70, dtype=torch.float64).expand(2, heads_kv, 70, 70).contiguous())
            options = {**problem.options, "dropout_p": 0.3}
            with_dropout = ops.attention(*problem.tensors[:5], torch.tensor([7]), **options)[0]
            without = ops.attention(*problem.tensors, **problem.options)[0]
            assert_within(with_dropout, without.where(keep, 0) / 0.7, 1e-14)


def test_log_sum_exp_never_changes() -> None:
    problem = build(Case(2, 2, 2, 20, 30, 8))
    lse = ops.attention(*problem.tensors)[1]
    seed = torch.tensor([3])
    assert torch.equal(ops.attention(*problem.tensors[:5], seed, dropout_p=0.9)[1], lse)


def test_grid_with_dropout() -> None:
    for seed, (mask, padding, causal, appended) in enumerate(
        [("none", "none", 0, 0), ("bool:BHTS", "bool", 1, 0), ("float32:11TS", "float32", 2, 2), ("none", "bool", 1, 1)]
    ):
        check(build(Case(2, 4, 2, 50, 90, 17, 9, torch.float32, mask, padding, causal, appended, 0.25), seed))


# ---------------------------------------------------------------------------------------------------------- statistics
def standard_score(hits: float, trials: int, p: float) -> float:
    """How many standard deviations ``hits`` of ``trials`` independent events of probability p are from their mean."""
    return (hits - trials * p) / math.sqrt(trials * p * (1 - p))


# The seeds are fixed, so the outcomes are too. 4.5 standard deviations come by chance once in 150,000 looks.
WIDE = 4.5


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_kept_is_one_minus_p_everywhere(p: float) -> None:
    """Over all pairs, and over each example, head, query and key alone."""
    for seed in (0, 1, 2**40):
        keep = keep_of_forward(seed, 2, 4, 128, 256, p, torch.float32) != 0
        for axes in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
            hits = keep.double().sum(axes)
            trials = keep.numel() // max(1, hits.numel())
            scores = [standard_score(float(h), trials, 1 - p) for h in hits.flatten()]
            assert max(map(abs, scores)) < WIDE, (seed, axes)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent_along_every_axis(p: float) -> None:
    """Two pairs one (or a power of two) apart agree as often as independent ones do."""
    keep = keep_of_forward(11, 4, 4, 128, 128, p, torch.float32) != 0
    agree = (1 - p) ** 2 + p**2
    for axis in range(4):
        for distance in (1, 2, 16, 64):
            if distance < keep.shape[axis]:
                n = keep.shape[axis] - distance
                same = keep.narrow(axis, 0, n) == keep.narrow(axis, distance, n)
                assert abs(standard_score(float(same.sum()), same.numel(), agree)) < WIDE, (axis, distance)


def test_calls_with_other_seeds_are_independent() -> None:
    base = keep_of_forward(1000, 2, 2, 64, 128, 0.5, torch.float32) != 0
    for other in (1001, 1002, 1000 ^ 2**32, -1000, 1000 + 2**20):
        same = base == (keep_of_forward(other, 2, 2, 64, 128, 0.5, torch.float32) != 0)
        assert abs(standard_score(float(same.sum()), same.numel(), 0.5)) < WIDE, other


def test_rows_have_no_period_and_no_twins() -> None:
    """Among 2 x 4 x 128 rows of 256 coin flips no two agree in more places than chance allows (8.5 deviations at 0.5 M
    pairs)."""
    keep = (keep_of_forward(5, 2, 4, 128, 256, 0.5, torch.float32) != 0).flatten(0, 2).double() * 2 - 1
    product = keep @ keep.T
    assert float(product.fill_diagonal_(0).abs().max()) < 7 * math.sqrt(256)


def test_the_expected_output_is_the_output_without_dropout() -> None:
    """Mean over 400 seeds, six standard errors."""
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 40, 40))
    results = torch.stack(
        [ops.attention(q, k, v, dropout_seed=torch.tensor([s]), dropout_p=0.3)[0] for s in range(400)]
    )
    error = (results.mean(0) - ops.attention(q, k, v)[0]).abs()
    assert bool((error < 6 * results.std(0) / 20).all())


# ----------------------------------------------------------------------------------------------- from torch's generator
def test_the_global_seed_decides_in_functional_and_module() -> None:
    q = torch.randn(2, 4, 30, 8)
    module = mha_ext.MultiheadAttention(32, 4, dropout=0.3, batch_first=True)
    x = torch.randn(2, 30, 32)
    for call in (lambda: functional.scaled_dot_product_attention(q, q, q, dropout_p=0.3), lambda: module(x, x, x)[0]):
        torch.manual_seed(5)
        first, second = call(), call()
        torch.manual_seed(5)
        assert torch.equal(call(), first) and torch.equal(call(), second) and not torch.equal(first, second)


def test_module_drops_in_training_only_and_returns_what_it_used() -> None:
    module = mha_ext.MultiheadAttention(32, 4, dropout=0.5, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    torch.manual_seed(1)
    out, weights = module(x, x, x, average_attn_weights=False)
    assert 0.4 < float((weights == 0).double().mean()) < 0.6
    torch.manual_seed(1)
    assert_within(module(x, x, x, need_weights=False)[0], out, 1e-13)
    torch.manual_seed(1)
    assert_within(module(x, x, x)[1], weights.mean(1), 1e-14)
    value = x @ module.in_proj_weight[64:].T + module.in_proj_bias[64:]
    mixed = weights @ value.unflatten(-1, (4, 8)).transpose(1, 2)
    assert_within(module.out_proj(mixed.transpose(1, 2).flatten(2)), out, 1e-13)
    assert torch.equal(module.eval()(x, x, x)[0], module(x, x, x)[0])
    assert bool((module(x, x, x, average_attn_weights=False)[1] > 0).all())


def test_every_call_draws_a_mask_of_its_own() -> None:
    q = torch.zeros(1, 1, 20, 4)
    value = torch.eye(20)[None, None]
    masks = [functional.scaled_dot_product_attention(q, q, value, dropout_p=0.5) != 0 for _ in range(40)]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_eval_draws_nothing_from_the_generator() -> None:
    module = mha_ext.MultiheadAttention(8, 2, dropout=0.5).eval()
    x = torch.randn(3, 1, 8)
    state = torch.get_rng_state()
    module(x, x, x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("need_weights", [False, True])
def test_module_thread_invariance(need_weights: bool) -> None:
    module = mha_ext.MultiheadAttention(64, 4, dropout=0.2, batch_first=True)
    x = torch.randn(3, 130, 64)
    results = []
    for count in (1, 2):
        twin, leaf = copy.deepcopy(module), x.clone().requires_grad_()
        with threads(count):
            torch.manual_seed(3)
            out, weights = twin(leaf, leaf, leaf, need_weights=need_weights)
            out.square().sum().backward()
        results.append([out, leaf.grad, *[p.grad for p in twin.parameters()], *([weights] if need_weights else [])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_backward_pass_repeats_itself() -> None:
    problem = build(Case(2, 4, 2, 70, 90, 16, dropout_p=0.3))
    first, second = run(problem), run(problem)
    assert all(torch.equal(first[2][n], second[2][n]) for n in first[2])
