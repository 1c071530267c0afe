"""Our attention as ONNX's operator Attention, for export to operator set 23 and later.

The operator adds masks to scores: whatever is not the causal order by itself becomes one mask, bool where nothing is
added. A sink becomes one more key whose value is 0. Source: https://onnx.ai/onnx/operators/onnx__Attention.html
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

__all__ = ["Node", "expressible", "node", "wanted"]

_VERSION = 23
_WEIGHTS = 3  # qk_matmul_output_mode: what the softmax gives
_UPPER_LEFT, _LOWER_RIGHT = 1, 2  # causal; from the latter on, positions are counted from the end


class Node(NamedTuple):
    """What one Attention node gives."""

    out: Tensor  # (B, H, T, D_v), its axes stored in the order of query's
    weights: Tensor  # (B, H, T, S)


def wanted(query: Tensor) -> bool:
    """Whether an export to ONNX runs whose operator set has Attention.

    A decomposition is not told the operator set. RMSNormalization came with the same one as Attention, and where it is
    there PyTorch's exporter does not take ``rms_norm`` apart.
    """
    if not torch.onnx.is_in_onnx_export():
        return False
    apart = torch.ops.aten.rms_norm.default.decompose(query, [query.shape[-1]])
    return apart is NotImplemented


def expressible(query: Tensor, dropout_seed: Tensor | None, added: tuple[Tensor | None, ...]) -> bool:
    """Whether the operator can say it: it has no dropout, and what it adds to scores has query's dtype.

    Args:
        query: ``(B, H, T, D)``.
        dropout_seed: as the attention operators take it.
        added: masks and biases or None; query's dtype has to hold their numbers.
    """
    dtypes = [x.dtype for x in added if x is not None]
    return dropout_seed is None and all(torch.promote_types(x, query.dtype) == query.dtype for x in dtypes)


def node(
    tensors: tuple[Tensor, Tensor, Tensor], attn_mask: Tensor | None, padding: Tensor | None, options: dict[str, Any]
) -> Node:
    """One Attention node, with what the operator leaves open settled around it.

    A query that sees no key gets 0 whatever the runtime does there, and keys and values in the padding are replaced
    by 0, since NaN would pass the mask that hides them.

    Args:
        tensors: query ``(B, H, T, D)``, key ``(B, H_kv, S, D)``, value ``(B, H_kv, S, D_v)``.
        attn_mask: bool (True = may attend) or added, broadcastable to ``(B, H, T, S)`` without appended keys.
        padding: ``(B, S)``, bool (True = ignore) or added.
        options: the other arguments of the attention operators.
    """
    query, key, value = tensors
    sink = options.get("sink")
    if padding is not None:
        hidden = _padded(padding if padding.dtype == torch.bool else padding == -math.inf, options, padding.shape[1])
        key, value = (x.masked_fill(hidden[:, None, :, None], 0) for x in (key, value))
    mask = _mask(query, key, (attn_mask, padding), options)
    seen = None if mask is None else (mask if mask.dtype == torch.bool else mask > -math.inf).any(-1, keepdim=True)
    num_keys = key.shape[2]
    if sink is not None:
        mask = _with_sink(mask, sink.to(query.dtype), num_keys)
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    if mask is not None:
        mask = mask.expand(-1, -1, query.shape[2], key.shape[2])  # ONNX Runtime broadcasts only the first two axes
    alone = mask is None and options.get("causal", 0) == _UPPER_LEFT
    scaled, numbers = _scaled(query, options)
    out, weights = _attention(scaled, key, value, mask, {**numbers, "is_causal": int(alone)})
    weights = weights[..., :num_keys]
    if seen is not None:
        out, weights = (x.masked_fill(seen.logical_not(), 0) for x in (out, weights))
    return Node(_lying_as(out, query), weights)


def _scaled(query: Tensor, options: dict[str, Any]) -> tuple[Tensor, dict[str, int | float]]:
    """The query and the node's numbers; attributes are float32, so a float64 query is scaled before."""
    scale, softcap = options.get("scale"), options.get("softcap", 0.0)
    numbers: dict[str, int | float] = {"softcap": softcap} if softcap > 0 else {}
    if query.dtype == torch.float64:
        query, scale = query * (query.shape[-1] ** -0.5 if scale is None else scale), 1.0
    return query, numbers if scale is None else {**numbers, "scale": scale}


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attributes: dict[str, int | float]
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    out, _, _, weights = torch.onnx.ops.symbolic_multi_out(
        "Attention",
        (query, key, value, mask),
        {**attributes, "qk_matmul_output_mode": _WEIGHTS},
        dtypes=(query.dtype, key.dtype, value.dtype, query.dtype),
        shapes=((batch, heads, queries, value.shape[3]), key.shape, value.shape, (batch, heads, queries, key.shape[2])),
        version=_VERSION,
    )
    return out, weights


def _mask(
    query: Tensor, key: Tensor, given: tuple[Tensor | None, Tensor | None], options: dict[str, Any]
) -> Tensor | None:
    """Everything that hides keys or is added to scores in one mask of four axes, or None."""
    attn_mask, padding = given
    keys = key.shape[2] - options.get("num_appended_keys", 0)
    visible = _visible_by_position(query, key, options, alone=attn_mask is None and padding is None)
    added: list[Tensor] = []
    if attn_mask is not None:
        (visible if attn_mask.dtype == torch.bool else added).append(attn_mask)
    if padding is not None:
        wide = padding[:, None, None, :]
        (visible if padding.dtype == torch.bool else added).append(~wide if padding.dtype == torch.bool else wide)
    bias = options.get("relative_bias")
    if bias is not None:
        added.append(_by_distance(bias, query.shape[2], keys))
    if not visible and not added:
        return None
    seen = None
    for part in visible:
        seen = part if seen is None else seen & part
    if not added:
        assert seen is not None
        return _padded(seen, options, keys, value=True)
    total = sum((x.to(query.dtype) for x in added[1:]), added[0].to(query.dtype))
    return _padded(total if seen is None else total.masked_fill(~seen, -math.inf), options, keys)


def _visible_by_position(query: Tensor, key: Tensor, options: dict[str, Any], alone: bool) -> list[Tensor]:
    """What the causal order, the window and the range of keys leave visible, ``(B or 1, 1, T, S)`` each."""
    causal, key_range = options.get("causal", 0), options.get("key_range")
    left, right = options.get("window_left", -1), options.get("window_right", -1)
    bounded = key_range is not None or left >= 0 or right >= 0
    extra = bounded or options.get("relative_bias") is not None or options.get("sink") is not None
    if causal == _UPPER_LEFT and alone and not extra and not options.get("num_appended_keys", 0):
        return []  # the operator's own is_causal
    queries, keys = query.shape[2], key.shape[2] - options.get("num_appended_keys", 0)
    j = torch.arange(keys, device=query.device).view(1, 1, 1, -1)
    position = torch.arange(queries, device=query.device).view(1, 1, -1, 1)
    if causal >= _LOWER_RIGHT:
        position = position + (keys - queries)
    visible = []
    if causal in (_UPPER_LEFT, _LOWER_RIGHT):
        visible.append(j <= position)
    if left >= 0:
        visible.append(j >= position - left)
    if right >= 0:
        visible.append(j <= position + right)
    if key_range is not None:
        first, behind = key_range[:, :, None, :, None].unbind(0)
        visible += [j >= first, j < behind]
    return visible


def _by_distance(bias: Tensor, queries: int, keys: int) -> Tensor:
    """``(B or 1, H or 1, T + S - 1)`` as ``(B or 1, H or 1, T, S)``: entry T - 1 + j - i for the pair (i, j)."""
    i = torch.arange(queries, device=bias.device)[:, None]
    j = torch.arange(keys, device=bias.device)
    return bias[:, :, (queries - 1) + j - i]


def _padded(mask: Tensor, options: dict[str, Any], keys: int, value: bool = False) -> Tensor:
    """A mask of ``keys`` keys with the appended ones, on which no mask acts."""
    appended = options.get("num_appended_keys", 0)
    if not appended:
        return mask
    behind = mask.new_full((*mask.shape[:-1], appended), value)
    return torch.cat((mask.expand(*mask.shape[:-1], keys), behind), -1)


def _with_sink(mask: Tensor | None, sink: Tensor, keys: int) -> Tensor:
    """The mask, added to scores, with the sink's logit behind the keys."""
    logit = sink[None, :, None, None]
    if mask is None:
        mask = sink.new_zeros(1, 1, 1, keys)
    elif mask.dtype == torch.bool:
        mask = sink.new_zeros(()).masked_fill(~mask, -math.inf)
    batch, heads, queries = mask.shape[0], sink.shape[0], mask.shape[2]
    return torch.cat((mask.expand(batch, heads, queries, keys), logit.expand(batch, heads, queries, 1)), -1)


def _lying_as(out: Tensor, query: Tensor) -> Tensor:
    """The operator's output in memory as ours lies, which the rest of a program may count on when it takes views."""

    def outside(axis: int, other: int) -> bool:
        return bool(guard_or_false(query.stride(axis) > query.stride(other)))

    if outside(1, 2):
        return out
    if not guard_or_false(query.stride(0) == 0) and outside(2, 0):
        return out.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    return out.transpose(1, 2).contiguous().transpose(1, 2)
