"""From the mask conventions of PyTorch's module and functions to the operators': four axes, bool True = may attend.

Everything is a view of the given mask, except the inversion of the module's bool masks, which costs one byte an
element; masks are never expanded over heads or batch and never merged with padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mha_ext import axes, checks
from mha_ext.errors import InvalidTypeError, InvalidValueError

__all__ = ["broadcast_mask", "broadcast_padding", "is_causal_bias", "layer_mask", "layer_padding", "saveable"]

_DTYPES = (torch.bool, *checks.FLOATS)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)


def is_causal_bias(mask: object) -> bool:
    """Whether a mask is a ``torch.nn.attention.bias.CausalBias``, told without an import that imports the compiler."""
    kind = type(mask)
    return kind is not Tensor and any(base.__module__ == "torch.nn.attention.bias" for base in kind.__mro__)


def _usable(where: str, name: str, mask: Tensor) -> Tensor:
    """The mask, such that the operators may keep it for the backward pass.

    Raises:
        TypeError: it is no dense tensor, neither bool nor floating point, or a CausalBias, whose numbers mean nothing.
    """
    checks.tensor(where, name, mask)
    if is_causal_bias(mask):
        expected = "a plain tensor (is_causal=True is causal)"
        raise InvalidTypeError(f"{where}: {name} must be {expected}, got {type(mask).__name__}")
    if mask.dtype not in _DTYPES and mask.dtype not in _FLOAT8:
        raise InvalidTypeError(f"{where}: {name} must be bool or floating point, got {mask.dtype}")
    if mask.layout is not torch.strided or mask.is_nested:
        checks.strided(where, name, mask)
    if mask.dtype in _FLOAT8:
        mask = mask.float()  # exact
    return saveable(mask)


def saveable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that was made in inference mode, which could not be kept for the backward pass."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and tensor.is_inference():
        return tensor.clone()
    return tensor


def layer_mask(where: str, mask: Tensor, sizes: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """The operators' mask from a layer's ``attn_mask`` (bool: True = may not attend).

    Args:
        where: the function that is being called, for messages.
        mask: ``(T, S)``, ``(B * H, T, S)`` batch-major, ``(B, T, S)``, ``(B, H, T, S)``, ``(S,)``; size 1 where it does
            not vary.
        sizes: B, H, T, S.
        device: where the mask must be.

    Returns:
        A mask broadcastable to ``(B, H, T, S)``, bool inverted (True = may attend).

    Raises:
        TypeError: neither bool nor floating point.
        ValueError: the shape does not fit, or the device differs.
    """
    mask = _usable(where, "attn_mask", mask)
    checks.same_device(where, "attn_mask", mask, device)
    batch, num_heads, num_queries, num_keys = sizes
    shape = mask.shape
    rank = len(shape)
    # The full size first: compared with 1, a size that depends on data could not be traced.
    fits = rank in (1, 2, 3, 4) and shape[-1] in (num_keys, 1) and (rank == 1 or shape[-2] in (num_queries, 1))
    if fits and rank == 3:
        if shape[0] in (batch, 1):
            mask = mask.unsqueeze(1)
        elif shape[0] == batch * num_heads:
            mask = mask.view(batch, num_heads, *shape[1:])
        else:
            fits = False
    elif fits and rank == 4:
        fits = shape[0] in (batch, 1) and shape[1] in (num_heads, 1)
    elif fits:
        mask = mask.view(1, 1, *shape) if rank == 2 else mask.view(1, 1, 1, *shape)
    if not fits:
        raise InvalidValueError(
            f"{where}: attn_mask must have shape (T, S) = {(num_queries, num_keys)}, "
            f"(B * num_heads, T, S) = {(batch * num_heads, num_queries, num_keys)}, "
            f"(B, T, S) = {(batch, num_queries, num_keys)} or be broadcastable to "
            f"(B, num_heads, T, S) = {(batch, num_heads, num_queries, num_keys)}, got {tuple(shape)}"
        )
    return mask.logical_not() if mask.dtype == torch.bool else mask


def layer_padding(where: str, mask: Tensor, batch: int, num_keys: int, device: torch.device) -> Tensor:
    """The operators' ``key_padding_mask`` from a layer's: ``(B, S)``, or ``(S,)`` for every example.

    Raises:
        TypeError: neither bool nor floating point.
        ValueError: the shape does not fit, or the device differs.
    """
    mask = _usable(where, "key_padding_mask", mask)
    checks.same_device(where, "key_padding_mask", mask, device)
    shape = mask.shape
    if len(shape) == 1 and shape[0] == num_keys:
        return mask.unsqueeze(0)
    if len(shape) != 2 or shape[0] not in (batch, 1) or shape[1] != num_keys:
        expected = f"(B, S) = {(batch, num_keys)} or (S,) = {(num_keys,)}"
        raise InvalidValueError(f"{where}: key_padding_mask must have shape {expected}, got {tuple(shape)}")
    return mask


def broadcast_mask(where: str, mask: Tensor, batch: tuple[int, ...], sizes: tuple[int, int, int]) -> Tensor:
    """The operators' mask from one that is broadcastable to ``(*batch, H, T, S)`` (bool: True = may attend).

    Args:
        where: the function that is being called, for messages.
        mask: the mask.
        batch: the leading sizes.
        sizes: H, T, S.

    Raises:
        TypeError: neither bool nor floating point.
        ValueError: the shape does not broadcast.
    """
    mask = _usable(where, "attn_mask", mask)
    full = (*batch, *sizes)
    shape = mask.shape
    if not axes.broadcasts(shape, full):
        raise InvalidValueError(f"{where}: attn_mask must be broadcastable to {full}, got {tuple(shape)}")
    if len(shape) < 3:
        mask = mask[(None,) * (3 - len(shape))]
    return axes.flatten_leading(mask, mask.dim() - 3, batch)


def broadcast_padding(where: str, mask: Tensor, batch: tuple[int, ...], num_keys: int) -> Tensor:
    """The operators' ``key_padding_mask`` from one that is broadcastable to ``(*batch, S)`` (bool: True = ignore).

    Raises:
        TypeError: neither bool nor floating point.
        ValueError: the shape does not broadcast.
    """
    mask = _usable(where, "key_padding_mask", mask)
    shape = mask.shape
    if len(shape) < 1 or shape[-1] != num_keys or not axes.broadcasts(shape[:-1], batch):
        raise InvalidValueError(
            f"{where}: key_padding_mask must be broadcastable to {(*batch, num_keys)}, got {tuple(shape)}"
        )
    return axes.flatten_leading(mask, len(shape) - 1, batch)
