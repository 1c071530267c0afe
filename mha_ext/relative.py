"""Biases that depend on the distance of key and query alone, in the shapes that attention takes them in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha_ext import checks
from mha_ext.errors import InvalidValueError

__all__ = ["alibi_slopes_for", "bucketed_relative_bias"]


def alibi_slopes_for(num_heads: int) -> Tensor:
    """The slopes of ALiBi (Press et al. 2022): ``2^(-8 h / H)``, h = 1 ... H, for H a power of two.

    For other H, as the authors' code has it: those of the largest power of two below, then every second one of the
    next power's, from its first on.

    Args:
        num_heads: H.

    Returns:
        ``(H,)`` float32, for ``scaled_dot_product_attention(..., alibi_slopes=...)``.

    Raises:
        TypeError: ``num_heads`` is not an integer.
        ValueError: it is not positive.

    Example:
        >>> from mha_ext.functional import alibi_slopes_for
        >>> alibi_slopes_for(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    num_heads = checks.size("alibi_slopes_for", "num_heads", num_heads)
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    return torch.tensor(slopes[:num_heads], dtype=torch.float32)


def bucketed_relative_bias(
    table: Tensor,
    num_queries: int,
    num_keys: int,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    offset: int = 0,
) -> Tensor:
    """T5's relative bias (Raffel et al. 2020): a learned number for each head and bucket of distances.

    Of the buckets for one direction, the first half are a distance each, the others grow as a geometric series up to
    ``max_distance``, and the last holds all beyond it. ``bidirectional`` gives half of the buckets to keys after the
    query; otherwise those share the bucket of distance 0.

    Args:
        table: ``(num_buckets, H)``, floating; gets gradients. T5's ``relative_attention_bias.weight``.
        num_queries: T.
        num_keys: S.
        bidirectional: as in T5's encoder; False as in its decoder.
        max_distance: from here on, distances share the last bucket.
        offset: the position of query 0 among the keys.

    Returns:
        ``(H, T + S - 1)``: entry n is for pairs with ``j - i = n - (T - 1)``, as
        ``scaled_dot_product_attention(..., relative_bias=...)`` takes it.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the table has no two axes or too few buckets, or a number is out of range.

    Example:
        >>> import torch
        >>> from mha_ext.functional import bucketed_relative_bias
        >>> table = torch.arange(8.0).unsqueeze(1)  # one head; buckets 0 to 3 look back, 4 to 7 ahead
        >>> bucketed_relative_bias(table, 4, 4, max_distance=16)
        tensor([[2., 2., 1., 0., 5., 6., 6.]])
    """
    where = "bucketed_relative_bias"
    checks.tensor(where, "table", table)
    checks.strided(where, "table", table)
    checks.float_dtype(where, "table", table.dtype)
    if table.dim() != 2:
        raise InvalidValueError(f"{where}: table must have shape (num_buckets, H), got {tuple(table.shape)}")
    checks.flags(where, bidirectional=bidirectional)
    thresholds = _checked_thresholds(where, table.shape[0], bidirectional, max_distance)
    num_queries, num_keys = _count(where, "num_queries", num_queries), _count(where, "num_keys", num_keys)
    if not isinstance(offset, torch.SymInt):
        offset = checks.integer(where, "offset", offset)
    length = torch.sym_max(num_queries + num_keys - 1, 0)  # type: ignore[no-untyped-call]
    distance = torch.arange(length, device=table.device) - (num_queries - 1 + offset)
    limits = torch.tensor(thresholds, device=table.device)
    if bidirectional:
        ahead = (distance > 0).long() * (table.shape[0] // 2)
        buckets = torch.bucketize(distance.abs(), limits, right=True) + ahead
    else:
        buckets = torch.bucketize(-distance, limits, right=True)
    return table.mT.index_select(1, buckets)


def _count(where: str, name: str, given: Any) -> int:
    """A number of queries or keys, which may be 0 and symbolic.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is negative.
    """
    if isinstance(given, torch.SymInt):
        return given  # type: ignore[return-value]
    count = checks.integer(where, name, given)
    if count < 0:
        raise InvalidValueError(f"{where}: {name} must not be negative, got {count}")
    return count


def _checked_thresholds(where: str, num_buckets: int, bidirectional: bool, max_distance: Any) -> tuple[int, ...]:
    """The smallest distance of each bucket of one direction, but for the first.

    Raises:
        TypeError: ``max_distance`` is not an integer.
        ValueError: there are too few buckets, an odd number for two directions, or the distances do not grow.
    """
    least = 4 if bidirectional else 2
    if num_buckets < least or (bidirectional and num_buckets % 2):
        expected = f"{'an even number of' if bidirectional else ''} at least {least} buckets".strip()
        raise InvalidValueError(f"{where}: table must have {expected}, got {num_buckets}")
    max_distance = checks.size(where, "max_distance", max_distance)
    buckets = num_buckets // 2 if bidirectional else num_buckets
    if max_distance <= buckets // 2:
        got = f"got {max_distance}"
        raise InvalidValueError(
            f"{where}: max_distance must be greater than {buckets // 2} (buckets of one distance), {got}"
        )
    return _thresholds(buckets, max_distance)


def _thresholds(buckets: int, max_distance: int) -> tuple[int, ...]:
    """T5's rule in whole numbers, so that no logarithm's rounding decides.

    With E exact buckets and L others, bucket E + k starts at the least d with ``L log(d / E) / log(max / E) >= k``.
    """
    exact = buckets // 2
    others = buckets - exact
    starts = list(range(1, exact + 1))
    for k in range(1, others):
        wanted = max_distance**k * exact ** (others - k)
        low, high = exact, max_distance
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if middle**others >= wanted else (middle + 1, high)
        starts.append(low)
    return tuple(starts)
