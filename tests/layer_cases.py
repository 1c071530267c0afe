"""Whole layers for the tests: makers, the exact answer of a layer in float64, and every way of calling one."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import generator
from torch import Tensor, nn

import mha_ext
from mha_ext import reference

EMBED, HEADS = 16, 4
MODES = ("train", "eval", "no_grad")


def make(kind: type[nn.MultiheadAttention] = mha_ext.MultiheadAttention, seed: int = 0, **options: Any) -> Any:
    """A float64 layer (unless said otherwise) with biases that are not zero."""
    options = {"batch_first": True, "dtype": torch.float64, **options}
    torch.manual_seed(seed)
    module = kind(options.pop("embed_dim", EMBED), options.pop("num_heads", HEADS), **options)
    g = generator(seed + 1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "bias" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=g, dtype=torch.float64) - 0.5)
    return module


def pair(seed: int = 0, **options: Any) -> tuple[mha_ext.MultiheadAttention, nn.MultiheadAttention]:
    """Ours and PyTorch's with the same parameters."""
    ours, theirs = make(seed=seed, **options), make(nn.MultiheadAttention, seed, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def sequence(batch: int, length: int, width: int = EMBED, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, width, generator=generator(seed), dtype=torch.float64).to(dtype)


@contextmanager
def mode(module: nn.Module, name: str) -> Iterator[None]:
    module.train(name == "train")
    with torch.no_grad() if name == "no_grad" else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class Answer:
    """The exact output and weights per head of a layer, and the gradients by parameter or input name."""

    out: Tensor
    weights: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)


def leaf(x: Tensor) -> Tensor:
    return x.detach().double().clone().requires_grad_()


def exact_layer(
    module: nn.MultiheadAttention,
    inputs: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor | None = None,
    **masks: Any,
) -> Answer:
    """A layer by the reference in float64; masks in the module's conventions, inputs (B, T, E); gradients on request.

    Masks that are (B * H, T, S) are read batch-major. Inputs that are one tensor share one gradient, named ``query``.
    """
    twin = copy.deepcopy(module).double().requires_grad_()
    names = {id(x): n for n, x in reversed(list(zip(("query", "key", "value"), inputs, strict=True)))}
    leaves = {n: leaf(x) for n, x in zip(("query", "key", "value"), inputs, strict=True) if names[id(x)] == n}
    parameters = reference.layer_parameters(twin, torch.float64)
    attn_mask, padding = masks.get("attn_mask"), masks.get("key_padding_mask")
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", padding)):
        if mask is not None and mask.is_floating_point():
            leaves[name] = leaf(mask)
    attn_mask, padding = leaves.get("attn_mask", attn_mask), leaves.get("key_padding_mask", padding)
    if attn_mask is not None:
        attn_mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
        if attn_mask.dim() == 3 and attn_mask.shape[0] == inputs[0].shape[0] * module.num_heads:
            attn_mask = attn_mask.unflatten(0, (-1, module.num_heads))
        elif attn_mask.dim() == 3:
            attn_mask = attn_mask[:, None]
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    out, _, weights = reference.multi_head_attention(
        *[leaves[names[id(x)]] for x in inputs],
        parameters,
        module.num_heads,
        attn_mask=attn_mask,
        key_padding_mask=padding,
        is_causal=masks.get("is_causal", False),
        keep=masks.get("keep"),
        dropout_p=masks.get("dropout_p", 0.0),
    )
    answer = Answer(out.detach(), weights.detach())
    if grad_out is not None:
        wanted = {**leaves, **dict(twin.named_parameters())}
        got = torch.autograd.grad(out, list(wanted.values()), grad_out.double(), allow_unused=True)
        answer.grads = {
            n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(wanted.items(), got, strict=True)
        }
    return answer


def gradients(module: nn.Module, inputs: tuple[Tensor, ...], grad_out: Tensor, **options: Any) -> dict[str, Tensor]:
    """Gradients of a layer's output by parameter, input (shared ones once) and float mask; none is accumulated."""
    names = {id(x): n for n, x in reversed(list(zip(("query", "key", "value"), inputs, strict=True)))}
    leaves = {names[id(x)]: x.detach().clone().requires_grad_() for x in inputs}
    floats = {
        n: m.detach().clone().requires_grad_()
        for n, m in options.items()
        if isinstance(m, Tensor) and m.is_floating_point()
    }
    out = module(*[leaves[names[id(x)]] for x in inputs], **{**options, **floats})[0]
    wanted = {**leaves, **floats, **dict(module.named_parameters())}
    got = torch.autograd.grad(out, list(wanted.values()), grad_out, allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(wanted.items(), got, strict=True)}


def causal_mask(queries: int, keys: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The module's convention: True (or -inf) where a key may not be seen."""
    hidden = torch.ones(queries, keys or queries, dtype=torch.bool).triu(1)
    return hidden if dtype is None else torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -math.inf)


def last_hidden(batch: int, keys: int) -> Tensor:
    """Padding: example b ignores its last b keys."""
    return torch.arange(keys) >= keys - torch.arange(batch)[:, None]
