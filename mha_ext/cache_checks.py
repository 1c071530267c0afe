"""Checks on what is given to a key/value cache, all made before it changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from mha_ext import checks
from mha_ext.cache_storage import Sizes
from mha_ext.errors import InvalidTypeError, InvalidValueError

__all__ = [
    "bounded",
    "chunk",
    "counts",
    "integers",
    "new_lengths",
    "overflow",
    "page_size",
    "queries",
    "reachable",
    "sizes",
]

_PAGE_SIZES = (16, 256)


def sizes(where: str, batch_size: Any, num_kv_heads: Any, head_dim: Any, value_head_dim: Any) -> Sizes:
    """The sizes of a cache: a batch of 0 is one, other sizes are positive.

    Raises:
        TypeError: one is no integer.
        ValueError: one is out of range.
    """
    batch = checks.integer(where, "batch_size", batch_size)
    if batch < 0:
        raise InvalidValueError(f"{where}: batch_size must not be negative, got {batch}")
    heads = checks.size(where, "num_kv_heads", num_kv_heads)
    return Sizes(
        batch, heads, checks.size(where, "head_dim", head_dim), checks.size(where, "value_head_dim", value_head_dim)
    )


def page_size(where: str, given: Any) -> int:
    """A number of positions that a page may have.

    Raises:
        TypeError: no integer.
        ValueError: out of range.
    """
    size = checks.integer(where, "page_size", given)
    if not _PAGE_SIZES[0] <= size <= _PAGE_SIZES[1]:
        raise InvalidValueError(f"{where}: page_size must be from {_PAGE_SIZES[0]} to {_PAGE_SIZES[1]}, got {size}")
    return size


def chunk(where: str, given: tuple[Any, Any], sizes: Sizes, dtype: torch.dtype, device: torch.device) -> int:
    """The number of positions of key and value, which fit the cache.

    Raises:
        TypeError: one is no dense tensor of the cache's dtype.
        ValueError: a shape or device differs, or a gradient would be lost.
    """
    key, value = given
    count = 0
    for name, tensor, width in (("key", key, sizes.head_dim), ("value", value, sizes.value_head_dim)):
        if not isinstance(tensor, Tensor) or tensor.is_nested or tensor.layout is not torch.strided:
            checks.tensor(where, name, tensor)
            checks.strided(where, name, tensor)
        shape = tensor.shape
        if tensor is key and len(shape) == 4:
            count = shape[2]
        if shape != (sizes.batch, sizes.num_kv_heads, count, width):
            _refuse_shape(where, name, tensor, (*sizes[:2], "n" if name == "key" else count, width))
        if tensor.dtype is not dtype:
            raise InvalidTypeError(f"{where}: {name} must have the cache's dtype {dtype}, got {tensor.dtype}")
        if tensor.device != device:
            raise InvalidValueError(f"{where}: {name} must be on the cache's device {device}, got {tensor.device}")
        if tensor.requires_grad and torch.is_grad_enabled():
            hint = "a cache passes no gradients: append under torch.no_grad(), or what is detached"
            raise InvalidValueError(f"{where}: {name} must not require a gradient ({hint}), got requires_grad=True")
    return count


def _refuse_shape(where: str, name: str, tensor: Tensor, wanted: tuple[object, ...]) -> NoReturn:
    axes = (
        "(batch_size, num_kv_heads, n, head_dim)" if name == "key" else "(batch_size, num_kv_heads, n, value_head_dim)"
    )
    shape = ", ".join(map(str, wanted))
    raise InvalidValueError(f"{where}: {name} must have shape ({shape}), {axes}, got {tuple(tensor.shape)}")


def overflow(where: str, max_length: int, held: list[int], ends: list[int]) -> NoReturn:
    """Refuses positions that do not fit.

    Raises:
        ValueError: always.
    """
    row = ends.index(max(ends))
    before = held[min(row, len(held) - 1)]
    got = f"got {ends[row] - before} positions for a row (number {row}) of length {before}"
    raise InvalidValueError(f"{where}: key must fit into the cache's max_length {max_length}, {got}")


def bounded(where: str, name: str, given: Any, most: int) -> int:
    """An integer from 0 to ``most``.

    Raises:
        TypeError: no integer.
        ValueError: out of range.
    """
    number = checks.integer(where, name, given)
    if not 0 <= number <= most:
        raise InvalidValueError(f"{where}: {name} must be from 0 to {most}, got {number}")
    return number


def integers(where: str, name: str, given: Any, limits: tuple[int | None, int, int]) -> list[int]:
    """Integers of a one-dimensional tensor or a sequence.

    Args:
        where: the function that is being called, for messages.
        name: the argument.
        given: what was passed.
        limits: how many there must be (None: any number), the least and the greatest.

    Raises:
        TypeError: not integers.
        ValueError: another number of them, or one out of range.
    """
    count, least, most = limits
    if isinstance(given, Tensor):
        checks.strided(where, name, given)
        if given.dtype.is_floating_point or given.dtype.is_complex or given.dtype is torch.bool:
            raise InvalidTypeError(f"{where}: {name} must be integers, got {given.dtype}")
        if given.dim() != 1:
            raise InvalidValueError(f"{where}: {name} must have one axis, got shape {tuple(given.shape)}")
        numbers: list[int] = given.tolist()
    elif isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        numbers = [checks.integer(where, name, number) for number in given]
    else:
        raise InvalidTypeError(f"{where}: {name} must be a tensor or sequence of integers, got {type(given).__name__}")
    if count is not None and len(numbers) != count:
        raise InvalidValueError(f"{where}: {name} must have {count} entries (batch_size), got {len(numbers)}")
    for number in numbers:
        if not least <= number <= most:
            raise InvalidValueError(f"{where}: {name} must be from {least} to {most}, got {number}")
    return numbers


def counts(where: str, given: Any, batch: int, most: int) -> list[int]:
    """How many of ``most`` positions are real in each row; one number where rows agree.

    Raises:
        TypeError: not integers.
        ValueError: another number of them, or one out of range.
    """
    numbers = integers(where, "lengths", given, (batch, 0, most))
    return numbers if len(set(numbers)) > 1 else (numbers[:1] or [most])


def queries(where: str, given: Any, most: int) -> int:
    """A number of queries that all rows have positions for.

    Raises:
        TypeError: no integer.
        ValueError: out of range.
    """
    return bounded(where, "num_queries", given, most)


def new_lengths(where: str, given: Any, lengths: list[int]) -> list[int]:
    """The length of each row after it is cut to what is given, for all rows or for each.

    Raises:
        TypeError: not integers.
        ValueError: out of range.
    """
    most = max(lengths, default=0)
    if not isinstance(given, Sequence) and not (isinstance(given, Tensor) and given.dim()):
        length = bounded(where, "length", given, most)
        return [min(length, before) for before in lengths]
    numbers = integers(where, "length", given, (len(lengths), 0, most))
    for row, (number, before) in enumerate(zip(numbers, lengths, strict=True)):
        if number > before:
            raise InvalidValueError(f"{where}: length must be from 0 to {before} for row {row}, got {number}")
    return numbers


def reachable(where: str, lengths: list[int], dropped: list[int], window: int | None) -> None:
    """Rows that end at ``lengths`` still hold all of the window before it.

    Raises:
        ValueError: one does not.
    """
    if window is None:
        return
    for length, lost in zip(lengths, dropped, strict=True):
        if length and lost > max(0, length - window):
            least = lost + window
            raise InvalidValueError(
                f"{where}: length must be 0 or at least {least} (earlier positions rolled out of the window {window}), "
                f"got {length}"
            )
