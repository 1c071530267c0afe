"""Checks on the parameters of a layer: those that a module holds, and those that the layer as a function is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mha_ext import checks
from mha_ext.errors import InvalidTypeError, InvalidValueError

__all__ = [
    "both_or_none",
    "function_heads",
    "function_parameters",
    "given",
    "module_heads",
    "projections",
    "static_heads",
]


def projections(
    where: str,
    weights: tuple[Tensor, ...],
    bias: Tensor | None,
    heads: tuple[int, int],
    widths: tuple[int, int, int],
) -> None:
    """The weights of a layer's input projections and their bias fit each other and the layer's sizes.

    Args:
        where: the function that is being called, for messages.
        weights: the packed weight, or those of query, key and value.
        bias: the packed bias.
        heads: H, H_kv.
        widths: of query, key and value.

    Raises:
        ValueError: a shape or a device differs.
    """
    if len(weights) == 1 and weights[0].shape[1:] == widths[:1]:  # the likely case; the rows fit the heads already
        rows, device = weights[0].shape[0], weights[0].device
        if bias is None or (bias.shape == (rows,) and bias.device == device):
            return
    counts = (heads[0] + 2 * heads[1],) if len(weights) == 1 else (*heads, heads[1])
    head_dim, device = weights[0].shape[0] // counts[0], weights[0].device
    for index, (weight, count, width) in enumerate(zip(weights, counts, widths, strict=False)):
        if weight.shape != (count * head_dim, width) or weight.device != device:
            name = "in_proj_weight" if len(weights) == 1 else f"{'qkv'[index]}_proj_weight"
            height = f"{count} * {head_dim}" if index else f"{count} * head_dim"
            got = f"got {tuple(weight.shape)} on {weight.device}"
            raise InvalidValueError(f"{where}: {name} must have shape ({height}, {width}) on {device}, {got}")
    rows = sum(counts) * head_dim
    if bias is not None and (bias.shape != (rows,) or bias.device != device):
        got = f"got {tuple(bias.shape)} on {bias.device}"
        raise InvalidValueError(f"{where}: in_proj_bias must have shape ({rows},) on {device}, {got}")


def module_heads(where: str, weights: tuple[Tensor, ...], num_heads: Any, num_kv_heads: int) -> tuple[int, int]:
    """A module's numbers of heads, which may have been assigned, checked against the rows of its weights.

    Raises:
        TypeError: ``num_heads`` is no int.
        ValueError: it is not positive, or heads do not divide the rows.
    """
    if type(num_heads) is not int or num_heads < 1:
        checks.size(where, "num_heads", num_heads)
    total = num_heads + 2 * num_kv_heads if len(weights) == 1 else num_heads
    rows = weights[0].shape[0]
    if rows % total:
        name = "in_proj_weight" if len(weights) == 1 else "q_proj_weight"
        heads_of = f"num_heads {num_heads}, num_kv_heads {num_kv_heads}"
        raise InvalidValueError(f"{where}: {name} must have a multiple of {total} rows ({heads_of}), got {rows}")
    return num_heads, num_kv_heads


def both_or_none(where: str, names: tuple[str, str], given: tuple[object, object]) -> None:
    """Two arguments that belong together are both None or both not.

    Raises:
        ValueError: one is missing.
    """
    if (given[0] is None) is not (given[1] is None):
        missing, other = names if given[0] is None else names[::-1]
        raise InvalidValueError(f"{where}: {missing} must be a tensor because {other} is given, got None")


def given(where: str, **tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors, none of which may be None.

    Raises:
        ValueError: one is None.
    """
    there = tuple(tensor for tensor in tensors.values() if tensor is not None)
    if len(there) < len(tensors):
        missing = ", ".join(name for name, tensor in tensors.items() if tensor is None)
        raise InvalidValueError(f"{where}: {missing} must be a tensor, got None")
    return there


def function_heads(where: str, embed_dim: Any, num_heads: Any) -> None:
    """The numbers that the layer as a function is given are positive integers, and one divides the other.

    Raises:
        TypeError: one is not an integer.
        ValueError: one is not positive, or they do not divide.
    """
    embed_dim = checks.size(where, "embed_dim_to_check", embed_dim)
    num_heads = checks.size(where, "num_heads", num_heads)
    if embed_dim % num_heads:
        got = f"got embed_dim {embed_dim} and num_heads {num_heads}"
        raise InvalidValueError(f"{where}: embed_dim_to_check must be divisible by num_heads, {got}")


def function_parameters(
    where: str,
    embed_dim: int,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    out_proj: tuple[Tensor, Tensor | None],
) -> tuple[int, int, int]:
    """Parameters of the layer as a function fit embed_dim, and are on one device and (no autocast) of one dtype.

    Args:
        where: the function that is being called, for messages.
        embed_dim: E.
        weights: of the input projections: one that is packed, or three.
        biases: in_proj_bias, bias_k, bias_v.
        out_proj: weight and bias of the output projection.

    Returns:
        The widths that query, key and value must have.

    Raises:
        TypeError: one is not a dense tensor, or its dtype differs.
        ValueError: a shape or a device differs, or one of bias_k and bias_v is missing.
    """
    weight, bias = out_proj
    checks.tensor(where, "out_proj_weight", weight)
    checks.strided(where, "out_proj_weight", weight)
    expected: list[tuple[str, Tensor | None, tuple[int | str, ...]]]
    if len(weights) == 1:
        expected = [("in_proj_weight", weights[0], (3 * embed_dim, embed_dim))]
    else:
        inner: tuple[int | str, ...] = (embed_dim, "kdim", "vdim")
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        expected = [(name, w, (embed_dim, size)) for name, w, size in zip(names, weights, inner, strict=True)]
    expected += [
        ("in_proj_bias", biases[0], (3 * embed_dim,)),
        ("bias_k", biases[1], _row_shape(biases[1], embed_dim)),
        ("bias_v", biases[2], _row_shape(biases[2], embed_dim)),
        ("out_proj_weight", weight, ("E_out", embed_dim)),
        ("out_proj_bias", bias, weight.shape[:1]),
    ]
    _fit(where, expected, weight, "out_proj_weight")
    both_or_none(where, ("bias_k", "bias_v"), biases[1:])
    if len(weights) == 1:
        return embed_dim, embed_dim, embed_dim
    return embed_dim, weights[1].shape[1], weights[2].shape[1]


def _row_shape(bias: Tensor | None, embed_dim: int) -> tuple[int, ...]:
    """The shape that bias_k or bias_v must have: ``(1, 1, E)`` or, as PyTorch also takes it, ``(1, E)`` or ``(E,)``."""
    rank = bias.dim() if isinstance(bias, Tensor) and bias.dim() in (1, 2) else 3
    return (*(1,) * (rank - 1), embed_dim)


def _fit(
    where: str, expected: Iterable[tuple[str, Tensor | None, tuple[int | str, ...]]], like: Tensor, like_name: str
) -> None:
    """What is given of the tensors is like ``like`` in kind, and has its shape (a size that may be any is a name)."""
    dtype, device = like.dtype, like.device
    for name, tensor, shape in expected:
        if tensor is None:
            continue
        checks.tensor(where, name, tensor)
        checks.strided(where, name, tensor)
        sizes = tensor.shape
        if len(sizes) != len(shape) or any(
            not isinstance(wanted, str) and have != wanted for have, wanted in zip(sizes, shape, strict=True)
        ):
            wanted_shape = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
            raise InvalidValueError(f"{where}: {name} must have shape {wanted_shape}, got {tuple(sizes)}")
        if tensor.device != device:
            raise InvalidValueError(f"{where}: {name} must be on {like_name}'s device {device}, got {tensor.device}")
        if tensor.dtype != dtype and not checks.cast_alike(device, tensor.dtype, dtype):
            raise InvalidTypeError(f"{where}: {name} must have {like_name}'s dtype {dtype}, got {tensor.dtype}")


def static_heads(
    where: str,
    static: tuple[Tensor | None, Tensor | None],
    bias_k: Tensor | None,
    sizes: checks.LayerSizes,
    num_heads: int,
    query: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Static keys and values ``(B H, S, D)`` as ``(B, H, S, D)``, as far as they are given.

    Args:
        where: the function that is being called, for messages.
        static: static_k, static_v.
        bias_k: must be None.
        sizes: of the call.
        num_heads: H.
        query: has their dtype (unless autocast is on) and device; its last size is H D.

    Raises:
        TypeError: one is not a dense tensor, or its dtype differs.
        ValueError: a shape or a device differs, or bias_k is given.
    """
    names, shape = ("static_k", "static_v"), (sizes.batch * num_heads, "S", query.shape[-1] // num_heads)
    _fit(where, [(name, tensor, shape) for name, tensor in zip(names, static, strict=True)], query, "query")
    if bias_k is not None:
        raise InvalidValueError(f"{where}: bias_k and bias_v must be None with static_k or static_v, got tensors")
    lengths = [sizes.num_keys if tensor is None else tensor.shape[1] for tensor in static]
    if lengths[0] != lengths[1]:
        name, other = ("static_v", "static_k") if static[0] is not None else ("static_v", "key")
        if static[1] is None:
            name, other, lengths = "static_k", "value", lengths[::-1]
        raise InvalidValueError(f"{where}: {name} must have {other}'s length {lengths[0]}, got {lengths[1]}")
    key, value = (x if x is None else x.view(sizes.batch, num_heads, *x.shape[1:]) for x in static)
    return key, value
