"""Wrong options are refused by name before any work, and numbers at the edge of what they may be do what they say."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from cases import DTYPES, UPPER_LEFT, ops
from tolerances import assert_within
from variant_cases import Variant, check, exact, limits_of, make

from mha_ext.functional import scaled_dot_product_attention

B, H, T, S = 2, 4, 5, 7
QUERY, KEY = torch.randn(B, H, T, 8), torch.randn(B, H, S, 8)
IDS = (torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 0, 1, 1, 1, 2, 2]))
NAN = math.nan


def attend(**options: Any) -> Any:
    return scaled_dot_product_attention(QUERY, KEY, KEY, **options)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"window": (-2, 0)}, ValueError, r"window must .*got \(-2, 0\)"),
        ({"window": (0, -5)}, ValueError, r"window must .*got \(0, -5\)"),
        ({"window": 3}, TypeError, r"window must be a pair.*got 3"),
        ({"window": (3,)}, TypeError, r"window must be a pair.*got \(3,\)"),
        ({"window": (1, 2, 3)}, TypeError, r"window must be a pair.*got \(1, 2, 3\)"),
        ({"window": (1.5, 2)}, TypeError, r"window must .*got .*(1.5|float)"),
        ({"window": ("a", 2)}, TypeError, "window must .*got"),
        ({"window": torch.tensor([1, 2])}, TypeError, "window must .*got"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive.*got 0.0"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive.*got -1.0"),
        ({"softcap": NAN}, ValueError, "softcap must .*got nan"),
        ({"softcap": math.inf}, ValueError, "softcap must .*got inf"),
        ({"softcap": "20"}, TypeError, "softcap must .*got"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes must have shape .*\(4,\).*got \(3,\)"),
        ({"alibi_slopes": torch.ones(3, 4)}, ValueError, r"alibi_slopes must have shape .*got \(3, 4\)"),
        ({"alibi_slopes": torch.ones(())}, ValueError, r"alibi_slopes must have shape .*got \(\)"),
        ({"alibi_slopes": torch.ones(4).long()}, TypeError, "alibi_slopes must be floating point, got torch.int64"),
        ({"alibi_slopes": [1.0] * 4}, TypeError, "alibi_slopes must be a tensor, got list"),
        ({"relative_bias": torch.ones(4, 12)}, ValueError, r"relative_bias must have shape .*\(4, 11\).*got \(4, 12\)"),
        ({"relative_bias": torch.ones(4, 1)}, ValueError, r"relative_bias must have shape .*got \(4, 1\)"),
        ({"relative_bias": torch.ones(11)}, ValueError, r"relative_bias must have shape .*got \(11,\)"),
        ({"relative_bias": torch.ones(2, 11)}, ValueError, r"relative_bias must have shape .*got \(2, 11\)"),
        ({"relative_bias": torch.ones(3, 4, 11)}, ValueError, r"relative_bias must have shape .*got \(3, 4, 11\)"),
        ({"relative_bias": torch.ones(4, 11).int()}, TypeError, "relative_bias must be floating .*got torch.int32"),
        ({"relative_bias": torch.ones(4, 11, dtype=torch.bool)}, TypeError, "relative_bias must be floating point"),
        ({"sink": torch.zeros(3)}, ValueError, r"sink must have shape .*\(4,\), got \(3,\)"),
        ({"sink": torch.zeros(2, 4)}, ValueError, r"sink must have shape .*\(4,\), got \(2, 4\)"),
        ({"sink": torch.zeros(4).int()}, TypeError, "sink must be floating point, got torch.int32"),
        ({"sink": 0.0}, TypeError, "sink must be a tensor, got float"),
        ({"segment_ids": IDS[0]}, ValueError, r"segment_ids must have shape .*7.*got \(5,\)"),
        ({"segment_ids": (IDS[1], IDS[0])}, ValueError, r"segment_ids must have shape .*5.*got \(7,\)"),
        ({"segment_ids": (*IDS, IDS[0])}, TypeError, "segment_ids must be .*got 3"),
        ({"segment_ids": (IDS[0].float(), IDS[1])}, TypeError, "segment_ids must be an integer .*got torch.float32"),
        ({"segment_ids": (IDS[0].bool(), IDS[1])}, TypeError, "segment_ids must be an integer tensor, got torch.bool"),
        ({"segment_ids": (IDS[0].tolist(), IDS[1])}, TypeError, "segment_ids must be a tensor, got list"),
        ({"segment_ids": (IDS[0].flip(0), IDS[1])}, ValueError, "segment_ids must not decrease .*got"),
        ({"segment_ids": (IDS[0], IDS[1].flip(0))}, ValueError, "segment_ids must not decrease .*got"),
        ({"segment_ids": (IDS[0].expand(3, 5), IDS[1])}, ValueError, r"segment_ids must have shape .*got \(3, 5\)"),
        ({"prefix_length": 3}, ValueError, "prefix_length must come with is_causal=True.*got is_causal=False"),
        ({"prefix_length": 3, "is_causal": True, "window": (2, 0)}, ValueError, "prefix_length must .*no window.*got"),
        ({"prefix_length": -1, "is_causal": True}, ValueError, "prefix_length must be at least 0, got -1"),
        ({"prefix_length": torch.tensor([1, -1]), "is_causal": True}, ValueError, "prefix_length must be at least 0"),
        ({"prefix_length": torch.tensor([1, 2, 3]), "is_causal": True}, ValueError, r"prefix_length must .*got \(3,"),
        ({"prefix_length": 2.5, "is_causal": True}, TypeError, "prefix_length must .*got"),
        ({"prefix_length": torch.tensor([1.0, 2.0]), "is_causal": True}, TypeError, "prefix_length must .*float32"),
        ({"key_range": torch.zeros(2, 4).int()}, ValueError, r"key_range must have shape .*got"),
        ({"key_range": torch.zeros(3, 5).int()}, ValueError, r"key_range must have shape \(2, 2, 5\), got \(3, 5\)"),
        ({"key_range": torch.zeros(2, 3, 5).int()}, ValueError, r"key_range must have shape .*got"),
        ({"key_range": torch.zeros(2, 5)}, TypeError, "key_range must be an integer tensor, got torch.float32"),
        ({"key_range": (0, 5)}, TypeError, "key_range must be a tensor, got tuple"),
        ({"sink": torch.zeros(4, device="meta")}, ValueError, "sink must be on query's device cpu, got meta"),
        ({"alibi_slopes": torch.zeros(4, device="meta")}, ValueError, "alibi_slopes must be on query's device cpu"),
        ({"key_range": torch.zeros(2, 5, device="meta").int()}, ValueError, "key_range must be on query's device cpu"),
    ],
    ids=lambda x: x[:70] if isinstance(x, str) else "",
)  # fmt: skip
def test_wrong_options_are_named(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^scaled_dot_product_attention: {message}"):
        attend(**options)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"window_left": -2}, ValueError, "window_left must be at least 0.*got -2"),
        ({"window_right": -2}, ValueError, "window_right must be at least 0.*got -2"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive.*got -1"),
        ({"softcap": NAN}, ValueError, "softcap must .*got nan"),
        ({"causal": 4}, ValueError, "causal must .*got 4"),
        ({"sink": torch.zeros(3)}, ValueError, "sink must have .*4.*got 3"),
        ({"sink": torch.zeros(4).int()}, TypeError, "sink must be float64.*got"),
        ({"relative_bias": torch.zeros(1, 4, 10)}, ValueError, "relative_bias must .*11.*got .*10"),
        ({"relative_bias": torch.zeros(4, 11)}, ValueError, "relative_bias must have 3 dimensions.*got"),
        ({"key_range": torch.zeros(2, 1, 5)}, TypeError, "key_range must be int32, got"),
        ({"key_range": torch.zeros(2, 3, 5).int()}, ValueError, "key_range must have batch size 1 or 2.*got 3"),
        ({"key_range": torch.zeros(2, 5).int()}, ValueError, "key_range must have 3 dimensions.*got 2"),
    ],
    ids=lambda x: x[:70] if isinstance(x, str) else "",
)
def test_operators_refuse_by_name(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^attention: {message}"):
        ops.attention(QUERY, KEY, KEY, **options)


# --------------------------------------------------------------------------------------------- numbers at their limits
@pytest.mark.parametrize("side", [1000, 2**31 - 1, 2**31, 2**62, sys.maxsize])
@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_wider_than_everything_is_none(side: int, alignment: str, is_causal: bool) -> None:
    options = {"is_causal": is_causal, "causal_alignment": alignment}
    want = attend(**options)
    for window in ((side, side), (None, side), (side, None), (side, -1), (None, None), [side, side]):
        assert torch.equal(attend(**options, window=window), want), window


@pytest.mark.parametrize(
    ("name", "given", "limit"),
    [("window", (2**70, 0), (None, 0)), ("window", (0, 2**64), (0, None)), ("prefix_length", 2**70, S)],
)
def test_numbers_beyond_64_bits_are_taken_or_refused_by_name(name: str, given: Any, limit: Any) -> None:
    rest = {"is_causal": True} if name == "prefix_length" else {}
    try:
        out = attend(**{name: given}, **rest)
    except (ValueError, TypeError) as error:
        assert f"{name} must" in str(error) and str(given) in str(error)
    else:
        assert torch.equal(out, attend(**{name: limit}, **rest))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [1e-300, 1e-42, 1e-6, 1e6, 1e37, 1e39, 1e300])
def test_any_cap(cap: float, dtype: torch.dtype) -> None:
    """Far below every score all are equal, far above nothing happens; nothing overflows on the way."""
    for lengths in ((33, 66), (3, 66)):
        call = make(Variant(1, 2, 1, *lengths, 16, dtype=dtype, softcap=cap))
        if cap < 1e-30:  # gradients through a cap so small are rounded to 0; what is left is that of equal weights
            truth, _ = exact(call)
            limits = limits_of(call, truth, grads=False)
            (out, lse), grads = call.gradients()
            assert_within(out, truth.out, limits["out"])
            assert_within(lse, truth.lse, limits["lse"])
            assert all(x.isfinite().all() for x in grads.values())
        else:
            check(call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(33, 66), (3, 66)], ids=str)
@pytest.mark.parametrize("logit", [-math.inf, -1e30, -300.0, 300.0, 1e30])
def test_any_sink(logit: float, lengths: tuple[int, int], dtype: torch.dtype) -> None:
    """Far below it is none (a query without keys has its value as lse), far above it takes the whole row."""
    call = make(Variant(1, 2, 1, *lengths, 16, dtype=dtype, mask="bool:B1TS", sink="float64"))
    call.tensors["sink"].fill_(logit)
    call.grad_lse.zero_()
    plain = {n: x for n, x in call.tensors.items() if n != "sink"}
    (out, lse), grads = call.gradients()
    assert all(x.isfinite().all() for x in (out, *grads.values()))
    rest = {n: x for n, x in call.rest.items() if n != "attn_mask"}
    if logit > 0:
        assert float(out.abs().max()) < 1e-30 and torch.equal(lse, torch.full_like(lse, logit))
    else:
        want = scaled_dot_product_attention(**plain, attn_mask=call.rest["attn_mask"], **rest, return_lse=True)
        seen = call.rest["attn_mask"].any(-1).expand_as(lse)
        truth, _ = exact(call)
        limits = limits_of(call, truth, grads=False)
        assert_within(out, want[0], 2 * limits["out"])
        assert_within(lse[seen], want[1][seen], 2 * limits["lse"][seen])
        assert bool((lse[~seen] == call.tensors["sink"][0].to(lse.dtype)).all()) and bool((~seen).any())


@pytest.mark.parametrize("where", ["relative_bias", "attn_mask"])
@pytest.mark.parametrize("lengths", [(33, 66), (3, 66)], ids=str)
def test_minus_infinity_hides_a_distance_as_it_hides_a_pair(where: str, lengths: tuple[int, int]) -> None:
    """A bias of minus infinity beyond some distance is a window; what lies there, NaN included, reaches nothing."""
    queries, keys = lengths
    call = make(Variant(2, 2, 1, queries, keys, 8, relative="float32:H"))
    bias = call.tensors["relative_bias"]
    distance = torch.arange(queries + keys - 1) - (queries - 1)
    hidden = (distance < -4) | (distance > 6)
    windowed = {**call.rest, "window": (4, 6)}
    want = scaled_dot_product_attention(**call.tensors, **windowed, return_lse=True)
    bias[:, hidden] = -math.inf
    tensors = dict(call.tensors)
    if where == "attn_mask":
        index = torch.arange(keys)[None] - torch.arange(queries)[:, None] + queries - 1
        tensors["attn_mask"] = tensors.pop("relative_bias")[:, index]
    tensors["key"], tensors["value"] = tensors["key"].clone(), tensors["value"].clone()
    last = queries - 1 + 6
    tensors["key"][:, :, last + 1 :], tensors["value"][:, :, last + 1 :] = math.nan, math.inf
    got = scaled_dot_product_attention(**tensors, **call.rest, return_lse=True)
    for a, b in zip(got, want, strict=True):
        assert_within(a, b, 1e-5)


def test_a_relative_bias_of_large_finite_numbers_stays_finite() -> None:
    call = make(Variant(1, 2, 2, 33, 66, 8, causal=UPPER_LEFT, relative="float32:H"))
    call.tensors["relative_bias"].fill_(torch.finfo(torch.float32).min)
    out, lse = call.ours()
    want = torch.stack([call.tensors["value"][:, :, : i + 1].mean(2) for i in range(33)], 2)
    assert lse.isfinite().all()
    assert_within(out, want, 1e-5)
