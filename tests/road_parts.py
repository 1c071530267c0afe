"""What the roads through the layer and through attention on heads share: strides of tensors, and limits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tolerances import double_limit, growth, peer_limit, roundoff
from torch import Tensor


def _offset(x: Tensor) -> Tensor:
    buffer = (
        x.new_ones([n + 3 for n in x.shape])
        if x.dtype == torch.bool
        else x.new_full([n + 3 for n in x.shape], math.nan)
    )
    return buffer[tuple(slice(2, 2 + n) for n in x.shape)].copy_(x)


def _stepped(x: Tensor) -> Tensor:
    return torch.stack([x, torch.ones_like(x)], -1).flatten(-2)[..., ::2]


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "rows alike": lambda x: x[..., :1, :].expand(x.shape) if x.dim() > 1 else x,
    "offset": _offset,
    "stepped": _stepped,
}


def limit(want: Tensor, peer: Tensor | None, dtype: torch.dtype, size: float = 0.0) -> float:
    """Twice the error of the same equations as matrix products in the dtype, and roundings of what cancels, size."""
    finite = want.nan_to_num(0.0, 0.0, 0.0)
    if peer is None:
        return double_limit(finite, 16) * max(1.0, size)
    return peer_limit(torch.where(want.isfinite(), peer.double(), finite), finite, dtype) + 4 * roundoff(dtype) * size


def weights_limit(want: Tensor, peer: Tensor | None, dtype: torch.dtype) -> float:
    """``limit`` for weights that are recomputed as exp(s - lse): on top, the error of lse, a sum over keys."""
    size = float(want.nan_to_num(0.0).abs().max())
    return limit(want, peer, dtype) + 2 * growth(max(want.shape[-1], 8), dtype) * size
