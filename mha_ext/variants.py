"""What today's models add to attention, from the keywords of :mod:`mha_ext.functional` to the operators' arguments.

Whatever bounds the keys of a query by their place (windows, documents, prefixes, given ranges) becomes two numbers a
query; whatever is added by distance (ALiBi, relative biases) becomes one number a distance and head. No tensor of
T x S numbers is made.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mha_ext import _ops, axes, checks, masks
from mha_ext.errors import InvalidTypeError, InvalidValueError

__all__ = ["Given", "Sizes", "has_readable_values", "limits", "places", "resolve", "softcap"]

NO_LIMIT = -1
_FAR = 1 << 40  # beyond any sequence, and far from where sums overflow
_CAUSAL, _LOWER_RIGHT = (1, 2), (2, 3)  # what these mean in the operators' `causal`
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Given(NamedTuple):
    """The keywords of one call."""

    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    relative_bias: Tensor | None = None
    sink: Tensor | None = None
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None
    prefix_length: int | Tensor | None = None
    key_range: Tensor | None = None


class Sizes(NamedTuple):
    """The caller's leading axes, and H, T, S."""

    batch: tuple[int, ...]
    heads: int
    queries: int
    keys: int


def limits(where: str, window: Any) -> tuple[int, int]:
    """How many keys before and behind its own position a query sees; -1 is no limit.

    Raises:
        TypeError: the window is no pair of ints or None.
        ValueError: a side is negative, other than -1.
    """
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidTypeError(f"{where}: window must be a pair (left, right), got {window!r}")
    sides = [NO_LIMIT if side is None else checks.integer(where, "window", side) for side in window]
    if min(sides) < NO_LIMIT:
        raise InvalidValueError(f"{where}: window must have sides of at least 0 (None: no limit), got {tuple(window)}")
    return min(sides[0], _FAR), min(sides[1], _FAR)


def softcap(where: str, given: Any) -> float:
    """The limit of scores as a number; 0 is none.

    Raises:
        TypeError: it is no real number.
        ValueError: it is not positive and finite.
    """
    if given is None:
        return 0.0
    cap: float = checks.real(where, "softcap", given)
    if not 0.0 < cap < float("inf"):
        raise InvalidValueError(f"{where}: softcap must be positive and finite, got {given}")
    return cap


def resolve(
    where: str, given: Given, sizes: Sizes, causal: int, lower_right: bool, query: Tensor
) -> tuple[int, _ops.Variants]:
    """The operators' ``causal`` and variants.

    Args:
        where: the function that is being called, for messages.
        given: the caller's keywords.
        sizes: those of the call.
        causal: 0 (no), 1 (upper left), 2 (lower right).
        lower_right: what positions count from where the call is not causal.
        query: any tensor of the call, for its device.

    Raises:
        TypeError: a keyword is of the wrong kind or dtype.
        ValueError: a shape or a value does not fit.
    """
    position = causal or (3 if lower_right else 0)
    offset = sizes.keys - sizes.queries if position in _LOWER_RIGHT else 0
    found: _ops.Variants = {}
    if given.window is not None:
        found["window_left"], found["window_right"] = limits(where, given.window)
    if given.softcap is not None:
        found["softcap"] = softcap(where, given.softcap)
    if given.sink is not None:
        found["sink"] = _sink(where, given.sink, sizes, query)
    bias = _distance_bias(where, given, sizes, offset, query)
    if bias is not None:
        found["relative_bias"] = bias
    ranges = []
    if given.segment_ids is not None:
        ranges.append(_segments(where, given.segment_ids, sizes, query))
    if given.prefix_length is not None:
        if causal not in _CAUSAL or given.window is not None:
            got = "a window" if causal in _CAUSAL else f"is_causal={bool(causal)}"
            raise InvalidValueError(f"{where}: prefix_length must come with is_causal=True and no window, got {got}")
        ranges.append(_prefix(where, given.prefix_length, sizes, offset, query))
        position = 0
    if given.key_range is not None:
        ranges.append(_ranges(where, given.key_range, sizes, query))
    if ranges:
        found["key_range"] = _intersection(ranges)
    return position, found


def _intersection(ranges: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Bounds ``(B or 1, T)`` as the operators' int32 ``(2, B or 1, T)``."""
    first, last = ranges[0]
    for begin, end in ranges[1:]:
        first, last = torch.maximum(first, begin), torch.minimum(last, end)
    return torch.stack((first, last)).to(torch.int32)


def _floating(where: str, name: str, given: Any, query: Tensor) -> Tensor:
    """A floating tensor on query's device; the operators take it in their own precision."""
    checks.tensor(where, name, given)
    if given.dtype not in checks.FLOATS:
        raise InvalidTypeError(f"{where}: {name} must be floating point, got {given.dtype}")
    checks.same_device(where, name, given, query.device)
    return masks.saveable(given)


def _sink(where: str, given: Any, sizes: Sizes, query: Tensor) -> Tensor:
    sink = _floating(where, "sink", given, query)
    if sink.shape != (sizes.heads,):
        raise InvalidValueError(
            f"{where}: sink must have shape (num_heads,) = {(sizes.heads,)}, got {tuple(sink.shape)}"
        )
    return sink


def _per_head(where: str, name: str, given: Any, sizes: Sizes, rest: tuple[int, ...], query: Tensor) -> Tensor:
    """A floating tensor ``(..., H or 1, *rest)`` as ``(B or 1, H or 1, *rest)``."""
    given = _floating(where, name, given, query)
    full, shape = (*sizes.batch, sizes.heads, *rest), given.shape
    split = len(shape) - len(rest)
    if split < 1 or tuple(shape[split:]) != rest or not axes.broadcasts(shape, full):
        tail = "".join(f", {size}" for size in rest)
        raise InvalidValueError(
            f"{where}: {name} must have shape (num_heads{tail}) = {(sizes.heads, *rest)}, or that with query's leading "
            f"axes before it, got {tuple(shape)}"
        )
    return axes.flatten_leading(given, split - 1, sizes.batch)


def _distance_bias(where: str, given: Given, sizes: Sizes, offset: int, query: Tensor) -> Tensor | None:
    """What is added to scores by ``j - i``: the relative bias and ALiBi's, ``(B or 1, H or 1, T + S - 1)``."""
    count = max(sizes.queries + sizes.keys - 1, 0)
    bias = None
    if given.relative_bias is not None:
        bias = _per_head(where, "relative_bias", given.relative_bias, sizes, (count,), query)
    if given.alibi_slopes is None:
        return bias
    slopes = _per_head(where, "alibi_slopes", given.alibi_slopes, sizes, (), query)
    exact = torch.promote_types(query.dtype, torch.float32)
    slopes = slopes.to(torch.promote_types(slopes.dtype, exact))
    distance = torch.arange(count, device=query.device) - (sizes.queries - 1 + offset)
    alibi = slopes.unsqueeze(-1) * -distance.abs()
    return alibi if bias is None else bias + alibi


def _bounds(where: str, name: str, given: Any, shapes: tuple[tuple[int, ...], int], query: Tensor) -> Tensor:
    """An integer tensor ``(..., n)`` as ``(B or 1, n)``, int64; ``shapes`` are the leading axes and n."""
    batch, length = shapes
    checks.tensor(where, name, given)
    if given.dtype not in _INTEGERS:
        raise InvalidTypeError(f"{where}: {name} must be an integer tensor, got {given.dtype}")
    checks.same_device(where, name, given, query.device)
    shape = given.shape
    if len(shape) < 1 or shape[-1] != length or not axes.broadcasts(shape, (*batch, length)):
        raise InvalidValueError(f"{where}: {name} must have shape {(*batch, length)}, got {tuple(shape)}")
    return axes.flatten_leading(given, len(shape) - 1, batch).long()


def has_readable_values(tensor: Tensor) -> bool:
    """Whether a tensor's values can be looked at: not while it is traced, batched or without data."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return plain and not tensor.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _segments(where: str, given: Any, sizes: Sizes, query: Tensor) -> tuple[Tensor, Tensor]:
    """First and last of the keys that have a query's segment id."""
    pair = given if isinstance(given, (tuple, list)) else (given, given)
    if len(pair) != 2:
        raise InvalidTypeError(f"{where}: segment_ids must be a tensor or (query's, key's), got {len(pair)} of them")
    ids = [
        _bounds(where, "segment_ids", one, (sizes.batch, length), query)
        for one, length in zip(pair, (sizes.queries, sizes.keys), strict=True)
    ]
    for one in ids:
        if has_readable_values(one) and bool((one[:, 1:] < one[:, :-1]).any()):
            row, place = (int(i) for i in (one[:, 1:] < one[:, :-1]).nonzero()[0])
            change = f"{int(one[row, place])} before {int(one[row, place + 1])}"
            raise InvalidValueError(f"{where}: segment_ids must not decrease along the sequence, got {change}")
    rows = 1 if all(one.shape[0] == 1 for one in ids) else prod(sizes.batch)
    query_ids, key_ids = (one.expand(rows, -1).contiguous() for one in ids)
    return places(key_ids, query_ids), places(key_ids, query_ids, behind_equals=True)


def places(ascending: Tensor, numbers: Tensor, *, behind_equals: bool = False) -> Tensor:
    """How many of ``ascending`` come before each of ``numbers``: (..., N) and (..., M) to (..., M) int64.

    Found by search, which is safe whatever the numbers are: nobody can look at them while a program is traced. ONNX has
    no search and compares all pairs.
    """
    if torch.onnx.is_in_onnx_export():
        line, column = ascending.unsqueeze(-2), numbers.unsqueeze(-1)
        return (line <= column if behind_equals else line < column).sum(-1)
    return torch.searchsorted(ascending, numbers, right=behind_equals)


def _prefix(where: str, given: Any, sizes: Sizes, offset: int, query: Tensor) -> tuple[Tensor, Tensor]:
    """The causal order, and the prefix for every query."""
    if isinstance(given, Tensor):
        lengths = _bounds(where, "prefix_length", given.unsqueeze(-1), (sizes.batch, 1), query)
        negative = has_readable_values(lengths) and bool((lengths < 0).any())
    else:
        length = min(checks.integer(where, "prefix_length", given), sizes.keys)
        lengths, negative = torch.full((1, 1), length, device=query.device), length < 0
    if negative:
        raise InvalidValueError(f"{where}: prefix_length must be at least 0, got {given}")
    causal = torch.arange(1 + offset, sizes.queries + 1 + offset, device=query.device)
    last = torch.maximum(causal, lengths).clamp(0, sizes.keys)
    return torch.zeros_like(last), last


def _ranges(where: str, given: Any, sizes: Sizes, query: Tensor) -> tuple[Tensor, Tensor]:
    """The caller's own bounds."""
    checks.tensor(where, "key_range", given)
    if given.dim() < 2 or given.shape[0] != 2:
        expected = (2, *sizes.batch, sizes.queries)
        raise InvalidValueError(f"{where}: key_range must have shape {expected}, got {tuple(given.shape)}")
    shapes = (sizes.batch, sizes.queries)
    first, last = (_bounds(where, "key_range", one, shapes, query).clamp(0, sizes.keys) for one in given)
    return first, last
