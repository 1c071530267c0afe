"""Derivatives beyond the first backward pass: ours, and PyTorch's math path, the one of its roads that has them.

"jvp" is the output along tangents of query, key and value; "double backward" the gradient, with respect to query, key
and value, of the sum of squares of their gradients; "per example" the gradients of every example by itself, by vmap.
All that belongs to them is inside the time: the forward pass, and the backward pass that is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import mha_ext
from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.peers.base import Peer, Runner

Attention = Callable[..., Tensor]


def _double_backward(attention: Attention, tensors: tuple[Tensor, ...], sent: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    first = torch.autograd.grad(attention(*leaves), leaves, sent, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)


def _per_example(attention: Attention, tensors: tuple[Tensor, ...], sent: Tensor) -> tuple[Tensor, ...]:
    def loss(*one: Tensor) -> Tensor:
        *inputs, cotangent = (x[None] for x in one)
        return (attention(*inputs) * cotangent).sum()

    found: tuple[Tensor, ...] = vmap(grad(loss, (0, 1, 2)))(*tensors, sent)
    return found


class _Derivatives(Peer):
    level = "derivative"

    def attention(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        """The function that is differentiated."""
        raise NotImplementedError

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Tangents are the tensors themselves, in another order."""
        tensors, sent = inputs.arguments, inputs.grad_output

        def attention(*heads: Tensor) -> Tensor:
            return self.attention(*heads, is_causal=case.causal)

        def forward() -> tuple[Tensor, Any]:
            with torch.enable_grad():
                if case.variant == "jvp":
                    found = jvp(attention, tensors, tensors[1:] + tensors[:1])[1]
                elif case.variant == "double backward":
                    found = torch.cat(_double_backward(attention, tensors, sent))
                else:
                    found = torch.cat(_per_example(attention, tensors, sent))
            return found, None

        return Runner(forward, {})


class OurDerivatives(_Derivatives):
    """``mha_ext.functional``."""

    name = "mha_ext"

    def attention(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        """By the fused operators."""
        out = mha_ext.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        assert isinstance(out, Tensor)
        return out


class MathDerivatives(_Derivatives):
    """``F.scaled_dot_product_attention`` held to its math path."""

    name = "F.sdpa, math"

    def attention(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        """By products and a softmax."""
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
