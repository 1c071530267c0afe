"""bfloat16 and float16 where their kernels differ from those of float32: pairs of elements with one left over, tiles
that are hidden in part or as a whole, numbers at both ends of each type's range; by every instruction set."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from cases import LAYOUTS, Case, Problem, build, check, exact, ops, run
from hypothesis import given, settings
from hypothesis import strategies as st
from switches import cpu_capability, threads
from test_special_values import nan_patterns
from tolerances import Exact, assert_within, attention_limits, fold_heads, growth, roundoff
from torch import Tensor

import mha_ext

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
EVERY = pytest.mark.parametrize("capability", mha_ext.available_cpu_capabilities())
SUBNORMAL = 2.0**-126  # of float32 and bfloat16: smaller numbers may be read or written as 0; 2^-14 for float16
ODD = (1, 3, 17, 33, 63, 65)


def everything(problem: Problem) -> list[Tensor]:
    out, lse, grads = run(problem)
    return [out, lse, *grads.values()]


# ------------------------------------------------------------------------------------------------------ sizes and edges
@HALVES
@EVERY
def test_odd_sizes(capability: str, dtype: torch.dtype) -> None:
    """Few queries or many, one key to several tiles, one left over of each pair of keys, of columns, of queries."""
    dims = itertools.cycle(itertools.product(ODD, (*ODD[1:], 1)))
    with cpu_capability(capability):
        for queries, keys in itertools.product((1, 2, 3, 7, 15, 31, 65), (1, 3, 31, 33, 65, 127, 129, 513)):
            check(build(Case(1, 2, 1, queries, keys, *next(dims), dtype)))


@HALVES
@EVERY
def test_causal_edges_beside_the_edges_of_tiles(capability: str, dtype: torch.dtype) -> None:
    with cpu_capability(capability):
        sizes = itertools.product((15, 16, 17, 31, 33, 63, 65, 129), (-14, -1, 0, 1, 31))
        for n, (queries, more) in enumerate(sizes):  # eight by five: each size meets both alignments
            check(build(Case(1, 1, 1, queries, queries + more, 33, 17, dtype, causal=1 + n % 2)))


@HALVES
@EVERY
def test_thread_count_changes_no_bit(capability: str, dtype: torch.dtype) -> None:
    """Nor do the sizes of the blocks that it decides: heads of one piece of a sum or several, blocks with a rest."""
    with cpu_capability(capability):
        for queries, keys, dim in itertools.product((97, 127, 130), (33, 200), (33, 64, 65, 80, 128)):
            problem = build(Case(1, 4, 2, queries, keys, dim, dim, dtype))
            results = []
            for count in (1, 2, 3):
                with threads(count):
                    results.append(everything(problem))
            for found in results[1:]:
                assert all(map(torch.equal, results[0], found)), problem.case


# ------------------------------------------------------------------------------------------- what lies behind the masks
HIDDEN = {
    "a tile": slice(32, 64),
    "two tiles": slice(64, 192),
    "the first keys": slice(0, 33),
    "the last key": slice(160, None),
    "every second key": slice(0, None, 2),
    "all but one": slice(1, None),
    "all": slice(None),
}


def hide(problem: Problem, kind: str, keys: slice) -> None:
    """These keys from every query; and every key from the query 5."""
    case = problem.case
    if kind == "padding":
        problem.key_padding_mask = torch.zeros(case.B, case.keys, dtype=torch.bool)
        problem.key_padding_mask[:, keys] = True
        problem.attn_mask = torch.ones(1, 1, case.T, 1, dtype=torch.bool)
        problem.attn_mask[:, :, 5] = False
        return
    visible = torch.rand(1, case.H if kind == "heads" else 1, case.T, case.keys) > 0.2
    visible[..., keys] = False
    visible[:, :, 5] = False
    problem.attn_mask = visible
    if kind == "float":
        problem.attn_mask = torch.where(visible, torch.randn(visible.shape), -math.inf).to(case.dtype)


@HALVES
@EVERY
@pytest.mark.parametrize("kind", ["bool", "heads", "float", "padding"])
def test_nan_and_infinity_behind_masks(kind: str, capability: str, dtype: torch.dtype) -> None:
    """What no query sees, and what a query holds that sees nothing, changes no bit; and the rest is right."""
    with cpu_capability(capability):
        for keys, (queries, dim, dim_v) in itertools.product(HIDDEN.values(), ((7, 33, 17), (65, 17, 63))):
            problem = build(Case(1, 2, 2, queries, 161, dim, dim_v, dtype))
            hide(problem, kind, keys)
            check(problem)
            clean = everything(problem)
            problem.key[:, :, keys], problem.value[:, :, keys] = math.nan, math.inf
            problem.query[:, :, 5], problem.grad_out[:, :, 5] = math.inf, math.nan
            dirty = everything(problem)
            assert all(map(torch.equal, clean, dirty))
            assert not dirty[0][:, :, 5].any() and not dirty[2][:, :, 5].any()


@HALVES
@EVERY
def test_nan_above_the_causal_edge(capability: str, dtype: torch.dtype) -> None:
    """Keys that the first queries do not see are NaN: these queries' results stay, all others' are NaN."""
    with cpu_capability(capability):
        for queries, first in itertools.product((33, 65, 130), (1, 15, 16, 31, 32)):
            problem = build(Case(1, 2, 2, queries, queries, 17, 31, dtype, causal=1))
            clean = everything(problem)
            problem.key[:, :, first:], problem.value[:, :, first:] = math.nan, math.nan
            dirty = everything(problem)
            for a, b in zip(clean[:3], dirty[:3], strict=True):
                assert torch.equal(a[:, :, :first], b[:, :, :first]) and bool(b[:, :, first:].isnan().all())


@EVERY
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from(["none", "bool:BHTS", "bool:11TS", "own:B1TS"]),
    st.sampled_from(["none", "bool"]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([(3, 601), (5, 7), (20, 41), (71, 33)]),
    st.lists(
        st.tuples(st.sampled_from(("query", "key", "value", "grad_out")), st.integers(0, 10**6)), min_size=1, max_size=3
    ),
)
def test_nan_goes_where_the_equations_take_it(
    capability: str,
    dtype: torch.dtype,
    mask: str,
    padding: str,
    causal: int,
    sizes: tuple[int, int],
    places: list[tuple[str, int]],
) -> None:
    mask = mask.replace("own", str(dtype).removeprefix("torch."))
    problem = build(Case(2, 2, 1, *sizes, 5, 3, dtype, mask, padding, causal))
    for name, place in places:
        tensor = getattr(problem, name)
        tensor.flatten()[place % tensor.numel()] = math.nan
    with cpu_capability(capability):
        for name, (ours, theirs) in nan_patterns(problem).items():
            assert torch.equal(ours, theirs), f"{name}: {int(ours.sum())} NaN, the equations give {int(theirs.sum())}"


# ------------------------------------------------------------------------------------------ both ends of a type's range
def scaled(case: Case, **sizes: float) -> Problem:
    """The case with some of its tensors multiplied."""
    problem = build(case)
    for name, size in sizes.items():
        tensor = getattr(problem, name)
        setattr(problem, name, (tensor.double() * size).to(tensor.dtype))
    return problem


SUBNORMALS: list[dict[str, float]] = [
    {"value": 2.0**-15},
    {"grad_out": 2.0**-15},
    {"query": 2.0**-15, "key": 2.0**13},
    {"query": 2.0**13, "key": 2.0**-15},
    {"value": 2.0**-16, "grad_out": 2.0**12},
    {"value": 2.0**12, "grad_out": 2.0**-16},
]


@EVERY
@pytest.mark.parametrize("queries", [3, 33])
@pytest.mark.parametrize("sizes", SUBNORMALS, ids=str)
def test_subnormal_float16_numbers_are_numbers(sizes: dict[str, float], queries: int, capability: str) -> None:
    """Most of one tensor's are below 2^-14; read as 0, they would change the result as much as it is large."""
    problem = scaled(Case(1, 2, 2, queries, 65, 17, 15, torch.float16), **sizes)
    small = min(sizes, key=lambda name: sizes[name])
    assert float((getattr(problem, small).abs() < 2.0**-14).double().mean()) > 0.9
    problem.grad_lse.zero_()
    with cpu_capability(capability):
        check(problem)


def assert_right_but_for_subnormals(problem: Problem, truth: Exact) -> None:
    """Within the limits, and what it makes when numbers below 2^-126 are read as 0: each sum of weights times one."""
    case = problem.case
    limits = attention_limits(truth, case.dtype, case.heads_kv)
    used, d_scores = truth.weights * truth.drop, abs(truth.scale) * truth.grad_scores().abs()
    more = {
        "out": used.sum(-1, keepdim=True),
        "query": d_scores.sum(-1, keepdim=True),
        "key": fold_heads(d_scores.sum(-2)[..., None], case.heads_kv),
        "value": fold_heads(used.sum(-2)[..., None], case.heads_kv),
    }
    out, lse, grads = run(problem)
    assert_within(lse, truth.lse, limits["lse"], "lse")
    for name, got in {"out": out, **grads}.items():
        want = truth.out if name == "out" else truth.grads[name]
        assert_within(got, want, limits[name] + SUBNORMAL * more[name], name)


@EVERY
@pytest.mark.parametrize("queries", [3, 33])
@pytest.mark.parametrize("name", ["query", "key", "value", "grad_out"])
def test_subnormal_bfloat16_numbers_are_small(name: str, queries: int, capability: str) -> None:
    """Alone or among others, kept or read as 0."""
    with cpu_capability(capability):
        for step in (1, 3):
            problem = build(Case(1, 2, 2, queries, 65, 17, 15, torch.bfloat16))
            getattr(problem, name)[..., ::step] *= 2.0**-130
            problem.grad_lse.zero_()
            assert_right_but_for_subnormals(problem, exact(problem))


@HALVES
@EVERY
@pytest.mark.parametrize("queries", [3, 33])
def test_scores_beyond_the_range_of_float16(queries: int, capability: str, dtype: torch.dtype) -> None:
    """Of some 10^5 to 10^7, also below zero in whole rows, with dropout and masks."""
    with cpu_capability(capability):
        for size, mask in itertools.product((100.0, 1000.0), ("none", "bool:B1TS")):
            problem = scaled(Case(1, 2, 2, queries, 65, 65, 17, dtype, mask, dropout_p=0.2), query=size, key=size)
            problem.key[..., 0], problem.query[..., 0] = size, -size
            top = (problem.query.double() @ problem.key.double().mT).abs().max()
            assert float(top) > 2 * 65504
            problem.grad_out *= 2.0**-10  # or gradients of query and key would be beyond it as well
            problem.grad_lse *= 2.0**-10
            check(problem)


@HALVES
@EVERY
@pytest.mark.parametrize("queries", [3, 33])
def test_equal_scores_near_the_top_of_the_range(queries: int, capability: str, dtype: torch.dtype) -> None:
    """Query i sees the keys j with the same i % D and j % D alike, with a score of 2^30 or more, and no other: output
    and gradient of the values are means, exact but for their own sums."""
    dim, keys, size = 17, 67, 2.0**15 if dtype == torch.float16 else 2.0**60
    problem = build(Case(1, 2, 2, queries, keys, dim, 9, dtype, scale=1.0))
    problem.query.copy_(size * torch.eye(dim)[torch.arange(queries) % dim])
    problem.key.copy_(size * torch.eye(dim)[torch.arange(keys) % dim])
    weights = (torch.arange(queries)[:, None] % dim == torch.arange(keys) % dim).double()
    lse = size**2 + weights.sum(1).log()
    weights /= weights.sum(1, keepdim=True)
    with cpu_capability(capability):
        out, found, grads = run(problem, with_lse_grad=False)
    share = growth(keys, dtype) + 8 * roundoff(torch.float32) + 2 * roundoff(dtype)
    assert_within(found, lse.expand(1, 2, -1), 4 * roundoff(torch.float32) * size**2)
    value, grad_out = problem.value.double(), problem.grad_out.double()
    assert_within(out, weights @ value, share * (weights @ value.abs()), "out")
    assert_within(grads["value"], weights.mT @ grad_out, share * (weights.mT @ grad_out.abs()), "value")


# ------------------------------------------------------------------------------------------------------------ at random
SHAPES = {
    "H": st.sampled_from([1, 2, 4]),
    "T": st.one_of(st.integers(1, 9), st.integers(10, 70), st.sampled_from([127, 128, 129])),
    "S": st.one_of(st.integers(2, 70), st.sampled_from([127, 128, 129, 255, 257])),
    "D": st.one_of(st.integers(1, 34), st.sampled_from([63, 64, 65, 80, 128])),
    "D_v": st.one_of(st.integers(1, 34), st.sampled_from([63, 64, 65, 96, 128])),
}
OPTIONS = {
    "mask": st.builds(
        lambda kind, *sizes: f"{kind}:{''.join(sizes)}",
        st.sampled_from(["bool", "bfloat16", "float16", "float32"]),
        *(st.sampled_from([letter, "1"]) for letter in "BHTS"),
    )
    | st.just("none"),
    "padding": st.sampled_from(["none", "bool", "bfloat16"]),
    "causal": st.integers(0, 2),
    "appended": st.sampled_from([0, 0, 1]),
    "dropout_p": st.sampled_from([0.0, 0.0, 0.3]),
    "layout": st.sampled_from(list(LAYOUTS)),
    "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
}
CASES = st.builds(Case, B=st.integers(1, 2), **SHAPES, **OPTIONS)


def check_drawn(capability: str, case: Case, groups: int, size: float, seed: int) -> None:
    case = replace(case, H_kv=max(1, case.H // groups))
    problem = build(case, seed)
    problem.query.mul_(size)
    problem.grad_lse.div_(max(size, 1.0))
    with cpu_capability(capability):
        check(problem)


DRAWN = given(CASES, st.sampled_from([1, 2, 4]), st.sampled_from([0.01, 1.0, 1.0, 8.0]), st.integers(0, 99))


@EVERY
@settings(max_examples=50, deadline=None, derandomize=True)
@DRAWN
def test_random_problems(capability: str, case: Case, groups: int, size: float, seed: int) -> None:
    check_drawn(capability, case, groups, size, seed)


@pytest.mark.long
@EVERY
@settings(max_examples=1000, deadline=None)
@DRAWN
def test_many_random_problems(capability: str, case: Case, groups: int, size: float, seed: int) -> None:
    check_drawn(capability, case, groups, size, seed)


@HALVES
@EVERY
def test_few_queries_and_many_agree_on_what_is_seen(capability: str, dtype: torch.dtype) -> None:
    """A query alone and among others, which another kernel may compute: both are right for a mask of every pattern."""
    problem = build(Case(1, 2, 1, 40, 97, 33, 31, dtype, "bool:BHTS", causal=2))
    truth = exact(problem)
    limits = attention_limits(truth, dtype, 1, grads=False)
    with cpu_capability(capability):
        for first in (0, 3, 17, 39):
            mask = problem.attn_mask[:, :, first : first + 1] & (torch.arange(97) <= first + 57)
            out, lse = ops.attention(problem.query[:, :, first : first + 1], problem.key, problem.value, mask)
            assert_within(out, truth.out[:, :, first : first + 1], limits["out"][:, :, first : first + 1])
            assert_within(lse, truth.lse[:, :, first : first + 1], limits["lse"][:, :, first : first + 1])


@EVERY
@pytest.mark.parametrize("queries", [3, 33])
@pytest.mark.parametrize(("of_query", "of_key", "scale"), [(1e19, 1e20, 1e-39), (1e-19, 1e-20, 1e38), (1e3, 1e3, 1e-6)])
def test_a_scale_that_keeps_products_in_range(
    of_query: float, of_key: float, scale: float, queries: int, capability: str
) -> None:
    """Products of queries and keys themselves would leave float32's range, or vanish."""
    query, key, value = (torch.randn(1, 2, n, 16) for n in (queries, 40, 40))
    tensors = [(x * size).bfloat16() for x, size in ((query, of_query), (key, of_key), (value, 1.0))]
    want = torch.softmax(scale * tensors[0].double() @ tensors[1].double().mT, -1) @ tensors[2].double()
    with cpu_capability(capability):
        out, _ = ops.attention(*tensors, scale=scale)
    assert float((out.double() - want).abs().max()) <= 2 * roundoff(torch.bfloat16) * float(tensors[2].abs().max())


@EVERY
@pytest.mark.parametrize("queries", [3, 33])
def test_an_output_beyond_the_range_spoils_no_gradient_that_leaves_it_out(queries: int, capability: str) -> None:
    """Dropout makes the first column infinite here and there; the loss does not look at it."""
    dtype = torch.float16
    query, key, value = (torch.randn(1, 1, n, 16).to(dtype) for n in (queries, 40, 40))
    value[..., 0] = torch.finfo(dtype).max * 0.9
    seed, options = torch.tensor([3]), {"dropout_p": 0.7}
    grad = torch.randn(1, 1, queries, 16).to(dtype)
    grad[..., 0] = 0
    results = []
    for hidden in (False, True):
        if hidden:
            value = value.clone()
            value[..., 0] = 0
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        with cpu_capability(capability):
            out, _ = ops.attention(*leaves, dropout_seed=seed, **options)
            results.append((out, torch.autograd.grad(out, leaves, grad)))
    assert bool(results[0][0][..., 0].isinf().any())
    for found, want in zip(results[0][1], results[1][1], strict=True):
        size = float(want.abs().max())
        assert bool(found.isfinite().all()) and float((found - want).abs().max()) <= 2 * roundoff(dtype) * size
