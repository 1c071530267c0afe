"""The equations in plain PyTorch: slow, obvious, any dtype, and independent of the C++ operators. The tests' oracle.

Notation: B batch, T queries, S keys, H query heads, H_kv key/value heads (query head h reads key/value head
``h // (H / H_kv)``), D the width of a query or key, D_v the width of a value. Row vectors: ``Y = X @ W`` with W of
shape (d_in, d_out), the transpose of what ``torch.nn.Linear`` stores.

Attention (one head)::

    S_ij = scale * Q_i . K_j + mask_ij           scale = 1 / sqrt(D)
    P_ij = exp(S_ij) / sum_j exp(S_ij)           over the visible j
    L_i  = log sum_j exp(S_ij)                   "lse"
    W_ij = keep_ij P_ij / (1 - p)                dropout; W = P without it
    O_i  = sum_j W_ij V_j

Its derivative, for gradients dO of the output, dL of the log-sum-exp and dW of the weights::

    dV_j  = sum_i W_ij dO_i
    dP_ij = keep_ij (dO_i . V_j + dW_ij) / (1 - p)
    dS_ij = P_ij (dP_ij - sum_j P_ij dP_ij + dL_i)
    dQ_i  = scale * sum_j dS_ij K_j,    dK_j = scale * sum_i dS_ij Q_i,    dmask = dS

Layer::

    Q = Xq W_Q,   K = Xk W_K,   V = Xv W_V,   Y = concat(O_1 ... O_H) W_O                     (20.1)

Sums run over visible pairs only. A pair that a mask hides is absent, not multiplied by zero, so a NaN behind a mask
reaches nothing; a query that sees no key has O = 0, P = 0, L = -inf and passes no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Gradients",
    "LayerParameters",
    "attention",
    "attention_backward",
    "dropout_keep",
    "layer_parameters",
    "multi_head_attention",
]


class Gradients(NamedTuple):
    """Gradients of attention; those of masks are None unless the mask is a float one."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    key_padding_mask: Tensor | None


@dataclass(frozen=True)
class _Masks:
    """Everything that decides which pairs are visible and what is added to their scores."""

    attn_mask: Tensor | None
    key_padding_mask: Tensor | None
    is_causal: bool
    causal_alignment: str
    num_appended_keys: int

    def spread(self) -> list[Tensor]:
        """The masks, broadcastable to (B, H, T, S); bool ones with True = may attend."""
        spread = []
        if self.attn_mask is not None:
            spread.append(self.attn_mask)
        if self.key_padding_mask is not None:
            padding = self.key_padding_mask[:, None, None, :]
            spread.append(~padding if padding.dtype == torch.bool else padding)
        return spread

    def visible(self, sizes: tuple[int, int, int, int], device: torch.device) -> Tensor:
        """Which pairs take part, (B, H, T, S)."""
        batch, heads, queries, keys = sizes
        keys -= self.num_appended_keys
        visible = torch.ones(batch, heads, queries, keys, dtype=torch.bool, device=device)
        for mask in self.spread():
            visible = visible & (mask if mask.dtype == torch.bool else mask != -math.inf)
        if self.is_causal:
            last = {"upper_left": 0, "lower_right": keys - queries}[self.causal_alignment]
            query_index = torch.arange(queries, device=device)[:, None]
            key_index = torch.arange(keys, device=device)[None, :]
            visible = visible & (key_index <= query_index + last)
        appended = visible.new_ones(batch, heads, queries, self.num_appended_keys)
        return torch.cat([visible, appended], dim=-1)

    def add_to(self, scores: Tensor) -> Tensor:
        """``scores`` plus the float masks, in the scores' dtype."""
        appended = scores.size(-1) - self.num_appended_keys
        before, after = scores[..., :appended], scores[..., appended:]
        for mask in self.spread():
            if mask.dtype != torch.bool:
                before = before + mask.to(scores.dtype)
        return torch.cat([before, after], dim=-1)

    def gradients(self, grad_scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of both masks: dS summed over the axes along which a float mask was broadcast."""
        grad_scores = grad_scores[..., : grad_scores.size(-1) - self.num_appended_keys]
        grads: list[Tensor | None] = []
        for mask, middle in ((self.attn_mask, False), (self.key_padding_mask, True)):
            if mask is None or mask.dtype == torch.bool:
                grads.append(None)
            else:
                shape = (mask.size(0), 1, 1, mask.size(1)) if middle else mask.shape
                grads.append(grad_scores.sum_to_size(shape).reshape(mask.shape).to(mask.dtype))
        return grads[0], grads[1]


def _dots(rows: Tensor, columns: Tensor, visible: Tensor) -> Tensor:
    """``rows_i . columns_j`` for every visible pair, 0 for the others."""
    if bool(rows.isfinite().all()) and bool(columns.isfinite().all()):
        return (rows @ columns.mT).where(visible, 0)
    pair = visible[..., None]
    return (rows[..., :, None, :].where(pair, 0) * columns[..., None, :, :].where(pair, 0)).sum(-1)


def _mixture(weights: Tensor, columns: Tensor, visible: Tensor) -> Tensor:
    """``sum_j weights_ij columns_j``, for weights that are 0 where a pair is hidden."""
    if bool(weights.isfinite().all()) and bool(columns.isfinite().all()):
        return weights @ columns
    pair = visible[..., None]
    return (weights[..., None] * columns[..., None, :, :].where(pair, 0)).sum(-2)


def _probabilities(query: Tensor, key: Tensor, masks: _Masks, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """P, L and the visible pairs."""
    visible = masks.visible((*query.shape[:3], key.size(2)), query.device)
    empty = ~visible.any(-1, keepdim=True)
    scores = masks.add_to(scale * _dots(query, key, visible)).where(visible, -math.inf)
    if key.size(2) == 0:
        return scores, query.new_full(query.shape[:3], -math.inf), visible
    # Any constant may be taken out of the exponentials; the largest score keeps them from overflowing.
    largest = scores.detach().amax(-1, keepdim=True).masked_fill(empty, 0)
    exponentials = (scores - largest).exp().where(visible, 0)
    total = exponentials.sum(-1, keepdim=True).masked_fill(empty, 1)
    lse = (largest + total.log()).masked_fill(empty, -math.inf)
    return (exponentials / total).where(visible, 0), lse.squeeze(-1), visible


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    return x if x.size(1) == num_heads else x.repeat_interleave(num_heads // x.size(1), dim=1)


def _sum_heads(grad: Tensor, num_kv_heads: int) -> Tensor:
    batch, num_heads, keys, width = grad.shape
    if num_heads == num_kv_heads:
        return grad
    return grad.reshape(batch, num_kv_heads, num_heads // num_kv_heads, keys, width).sum(2)


def _drop(x: Tensor, keep: Tensor | None, dropout_p: float) -> Tensor:
    return x if keep is None else x * keep / (1 - dropout_p)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_alignment: str = "upper_left",
    scale: float | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    num_appended_keys: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled dot-product attention, differentiable by autograd.

    Args:
        query: (B, H, T, D).
        key: (B, H_kv, S, D); H_kv divides H.
        value: (B, H_kv, S, D_v).
        attn_mask: broadcastable to (B, H, T, S - num_appended_keys). Bool: True = may attend. Float: added; -inf hides.
        key_padding_mask: (B or 1, S - num_appended_keys). Bool: True = ignore. Float: added; -inf hides.
        is_causal: query i sees key j only if ``j <= i`` ("upper_left") or ``j <= i + S - num_appended_keys - T``
            ("lower_right"), together with the masks.
        causal_alignment: "upper_left" or "lower_right".
        scale: ``1 / sqrt(D)`` by default.
        keep: (B, H, T, S) bool, the pairs that dropout keeps; see :func:`dropout_keep`.
        dropout_p: the kept weights are divided by ``1 - dropout_p``.
        num_appended_keys: the last keys, to which neither masks nor causality apply.

    Returns:
        The output (B, H, T, D_v), the log-sum-exp of the scores (B, H, T), and the weights after dropout (B, H, T, S).
    """
    masks = _Masks(attn_mask, key_padding_mask, is_causal, causal_alignment, num_appended_keys)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    key, value = _repeat_heads(key, query.size(1)), _repeat_heads(value, query.size(1))
    probabilities, lse, visible = _probabilities(query, key, masks, scale)
    weights = _drop(probabilities, keep, dropout_p)
    return _mixture(weights, value, visible), lse, weights


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    grad_lse: Tensor | None = None,
    grad_weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_alignment: str = "upper_left",
    scale: float | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    num_appended_keys: int = 0,
) -> Gradients:
    """The derivative of :func:`attention` by the closed form in this module's docstring, without autograd.

    ``grad_out`` is dO (B, H, T, D_v), ``grad_lse`` dL (B, H, T) and ``grad_weights`` dW (B, H, T, S); the other
    arguments are those of :func:`attention`. The gradient of a float mask has the shape and dtype of the mask.
    """
    masks = _Masks(attn_mask, key_padding_mask, is_causal, causal_alignment, num_appended_keys)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    num_kv_heads = key.size(1)
    key, value = _repeat_heads(key, query.size(1)), _repeat_heads(value, query.size(1))
    probabilities, _, visible = _probabilities(query, key, masks, scale)
    grad_value = _mixture(_drop(probabilities, keep, dropout_p).mT, grad_out, visible.mT)
    grad_probabilities = _dots(grad_out, value, visible)
    if grad_weights is not None:
        grad_probabilities = grad_probabilities + grad_weights.where(visible, 0)
    grad_probabilities = _drop(grad_probabilities, keep, dropout_p)
    change = grad_probabilities - (probabilities * grad_probabilities).sum(-1, keepdim=True)
    if grad_lse is not None:
        change = change + grad_lse[..., None]
    grad_scores = (probabilities * change).where(visible, 0)
    return Gradients(
        scale * _mixture(grad_scores, key, visible),
        _sum_heads(scale * _mixture(grad_scores.mT, query, visible.mT), num_kv_heads),
        _sum_heads(grad_value, num_kv_heads),
        *masks.gradients(grad_scores),
    )


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of 64-bit patterns held in int64."""
    return torch.bitwise_and(x >> bits, 2 ** (64 - bits) - 1)


def _signed(pattern: int) -> int:
    """The int64 with the same 64 bits."""
    return (pattern + 2**63) % 2**64 - 2**63


def _splitmix64(x: Tensor) -> Tensor:
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def dropout_keep(seed: int, batch: int, heads: int, queries: int, keys: int, dropout_p: float) -> Tensor:
    """Which pairs dropout keeps: a hash of (seed, b, h, i, j), the same whatever computes it and in whatever order.

    Args:
        seed: any 64-bit integer.
        batch: B.
        heads: H, query heads.
        queries: T.
        keys: S, appended keys included.
        dropout_p: the share of pairs to drop.

    Returns:
        (B, H, T, S), True = kept.
    """
    head = _splitmix64(_splitmix64(torch.tensor(_signed(seed))) ^ torch.arange(batch * heads))
    column = _splitmix64(head[:, None, None] + torch.arange(keys))
    low, high = column & 0xFFFFFFFF, _shift_right(column, 32)
    x = torch.arange(queries)[:, None] ^ low
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) + high) & 0xFFFFFFFF
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x9E3779B1) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    return (x >= int(dropout_p * 2**32)).view(batch, heads, queries, keys)


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of a layer for row vectors.

    The widths tell the rest: with H heads, D is the columns of ``w_q`` / H and H_kv the columns of ``w_k`` / D.

    Attributes:
        w_q: W_Q, (d, H D); the first D columns feed head one, the next D head two, and so on.
        w_k: W_K, (d_k, H_kv D).
        w_v: W_V, (d_v, H_kv D_v).
        w_o: W_O, (H D_v, d).
        b_q: added to Q, (H D), and likewise for the next three.
        b_k: added to K.
        b_v: added to V.
        b_o: added to Y.
        appended_key: (H_kv D) or (1, 1, H_kv D), one more key for every example.
        appended_value: (H_kv D_v) or (1, 1, H_kv D_v), its value.
        append_zeros: append a key and a value of zeros.
    """

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    b_o: Tensor | None = None
    appended_key: Tensor | None = None
    appended_value: Tensor | None = None
    append_zeros: bool = False


def layer_parameters(module: torch.nn.MultiheadAttention, dtype: torch.dtype | None = None) -> LayerParameters:
    """The parameters of a module as :func:`multi_head_attention` takes them: every weight transposed.

    Args:
        module: ``torch.nn.MultiheadAttention`` or a subclass that keeps its parameter names; with ``num_kv_heads`` and
            ``head_dim`` attributes the rows of the packed weight are those of H, H_kv and H_kv heads.
        dtype: convert to this dtype.
    """
    first = module.num_heads * module.head_dim
    second = first + getattr(module, "num_kv_heads", module.num_heads) * module.head_dim

    def convert(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(dtype or x.dtype)

    packed, bias = module.in_proj_weight, module.in_proj_bias
    if packed is None:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        weights = [packed[:first], packed[first:second], packed[second:]]
    w_q, w_k, w_v, w_o = (weight.to(dtype or weight.dtype).mT for weight in [*weights, module.out_proj.weight])
    biases = [None] * 3 if bias is None else [bias[:first], bias[first:second], bias[second:]]
    b_q, b_k, b_v, b_o = map(convert, [*biases, module.out_proj.bias])
    return LayerParameters(
        *(w_q, w_k, w_v, w_o),
        *(b_q, b_k, b_v, b_o),
        appended_key=convert(module.bias_k),
        appended_value=convert(module.bias_v),
        append_zeros=module.add_zero_attn,
    )


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x @ weight
    return product if bias is None else product + bias


def _heads(x: Tensor, num_heads: int, appended: Tensor | None, append_zeros: bool) -> Tensor:
    """(B, S, H D) to (B, H, S or more, D)."""
    if appended is not None:
        x = torch.cat([x, appended.expand(x.size(0), 1, -1)], dim=1)
    if append_zeros:
        x = torch.cat([x, x.new_zeros(x.size(0), 1, x.size(2))], dim=1)
    batch, keys, width = x.shape
    return x.reshape(batch, keys, num_heads, width // num_heads).transpose(1, 2)


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, parameters: LayerParameters, num_heads: int, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """A whole layer (eq. 20.1), differentiable by autograd.

    Args:
        query: Xq, (B, T, d).
        key: Xk, (B, S, d_k).
        value: Xv, (B, S, d_v).
        parameters: see :class:`LayerParameters` and :func:`layer_parameters`.
        num_heads: H.
        **options: those of :func:`attention` from ``attn_mask`` on, without ``num_appended_keys``.

    Returns:
        The output (B, T, d), the log-sum-exp (B, H, T) and the weights after dropout (B, H, T, S + appended keys).
    """
    p = parameters
    num_kv_heads = p.w_k.size(1) * num_heads // p.w_q.size(1)
    q = _heads(_project(query, p.w_q, p.b_q), num_heads, None, False)
    k = _heads(_project(key, p.w_k, p.b_k), num_kv_heads, p.appended_key, p.append_zeros)
    v = _heads(_project(value, p.w_v, p.b_v), num_kv_heads, p.appended_value, p.append_zeros)
    out, lse, weights = attention(q, k, v, num_appended_keys=k.size(2) - key.size(1), **options)
    return _project(out.transpose(1, 2).flatten(2), p.w_o, p.b_o), lse, weights
