"""PyTorch's transformers in float64, written from their equations: the truth for models that have been converted.

The weights are a model's own; nothing of its ``forward``, nor of our package, is used. Sequences are (B, T, E) here,
and what a query may see is one tensor of addends, (B, 1 or H, T, S), -inf where it must not look. A query that sees
nothing attends to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from layer_cases import causal_mask, last_hidden, mode
from torch import Tensor, nn

MODES = ("train", "eval", "no_grad", "inference")


@contextmanager
def running(model: nn.Module, name: str) -> Iterator[None]:
    """As ``layer_cases.mode``, with inference mode besides."""
    with torch.inference_mode() if name == "inference" else nullcontext(), mode(model, name):
        yield


def attention(layer: nn.MultiheadAttention, query: Tensor, memory: Tensor, addend: Tensor | float) -> Tensor:
    heads = layer.num_heads
    width = query.shape[-1] // heads
    weights = layer.in_proj_weight.chunk(3)
    biases = layer.in_proj_bias.chunk(3) if layer.in_proj_bias is not None else (None,) * 3
    inputs = (query, memory, memory)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (heads, width)).transpose(1, 2)
        for x, w, b in zip(inputs, weights, biases, strict=True)
    )
    scores = q @ k.mT / width**0.5 + addend
    largest = scores.amax(-1, keepdim=True)
    powers = (scores - torch.where(largest.isinf(), 0.0, largest)).exp()
    total = powers.sum(-1, keepdim=True)
    seen = powers / torch.where(total == 0, 1.0, total)
    return F.linear((seen @ v).transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)


def norm(layer: nn.LayerNorm | None, x: Tensor) -> Tensor:
    if layer is None:
        return x
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt()
    return scaled * layer.weight + (0 if layer.bias is None else layer.bias)


def _blocks(layer: Any, x: Tensor, blocks: list[tuple[nn.LayerNorm, Any]]) -> Tensor:
    for layer_norm, block in blocks:
        x = x + block(norm(layer_norm, x)) if layer.norm_first else norm(layer_norm, x + block(x))
    return x


def _perceptron(layer: Any) -> Any:
    return lambda x: F.linear(
        F.linear(x, layer.linear1.weight, layer.linear1.bias).clamp(min=0), layer.linear2.weight, layer.linear2.bias
    )


def encoder_layer(layer: nn.TransformerEncoderLayer, x: Tensor, addend: Tensor | float) -> Tensor:
    attend = lambda y: attention(layer.self_attn, y, y, addend)  # noqa: E731
    return _blocks(layer, x, [(layer.norm1, attend), (layer.norm2, _perceptron(layer))])


def decoder_layer(
    layer: nn.TransformerDecoderLayer, x: Tensor, memory: Tensor, addend: Tensor | float, memory_addend: Tensor | float
) -> Tensor:
    attend = lambda y: attention(layer.self_attn, y, y, addend)  # noqa: E731
    cross = lambda y: attention(layer.multihead_attn, y, memory, memory_addend)  # noqa: E731
    return _blocks(layer, x, [(layer.norm1, attend), (layer.norm2, cross), (layer.norm3, _perceptron(layer))])


def encoder(model: nn.TransformerEncoder, x: Tensor, addend: Tensor | float) -> Tensor:
    for layer in model.layers:
        x = encoder_layer(layer, x, addend)
    return norm(model.norm, x)


def decoder(model: nn.TransformerDecoder, x: Tensor, memory: Tensor, addend: Any, memory_addend: Any) -> Tensor:
    for layer in model.layers:
        x = decoder_layer(layer, x, memory, addend, memory_addend)
    return norm(model.norm, x)


def addend(attn_mask: Tensor | None, padding: Tensor | None, causal: bool, sizes: tuple[int, int, int]) -> Tensor:
    """The masks of one attention, in the modules' conventions, as what is added to its scores."""
    batch, queries, keys = sizes
    total = torch.zeros(batch, 1, queries, keys, dtype=torch.float64)
    parts = [attn_mask] if attn_mask is None or attn_mask.dim() == 2 else [attn_mask.unflatten(0, (batch, -1))]
    parts += [None if padding is None else padding[:, None, None], causal_mask(queries, keys) if causal else None]
    for part in parts:
        if part is not None:
            hidden = torch.zeros_like(part, dtype=torch.float64)
            total = total + (hidden.masked_fill(part, -torch.inf) if part.dtype == torch.bool else part.double())
    return total


def mask_cases(batch: int, length: int, heads: int) -> dict[str, tuple[Tensor | None, Tensor | None, bool]]:
    """Attention mask, padding and causal hint, each as it is handed to a layer."""
    g = torch.Generator().manual_seed(7)
    bias = torch.randn(length, length, generator=g, dtype=torch.float64)
    hidden, causal = last_hidden(batch, length), causal_mask(length)
    heads_bias = torch.randn(batch * heads, length, length, generator=g, dtype=torch.float64)
    floats = torch.zeros(batch, length, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    return {
        "none": (None, None, False),
        "padding": (None, hidden, False),
        "float padding": (None, floats, False),
        "bool mask": (bias > 0.3, None, False),
        "float mask": (bias, None, False),
        "mask per head": (heads_bias, None, False),
        "causal": (causal, None, False),
        "causal, float": (causal_mask(length, dtype=torch.float64), None, False),
        "causal and hint": (causal, None, True),
        "hint alone": (None, None, True),
        "hint and padding": (None, hidden, True),
        "causal, hint and padding": (causal, hidden, True),
        "float mask and float padding": (bias, floats, False),
        "padding at the start, causal": (causal, hidden.flip(1), True),
        "everything hidden": (None, torch.ones_like(hidden), False),
    }
