"""Calls of PyTorch's scaled_dot_product_attention for the tests of the activation, and who computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from cases import generator
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

OURS, COMPOSITION = "mha_ext::attention", "aten::_scaled_dot_product_attention_math"


class Call(NamedTuple):
    """Inputs of F.scaled_dot_product_attention in float64."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Call:
        tensors = (x.to(dtype).requires_grad_() for x in self[:3])
        options = {
            name: x.to(dtype).detach().requires_grad_(x.requires_grad)
            if isinstance(x, Tensor) and x.is_floating_point()
            else x
            for name, x in self.options.items()
        }
        return Call(*tensors, options)

    def __call__(self) -> Tensor:
        return F.scaled_dot_product_attention(self.query, self.key, self.value, **self.options)

    def leaves(self) -> list[Tensor]:
        mask = self.options.get("attn_mask")
        return [*self[:3], mask] if mask is not None and mask.requires_grad else list(self[:3])

    def results(self) -> list[Tensor]:
        """Output and the gradients of its product with fixed numbers."""
        out = self()
        weights = torch.randn(out.shape, generator=generator(9), dtype=torch.float64).to(out.dtype)
        return [out, *torch.autograd.grad(out, self.leaves(), weights)]


def call(*shapes: tuple[int, ...], **options: Any) -> Call:
    g = generator(3)
    query, key, value = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    return Call(query, key, value, options)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(4), dtype=torch.float64)


def seen(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=generator(5)) < 0.7
    mask[..., 0] = True
    return mask


Q, K, V = (2, 4, 9, 8), (2, 4, 13, 8), (2, 4, 13, 8)
TAKEN: dict[str, Call] = {
    "plain": call(Q, K, V),
    "causal": call(Q, K, V, is_causal=True),
    "scale": call(Q, K, V, scale=-0.3),
    "bool mask": call(Q, K, V, attn_mask=seen(9, 13)),
    "bool mask per example": call(Q, K, V, attn_mask=seen(2, 1, 1, 13)),
    "row of a mask": call(Q, K, V, attn_mask=seen(9, 1)),
    "float mask": call(Q, K, V, attn_mask=noise(2, 4, 9, 13)),
    "float mask, 3 axes": call(Q, K, V, attn_mask=noise(4, 9, 13)),
    "float mask with gradient": call(Q, K, V, attn_mask=noise(1, 4, 9, 13).requires_grad_()),
    "wide values": call(Q, K, (2, 4, 13, 11)),
    "one key head": call(Q, (2, 1, 13, 8), (2, 1, 13, 8)),
    "one batch of keys": call(Q, (1, 4, 13, 8), (1, 4, 13, 8)),
    "grouped": call(Q, (2, 2, 13, 8), (2, 2, 13, 8), enable_gqa=True),
    "2-D": call((9, 8), (13, 8), (13, 8), attn_mask=noise(9, 13)),
    "3-D": call((3, 9, 8), (3, 13, 8), (3, 13, 6), attn_mask=seen(3, 9, 13)),
    "3-D causal": call((3, 9, 8), (3, 13, 8), (3, 13, 8), is_causal=True),
    "3-D grouped": call((4, 9, 8), (2, 13, 8), (2, 13, 8), enable_gqa=True),
    "5-D": call((2, 3, 4, 9, 8), (2, 3, 4, 13, 8), (2, 3, 4, 13, 8), attn_mask=seen(3, 1, 9, 13)),
    "6-D": call((2, 1, 2, 4, 9, 8), (2, 3, 2, 4, 13, 8), (1, 3, 2, 4, 13, 8), attn_mask=noise(9, 13)),
}


def in_order(x: Tensor, *order: int) -> Tensor:
    return x.permute(order).contiguous().permute([order.index(i) for i in range(len(order))])


PLAIN = TAKEN["plain"]
TAKEN["odd strides"] = Call(*(in_order(x, 3, 0, 1, 2) for x in PLAIN[:3]), {})
TAKEN["layer's strides"] = Call(*(in_order(x, 0, 2, 1, 3) for x in PLAIN[:3]), {"is_causal": True})
TAKEN["expanded"] = Call(PLAIN.query, PLAIN.key[:1].expand(2, 4, 13, 8), PLAIN.value[:, :1].expand(2, 4, 13, 8), {})


def ran(function: Callable[[], object]) -> set[str]:
    """Names of the operators that a call ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {event.name for event in profile.events()}


def truth(wanted: Call) -> list[Tensor]:
    """By PyTorch's composition in float64."""
    with sdpa_kernel(SDPBackend.MATH):
        return wanted.to(torch.float64).results()
