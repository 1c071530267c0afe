"""Attention on jagged nested tensors, against each sequence alone through PyTorch's math in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mha_ext.functional import scaled_dot_product_attention

LENGTHS, HEADS, KV_HEADS, DIM, VALUE_DIM = [3, 0, 17, 1, 40], 4, 2, 8, 5


def jagged(heads: int, width: int, lengths: list[int] = LENGTHS, offsets: Tensor | None = None) -> Any:
    rows = torch.randn(sum(lengths), heads, width, dtype=torch.float64)
    if offsets is None:
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return torch.nested.nested_tensor_from_jagged(rows, offsets=offsets).detach().requires_grad_()


def alone(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    heads = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*heads, enable_gqa=True, **options).squeeze(0).transpose(0, 1)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_each_sequence_is_as_alone_forward_and_backward(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    query = jagged(HEADS, DIM)
    key, value = jagged(KV_HEADS, DIM, offsets=query.offsets()), jagged(KV_HEADS, VALUE_DIM, offsets=query.offsets())
    inputs = (query, key, value)
    out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs), enable_gqa=True, **options)
    assert out.layout == torch.jagged
    rows = out.transpose(1, 2)
    grad = torch.randn_like(rows.values())
    found = torch.autograd.grad(rows.values(), inputs, grad)
    parts = [[part.detach().requires_grad_() for part in x.unbind()] for x in inputs]
    expected = torch.cat([alone(*part, **options) for part in zip(*parts, strict=True)])
    torch.testing.assert_close(rows.values(), expected, rtol=0, atol=1e-13)
    leaves = [leaf for side in parts for leaf in side]
    grads = torch.autograd.grad(expected, leaves, grad)
    for index, ours in enumerate(found):
        theirs = torch.cat(grads[index * len(LENGTHS) : (index + 1) * len(LENGTHS)])
        torch.testing.assert_close(ours.values(), theirs, rtol=0, atol=1e-13)


def test_keys_of_other_lengths() -> None:
    torch.manual_seed(1)
    query, key = jagged(HEADS, DIM, [2, 5, 1]), jagged(HEADS, DIM, [7, 1, 4])
    value = jagged(HEADS, DIM, [7, 1, 4], offsets=key.offsets())
    out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)))
    parts = zip(*(x.unbind() for x in (query, key, value)), strict=True)
    expected = torch.cat([alone(*part) for part in parts])
    torch.testing.assert_close(out.transpose(1, 2).values(), expected, rtol=0, atol=1e-13)


def test_the_result_adds_to_query() -> None:
    query = jagged(HEADS, DIM)
    x = query.transpose(1, 2)
    assert (scaled_dot_product_attention(x, x, x).transpose(1, 2) + query).shape == query.shape


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"attn_mask": torch.ones(3, 3)}, NotImplementedError, "attn_mask must not be set with nested tensors"),
        ({"return_lse": True}, NotImplementedError, "return_lse must not be set with nested tensors, got True"),
        (
            {"key": torch.ones(5, 4, 3, 8)},
            NotImplementedError,
            "key must be a jagged nested tensor .* got a dense tensor",
        ),
        ({"key": jagged(2, 8).transpose(1, 2)}, ValueError, "key must have query's 4 heads .* got 2"),
        (
            {"value": jagged(4, 8, [1, 1, 1, 1, 1]).transpose(1, 2)},
            ValueError,
            "value must have key's lengths, got others",
        ),
        ({"dropout_p": 2.0}, ValueError, "dropout_p"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    x = jagged(HEADS, DIM).transpose(1, 2)
    with pytest.raises(kind, match=message):
        scaled_dot_product_attention(**{"query": x, "key": x, "value": x, **changes})
