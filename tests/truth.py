"""The truth that every road is measured against: attention and the layer around it, pair by pair and head by head.

Independent of the package, of its reference and of PyTorch's attention functions. Who sees whom is decided first
(``rules``); a pair that does not see each other is then left out with ``torch.where`` before anything is multiplied, so
that plain autograd, too, takes nothing from behind a mask. Quadratic in memory times the head size: for small problems.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

UPPER_LEFT, LOWER_RIGHT = 1, 2


class Rules(NamedTuple):
    """Who sees whom: ``hidden`` and what is added to the scores, ``bias`` (0 where hidden), both (B, H, T, S)."""

    hidden: Tensor
    bias: Tensor

    def unseen_keys(self) -> Tensor:
        """(B, S), True where no query of any head sees the key."""
        return self.hidden.all(2).all(1)

    def blind_queries(self) -> Tensor:
        """(B, T), True where the query sees no key in any head."""
        return self.hidden.all(3).all(1)


class Attended(NamedTuple):
    """What one attention gives."""

    out: Tensor
    lse: Tensor
    weights: Tensor


def four_axes(mask: Tensor, batch: int, num_heads: int) -> Tensor:
    """A layer's mask of 1 to 4 axes as one that broadcasts to (B, H, T, S), axis by axis as the contract reads it."""
    if mask.dim() == 3 and mask.shape[0] == batch * num_heads and mask.shape[0] != batch:
        return torch.stack([torch.stack([mask[b * num_heads + h] for h in range(num_heads)]) for b in range(batch)])
    if mask.dim() == 3:
        return torch.stack([mask[b][None] for b in range(mask.shape[0])])
    return mask[(None,) * (4 - mask.dim())]


def rules(
    sizes: tuple[int, int, int, int],
    masks: Sequence[Tensor],
    causal: int = 0,
    appended: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Rules:
    """Masks that broadcast to (B, H, T, S) (True or -inf = hidden, floats added), causality, and keys appended after.

    Args:
        sizes: B, H, T, S, without appended keys.
        masks: bool, or floating and then in ``dtype`` already if its gradient is wanted.
        causal: 0, UPPER_LEFT or LOWER_RIGHT.
        appended: number of keys behind the others, which masks and causality do not reach.
        dtype: of ``bias``.
    """
    hidden, bias = torch.zeros(sizes, dtype=torch.bool), torch.zeros(sizes, dtype=dtype)
    for mask in masks:
        if mask.dtype == torch.bool:
            hidden = hidden | mask
        else:
            hidden = hidden | (mask == -math.inf)
            bias = bias + torch.where(mask == -math.inf, 0.0, mask.to(dtype))
    queries, keys = sizes[2:]
    for i in range(queries if causal else 0):
        last = i + (keys - queries if causal == LOWER_RIGHT else 0)
        for j in range(keys):
            if j > last:
                hidden[:, :, i, j] = True
    bias = torch.where(hidden, 0.0, bias)
    seen = torch.zeros(*sizes[:3], appended)
    return Rules(torch.cat([hidden, seen.bool()], 3), torch.cat([bias, seen.to(dtype)], 3))


def attention(
    q: Tensor, k: Tensor, v: Tensor, who: Rules, scale: float | None = None, pairwise: bool = True
) -> Attended:
    """Attention on (B, H, T, D), (B, H, S, D), (B, H, S, D_v), in the dtype of its inputs.

    ``pairwise`` leaves hidden pairs out of every product; without it the same equations run as matrix products, which
    is what the rounding of another implementation is measured with (inputs have to be finite then).
    """
    hidden = who.hidden
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if pairwise:
        seen = ~hidden[..., None]
        products = torch.where(seen, q[:, :, :, None], 0.0) * torch.where(seen, k[:, :, None], 0.0)
        scores = products.sum(-1) * scale + who.bias
    else:
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale + who.bias
    scores = torch.where(hidden, -math.inf, scores)
    top = torch.nn.functional.pad(scores.detach(), (0, 1), value=-math.inf).amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    shares = torch.where(hidden, 0.0, torch.exp(torch.where(hidden, 0.0, scores - top)))
    empty = hidden.all(-1, keepdim=True)
    total = torch.where(empty, 1.0, shares.sum(-1, keepdim=True))
    weights = torch.where(hidden, 0.0, shares / total)  # also beside a NaN in the same row
    if pairwise:
        out = (weights[..., None] * torch.where(seen, v[:, :, None], 0.0)).sum(-2)
    else:
        out = torch.einsum("bhij,bhjd->bhid", weights, v)
    lse = torch.where(empty, -math.inf, top + torch.log(total))[..., 0]
    return Attended(out, lse, weights)


def cancelling(weights: Tensor, d_weights: Tensor) -> Tensor:
    """The size of what is subtracted in the gradient of each score, p (dP - sum p dP): it may leave rounding only."""
    moved = (weights * d_weights).nan_to_num(0.0, 0.0, 0.0).abs()
    return moved + weights.nan_to_num(0.0) * moved.sum(-1, keepdim=True)


def projections(parameters: Mapping[str, Tensor], rows: tuple[int, int, int]) -> list[tuple[Tensor, Tensor | float]]:
    """Weight and bias of query, key and value, of so many rows each, from a layer's parameters."""
    if "in_proj_weight" in parameters:
        packed = parameters["in_proj_weight"]
        weights = [packed[: rows[0]], packed[rows[0] : rows[0] + rows[1]], packed[rows[0] + rows[1] :]]
    else:
        weights = [parameters[f"{name}_proj_weight"] for name in "qkv"]
    if "in_proj_bias" not in parameters:
        return [(weight, 0.0) for weight in weights]
    bias = parameters["in_proj_bias"]
    biases = [bias[: rows[0]], bias[rows[0] : rows[0] + rows[1]], bias[rows[0] + rows[1] :]]
    return list(zip(weights, biases, strict=True))


def layer(
    parameters: Mapping[str, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    heads: tuple[int, int, int],
    who: Rules,
    add_zero: bool = False,
    static: tuple[Tensor | None, Tensor | None] = (None, None),
    pairwise: bool = True,
) -> tuple[Tensor, list[Tensor]]:
    """The layer on (B, T, E) inputs, one head after the other.

    Args:
        parameters: by the names of ``torch.nn.MultiheadAttention``, in the inputs' dtype.
        inputs: query, key, value.
        heads: number of query heads, of key and value heads, and the size of each.
        who: rules that count appended keys.
        add_zero: whether a key and value of zeros come last.
        static: keys and values (B, H, S, D) to use instead of the projected ones.
        pairwise: see ``attention``.

    Returns:
        (B, T, E_out) and the weights, (B, 1, T, S) of each head.
    """
    num_heads, num_kv_heads, dim = heads
    rows = (num_heads * dim, num_kv_heads * dim, num_kv_heads * dim)
    maps = projections(parameters, rows)
    hidden = who.hidden
    contexts, weights = [], []
    for h in range(num_heads):
        g = h // (num_heads // num_kv_heads)
        group = hidden[:, g * (num_heads // num_kv_heads) : (g + 1) * (num_heads // num_kv_heads)]
        blind, unseen = hidden[:, h].all(2), group.all(2).all(1)
        mine, shared = slice(h * dim, (h + 1) * dim), slice(g * dim, (g + 1) * dim)
        q = _head(inputs[0], blind, *maps[0], mine)
        k, v = (
            _head(inputs[n], unseen, *maps[n], shared) if given is None else given[:, h]
            for n, given in zip((1, 2), static, strict=True)
        )
        if "bias_k" in parameters:
            k = torch.cat([k, parameters["bias_k"][:, :, shared].expand(k.shape[0], 1, dim)], 1)
            v = torch.cat([v, parameters["bias_v"][:, :, shared].expand(v.shape[0], 1, dim)], 1)
        if add_zero:
            k, v = (torch.cat([x, x.new_zeros(x.shape[0], 1, dim)], 1) for x in (k, v))
        one = Rules(hidden[:, h, None], who.bias[:, h, None])
        got = attention(q[:, None], k[:, None], v[:, None], one, pairwise=pairwise)
        contexts.append(got.out[:, 0])
        weights.append(got.weights)
    out = torch.einsum("bte,oe->bto", torch.cat(contexts, 2), parameters["out_proj.weight"])
    return out + parameters.get("out_proj.bias", 0.0), weights


def _head(x: Tensor, unused: Tensor, weight: Tensor, bias: Tensor | float, rows: slice) -> Tensor:
    """One head of a projection, from the rows of x that anybody uses."""
    used = torch.where(unused[:, : x.shape[1], None], 0.0, x)
    projected = torch.einsum("bte,de->btd", used, weight[rows])
    return projected + bias[rows] if isinstance(bias, Tensor) else projected
