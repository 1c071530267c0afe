"""Who may see whom: every kind of mask alone and together, empty rows, and what lies behind a mask."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import DTYPES, Case, Problem, attention_weights, build, check, exact, merged_bias, ops, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_within, attention_limits, roundoff
from torch import Tensor

from mha_ext import functional

SHAPES = ["".join(letters) for letters in itertools.product("B1", "H1", "T1", "S1")]


# ---------------------------------------------------------------------------------------------------- kinds and grids
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["bool", "float32", "float64", "bfloat16", "float16"])
def test_any_broadcastable_shape_and_dtype(kind: str, shape: str) -> None:
    """Forward and all gradients, the float mask's own included, in the mask's shape and dtype."""
    for seed, case in enumerate([Case(2, 4, 2, 19, 35, 8), Case(3, 2, 1, 33, 16, 17, 5)]):
        check(build(Case(**{**case.__dict__, "mask": f"{kind}:{shape}"}), seed))


@pytest.mark.parametrize("causal", [0, 1, 2])
@pytest.mark.parametrize("padding", ["none", "bool", "float32"])
@pytest.mark.parametrize("mask", ["none", "bool:11TS", "float32:BHTS"])
@pytest.mark.parametrize("appended", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(5, 5), (33, 70), (70, 33), (1, 66)], ids=str)
def test_masks_causality_padding_and_appended_keys_together(
    causal: int, padding: str, mask: str, appended: int, sizes: tuple[int, int]
) -> None:
    case = Case(
        2, 2, 2, sizes[0], sizes[1] + appended, 12, 12, mask=mask, padding=padding, causal=causal, appended=appended
    )
    check(build(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 63, 64, 65, 129, 257])
@pytest.mark.parametrize("causal", [1, 2])
def test_causal_around_tile_edges(dtype: torch.dtype, keys: int, causal: int) -> None:
    for queries in (1, keys, max(1, keys - 1), keys + 1, 65):
        check(build(Case(1, 1, 1, queries, keys, 8, dtype=dtype, causal=causal)), grads=dtype != torch.float64)


@pytest.mark.parametrize("appended", [1, 2, 3])
@pytest.mark.parametrize("keys", [63, 64, 65, 66, 67, 127, 128, 129, 130])
def test_appended_keys_around_tile_edges(appended: int, keys: int) -> None:
    for causal, mask in ((0, "none"), (1, "none"), (2, "float32:11TS"), (1, "bool:BHTS")):
        check(build(Case(1, 2, 2, 20, keys, 8, 8, mask=mask, padding="bool", causal=causal, appended=appended)))


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_long_masks(dtype: torch.dtype, shape: str) -> None:
    sizes, paddings = ((130, 200), (257, 64), (64, 257)), ("none", "bool", "float64")
    for i, (kind, causal) in enumerate(itertools.product(("bool", "float32", "float16"), (0, 1, 2))):
        case = Case(2, 4, 2, *sizes[i % 3], 24, 32, dtype, f"{kind}:{shape}", paddings[(i + i // 3) % 3], causal)
        check(build(case))


def test_causal_is_what_a_triangle_of_booleans_says() -> None:
    """Upper-left and lower-right alignment by hand on 2 x 4 and 4 x 2."""
    for queries, keys, causal, rows in (
        (2, 4, 1, ["1000", "1100"]),
        (2, 4, 2, ["1110", "1111"]),
        (4, 2, 1, ["10", "11", "11", "11"]),
        (4, 2, 2, ["00", "00", "10", "11"]),
    ):
        visible = torch.tensor([[c == "1" for c in row] for row in rows])
        q, k, v = torch.randn(1, 1, queries, 8), torch.randn(1, 1, keys, 8), torch.randn(1, 1, keys, 8)
        out, lse = ops.attention(q, k, v, causal=causal)
        want, want_lse = ops.attention(q, k, v, visible[None, None])
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        alignment = "upper_left" if causal == 1 else "lower_right"
        got = functional.scaled_dot_product_attention(q, k, v, is_causal=True, causal_alignment=alignment)
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "view",
    [
        lambda b, h, t, s, r: r(b, 1, 1, s).expand(b, h, t, s),
        lambda b, h, t, s, r: r(b, h, s, t).transpose(-1, -2),
        lambda b, h, t, s, r: r(b, h, t, 2 * s)[..., ::2],
        lambda b, h, t, s, r: r(b, h, t, s + 5)[..., 2 : s + 2],
        lambda b, h, t, s, r: r(b, h, 3 * t, s)[:, :, ::3],
        lambda b, h, t, s, r: r(t, s, h, b).permute(3, 2, 0, 1),
        lambda b, h, t, s, r: r(t, 1).expand(1, 1, t, s),
        lambda b, h, t, s, r: r(1, 1, 1, 1).expand(b, h, t, s),
        lambda b, h, t, s, r: r(1, s).expand(b, h, t, s)[:, :1],
    ],
)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("sizes", [(37, 43), (16, 64), (65, 33)], ids=str)
def test_mask_strides(view: object, kind: str, sizes: tuple[int, int]) -> None:
    problem = build(Case(2, 3, 3, *sizes, 16))
    make = (lambda *shape: torch.rand(*shape) > 0.3) if kind == "bool" else torch.randn
    problem.attn_mask = view(2, 3, *sizes, make)
    check(problem)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(["bool", "float32", "bfloat16", "float64"]),
    st.sampled_from(SHAPES),
    st.permutations([0, 1, 2, 3]),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
    st.sampled_from([(1, 1), (7, 33), (17, 16), (48, 65)]),
)
def test_any_mask_strides(kind: str, shape: str, order: list[int], steps: list[int], sizes: tuple[int, int]) -> None:
    problem = build(Case(2, 2, 1, *sizes, 8, mask=f"{kind}:{shape}"))
    values = problem.attn_mask
    buffer = torch.zeros([values.shape[i] * step for i, step in zip(order, steps, strict=True)], dtype=values.dtype)
    view = buffer[tuple(slice(None, None, step) for step in steps)].permute([order.index(i) for i in range(4)])
    problem.attn_mask = view.copy_(values)
    check(problem)


def test_padding_of_one_row_is_shared_and_any_stride_is_read() -> None:
    problem = build(Case(3, 2, 2, 9, 21, 8))
    problem.key_padding_mask = (torch.arange(21) > 13)[None]
    check(problem)
    problem.key_padding_mask = (torch.rand(21, 6) > 0.5)[:, ::2].T
    check(problem)
    problem.key_padding_mask = torch.randn(21, 3).T
    check(problem)


# ----------------------------------------------------------------------------------------------------------- empty rows
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_a_row_that_sees_nothing_is_zero_and_passes_nothing(dtype: torch.dtype, kind: str) -> None:
    """Exactly zero output, log-sum-exp -inf, and exactly zero gradients, whatever the query and the incoming gradient
    hold."""
    problem = build(Case(2, 2, 2, 20, 40, 16, dtype=dtype))
    visible = torch.rand(2, 2, 20, 40) > 0.5
    visible[:, :, 3], visible[1], visible[:, :, 19] = False, False, False
    problem.attn_mask = visible if kind == "bool" else torch.zeros(2, 2, 20, 40).masked_fill(~visible, -math.inf)
    clean = run(problem)
    for bad in (math.nan, math.inf, torch.finfo(dtype).max):
        problem.query = problem.query.masked_fill(~visible.any(-1)[..., None], bad)
        problem.grad_out = problem.grad_out.masked_fill(~visible.any(-1)[..., None], bad)
        problem.grad_lse = problem.grad_lse.masked_fill(~visible.any(-1), bad)
        out, lse, grads = run(problem)
        assert not out[1].any() and not out[0, :, 3].any() and bool((lse[1] == -math.inf).all())
        assert not grads["query"][1].any() and not grads["key"][1].any() and not grads["value"][1].any()
        assert torch.equal(out, clean[0]) and torch.equal(lse, clean[1])
        assert all(torch.equal(grads[name], clean[2][name]) for name in grads)


def test_lower_right_causality_with_more_queries_than_keys_leaves_empty_rows() -> None:
    problem = build(Case(1, 2, 2, 40, 18, 8, causal=2))
    problem.query[:, :, :22] = math.nan
    problem.grad_out[:, :, :22] = math.nan
    out, lse, grads = run(problem)
    assert (
        not out[:, :, :22].any() and bool(lse[:, :, 22:].isfinite().all()) and bool((lse[:, :, :22] == -math.inf).all())
    )
    assert all(bool(g.isfinite().all()) for g in grads.values()) and not grads["query"][:, :, :22].any()


def test_every_key_padded_but_an_appended_one_is_seen() -> None:
    problem = build(Case(2, 2, 2, 7, 12, 8, causal=1, appended=1))
    problem.key_padding_mask = torch.ones(2, 11, dtype=torch.bool)
    out, _, _ = run(problem)
    assert torch.equal(out, problem.value[:, :, -1:].expand_as(out))
    check(problem)


# ------------------------------------------------------------------------------------------------------- behind a mask
def hide(problem: Problem, kind: str) -> Tensor:
    """Give the problem a mask of that kind that hides keys for all queries; which keys, (B, S) bool."""
    batch, _, queries, keys = problem.case.B, problem.case.H, problem.case.T, problem.case.keys
    hidden = torch.rand(batch, keys, generator=torch.Generator().manual_seed(5)) > 0.6
    hidden[:, 0], hidden[:, -1] = False, True
    if kind == "padding":
        problem.key_padding_mask = hidden
    elif kind == "float_padding":
        problem.key_padding_mask = torch.randn(batch, keys).masked_fill(hidden, -math.inf)
    elif kind == "bool":
        problem.attn_mask = ~hidden[:, None, None].expand(batch, 1, queries, keys)
    else:
        problem.attn_mask = torch.randn(batch, 1, queries, keys).masked_fill(hidden[:, None, None], -math.inf)
    return hidden


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["padding", "float_padding", "bool", "float"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_behind_a_mask_reaches_anything(dtype: torch.dtype, kind: str, bad: float) -> None:
    """Keys and values that nobody sees may hold anything: not one bit of the output or a gradient changes."""
    for sizes in ((2, 2, 2, 9, 21, 8), (1, 2, 1, 40, 150, 16)):
        problem = build(Case(*sizes, dtype=dtype))
        hidden = hide(problem, kind)
        clean = run(problem)
        for names in (("key",), ("value",), ("key", "value")):
            dirty = build(problem.case)
            dirty.attn_mask, dirty.key_padding_mask = problem.attn_mask, problem.key_padding_mask
            for name in names:
                setattr(dirty, name, getattr(dirty, name).masked_fill(hidden[:, None, :, None], bad))
            out, lse, grads = run(dirty)
            assert torch.equal(out, clean[0]) and torch.equal(lse, clean[1])
            assert all(torch.equal(grads[name], clean[2][name]) for name in grads), names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [1, 2])
def test_a_nan_in_the_future_reaches_only_the_future(dtype: torch.dtype, causal: int) -> None:
    """Key j = 50 is NaN: rows before it are bit for bit those of a clean key, rows that see it are all NaN."""
    problem = build(Case(1, 2, 2, 100, 100, 16, dtype=dtype, causal=causal))
    out, lse, _ = run(problem)
    for name in ("key", "value"):
        dirty = build(problem.case)
        getattr(dirty, name)[:, :, 50] = math.nan
        got, got_lse, grads = run(dirty)
        assert torch.equal(got[:, :, :50], out[:, :, :50]) and torch.equal(got_lse[:, :, :50], lse[:, :, :50])
        assert bool(got[:, :, 50:].isnan().all())
        assert bool(grads["query"][:, :, :50].isfinite().all()) and bool(grads["query"][:, :, 50:].isnan().all())


def test_a_hole_in_a_mask_hides_and_shows_pair_by_pair() -> None:
    """A NaN key and value seen by some queries only, over many tiles, forward and backward."""
    for kind in ("bool", "float"):
        problem = build(Case(2, 2, 2, 70, 140, 16))
        visible = torch.rand(2, 1, 70, 140) > 0.4
        bad_keys = [0, 31, 64, 139]
        visible[:, :, ::2, bad_keys] = False
        visible[:, :, 1::2, 64] = True
        problem.attn_mask = visible if kind == "bool" else torch.zeros(2, 1, 70, 140).masked_fill(~visible, -math.inf)
        clean = run(problem)
        for name in ("key", "value"):
            dirty = build(problem.case)
            dirty.attn_mask = problem.attn_mask
            getattr(dirty, name)[:, :, bad_keys] = math.nan
            out, _, grads = run(dirty)
            assert torch.equal(out[:, :, ::2], clean[0][:, :, ::2])
            assert bool(out[:, :, 1::2].isnan().all())
            assert torch.equal(grads["query"][:, :, ::2], clean[2]["query"][:, :, ::2])


def test_a_nan_query_spoils_its_own_row_only() -> None:
    problem = build(Case(1, 2, 2, 33, 50, 8))
    clean, _, _ = run(problem)
    problem.query[0, 1, 17, 3] = math.nan
    out, lse, _ = run(problem)
    rows = torch.zeros(1, 2, 33, dtype=torch.bool)
    rows[0, 1, 17] = True
    assert (
        torch.equal(out.isnan().any(-1), rows)
        and torch.equal(out.isnan().all(-1), rows)
        and torch.equal(lse.isnan(), rows)
    )
    assert torch.equal(out[~rows], clean[~rows])


def test_a_nan_in_a_float_mask_is_seen_where_it_acts() -> None:
    problem = build(Case(1, 1, 1, 20, 30, 8, causal=1))
    problem.attn_mask = torch.zeros(1, 1, 20, 30)
    problem.attn_mask[..., 5, 2] = math.nan
    problem.attn_mask[..., 4, 9] = math.nan
    out = ops.attention(*problem.tensors, **problem.options)[0]
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 0, 5]]


# ------------------------------------------------------------------------------------------- huge but ordinary numbers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mask_of_the_smallest_number_is_an_ordinary_number(dtype: torch.dtype) -> None:
    """finfo.min is not -inf: beside an ordinary score it gives weight 0; a row that holds nothing else is a plain
    softmax over equal scores (the scores vanish beside it), so the mean of the values."""
    problem = build(Case(1, 2, 2, 6, 40, 8, dtype=dtype))
    problem.attn_mask = torch.zeros(1, 1, 6, 40, dtype=dtype)
    problem.attn_mask[..., 2, :] = torch.finfo(dtype).min
    problem.attn_mask[..., 4, 10:] = torch.finfo(dtype).min
    out, lse, _ = run(problem)
    some = problem.value[:, :, :10]
    alone = ops.attention(problem.query[:, :, 4:5], problem.key[:, :, :10], some)[0]
    assert_within(out[:, :, 4:5], alone, 4 * roundoff(dtype) * float(some.abs().max()))
    mean = problem.value.double().mean(2)
    size = float(problem.value.abs().max())
    assert_within(out[:, :, 2], mean, 40 * roundoff(torch.float32) * size + 2 * roundoff(dtype) * size)
    assert bool(lse.isfinite().all()) and bool((lse[:, :, 2] < -1e38).all())


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float64])
def test_rows_beside_the_smallest_number_keep_their_weights(mask_dtype: torch.dtype) -> None:
    """All weights of a row are equal then, 1/40 each; what its own dtype's smallest number becomes in float32 hides
    nothing, and m + log l, in which log l has no digit left, still gives weights and gradients."""
    problem = build(Case(1, 2, 2, 6, 41, 8))
    problem.attn_mask = torch.full((1, 1, 6, 41), torch.finfo(mask_dtype).min, dtype=mask_dtype)
    problem.attn_mask[..., 40] = -math.inf
    _, _, grads = run(problem)
    weights = attention_weights(problem.query, problem.key, *problem.tensors[3:], average=True, **problem.options)
    assert_within(weights[..., :40], torch.full((1, 6, 40), 1 / 40), 4 * roundoff(torch.float32) / 40)
    assert bool((weights[..., 40] == 0).all())
    upstream = problem.grad_out.double().sum(2, keepdim=True) / 40
    size = float(problem.grad_out.abs().sum(2).max()) / 40
    assert_within(grads["value"][:, :, :40], upstream.expand(1, 2, 40, 8), 16 * roundoff(torch.float32) * size)


@pytest.mark.parametrize("low", [-1e4, -2e5, -1e9, -1e30])
def test_large_negative_masks(low: float) -> None:
    """Rows whose every score is very low still attend; the order among them counts as far as float32 resolves it."""
    problem = build(Case(1, 1, 1, 8, 50, 8))
    problem.attn_mask = torch.full((1, 1, 8, 50), low)
    problem.attn_mask[..., ::2, :7] = 0.0
    truth = exact(problem)
    rows = slice(0, None, 2)
    out, lse, grads = run(problem)
    assert_within(out[:, :, rows], truth.out[:, :, rows], attention_limits(truth, torch.float32, 1)["out"][:, :, rows])
    assert (
        bool(out.isfinite().all())
        and bool(lse.isfinite().all())
        and all(bool(g.isfinite().all()) for g in grads.values())
    )
    if low == -1e4:
        check(problem)


# ------------------------------------------------------------------------------------------------ conventions in Python
def test_functional_mask_true_means_may_attend_and_padding_true_means_ignore() -> None:
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    hidden = torch.zeros(2, 7, dtype=torch.bool)
    hidden[1, 4:] = True
    want = torch.cat(
        [
            functional.scaled_dot_product_attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
            for b, n in ((0, 7), (1, 4))
        ]
    )
    assert_within(functional.scaled_dot_product_attention(q, k, v, ~hidden[:, None, None]), want, 1e-13)
    assert_within(functional.scaled_dot_product_attention(q, k, v, key_padding_mask=hidden), want, 1e-13)


@pytest.mark.parametrize(
    "shape", [(5, 7), (7,), (3, 5, 7), (3, 1, 7), (2, 1, 1, 7), (2, 3, 5, 1), (1, 7), (5, 1), (1, 1)], ids=str
)
def test_functional_broadcasts_masks_of_any_rank(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    for mask in (torch.rand(shape) > 0.2, torch.randn(shape, dtype=torch.float64)):
        full = mask.expand(2, 3, 5, 7)
        case = Case(2, 3, 3, 5, 7, 8, dtype=torch.float64)
        weights = torch.softmax(q @ k.mT / 8**0.5 + merged_bias(case, full, None), -1).nan_to_num(0.0)
        assert_within(functional.scaled_dot_product_attention(q, k, v, mask), weights @ v, 1e-13)


def test_functional_takes_causal_bias_objects() -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    for make, offset in ((causal_upper_left, 0), (causal_lower_right, 2)):
        want = functional.scaled_dot_product_attention(q, k, v, torch.ones(5, 7, dtype=torch.bool).tril(offset))
        assert_within(functional.scaled_dot_product_attention(q, k, v, make(5, 7)), want, 1e-13)


@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (6, 6)], ids=str)
@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
def test_functional_causal_bias_and_the_flag_both_apply(sizes: tuple[int, int], alignment: str) -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (sizes[0], sizes[1], sizes[1]))
    offsets = {"upper_left": 0, "lower_right": sizes[1] - sizes[0]}
    for make, of_bias in ((causal_upper_left, "upper_left"), (causal_lower_right, "lower_right")):
        visible = torch.ones(sizes, dtype=torch.bool).tril(min(offsets[alignment], offsets[of_bias]))
        want = functional.scaled_dot_product_attention(q, k, v, visible)
        options = {"is_causal": True, "causal_alignment": alignment}
        assert_within(functional.scaled_dot_product_attention(q, k, v, make(*sizes), **options), want, 1e-13)


def test_functional_causality_and_a_mask_both_apply() -> None:
    q = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    mask = torch.rand(6, 6) > 0.4
    got = functional.scaled_dot_product_attention(q, q, q, mask, is_causal=True)
    assert_within(got, functional.scaled_dot_product_attention(q, q, q, mask.tril()), 1e-13)
    bias = torch.randn(6, 6, dtype=torch.float64)
    low = bias.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -math.inf)
    got = functional.scaled_dot_product_attention(q, q, q, bias, is_causal=True)
    assert_within(got, functional.scaled_dot_product_attention(q, q, q, low), 1e-13)
