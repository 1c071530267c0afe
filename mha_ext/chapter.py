"""The chapter's functions: forward and backward passes with an explicit cache and without autograd.

They run the package's C++ operators on tensors or NumPy arrays; what comes out is of the kind of the first argument.
Row vectors: activations (B, T, d) multiply weights from the left, ``Y = X @ W`` with W of shape (d_in, d_out), the
transpose of what ``torch.nn.MultiheadAttention`` stores.

Equations::

    Q = Xq W_Q,  K = Xk W_K,  V = Xv W_V,  Y = concat(O_1 ... O_H) W_O                            (20.1)
    one head: O_h = softmax(Q_h K_h^T / sqrt(d_h) + mask) V_h
    dW_O = Ycat^T dY,  dYcat = dY W_O^T                                                           (20.2)
    dW_Q = Xq^T dQ,  dXq = dQ W_Q^T, and likewise for K and V                                     (20.3)

A cache holds what its class says. The weights, T x S numbers a head, are never stored: the backward pass computes them
again, one tile at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from mha_ext import _ops, checks
from mha_ext.arrays import (
    like,
    require,
    require_array,
    require_cache,
    require_like_output,
    require_params,
    require_rank,
    tensor,
    tensors,
)

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "AttentionCache",
    "MultiHeadAttentionCache",
    "attention_backward",
    "attention_forward",
    "combine_heads",
    "multi_head_attention_backward",
    "multi_head_attention_forward",
    "split_heads",
]

Array = TypeVar("Array", Tensor, "npt.NDArray[Any]")
Mask = Any  # a tensor or an array, not necessarily of the other arguments' kind


@dataclass(frozen=True)
class AttentionCache:
    """What :func:`attention_backward` reads, in the operators' four axes.

    Attributes:
        query: (B, H, T, D).
        key: (B, H_kv, S, D).
        value: (B, H_kv, S, D_v).
        mask: broadcastable to (B, H, T, S), or None.
        out: (B, H, T, D_v).
        lse: (B, H, T), log-sum-exp of each query's scores.
        rounding: what rounding took from out, (B, H, T, D_v) in bfloat16; empty for float32 and float64.
        shapes: the shapes of Q, K, V and of the mask as the caller gave them.
        array_mask: whether the caller's mask was a NumPy array.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    out: Tensor
    lse: Tensor
    rounding: Tensor
    shapes: tuple[tuple[int, ...], ...]
    array_mask: bool


@dataclass(frozen=True)
class MultiHeadAttentionCache:
    """What :func:`multi_head_attention_backward` reads.

    Attributes:
        inputs: Xq, Xk, Xv.
        params: W_Q, W_K, W_V, W_O.
        attention: the cache of the attention between the projections.
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    params: tuple[Tensor, Tensor, Tensor, Tensor]
    attention: AttentionCache


def split_heads(x: Array, num_heads: int) -> Array:
    """(B, T, d) to (B, H, T, d / H), a view.

    Args:
        x: (B, T, d).
        num_heads: H.

    Raises:
        ValueError: x has not three axes, or H does not divide d.

    Example:
        >>> split_heads(torch.arange(6.0).view(1, 1, 6), 3)[0, :, 0].tolist()
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """
    require_array("split_heads", "x", x)
    require_rank("split_heads", "x", x.shape, 3)
    batch, length, width = x.shape
    num_heads = checks.integer("split_heads", "num_heads", num_heads)
    if num_heads < 1:
        raise ValueError(f"split_heads: num_heads must be at least 1, got {num_heads}")
    if width % num_heads:
        raise ValueError(f"embed_dim {width} is not divisible by num_heads {num_heads}")
    heads: Array = x.reshape(batch, length, num_heads, width // num_heads).swapaxes(1, 2)
    return heads


def combine_heads(x: Array) -> Array:
    """(B, H, T, d_h) to (B, T, H d_h): the inverse of :func:`split_heads`, and its backward pass.

    Args:
        x: (B, H, T, d_h).

    Raises:
        ValueError: x has not four axes.
    """
    require_array("combine_heads", "x", x)
    require_rank("combine_heads", "x", x.shape, 4)
    batch, num_heads, length, head_dim = x.shape
    combined: Array = x.swapaxes(1, 2).reshape(batch, length, num_heads * head_dim)
    return combined


def attention_forward(Q: Array, K: Array, V: Array, mask: Mask = None, return_cache: bool = False) -> Any:
    """Scaled dot-product attention, ``softmax(Q K^T / sqrt(D) + mask) V``.

    Args:
        Q: (..., T, D), any number of leading axes; the last of them are heads.
        K: (..., S, D); its heads may be fewer if they divide Q's (grouped-query attention).
        V: (..., S, D_v).
        mask: broadcastable to (..., T, S): bool, True = may attend; float, added. When Q has the axes (B, H, T, D) a
            mask (B, T, S) is read per example.
        return_cache: also return what :func:`attention_backward` needs.

    Returns:
        The output (..., T, D_v), or (output, cache). A query that may attend to nothing gives 0.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: an argument is neither a tensor nor a NumPy array, or has the wrong dtype.

    Example:
        >>> keys = torch.zeros(2, 4)
        >>> attention_forward(torch.ones(1, 4), keys, torch.tensor([[1.0], [3.0]]))
        tensor([[2.]])
    """
    with torch.no_grad():
        out, cache = _attend("attention_forward", tensors("attention_forward", Q=Q, K=K, V=V), mask)
    result = like(Q, out)
    return (result, cache) if return_cache else result


def attention_backward(grad_O: Array, cache: AttentionCache, *, return_grad_mask: bool = False) -> tuple[Array, ...]:
    """Gradients of :func:`attention_forward`, weights computed again tile by tile.

    Args:
        grad_O: gradient of the output, in its shape.
        cache: from the forward pass.
        return_grad_mask: also return the gradient of a float mask, in its shape, dtype and kind (None for other masks).

    Returns:
        The gradients of Q, K and V, and of the mask if asked for.

    Raises:
        ValueError: ``grad_O`` has not the output's shape.
        TypeError: ``grad_O`` is neither a tensor nor a NumPy array, or has not the output's dtype.
    """
    where = "attention_backward"
    require_cache(where, cache, AttentionCache)
    (grad,) = tensors(where, grad_O=grad_O)
    require_like_output(where, "grad_O", grad, (*cache.shapes[0][:-1], cache.out.size(-1)), cache.out)
    with torch.no_grad():
        results: list[Any] = _attend_backward(grad, cache, return_grad_mask)
    return (*(like(grad_O, x) for x in results[:3]), *results[3:])


def multi_head_attention_forward(
    Xq: Array,
    Xk: Array,
    Xv: Array,
    params: tuple[Array, Array, Array, Array],
    num_heads: int,
    mask: Mask = None,
    return_cache: bool = False,
) -> Any:
    """A multi-head attention layer (eq. 20.1).

    Args:
        Xq: (B, T, d), what asks.
        Xk: (B, S, d_k), what is compared; Xq itself in self-attention.
        Xv: (B, S, d_v), what is mixed.
        params: W_Q (d, H d_h), W_K (d_k, H_kv d_h), W_V (d_v, H_kv d_h), W_O (H d_h, d_out). The first d_h columns feed
            head one, the next d_h head two, and so on. Narrower W_K and W_V mean fewer key/value heads, H_kv of them.
        num_heads: H.
        mask: broadcastable to (B, H, T, S): bool, True = may attend; float, added. (B, T, S) is read per example.
        return_cache: also return what :func:`multi_head_attention_backward` needs.

    Returns:
        The output (B, T, d_out), or (output, cache).

    Raises:
        ValueError: the shapes do not fit.
        TypeError: an argument is neither a tensor nor a NumPy array, or has the wrong dtype.

    Example:
        >>> eye = torch.eye(4)
        >>> multi_head_attention_forward(*[torch.ones(1, 3, 4)] * 3, (eye, eye, eye, eye), num_heads=2).shape
        torch.Size([1, 3, 4])
    """
    where = "multi_head_attention_forward"
    require_params(where, params)
    num_heads = checks.integer(where, "num_heads", num_heads)
    names = ("Xq", "Xk", "Xv", "W_Q", "W_K", "W_V", "W_O")
    xq, xk, xv, w_q, w_k, w_v, w_o = tensors(where, **dict(zip(names, (Xq, Xk, Xv, *params), strict=True)))
    num_kv_heads = _check_layer(where, (xq, xk, xv), (w_q, w_k, w_v, w_o), num_heads)
    with torch.no_grad():
        q = split_heads(xq @ w_q, num_heads)
        k = split_heads(xk @ w_k, num_kv_heads)
        v = split_heads(xv @ w_v, num_kv_heads)
        out, attention = _attend(where, [q, k, v], mask)
        result = like(Xq, combine_heads(out) @ w_o)
    if not return_cache:
        return result
    return result, MultiHeadAttentionCache((xq, xk, xv), (w_q, w_k, w_v, w_o), attention)


def multi_head_attention_backward(
    grad_output: Array, cache: MultiHeadAttentionCache, *, return_grad_mask: bool = False
) -> tuple[Any, ...]:
    """Gradients of :func:`multi_head_attention_forward` (eqs. 20.2 and 20.3).

    In self-attention the input's gradient is the sum of the three input gradients; in cross-attention they stay apart.

    Args:
        grad_output: gradient of the output, (B, T, d_out).
        cache: from the forward pass.
        return_grad_mask: also return the gradient of a float mask, in its shape, dtype and kind (None for other masks).

    Returns:
        ``((grad_Xq, grad_Xk, grad_Xv), (grad_W_Q, grad_W_K, grad_W_V, grad_W_O))``, and the gradient of the mask if
        asked for.

    Raises:
        ValueError: ``grad_output`` has not the output's shape.
        TypeError: ``grad_output`` is neither a tensor nor a NumPy array, or has not the output's dtype.
    """
    where = "multi_head_attention_backward"
    require_cache(where, cache, MultiHeadAttentionCache)
    (grad,) = tensors(where, grad_output=grad_output)
    w_o, out = cache.params[3], cache.attention.out
    require_like_output(where, "grad_output", grad, (*cache.inputs[0].shape[:2], w_o.size(1)), out)
    with torch.no_grad():
        grad_w_o = _weight_gradient(combine_heads(out), grad)
        grad_heads = split_heads(grad @ w_o.mT, out.size(1))
        grads = _attend_backward(grad_heads, cache.attention, return_grad_mask)
        grads_qkv: list[Tensor] = [combine_heads(x) for x in grads[:3]]
        grads_x = [grad_y @ w.mT for grad_y, w in zip(grads_qkv, cache.params[:3], strict=True)]
        grads_w: list[Tensor] = [_weight_gradient(x, grad_y) for x, grad_y in zip(cache.inputs, grads_qkv, strict=True)]
    of_inputs = tuple(like(grad_output, x) for x in grads_x)
    of_params = tuple(like(grad_output, w) for w in [*grads_w, grad_w_o])
    if not return_grad_mask:
        return of_inputs, of_params
    return of_inputs, of_params, grads[3]


def _weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """``X^T dY`` over batch and length. Rows without a gradient are left out: behind a mask X may hold NaN."""
    used = (grad != 0).any(-1, keepdim=True)
    return x.where(used, 0).flatten(0, 1).mT @ grad.flatten(0, 1)


def _attend(where: str, qkv: list[Tensor], mask: Mask) -> tuple[Tensor, AttentionCache]:
    """The operator on any leading axes."""
    _check_attention(where, *qkv)
    array_mask = not isinstance(mask, Tensor)
    mask = None if mask is None else tensor(where, "mask", mask)
    shapes = tuple(tuple(x.shape) for x in (*qkv, mask) if x is not None)
    q, k, v = (_four_axes(x) for x in qkv)
    four_axes_mask = None if mask is None else _four_axes_mask(where, mask, _all_axes(shapes))
    out, lse, _, rounding = _ops.attention_for_backward(q, k, v, four_axes_mask)
    cache = AttentionCache(q, k, v, four_axes_mask, out, lse, rounding, shapes, array_mask)
    return out.reshape(*shapes[0][:-1], v.size(-1)), cache


def _attend_backward(grad: Tensor, cache: AttentionCache, with_mask: bool) -> list[Any]:
    """The gradients of Q, K and V in the caller's shapes and, if asked for, that of the mask, as the caller gave it."""
    mask = cache.mask
    differentiable = mask is not None and mask.is_floating_point()
    saved = (cache.query, cache.key, cache.value, mask, None, None, cache.out, cache.lse)
    wanted = (True, True, True, with_mask and differentiable, False, False, False)
    *grads, grad_mask, _, _, _ = _ops.attention_backward(
        _four_axes(grad), None, *saved, output_mask=wanted, rounding=cache.rounding
    )
    results: list[Any] = [cast(Tensor, x).reshape(shape) for x, shape in zip(grads, cache.shapes, strict=False)]
    if with_mask and not differentiable:
        results.append(None)
    elif with_mask:
        caller_mask = _caller_mask(cast(Tensor, grad_mask), cache.shapes)
        results.append(caller_mask.numpy() if cache.array_mask else caller_mask)
    return results


def _four_axes(x: Tensor) -> Tensor:
    """(..., H, T, D) or (T, D) as (B, H, T, D)."""
    *batch, num_heads = x.shape[:-2] or (1,)
    return x.reshape(prod(batch), num_heads, *x.shape[-2:])


def _all_axes(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """(..., H, T, S), at least three."""
    query, key = shapes[:2]
    return (*(query[:-2] or (1,)), query[-2], key[-2])


def _aligned(mask_shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """The mask's shape with one size for each of ``axes``; (B, T, S) is per example."""
    if len(axes) == 4 and len(mask_shape) == 3:
        return (mask_shape[0], 1, *mask_shape[1:])
    return (1,) * (len(axes) - len(mask_shape)) + mask_shape


def _four_axes_mask(where: str, mask: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The mask as the operators take it: batch axes merged into one, of size 1 where the mask does not vary."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{where}: mask must be bool or floating point, got {mask.dtype}")
    shape = _aligned(tuple(mask.shape), axes)
    if len(shape) != len(axes) or any(size not in (1, whole) for size, whole in zip(shape, axes, strict=True)):
        per_example = f" or to (B, T, S) = {(axes[0], *axes[2:])}" if len(axes) == 4 else ""
        raise ValueError(f"{where}: mask must be broadcastable to {axes}{per_example}, got {tuple(mask.shape)}")
    batch, rest = axes[:-3], shape[-3:]
    mask = mask.reshape(shape)
    if shape[:-3] == (1,) * len(batch):
        return mask.reshape(1, *rest)
    return mask.expand(*batch, *rest).reshape(prod(batch), *rest)


def _caller_mask(grad: Tensor, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    """The gradient of the caller's mask from that of the operators'."""
    shape, axes = shapes[3], _all_axes(shapes)
    if grad.numel() != prod(shape):
        grad = grad.reshape(*axes[:-3], *grad.shape[1:]).sum_to_size(_aligned(shape, axes))
    return grad.reshape(shape)


def _check_attention(where: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("Q", query), ("K", key), ("V", value)):
        require(x.dim() >= 2, f"{where}: {name} must have at least 2 axes, got shape {tuple(x.shape)}")
    shapes = f"got Q, K, V of shape {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
    require(key.shape[:-1] == value.shape[:-1], f"{where}: V must have K's axes but for the last, {shapes}")
    require(query.size(-1) == key.size(-1) > 0, f"{where}: K must have Q's last size, at least 1, {shapes}")
    heads, kv_heads = query.shape[-3:-2], key.shape[-3:-2]
    require(query.shape[:-3] == key.shape[:-3], f"{where}: K must have Q's leading axes, {shapes}")
    grouped = heads == kv_heads or (heads and kv_heads and kv_heads[0] > 0 and heads[0] % kv_heads[0] == 0)
    require(bool(grouped), f"{where}: K's heads must divide Q's heads, {shapes}")


def _check_layer(where: str, inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], num_heads: int) -> int:
    """H_kv, after everything fits."""
    for name, x in zip(("Xq", "Xk", "Xv"), inputs, strict=True):
        require_rank(where, name, x.shape, 3)
    for name, w in zip(("W_Q", "W_K", "W_V", "W_O"), weights, strict=True):
        require_rank(where, name, w.shape, 2)
    for name, x, w in zip(("W_Q", "W_K", "W_V"), inputs, weights, strict=False):
        require(w.size(0) == x.size(2), f"{where}: {name} must have {x.size(2)} rows, got shape {tuple(w.shape)}")
    lengths = [tuple(x.shape[:2]) for x in inputs]
    require(lengths[0][0] == lengths[1][0], f"{where}: Xk must have Xq's batch {lengths[0][0]}, got {lengths[1][0]}")
    require(lengths[1] == lengths[2], f"{where}: Xv must have Xk's batch and length {lengths[1]}, got {lengths[2]}")
    w_q, w_k, w_v, w_o = (w.shape for w in weights)
    require(num_heads >= 1, f"{where}: num_heads must be at least 1, got {num_heads}")
    require(w_q[1] % num_heads == 0, f"embed_dim {w_q[1]} is not divisible by num_heads {num_heads}")
    head_dim = w_q[1] // num_heads
    fits = head_dim > 0 and w_k[1] > 0 and w_k[1] % head_dim == 0 and num_heads % (w_k[1] // head_dim) == 0
    expected = (
        f"as many columns as W_Q, {w_q[1]}, or those of a number of heads of width {head_dim} that divides {num_heads}"
    )
    require(fits, f"{where}: W_K must have {expected}, got shape {tuple(w_k)}")
    num_kv_heads = w_k[1] // head_dim
    require(w_v[1] % num_kv_heads == 0, f"{where}: W_V must have {num_kv_heads} heads, got shape {tuple(w_v)}")
    rows = w_v[1] // num_kv_heads * num_heads
    require(w_o[0] == rows, f"{where}: W_O must have {rows} rows, got shape {tuple(w_o)}")
    return num_kv_heads
