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
from switches import threads
from tolerances import assert_within, double_limit
from torch import Tensor, nn

import mha_ext
from mha_ext import reference

EMBED, HEADS = 16, 4
MODES = ("train", "eval", "no_grad")
VARIANTS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"kdim": 8, "vdim": 6},
    {"bias": False, "add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 8, "bias": False},
    {"vdim": 5, "add_bias_kv": True},
    {"kdim": 8, "vdim": 6, "add_zero_attn": True, "batch_first": False},
    {"batch_first": False},
    {"num_heads": 1},
    {"num_heads": EMBED},
]

SHARED_HEADS: list[dict[str, Any]] = [
    {"num_kv_heads": 2},
    {"num_kv_heads": 1, "head_dim": 6, "add_bias_kv": True},
    {"num_kv_heads": 2, "kdim": 8, "vdim": 6, "bias": False},
]


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


def inputs_for(module: nn.MultiheadAttention, shared: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query (2, 5, E), key and value (2, 7, .), in the module's layout; ``shared`` as the operator's argument."""
    query, key, value = sequence(2, 5), sequence(2, 7, module.kdim, 2), sequence(2, 7, module.vdim, 3)
    if not module.batch_first:
        query, key, value = (x.transpose(0, 1).contiguous() for x in (query, key, value))
    return (query, query, query) if shared == 2 else (query, key, key) if shared == 1 else (query, key, value)


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


def same_states(a: nn.Module, b: nn.Module) -> bool:
    """Names in order, bits, dtypes and devices of all parameters."""
    first, second = list(a.state_dict().items()), list(b.state_dict().items())
    return [(n, x.dtype, x.device) for n, x in first] == [(n, x.dtype, x.device) for n, x in second] and all(
        torch.equal(x, y) for (_, x), (_, y) in zip(first, second, strict=True) if x.device.type != "meta"
    )


@threads(1)
def assert_agree(ours: nn.Module, theirs: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> None:
    """Two layers give the same output, weights and gradients of inputs and parameters, by name, weights asked for or
    not; the first layer's output is contiguous."""
    grad_out = torch.randn(inputs[0].shape, generator=generator(5), dtype=torch.float64)
    want, want_weights = theirs(*inputs, **options)
    want_grads = gradients(theirs, inputs, grad_out, **options)
    for need_weights in (True, False):
        out, weights = ours(*inputs, need_weights=need_weights, **options)
        assert_within(out, want, double_limit(want, EMBED), f"output, need_weights={need_weights}")
        assert out.is_contiguous() and (weights is not None) == need_weights
        if need_weights:
            assert_within(weights, want_weights, double_limit(want_weights, EMBED), "weights")
        got = gradients(ours, inputs, grad_out, need_weights=need_weights, **options)
        assert list(got) == list(want_grads)
        for name, grad in got.items():
            assert_within(grad, want_grads[name], double_limit(want_grads[name], 100), name)


def causal_mask(queries: int, keys: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The module's convention: True (or -inf) where a key may not be seen."""
    hidden = torch.ones(queries, keys or queries, dtype=torch.bool).triu(1)
    return hidden if dtype is None else torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -math.inf)


def last_hidden(batch: int, keys: int) -> Tensor:
    """Padding: example b ignores its last b keys."""
    return torch.arange(keys) >= keys - torch.arange(batch)[:, None]
