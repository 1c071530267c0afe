"""One attention from two, over two sets of keys (what ring attention and shared prefixes need)."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from mha_ext import checks
from mha_ext.errors import InvalidTypeError, InvalidValueError

__all__ = ["merge_attention"]

_WHERE = "merge_attention"


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from attention over one part of them and over the rest.

    With the parts' shares ``w = exp(lse_a - lse)`` and ``1 - w``, out is ``w out_a + (1 - w) out_b``, lse the logarithm
    of ``exp(lse_a) + exp(lse_b)``. More than two parts are merged one after the other. A row that saw no key (lse -inf)
    has no share, whatever its output holds; where both have none, out is 0 and lse -inf. Gradients flow to all four.

    Args:
        out_a: ``(..., T, D_v)``, floating, as ``scaled_dot_product_attention(..., return_lse=True)`` gives it: the
            same queries, scale and masks as for b, without dropout, and a sink at most on one side. Causal order and
            windows count a part's own keys: give them as ``key_range``.
        lse_a: ``(..., T)``, the natural log-sum-exp of the scores.
        out_b: of out_a's shape and dtype, from the other keys.
        lse_b: of lse_a's shape and dtype.

    Returns:
        out ``(..., T, D_v)`` and lse ``(..., T)``, in the dtypes of the parts, computed in float32 at least.

    Raises:
        TypeError: an argument is not a dense floating tensor, or a dtype differs.
        ValueError: a shape or a device differs.

    Example:
        >>> import torch
        >>> from mha_ext.functional import merge_attention, scaled_dot_product_attention
        >>> query, key, value = (torch.randn(2, 4, 6, 8) for _ in range(3))
        >>> halves = [scaled_dot_product_attention(query, key[:, :, part], value[:, :, part], return_lse=True)
        ...           for part in (slice(0, 3), slice(3, 6))]
        >>> out, lse = merge_attention(*halves[0], *halves[1])
        >>> torch.allclose(out, scaled_dot_product_attention(query, key, value), atol=1e-6)
        True
    """
    _check(out_a, lse_a, out_b, lse_b)
    dtype = torch.promote_types(torch.promote_types(out_a.dtype, lse_a.dtype), torch.float32)
    first, second = lse_a.to(dtype), lse_b.to(dtype)
    nothing_a, nothing_b = first == -inf, second == -inf
    nothing = nothing_a & nothing_b
    # What is subtracted may be any number: the results do not depend on it, so neither do their derivatives.
    largest = torch.maximum(first, second).detach().masked_fill(nothing, 0.0)
    shares = (first - largest).exp(), (second - largest).exp()
    total = (shares[0] + shares[1]).masked_fill(nothing, 1.0)
    lse = (largest + total.log()).masked_fill(nothing, -inf)
    out = _weighted(out_a.to(dtype), shares[0] / total, nothing_a) + _weighted(
        out_b.to(dtype), shares[1] / total, nothing_b
    )
    return out.to(out_a.dtype), lse.to(lse_a.dtype)


def _weighted(out: Tensor, share: Tensor, nothing: Tensor) -> Tensor:
    """One part's addend; what an empty row holds, NaN in other libraries, is left out."""
    return out.masked_fill(nothing.unsqueeze(-1), 0.0) * share.unsqueeze(-1)


def _check(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> None:
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, tensor in given.items():
        checks.tensor(_WHERE, name, tensor)
        checks.strided(_WHERE, name, tensor)
        checks.float_dtype(_WHERE, name, tensor.dtype)
        if tensor.device != out_a.device:
            raise InvalidValueError(f"{_WHERE}: {name} must be on out_a's device {out_a.device}, got {tensor.device}")
    if out_a.dim() < 2:
        raise InvalidValueError(f"{_WHERE}: out_a must have at least 2 axes (T, D_v), got shape {tuple(out_a.shape)}")
    for name, like, shape in (
        ("lse_a", "", out_a.shape[:-1]),
        ("out_b", "out_a", out_a.shape),
        ("lse_b", "lse_a", lse_a.shape),
    ):
        tensor = given[name]
        if tensor.shape != shape:
            whose = f"{like}'s shape" if like else "shape"
            raise InvalidValueError(f"{_WHERE}: {name} must have {whose} {tuple(shape)}, got {tuple(tensor.shape)}")
        if like and tensor.dtype != given[like].dtype:
            raise InvalidTypeError(f"{_WHERE}: {name} must have {like}'s dtype {given[like].dtype}, got {tensor.dtype}")
