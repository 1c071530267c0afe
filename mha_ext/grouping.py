"""``to_grouped_query``: a layer with fewer key and value heads, made from a trained one."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from mha_ext import checks, layer_variants
from mha_ext.errors import InvalidTypeError, InvalidValueError
from mha_ext.module import MultiheadAttention

__all__ = ["to_grouped_query"]

_WHERE = "to_grouped_query"


def to_grouped_query(module: nn.MultiheadAttention, num_kv_heads: int) -> MultiheadAttention:
    """A grouped-query layer whose key and value heads are means of a trained layer's (Ainslie et al. 2023, GQA).

    Each group of consecutive key heads becomes one: their rows of the weights and biases are averaged, and so are the
    value heads' and the appended ``bias_k`` and ``bias_v``. Everything else is copied: the other parameters, the output
    projection as the module that it is, dtype, device, mode, ``requires_grad``. Heads that are equal stay what they are
    to the bit. A short training afterwards is meant to recover what pooling loses.

    Args:
        module: any ``nn.MultiheadAttention``, ours included; it is left as it is.
        num_kv_heads: divides the module's number of key and value heads; 1 is multi-query attention.

    Returns:
        A new ``mha_ext.MultiheadAttention``, without hooks of the given module, or what a subclass of its own adds.

    Raises:
        TypeError: ``module`` is no attention layer, or ``num_kv_heads`` not an integer.
        ValueError: ``num_kv_heads`` is not positive or does not divide.

    Example:
        >>> import torch, mha_ext
        >>> grouped = mha_ext.to_grouped_query(torch.nn.MultiheadAttention(16, 4), 2)
        >>> grouped
        MultiheadAttention(
          16, 4, num_kv_heads=2
          (out_proj): NonDynamicallyQuantizableLinear(in_features=16, out_features=16, bias=True)
        )
    """
    if not isinstance(module, nn.MultiheadAttention):
        kind = type(module).__name__
        raise InvalidTypeError(f"{_WHERE}: module must be an nn.MultiheadAttention, got {kind}")
    before: int = getattr(module, "num_kv_heads", module.num_heads)
    num_kv_heads = checks.size(_WHERE, "num_kv_heads", num_kv_heads)
    if before % num_kv_heads:
        raise InvalidValueError(
            f"{_WHERE}: num_kv_heads must divide {before} (key and value heads), got {num_kv_heads}"
        )
    grouped = _empty_like(module, num_kv_heads)
    rows = module.num_heads * module.head_dim  # the query's, at the top of what is packed
    group = before // num_kv_heads
    for name, kept, axis in (
        ("in_proj_weight", rows, 0),
        ("q_proj_weight", rows, 0),
        ("k_proj_weight", 0, 0),
        ("v_proj_weight", 0, 0),
        ("in_proj_bias", rows, 0),
        ("bias_k", 0, 2),
        ("bias_v", 0, 2),
    ):
        given = getattr(module, name)
        if given is not None:
            pooled = _pool(given.detach(), kept, axis, (module.head_dim, group))
            setattr(grouped, name, nn.Parameter(pooled, requires_grad=given.requires_grad))
    names = ("out_proj", "q_norm", "k_norm", "rope", "sink") if grouped._has_variants else ("out_proj",)
    for name in names:
        setattr(grouped, name, copy.deepcopy(getattr(module, name)))
    grouped.training = module.training
    return grouped


def _empty_like(module: nn.MultiheadAttention, num_kv_heads: int) -> MultiheadAttention:
    """A layer with the module's options, without storage, made without random numbers."""
    return MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        module.dropout,
        module.in_proj_bias is not None,
        module.bias_k is not None,
        module.add_zero_attn,
        module.kdim,
        module.vdim,
        module.batch_first,
        device="meta",
        num_kv_heads=num_kv_heads,
        head_dim=module.head_dim,
        **(layer_variants.used(module) if isinstance(module, MultiheadAttention) else {}),
    )


def _pool(x: Tensor, kept: int, axis: int, sizes: tuple[int, int]) -> Tensor:
    """A new tensor: what comes first on an axis as it is, then the means of groups of heads.

    Args:
        x: a parameter.
        kept: how much is not pooled.
        axis: the axis of heads.
        sizes: D, and the number of heads of a group.
    """
    first, heads = x.split_with_sizes([kept, x.shape[axis] - kept], axis)
    groups = heads.unflatten(axis, (-1, sizes[1], sizes[0])).double()  # type: ignore[no-untyped-call]
    # Means of differences: those of equal heads are 0, where a sum and its quotient would round.
    one = groups.select(axis + 1, 0)
    means = one + (groups - one.unsqueeze(axis + 1)).mean(axis + 1)
    return torch.cat((first, means.flatten(axis, axis + 1).to(x.dtype)), axis)
