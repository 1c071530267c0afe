"""Sequences of different lengths, packed one behind the other without padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha_ext import _ops, checks, errors, variants
from mha_ext.errors import InvalidTypeError, InvalidValueError
from mha_ext.seeds import draw_seed

__all__ = ["varlen_attention"]

_WHERE = "varlen_attention"


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "upper_left",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention inside each of N packed sequences, in time that grows with the sum of their lengths' products.

    Args:
        query: ``(total_T, H, D)``, sequence after sequence, any strides.
        key: ``(total_S, G, D)``; G divides H, query head h uses key and value head ``h // (H / G)``.
        value: ``(total_S, G, D_v)``.
        cu_seqlens_q: ``(N + 1,)`` int32 or int64: where the queries of each sequence begin, and the last ones end;
            it begins with 0, ends with total_T and does not decrease (sequences may be empty).
        cu_seqlens_k: the same of keys.
        max_seqlen_q: at least the length of the longest sequence; nothing else depends on it.
        max_seqlen_k: the same of keys.
        dropout_p: probability in [0, 1) of dropping a weight.
        is_causal: query i of a sequence sees its key j only if ``j <= i`` (or as ``causal_alignment`` says).
        scale: factor of the scores, ``1 / sqrt(D)`` by default.
        causal_alignment: ``"upper_left"``, or ``"lower_right"``: ``j <= i + S_n - T_n``.
        window: as in :func:`scaled_dot_product_attention`, inside each sequence.
        softcap: as there.
        return_lse: also return the log-sum-exp of the scores, ``(H, total_T)``.

    Returns:
        The output ``(total_T, H, D_v)``; with ``return_lse`` a pair of it and the lse. A query of a sequence without
        keys gets 0, and an lse of -inf.

    Raises:
        ValueError: shapes do not fit, lengths decrease or end elsewhere, or an option is out of range.
        TypeError: a dtype does not fit, or an argument is of the wrong type.

    Example:
        >>> import torch
        >>> from mha_ext.functional import varlen_attention
        >>> x, lengths = torch.randn(7, 4, 16), torch.tensor([0, 2, 2, 7])
        >>> varlen_attention(x, x, x, lengths, lengths, 5, 5, is_causal=True).shape
        torch.Size([7, 4, 16])
    """
    checks.flags(_WHERE, is_causal=is_causal, return_lse=return_lse)
    checks.one_of(_WHERE, "causal_alignment", causal_alignment, ("upper_left", "lower_right"))
    _inputs(query, key, value)
    bounds = [
        _starts(name, given, total, longest, query.device)
        for name, given, total, longest in (
            ("q", cu_seqlens_q, query.shape[0], max_seqlen_q),
            ("k", cu_seqlens_k, key.shape[0], max_seqlen_k),
        )
    ]
    if bounds[0].shape[0] != bounds[1].shape[0]:
        counts = f"{bounds[0].shape[0]} and {bounds[1].shape[0]}"
        raise InvalidValueError(f"{_WHERE}: cu_seqlens_k must have as many entries as cu_seqlens_q, got {counts}")
    checks.dropout_probability(_WHERE, "dropout_p", dropout_p)
    if scale is not None:
        scale = checks.real(_WHERE, "scale", scale)
    left, right = (variants.NO_LIMIT, variants.NO_LIMIT) if window is None else variants.limits(_WHERE, window)
    sides = (left, 0 if is_causal else right)
    key_range = _key_range(bounds[0], bounds[1], query.shape[0], sides, causal_alignment == "lower_right")
    seed = draw_seed(query.device) if dropout_p > 0.0 else None
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    try:
        out, lse = _ops.attention(
            q,
            k,
            v,
            dropout_seed=seed,
            dropout_p=dropout_p,
            scale=scale,
            key_range=key_range,
            softcap=variants.softcap(_WHERE, softcap),
        )
    except (ValueError, TypeError) as error:
        errors.pass_on(error, _WHERE)
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def _inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    checks.tensors(_WHERE, query, key, value)
    checks.dense(_WHERE, (query, key, value))
    for name, given in (("query", query), ("key", key), ("value", value)):
        if given.dim() != 3:
            expected = "3 dimensions (total length, heads, head_dim)"
            raise InvalidValueError(f"{_WHERE}: {name} must have {expected}, got shape {tuple(given.shape)}")


def _starts(which: str, given: Any, total: int, longest: Any, device: torch.device) -> Tensor:
    """Where sequences begin and the last one ends, int64, checked as far as its values can be looked at."""
    name = f"cu_seqlens_{which}"
    checks.tensor(_WHERE, name, given)
    if given.dtype not in (torch.int32, torch.int64):
        raise InvalidTypeError(f"{_WHERE}: {name} must be int32 or int64, got {given.dtype}")
    if given.dim() != 1 or given.shape[0] < 1:
        raise InvalidValueError(f"{_WHERE}: {name} must have shape (N + 1,), got {tuple(given.shape)}")
    checks.same_device(_WHERE, name, given, device)
    longest = checks.integer(_WHERE, f"max_seqlen_{which}", longest)
    starts: Tensor = given.long()
    if variants.has_readable_values(given):
        lengths = starts.diff()
        first, last = int(starts[0]), int(starts[-1])
        if first != 0 or last != total:
            raise InvalidValueError(f"{_WHERE}: {name} must begin with 0 and end with {total}, got {first} and {last}")
        if bool((lengths < 0).any()):
            where = int((lengths < 0).nonzero()[0])
            pair = f"{int(starts[where])} before {int(starts[where + 1])}"
            raise InvalidValueError(f"{_WHERE}: {name} must not decrease, got {pair}")
        found = int(lengths.max()) if lengths.shape[0] else 0
        if longest < found:
            expected = f"at least the longest sequence's length {found}"
            raise InvalidValueError(f"{_WHERE}: max_seqlen_{which} must be {expected}, got {longest}")
    return starts


def _key_range(starts_q: Tensor, starts_k: Tensor, total: int, sides: tuple[int, int], lower_right: bool) -> Tensor:
    """The packed keys that each packed query sees, int32 ``(2, 1, total)``."""
    lengths_q, lengths_k = starts_q.diff(), starts_k.diff()
    place = torch.arange(total, device=starts_q.device)
    if lengths_q.shape[0] == 0:
        return place.new_zeros((2, 1, total), dtype=torch.int32)
    sequence = variants.places(starts_q[1:].contiguous(), place, behind_equals=True).clamp(max=lengths_q.shape[0] - 1)
    begin, end = starts_k[:-1][sequence], starts_k[1:][sequence]
    left, right = sides
    if left >= 0 or right >= 0:
        shift = starts_k[:-1] - starts_q[:-1] + (lengths_k - lengths_q if lower_right else 0)
        position = place + shift[sequence]
        begin = begin if left < 0 else torch.maximum(begin, position - left)
        end = end if right < 0 else torch.minimum(end, position + right + 1)
    return torch.stack((begin, end)).to(torch.int32).unsqueeze(1)
