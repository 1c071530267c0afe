"""Jagged nested tensors: sequences of different length that lie packed already, so packed attention serves them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha_ext.errors import InvalidValueError, UnsupportedLayoutError
from mha_ext.varlen import varlen_attention

__all__ = ["attend"]


_PASSED_ON = ("dropout_p", "is_causal", "scale", "softcap", "window", "causal_alignment")


def attend(where: str, query: Any, key: Any, value: Any, enable_gqa: bool, **keywords: Any) -> Any:
    """Attention on jagged nested tensors ``(B, H, length, D)``, in the time of their real lengths.

    Args:
        where: the function that is being called, for messages.
        query: jagged, without holes.
        key: as query, of any lengths.
        value: as query, of key's lengths.
        enable_gqa: whether key and value may have fewer heads.
        keywords: the caller's others; those that :func:`varlen_attention` does not take must be None or False.

    Returns:
        A jagged nested tensor ``(B, H, length, D_v)`` with query's lengths, stored as ``(B, length, H, D_v)``.

    Raises:
        NotImplementedError: an input is no jagged tensor without holes, or another keyword is set; a TypeError as well.
        ValueError: shapes do not fit.
    """
    options = {name: keywords.pop(name) for name in _PASSED_ON}
    for name, given in keywords.items():
        if given is not None and given is not False:
            raise UnsupportedLayoutError(f"{where}: {name} must not be set with nested tensors, got {_shown(given)}")
    inputs = (query, key, value)
    packed = [_packed(where, name, given) for name, given in zip(("query", "key", "value"), inputs, strict=True)]
    (q, starts_q), (k, starts_k), (v, starts_v) = packed
    if starts_k is not starts_v and not torch.equal(starts_k, starts_v):
        raise InvalidValueError(f"{where}: value must have key's lengths, got others")
    if starts_q.shape[0] != starts_k.shape[0]:
        batches = f"{starts_q.shape[0] - 1}, got {starts_k.shape[0] - 1}"
        raise InvalidValueError(f"{where}: key must have query's batch size {batches}")
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise InvalidValueError(
            f"{where}: key must have query's {q.shape[1]} heads (enable_gqa=True: a divisor), got {k.shape[1]}"
        )
    longest = [int(starts.diff().max()) if starts.shape[0] > 1 else 0 for starts in (starts_q, starts_k)]
    out: Any = varlen_attention(q, k, v, starts_q, starts_k, longest[0], longest[1], **options)
    # The same offsets object, so that the result adds to query.
    return torch.nested.nested_tensor_from_jagged(out, offsets=starts_q).transpose(1, 2)


def _shown(given: Any) -> str:
    return type(given).__name__ if isinstance(given, Tensor) else repr(given)


def _packed(where: str, name: str, given: Any) -> tuple[Tensor, Tensor]:
    """``(total length, H, D)`` and where sequences begin."""
    if not given.is_nested or given.layout != torch.jagged or given.dim() != 4:
        kind = f"a nested tensor of {given.dim()} axes, {given.layout}" if given.is_nested else "a dense tensor"
        expected = "a jagged nested tensor (B, H, length, D), as all three"
        raise UnsupportedLayoutError(f"{where}: {name} must be {expected}, got {kind}")
    rows = given.transpose(1, 2)
    if rows._ragged_idx != 1 or given.lengths() is not None:
        raise UnsupportedLayoutError(
            f"{where}: {name} must have its lengths on axis 2, without holes between sequences"
        )
    return rows.values(), rows.offsets()
