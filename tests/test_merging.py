"""Attention over two parts of the keys, merged, against one over all: values, gradients, empty rows, errors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from cases import DTYPES, Case, build, exact, generator
from tolerances import assert_within, attention_limits, double_limit, roundoff
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from mha_ext.functional import merge_attention, scaled_dot_product_attention

PARTS = [(0, 20), (1, 20), (11, 20), (20, 20)]  # where the first part ends, and the number of keys


def attend_in_parts(case: Case, tensors: tuple[Tensor, ...], cut: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The halves' attention by our function, merged."""
    query, key, value = tensors
    halves = []
    for part in (slice(0, cut), slice(cut, case.keys)):
        piece = None if mask is None else mask[..., part]
        halves += scaled_dot_product_attention(
            query, key[:, :, part], value[:, :, part], piece, enable_gqa=True, return_lse=True
        )
    return merge_attention(*halves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("mask", ["none", "bool:BHTS", "float64:1HTS"])
@pytest.mark.parametrize(("cut", "keys"), PARTS, ids=str)
def test_two_parts_are_the_whole(cut: int, keys: int, mask: str, kv_heads: int, dtype: torch.dtype) -> None:
    """Output, log-sum-exp and gradients within what a single call is allowed, three times: of the parts' own errors
    (weighted, they add up to once), their log-sum-exps' in the shares, and the merger's few roundings."""
    case = Case(2, 4, kv_heads, 9, keys, 16, dtype=dtype, mask=mask)
    problem = build(case)
    truth = exact(problem)
    limits = attention_limits(truth, dtype, kv_heads)
    leaves = [x.detach().requires_grad_() for x in (problem.query, problem.key, problem.value)]
    out, lse = attend_in_parts(case, tuple(leaves), cut, problem.attn_mask)
    assert_within(out, truth.out, 3 * limits["out"], "out")
    assert_within(lse, truth.lse, 3 * limits["lse"], "lse")
    assert out.dtype == dtype
    grad_lse = torch.where(truth.lse.isfinite(), problem.grad_lse, 0.0).to(lse.dtype)
    grads = torch.autograd.grad((out, lse), leaves, (problem.grad_out, grad_lse))
    for name, grad in zip(("query", "key", "value"), grads, strict=True):
        assert_within(grad, truth.grads[name], 3 * limits[name], name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_by_hand(dtype: torch.dtype) -> None:
    """lse log 3 and 0: shares 3/4 and 1/4; far apart, one part is all; nothing of an empty row is read."""
    lse_a = torch.tensor([math.log(3.0), 1000.0, 0.5, -math.inf, -math.inf])
    lse_b = torch.tensor([0.0, -1000.0, -math.inf, 0.5, -math.inf])
    out_a = torch.tensor([4.0, 1.5, 2.0, math.nan, math.inf], dtype=dtype).unsqueeze(-1)
    out_b = torch.tensor([8.0, 9.0, math.inf, 3.0, math.nan], dtype=dtype).unsqueeze(-1)
    out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
    want = torch.tensor([5.0, 1.5, 2.0, 3.0, 0.0]).unsqueeze(-1)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_within(out, want, 5 * max(roundoff(dtype), roundoff(torch.float32)) * 8)
    assert_within(lse, torch.tensor([math.log(4.0), 1000.0, 0.5, 0.5, -math.inf]), 4 * roundoff(torch.float32))


def test_a_broken_part_shows() -> None:
    out, lse = merge_attention(torch.zeros(2, 1), torch.tensor([math.nan, 0.0]), torch.ones(2, 1), torch.zeros(2))
    assert out.isnan().flatten().tolist() == lse.isnan().tolist() == [True, False]


def parts(seed: int = 1) -> list[Tensor]:
    """Outputs and log-sum-exps of four rows: both parts full, one empty, the other, both."""
    g = generator(seed)
    out_a, out_b = (torch.randn(2, 4, 3, generator=g, dtype=torch.float64) for _ in range(2))
    lse_a, lse_b = (torch.randn(2, 4, generator=g, dtype=torch.float64) for _ in range(2))
    lse_a[:, [1, 3]] = -math.inf
    lse_b[:, [2, 3]] = -math.inf
    return [x.requires_grad_() for x in (out_a, lse_a, out_b, lse_b)]


def full_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach()[:, :1].contiguous().requires_grad_() for x in tensors)


def test_derivatives() -> None:
    assert gradcheck(merge_attention, full_rows(*parts())) and gradgradcheck(merge_attention, full_rows(*parts()))


def test_derivatives_beside_empty_rows() -> None:
    """First and second derivatives of rows with an empty side are those of the side that is not; never NaN."""
    given = parts()
    out, lse = merge_attention(*given)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), given, (grad_out, grad_lse), create_graph=True)
    for (grad_out_side, grad_lse_side), alone, others in (
        (grads[:2], 2, (1, 3)),
        (grads[2:], 1, (2, 3)),
    ):
        assert torch.equal(grad_out_side[:, alone], grad_out[:, alone])
        assert_within(grad_lse_side[:, alone], grad_lse[:, alone], double_limit(grad_lse, 3))
        for row in others:
            assert not grad_out_side[:, row].any() and not grad_lse_side[:, row].any()
    again = torch.autograd.grad(sum((g**2).sum() for g in grads), given)
    assert all(bool(g.isfinite().all()) for g in (*grads, *again))


def test_transforms() -> None:
    given = [x.detach() for x in parts()]
    want = merge_attention(*given)
    compiled = torch.compile(merge_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for got in (torch.func.vmap(merge_attention)(*given), compiled(*given)):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


OUT, LSE = torch.zeros(2, 3, 4), torch.zeros(2, 3)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"out_a": 1.0}, TypeError, "out_a must be a tensor, got float"),
    ({"lse_b": None}, TypeError, "lse_b must be a tensor, got NoneType"),
    ({"out_b": OUT.long()}, TypeError, "out_b must be float64, float32, bfloat16 or float16, got torch.int64"),
    ({"out_b": OUT.to_sparse()}, TypeError, "out_b must be a dense tensor"),
    ({"out_a": OUT[0, 0]}, ValueError, "out_a must have at least 2 axes (T, D_v), got shape (4,)"),
    ({"lse_a": LSE[:, :2]}, ValueError, "lse_a must have shape (2, 3), got (2, 2)"),
    ({"lse_a": LSE.unsqueeze(-1)}, ValueError, "lse_a must have shape (2, 3), got (2, 3, 1)"),
    ({"out_b": OUT[:1]}, ValueError, "out_b must have out_a's shape (2, 3, 4), got (1, 3, 4)"),
    ({"lse_b": LSE[:1]}, ValueError, "lse_b must have lse_a's shape (2, 3), got (1, 3)"),
    ({"out_b": OUT.double()}, TypeError, "out_b must have out_a's dtype torch.float32, got torch.float64"),
    ({"lse_b": LSE.double()}, TypeError, "lse_b must have lse_a's dtype torch.float32, got torch.float64"),
    ({"lse_b": LSE.to("meta")}, ValueError, "lse_b must be on out_a's device cpu, got meta"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG, ids=lambda v: v if isinstance(v, str) else None)
def test_refused(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(f"merge_attention: {message}")):
        merge_attention(**{"out_a": OUT, "lse_a": LSE, "out_b": OUT, "lse_b": LSE, **changes})
