"""What lies outside the visible pairs reaches nothing; any leading axes; and the other roads to the same numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import truth
from cases import DTYPES, LOWER_RIGHT, UPPER_LEFT
from hypothesis import given, settings
from hypothesis import strategies as st
from switches import threads
from tolerances import assert_within, double_limit
from torch import Tensor
from torch.func import vmap
from variant_cases import HEADS_AND_NUMBERS, Call, Variant, exact, limits_of, make, variants
from variant_truth import biases, by_name, visible

from mha_ext.functional import scaled_dot_product_attention

RESTRICTIONS = {
    "window": {"window": (9, 4), "ends": True},
    "window from the start": {"window": (9, 4)},
    "lower right": {"causal": LOWER_RIGHT, "window": (9, None)},
    "segments": {"segments": "batch"},
    "prefix": {"causal": UPPER_LEFT, "prefix": 3},
    "range": {"key_range": "BT"},
}


# ------------------------------------------------------------------------------------------------- NaN, pair by pair
def sizes_of(call: Call) -> tuple[int, int, int, int]:
    case = call.variant
    return case.B, case.H, case.T, case.keys


def patterns(call: Call) -> dict[str, tuple[Tensor, Tensor]]:
    """Where results are NaN: ours, and by equations that leave hidden pairs out before they multiply."""
    case = call.variant
    hidden = ~visible(sizes_of(call), call.rest | {"attn_mask": call.options.get("attn_mask")})
    keep = call.keep()
    assert keep is None

    def pairwise(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        bias = torch.zeros(sizes_of(call), dtype=query.dtype)
        for part in biases(sizes_of(call), options):
            bias = bias + torch.where(hidden, 0.0, part)
        key, value = (x.repeat_interleave(case.H // case.heads_kv, 1) for x in (key, value))
        found = truth.attention(query, key, value, truth.Rules(hidden, bias), case.scale)
        return found.out, found.lse

    sent = {"out": call.grad_out, "lse": call.grad_lse}
    want, want_grads = by_name(pairwise, {n: x.double() for n, x in call.tensors.items()}, call.rest, {
        n: x.double() for n, x in sent.items()
    })  # fmt: skip
    got, grads = call.gradients()
    found = {"out": (got[0], want[0]), "lse": (got[1], want[1])}
    found |= {n: (grads[n], want_grads[n]) for n in grads}
    return {n: (a.isnan(), b.isnan()) for n, (a, b) in found.items()}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    variants(dtypes=[torch.float32, torch.bfloat16]),
    st.lists(
        st.tuples(st.sampled_from(["query", "key", "value", "relative_bias", "grad_out"]), st.integers(0, 10**6)),
        min_size=1, max_size=3,
    ),
)  # fmt: skip
def test_nan_goes_where_the_equations_take_it(case: Variant, places: list[tuple[str, int]]) -> None:
    """NaN in up to three places: results are NaN in the same places, pair by pair. (A capped or sunk score of NaN is
    one as well; dropout is elsewhere.)"""
    case = replace(case, dropout_p=0.0, softcap=None, sink="none", alibi="none", layout="plain", padding="none")
    call = make(replace(case, D=min(case.D, 8), T=min(case.T, 33) if case.segments != "one" else case.T))
    for name, place in places:
        tensor = call.grad_out if name == "grad_out" else call.tensors.get(name)
        if tensor is not None:
            tensor.flatten()[place % tensor.numel()] = math.nan
    for name, (ours, theirs) in patterns(call).items():
        assert torch.equal(ours, theirs), f"{name}: {int(ours.sum())} NaN, the equations give {int(theirs.sum())}"


@pytest.mark.parametrize("filling", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RESTRICTIONS)
@pytest.mark.parametrize("lengths", [(33, 130), (3, 257), (66, 65)], ids=str)
def test_what_no_query_sees_changes_no_bit(
    name: str, dtype: torch.dtype, filling: float, lengths: tuple[int, int]
) -> None:
    case = Variant(2, 4, 2, *lengths, 16, dtype=dtype, softcap=4.0, sink="float32", **RESTRICTIONS[name])
    call = make(case)
    hidden = ~visible(sizes_of(call), call.options)
    unseen = hidden.unflatten(1, (2, 2)).all(2).all(2)[..., None]
    blind = hidden.all(3)[..., None]
    clean = call.gradients()
    for x in (call.tensors["key"], call.tensors["value"]):
        x.copy_(x.masked_fill(unseen, filling))
    call.tensors["query"].copy_(call.tensors["query"].masked_fill(blind, filling))
    dirty = call.gradients()
    for a, b in zip([*clean[0], *clean[1].values()], [*dirty[0], *dirty[1].values()], strict=True):
        assert torch.equal(a, b)
    assert bool(unseen.any()) or bool(blind.any()) or lengths[0] == 66


def test_numbers_of_a_relative_bias_that_no_pair_uses_change_no_bit() -> None:
    call = make(Variant(2, 2, 2, 40, 70, 8, causal=UPPER_LEFT, relative="float32:H"))
    clean = call.gradients()
    call.tensors["relative_bias"][:, 40:] = math.nan
    dirty = call.gradients()
    for a, b in zip([*clean[0], *clean[1].values()], [*dirty[0], *dirty[1].values()], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["softcap", "sink"])
def test_a_visible_nan_stays_visible(name: str) -> None:
    options = {"softcap": {"softcap": 2.0}, "sink": {"sink": "float32"}}[name]
    call = make(Variant(1, 2, 2, 40, 70, 8, causal=UPPER_LEFT, **options))
    call.tensors["key"][:, 1, 30] = math.nan
    out, lse = call.ours()
    want = torch.zeros(1, 2, 40, dtype=torch.bool)
    want[:, 1, 30:] = True
    assert torch.equal(out.isnan().all(-1), want) and torch.equal(lse.isnan(), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cap_holds_scores_that_would_overflow(dtype: torch.dtype) -> None:
    """Scores far beyond the cap are the cap: infinite products too, and their gradient is 0, not NaN."""
    size = 1e30 if dtype in (torch.float64, torch.float32, torch.bfloat16) else 3e4
    signs = torch.tensor([1.0, -1.0, 1.0]).to(dtype)
    query = torch.full((1, 1, 2, 4), size).to(dtype).requires_grad_()
    key = (signs[:, None] * torch.full((3, 4), size).to(dtype))[None, None].detach().requires_grad_()
    value = torch.randn(1, 1, 3, 4).to(dtype)
    out, lse = scaled_dot_product_attention(query, key, value, softcap=3.0, return_lse=True)
    want = math.log(2 * math.exp(3.0) + math.exp(-3.0))
    assert_within(lse, torch.full((1, 1, 2), want), 1e-5)
    out.float().sum().backward()
    assert not query.grad.any() and not key.grad.any()


# ------------------------------------------------------------------------------------------- leading axes and strides
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_any_leading_axes(leading: tuple[int, ...]) -> None:
    """Everything that may differ along the batch takes the same leading axes as query."""
    count = math.prod(leading)
    case = Variant(
        count, 4, 2, 17, 33, 8, 5, torch.float64, causal=LOWER_RIGHT, segments="batch", key_range="BT", prefix="batch",
        alibi="float64:BH", relative="float64:BH", sink="float64", softcap=2.0,
    )  # fmt: skip
    call = make(case)
    want = call.ours()

    def unmerged(x: Tensor, axis: int = 0) -> Tensor:
        return x.reshape((*x.shape[:axis], *leading, *x.shape[axis + 1 :]))

    tensors = {n: x if n == "sink" else unmerged(x) for n, x in call.tensors.items()}
    ids = tuple(map(unmerged, call.rest["segment_ids"]))
    more = {"segment_ids": ids, "prefix_length": unmerged(call.rest["prefix_length"])}
    more["key_range"] = unmerged(call.rest["key_range"], 1)
    got = scaled_dot_product_attention(**tensors, **{**call.rest, **more}, return_lse=True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, unmerged(b))


def test_what_is_shared_by_a_batch_needs_no_batch_axis() -> None:
    call = make(Variant(3, 2, 2, 9, 14, 8, alibi="float32:H", relative="float32:H", segments="pair", key_range="T"))
    want = call.ours()
    shared = {n: x.expand(3, *x.shape) for n, x in call.tensors.items() if n in ("alibi_slopes", "relative_bias")}
    ids = tuple(x.expand(3, -1) for x in call.rest["segment_ids"])
    ranges = call.rest["key_range"][:, None].expand(2, 3, -1)
    got = scaled_dot_product_attention(
        **{**call.tensors, **shared, **call.rest, "segment_ids": ids, "key_range": ranges}, return_lse=True
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_strided_and_other_integer_arguments() -> None:
    call = make(Variant(2, 2, 2, 9, 14, 8, relative="float32:H", alibi="float32:BH", segments="pair", key_range="T"))
    want = call.ours()

    def strided(x: Tensor) -> Tensor:
        return torch.stack([x, x], -1)[..., 0]

    tensors = {n: x if n in HEADS_AND_NUMBERS else strided(x) for n, x in call.tensors.items()}
    for dtype in (torch.int32, torch.int16, torch.uint8):
        ranges = call.rest["key_range"].clamp(0)
        ids = tuple(strided(x.to(dtype)) for x in call.rest["segment_ids"])
        rest = {**call.rest, "segment_ids": ids, "key_range": strided(ranges.to(dtype))}
        got = scaled_dot_product_attention(**tensors, **rest, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_nothing_to_attend(sizes: tuple[int, int]) -> None:
    queries, keys = sizes
    query, key = torch.randn(2, 2, queries, 4, requires_grad=True), torch.randn(2, 2, keys, 4)
    sink = torch.tensor([0.5, -2.0], requires_grad=True)
    ids = (torch.zeros(queries, dtype=torch.long), torch.zeros(keys, dtype=torch.long))
    options: dict[str, Any] = {"window": (2, 2), "softcap": 2.0, "segment_ids": ids}
    if queries and keys == 0:
        options["relative_bias"] = torch.zeros(1, queries - 1)
    out, lse = scaled_dot_product_attention(query, key, key, sink=sink, **options, return_lse=True)
    assert out.shape == (2, 2, queries, 4) and not out.any()
    assert torch.equal(lse, sink[:, None].expand(2, 2, queries))
    (out.sum() + lse.sum()).backward()
    assert not query.grad.any() and torch.equal(sink.grad, torch.full((2,), 2.0 * queries))


def test_what_was_made_in_inference_mode_can_be_trained_with() -> None:
    """As masks made there can."""
    with torch.inference_mode():
        call = make(
            Variant(2, 2, 2, 9, 14, 8, relative="float32:H", alibi="float32:H", sink="float32", segments="pair")
        )
        call.rest["key_range"] = torch.tensor([[0] * 9, [12] * 9])
    heads = {n: call.tensors[n].clone().requires_grad_() for n in HEADS_AND_NUMBERS}
    results = []
    for made in (call.options, {n: x.clone() if isinstance(x, Tensor) else x for n, x in call.options.items()}):
        out = scaled_dot_product_attention(**heads, **made)
        results.append(torch.autograd.grad(out, list(heads.values()), call.grad_out.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---------------------------------------------------------------------------------------------------------- other roads
MANY = Variant(
    2, 4, 2, 17, 33, 8, 5, torch.float64, "bool:B1TS", causal=LOWER_RIGHT, window=(20, None), segments="batch",
    alibi="float64:H", relative="float64:BH", sink="float64", softcap=2.0,
)  # fmt: skip


def test_a_compiled_call_gives_the_same() -> None:
    """Traced whole, forward and backward."""
    call = make(MANY)
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True, dynamic=False)
    sent = {"out": call.grad_out, "lse": call.grad_lse}
    want, want_grads = call.gradients()
    got, grads = by_name(compiled, call.tensors, {**call.rest, "return_lse": True}, sent)
    for a, b in zip([*got, *grads.values()], [*want, *want_grads.values()], strict=True):
        assert_within(a, b, double_limit(b, 100))


def test_vmap_gives_the_same() -> None:
    call = make(MANY)
    query = call.tensors["query"]
    others = {n: x for n, x in {**call.tensors, **call.rest}.items() if n != "query"}
    mapped = vmap(lambda q: scaled_dot_product_attention(q, **others, return_lse=True))(torch.stack([query, -query]))
    for sign, place in ((1, 0), (-1, 1)):
        want = scaled_dot_product_attention(sign * query, **others, return_lse=True)
        for a, b in zip(mapped, want, strict=True):
            assert_within(a[place], b, double_limit(b, 100))


def test_autocast_lowers_heads_and_leaves_the_rest() -> None:
    """To the bit what casting query, key and value gives: biases and sinks keep their numbers."""
    call = make(replace(MANY, dtype=torch.float32, relative="float32:BH", alibi="float32:H", sink="float32"))
    lowered = {n: x.bfloat16() if n in HEADS_AND_NUMBERS else x for n, x in call.tensors.items()}
    want = scaled_dot_product_attention(**lowered, **call.rest, return_lse=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = scaled_dot_product_attention(**call.tensors, **call.rest, return_lse=True)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_composition_of_other_devices_gives_the_same() -> None:
    """Meta tensors have the real shapes, strides and dtypes."""
    call = make(MANY)
    moved = {n: x.to("meta") for n, x in call.tensors.items()}
    rest = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in call.rest.items() if n != "segment_ids"}
    fake = scaled_dot_product_attention(**moved, **rest, return_lse=True)
    for a, b in zip(fake, call.ours(), strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device.type) == (b.shape, b.dtype, b.stride(), "meta")


def test_a_window_is_what_the_same_mask_says() -> None:
    """Bounds and a bool matrix of the same pairs, to rounding, and to the bit where tiles are the same."""
    call = make(Variant(2, 2, 2, 130, 257, 16, window=(64, 3), ends=True, sink="float32"))
    truth_, _ = exact(call)
    limits = limits_of(call, truth_, grads=False)
    mask = visible(sizes_of(call), call.rest)[:1, :1]
    rest = {n: x for n, x in call.rest.items() if n != "window"}
    with threads(1):
        got = scaled_dot_product_attention(**call.tensors, **rest, attn_mask=mask, return_lse=True)
        want = call.ours()
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        assert_within(a, b, 2 * limits[name], name)
