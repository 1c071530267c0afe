"""The tensors of a case, the same for every peer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.cases import DTYPES, Case, packed_lengths

_SEED = 0
_VISIBLE_SHARE = 0.8
_PADDED_SHARE = 0.25  # of the keys, at the end, in the shortest example
_WINDOW = 128  # keys to each side


@dataclass(frozen=True)
class Inputs:
    """What a peer computes with. Leaves are made by the peers, each its own.

    Attributes:
        arguments: query, key and value of the core and of variants, (B, H, T, D), but (total length, H, D) of "packed";
            the one input of a layer, (B, T, E).
        mask: None, or (T, S): bool with True = may attend, or float, added; a float one may have another shape.
        padding: None, or (B, S) bool with True = ignore.
        grad_output: gradient of the output.
        parameters: a layer's weights and biases by the names of ``nn.MultiheadAttention``; empty for the core.
    """

    arguments: tuple[Tensor, ...]
    mask: Tensor | None
    padding: Tensor | None
    grad_output: Tensor
    parameters: dict[str, Tensor]


def _mask(case: Case, generator: torch.Generator, dtype: torch.dtype) -> Tensor | None:
    shape = (case.length, case.keys)
    if "bool" in case.mask:
        mask = torch.rand(shape, generator=generator) < _VISIBLE_SHARE
        mask[:, 0] = True  # PyTorch's layer has no defined result for a query that sees nothing
        return mask
    if case.mask == "window":
        return (torch.arange(case.length)[:, None] - torch.arange(case.keys)).abs() <= _WINDOW
    if case.mask in ("float", "bias"):
        sizes = {"B": case.batch, "H": case.heads, "T": case.length, "S": case.keys, "1": 1}
        return torch.randn([sizes[axis] for axis in case.mask_shape or "TS"], generator=generator).to(dtype)
    return None


def _padding(case: Case) -> Tensor | None:
    if "padding" not in case.mask:
        return None
    if case.mask == "half padding":
        lengths = torch.full((case.batch,), case.keys // 2)
    else:
        shortest = case.keys - int(case.keys * _PADDED_SHARE)
        lengths = torch.linspace(shortest, case.keys, case.batch).round()
    return torch.arange(case.keys) >= lengths[:, None]


def _layer_parameters(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(_SEED)
    layer = nn.MultiheadAttention(case.embed_dim, case.heads).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-0.1, 0.1)  # the initial biases are zero and would hide mistakes
    return {name: parameter.detach() for name, parameter in layer.named_parameters()}


def make_inputs(case: Case) -> Inputs:
    """Makes the tensors of a case; the same case always has the same ones."""
    generator = torch.Generator().manual_seed(_SEED)
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if case.level == "layer":
        shape = (case.batch, case.length, case.embed_dim)
        arguments: tuple[Tensor, ...] = (normal(*shape),)
        grad_output = normal(*shape)
        parameters = _layer_parameters(case, dtype)
    elif case.variant == "packed":
        total = sum(packed_lengths(case))
        arguments = tuple(normal(total, case.heads, case.head_dim) for _ in range(3))
        grad_output = normal(total, case.heads, case.head_dim)
        parameters = {}
    else:
        kv_heads = case.kv_heads or case.heads
        query = normal(case.batch, case.heads, case.length, case.head_dim)
        key, value = (normal(case.batch, kv_heads, case.keys, width) for width in (case.head_dim, case.value_width))
        arguments = (query, key, value)
        grad_output = normal(case.batch, case.heads, case.length, case.value_width)
        parameters = {}
    return Inputs(arguments, _mask(case, generator, dtype), _padding(case), grad_output, parameters)
