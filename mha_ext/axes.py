"""From attention inputs with any leading axes to the operators' four axes, and back."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mha_ext.errors import InvalidValueError

__all__ = ["Layout", "align", "broadcasts", "flatten_leading"]


class Layout(NamedTuple):
    """How the caller's leading axes were turned into batch and heads."""

    batch: tuple[int, ...]  # the axes before heads
    rank: int  # 2: no heads either

    def restore(self, x: Tensor, has_heads: bool = True) -> Tensor:
        """The caller's leading axes on a result ``(B, H, ...)``, or ``(B, ...)`` when it has no heads."""
        if self.rank == 4:
            return x
        if self.rank > 4:
            return x.view(*self.batch, *x.shape[1:])
        return x[0, 0] if self.rank == 2 and has_heads else x[0]


def broadcasts(shape: torch.Size, full: tuple[int, ...]) -> bool:
    """Whether a shape is broadcastable to another."""
    aligned = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(size in (whole, 1) for size, whole in aligned)


def flatten_leading(x: Tensor, lead: int, batch: tuple[int, ...]) -> Tensor:
    """Merge the axes for ``batch`` (the first ``lead``, 1 where missing) into one of size 1 or their product."""
    rest = x.shape[lead:]
    if prod(x.shape[:lead]) == 1 and prod(batch) != 0:
        return x.reshape(1, *rest)
    return x.expand(*batch, *rest).reshape(prod(batch), *rest)


def align(
    where: str, tensors: tuple[Tensor, Tensor, Tensor], enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Layout]:
    """Query, key and value with four axes, one batch, and heads that fit; and how to undo that on results."""
    query, key, value = tensors
    if query.dim() == key.dim() == value.dim() == 4:
        batch, num_heads = query.shape[:2]
        key_lead = key.shape[:2]
        if key_lead == value.shape[:2] and batch == key_lead[0] and (enable_gqa or num_heads == key_lead[1]):
            return query, key, value, Layout((batch,), 4)
    leads = []
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        if tensor.dim() < 2:
            raise InvalidValueError(f"{where}: {name} must have at least 2 axes, got shape {tuple(tensor.shape)}")
        leads.append((1, *tensor.shape[:-2])[-max(1, tensor.dim() - 2) :])
    try:
        batch_shape = tuple(torch.broadcast_shapes(*(lead[:-1] for lead in leads)))  # type: ignore[no-untyped-call]
    except RuntimeError:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        message = (
            f"{where}: key and value must have query's batch sizes (or 1), got query, key, value of shape {shapes}"
        )
        raise InvalidValueError(message) from None
    heads = _fitting_heads(where, (leads[0][-1], leads[1][-1], leads[2][-1]), enable_gqa)
    query, key, value = (
        tensor.expand(*batch_shape, count, *tensor.shape[-2:]).reshape(prod(batch_shape), count, *tensor.shape[-2:])
        for tensor, count in zip(tensors, heads, strict=True)
    )
    rank = max(tensor.dim() for tensor in tensors)
    return query, key, value, Layout(batch_shape, rank)


def _fitting_heads(where: str, heads: tuple[int, int, int], enable_gqa: bool) -> tuple[int, int, int]:
    """The numbers of heads to which query, key and value are expanded: grouped as given, otherwise all the same."""
    num_heads, num_key_heads, num_value_heads = heads
    if enable_gqa:
        if num_key_heads != num_value_heads:
            raise InvalidValueError(f"{where}: value must have key's {num_key_heads} heads, got {num_value_heads}")
        return heads
    common = max(heads)
    if any(count not in (1, common) for count in heads):
        hint = "; enable_gqa=True lets heads of key and value serve groups of query heads"
        raise InvalidValueError(f"{where}: key and value must have query's {num_heads} heads, got {heads[1:]}{hint}")
    key_value = 1 if num_key_heads == num_value_heads == 1 else common  # the operator shares one head by itself
    return common, key_value, key_value
