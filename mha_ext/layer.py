"""The layer in pieces (eqs 20.1): projections into heads, appended keys, attention, heads into a context.

Used where the one-node operator does not apply: weights are asked for, keys are appended, projections are separate, or
the output projection is more than a plain linear layer. Same result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_ext import _ops, checks, errors, masks, plain
from mha_ext.seeds import draw_seed

__all__ = [
    "NO_WINDOW",
    "Options",
    "add_batch_axis",
    "append_keys",
    "attend",
    "combine_heads",
    "fused",
    "linear",
    "output",
    "project",
    "projection_maps",
    "resolve",
    "shared_inputs",
    "split_heads",
]

QKV = tuple[Tensor, Tensor, Tensor]
NO_WINDOW = (-1, -1)


class Options(NamedTuple):
    """What one call asks of the attention; masks in the layer's conventions, or after ``resolve`` the operators'."""

    attn_mask: Tensor | None = None
    key_padding_mask: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    causal: int = 0
    need_weights: bool = False
    average_weights: bool = True
    where: str = "attention"  # the function that was called, for messages
    window: tuple[int, int] = NO_WINDOW  # how many keys to the left and to the right, -1 for all
    softcap: float = 0.0
    sink: Tensor | None = None
    key_range: Tensor | None = None  # as the operators take it


def resolve(where: str, options: Options, sizes: checks.LayerSizes, num_heads: int, device: torch.device) -> Options:
    """The options with the masks in the operators' conventions and, where there is dropout, a seed, drawn if not given.

    Raises:
        TypeError: a mask is neither bool nor floating point.
        ValueError: a mask's shape or device, or the dropout probability, does not fit.
    """
    attn_mask, key_padding_mask, dropout_p = options[:3]
    if attn_mask is not None:
        shape = (sizes.batch, num_heads, sizes.num_queries, sizes.num_keys)
        attn_mask = masks.layer_mask(where, attn_mask, shape, device)
    if key_padding_mask is not None:
        key_padding_mask = masks.layer_padding(where, key_padding_mask, sizes.batch, sizes.num_keys, device)
    seed = None
    if dropout_p != 0.0:
        checks.dropout_probability(where, "dropout", dropout_p)
        seed = draw_seed(device) if options.dropout_seed is None else options.dropout_seed
    _, _, _, _, causal, need_weights, average, _, window, softcap, sink, key_range = options
    seen = (window, softcap, sink, key_range)
    # Not _replace: a short sequence would notice.
    return Options(attn_mask, key_padding_mask, dropout_p, seed, causal, need_weights, average, where, *seen)


def add_batch_axis(inputs: QKV, axis: int) -> QKV:
    """Query, key and value with a batch axis of size 1; what was one tensor stays one tensor."""
    query, key, value = inputs
    q = query.unsqueeze(axis)
    k = q if key is query else key.unsqueeze(axis)
    v = k if value is key else value.unsqueeze(axis)
    return q, k, v


def shared_inputs(query: Tensor, key: Tensor, value: Tensor) -> int:
    """2 when query, key and value are one tensor, 1 when key and value are, else 0."""
    if key is not value:
        return 0
    return 2 if query is key else 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``torch.nn.functional.linear``, by the product that the layer's operator takes, so that both give the same."""
    out: Tensor | None = None if torch.compiler.is_compiling() else _ops.linear_directly(x, weight, bias)
    return F.linear(x, weight, bias) if out is None else out


def output(out_proj: nn.Linear, context: Tensor) -> Tensor:
    """The module's answer, which for a plain linear map is ``linear``'s."""
    if torch.compiler.is_compiling() or not plain.is_linear(out_proj):
        answer: Tensor = out_proj(context)
        return answer
    return linear(context, out_proj.weight, out_proj.bias)


def split_heads(x: Tensor, num_heads: int, batch_first: bool) -> Tensor:
    """``(B, T, H D)`` or ``(T, B, H D)`` as a ``(B, H, T, D)`` view."""
    first, second, width = x.shape
    x = x.view(first, second, num_heads, width // num_heads)
    return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)


def combine_heads(x: Tensor, batch_first: bool) -> Tensor:
    """``(B, H, T, D)`` to contiguous ``(B, T, H D)``, a view where the operator wrote x, or ``(T, B, H D)``."""
    return (x.transpose(1, 2) if batch_first else x.permute(2, 0, 1, 3).contiguous()).flatten(2)


def projection_maps(
    weights: tuple[Tensor, ...], bias: Tensor | None, heads: tuple[int, int]
) -> tuple[tuple[Tensor, Tensor | None, int], ...]:
    """Weight, bias and number of heads of query's, key's and value's projections, from a packed weight or three."""
    counts = (heads[0], heads[1], heads[1])
    if len(weights) == 1:
        head_dim = weights[0].shape[0] // sum(counts)
        weights = weights[0].split_with_sizes([count * head_dim for count in counts])
    biases = (None,) * 3 if bias is None else bias.split_with_sizes([weight.shape[0] for weight in weights])
    return tuple(zip(weights, biases, counts, strict=True))


def project(
    inputs: QKV, weights: tuple[Tensor, ...], bias: Tensor | None, heads: tuple[int, int], batch_first: bool
) -> QKV:
    """Query, key and value heads through one weight that is packed, or through three; the bias is packed.

    Returns:
        ``(B, H, T, D)``, ``(B, H_kv, S, D)``, ``(B, H_kv, S, D)``, views of the products.
    """
    if len(weights) == 1 and shared_inputs(*inputs):
        return _project_shared(inputs, weights[0], bias, heads, batch_first)
    maps = projection_maps(weights, bias, heads)
    q, k, v = (
        split_heads(linear(x, weight, part), count, batch_first)
        for x, (weight, part, count) in zip(inputs, maps, strict=True)
    )
    return q, k, v


def _project_shared(inputs: QKV, weight: Tensor, bias: Tensor | None, heads: tuple[int, int], batch_first: bool) -> QKV:
    """Query, key and value heads through one packed weight, inputs that are the same tensor by one product.

    Args:
        inputs: query, key, value, ``(B, T, E)`` or ``(T, B, E)``; at least key and value are one tensor.
        weight: ``((H + 2 H_kv) D, E)``, rows in the order query, key, value.
        bias: ``((H + 2 H_kv) D,)``.
        heads: H, H_kv.
        batch_first: the layout of the inputs.
    """
    num_heads, num_kv_heads = heads
    counts = (num_heads, num_kv_heads, num_kv_heads)
    if shared_inputs(*inputs) == 2:
        q, k, v = split_heads(linear(inputs[0], weight, bias), sum(counts), batch_first).split_with_sizes(counts, 1)
        return q, k, v
    head_dim = weight.shape[0] // sum(counts)
    groups = (num_heads, 2 * num_kv_heads)
    rows = [count * head_dim for count in groups]
    weights = weight.split_with_sizes(rows)
    biases = (None,) * len(rows) if bias is None else bias.split_with_sizes(rows)
    q = split_heads(linear(inputs[0], weights[0], biases[0]), num_heads, batch_first)
    k, v = split_heads(linear(inputs[1], weights[1], biases[1]), groups[1], batch_first).split_with_sizes(counts[1:], 1)
    return q, k, v


def append_keys(
    k: Tensor, v: Tensor, bias_k: Tensor | None, bias_v: Tensor | None, add_zero: bool
) -> tuple[Tensor, Tensor, int]:
    """Keys and values with the learned pair and the zero pair behind them, and how many were appended.

    Args:
        k: ``(B, H_kv, S, D)``.
        v: ``(B, H_kv, S, D)``.
        bias_k: ``(1, 1, H_kv D)``, given with ``bias_v`` or not at all.
        bias_v: as ``bias_k``.
        add_zero: whether to append a key and value of zeros.
    """
    keys, values = [k], [v]
    if bias_k is not None and bias_v is not None:
        for parts, bias in ((keys, bias_k), (values, bias_v)):
            batch, num_heads, _, head_dim = parts[0].shape
            row = bias.to(parts[0].dtype).reshape(1, num_heads, 1, head_dim)
            parts.append(row.expand(batch, num_heads, 1, head_dim))
    if add_zero:
        for parts in (keys, values):
            batch, num_heads, _, head_dim = parts[0].shape
            parts.append(parts[0].new_zeros(batch, num_heads, 1, head_dim))
    if len(keys) == 1:
        return k, v, 0
    return torch.cat(keys, 2), torch.cat(values, 2), len(keys) - 1


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, num_appended_keys: int, batch_first: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention on heads: the context, heads combined, in the layer's layout, and the weights if they are wanted."""
    mask, padding, dropout_p, seed, causal, need_weights, average, where, window, softcap, sink, key_range = options
    extra: _ops.Variants = {}
    if window != NO_WINDOW:
        extra["window_left"], extra["window_right"] = window
    if softcap:
        extra["softcap"] = softcap
    if sink is not None:
        extra["sink"] = sink
    if key_range is not None:
        extra["key_range"] = key_range
    tensors, weights, appended = (q, k, v, mask, padding, seed), None, num_appended_keys
    try:
        if need_weights:
            out, _, weights = _ops.attention_with_weights(
                *tensors, dropout_p=dropout_p, causal=causal, num_appended_keys=appended, average=average, **extra
            )
        else:
            out, _ = _ops.attention(*tensors, dropout_p=dropout_p, causal=causal, num_appended_keys=appended, **extra)
    except (ValueError, TypeError) as error:
        errors.pass_on(error, where)
    return combine_heads(out, batch_first), weights


def fused(
    inputs: QKV,
    parameters: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    options: Options,
    heads: tuple[int, int],
    batch_first: bool,
) -> Tensor:
    """The whole layer as one operator: no weights, no appended keys.

    Args:
        inputs: query, key, value, ``(B, T, E)`` or ``(T, B, E)``.
        parameters: packed weight and bias of the input projections, weight and bias of the output projection.
        options: resolved.
        heads: H, H_kv.
        batch_first: the layout of inputs and output.
    """
    query, key, value = inputs
    if not torch.compiler.is_compiling():
        masks_and_seed = (options.attn_mask, options.key_padding_mask, options.dropout_seed)
        numbers = (query.shape[2], *heads, batch_first, options.dropout_p, options.causal)
        out = _ops.layer_directly(*inputs, *parameters, *masks_and_seed, *numbers)
        if out is not None:
            return out
    try:
        return _ops.multi_head_attention(
            query,
            key,
            value,
            *parameters,
            options.attn_mask,
            options.key_padding_mask,
            options.dropout_seed,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            shared_inputs=shared_inputs(query, key, value),
            batch_first=batch_first,
            dropout_p=options.dropout_p,
            causal=options.causal,
        )[0]
    except (ValueError, TypeError) as error:
        errors.pass_on(error, options.where)
