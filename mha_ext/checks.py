"""Checks on a layer's arguments, made once and before any work; every message names argument, expected and given."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mha_ext.errors import InvalidTypeError, InvalidValueError, UnsupportedLayoutError

__all__ = [
    "FLOATS",
    "LayerSizes",
    "cast_alike",
    "dense",
    "dropout_probability",
    "flags",
    "float_dtype",
    "head_dim",
    "integer",
    "layer_flags",
    "layer_sizes",
    "one_of",
    "real",
    "same_device",
    "same_kind",
    "size",
    "strided",
    "tensor",
    "tensors",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # the likely ones first
_FLOAT_NAMES = "float64, float32, bfloat16 or float16"
_NUMBERS = (float, int, Real, torch.SymFloat, torch.SymInt)


class LayerSizes(NamedTuple):
    """Sizes of one call of the layer."""

    batch: int
    num_queries: int
    num_keys: int
    batched: bool


def tensor(where: str, name: str, given: object) -> None:
    """An argument is a tensor.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(given, Tensor):
        raise InvalidTypeError(f"{where}: {name} must be a tensor, got {type(given).__name__}")


def tensors(where: str, query: object, key: object, value: object) -> None:
    """Query, key and value are tensors.

    Raises:
        TypeError: one is not.
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        for name, given in (("query", query), ("key", key), ("value", value)):
            tensor(where, name, given)


def dense(where: str, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Query, key and value are neither nested nor sparse.

    Raises:
        UnsupportedLayoutError: one is.
    """
    query, key, value = inputs
    if not (query.is_nested or key.is_nested or value.is_nested):
        dense_layout = torch.strided
        if query.layout is dense_layout and key.layout is dense_layout and value.layout is dense_layout:
            return
    for name, given in zip(("query", "key", "value"), inputs, strict=True):
        strided(where, name, given)


def strided(where: str, name: str, given: Tensor) -> None:
    """A tensor is neither nested nor sparse.

    Raises:
        UnsupportedLayoutError: it is.
    """
    if given.is_nested or given.layout is not torch.strided:
        kind = "a nested tensor" if given.is_nested else f"layout {given.layout}"
        raise UnsupportedLayoutError(f"{where}: {name} must be a dense tensor (others are not implemented), got {kind}")


def same_device(where: str, name: str, given: Tensor, device: torch.device) -> None:
    """A tensor is on query's device.

    Raises:
        ValueError: it is on another.
    """
    if given.device != device:
        raise InvalidValueError(f"{where}: {name} must be on query's device {device}, got {given.device}")


def one_of(where: str, name: str, given: object, choices: tuple[str, ...]) -> None:
    """A string is one of the choices.

    Raises:
        TypeError: it is not a string.
        ValueError: it is another one.
    """
    if not isinstance(given, str):
        raise InvalidTypeError(f"{where}: {name} must be a str, one of {choices}, got {type(given).__name__}")
    if given not in choices:
        raise InvalidValueError(f"{where}: {name} must be one of {choices}, got {given!r}")


def flags(where: str, **given: object) -> None:
    """Options are True or False, of whatever type of truth values.

    Raises:
        TypeError: one is something else.
    """
    for name, flag in given.items():
        if type(flag).__name__ not in ("bool", "bool_", "SymBool"):
            raise InvalidTypeError(f"{where}: {name} must be a bool, got {type(flag).__name__}")


def layer_flags(where: str, need_weights: Any, average_attn_weights: Any, is_causal: Any) -> tuple[bool, bool, bool]:
    """The flags of a call of the layer as truth values.

    Raises:
        TypeError: one has none.
    """
    if type(need_weights) is type(average_attn_weights) is type(is_causal) is bool:
        return need_weights, average_attn_weights, is_causal
    return (
        _flag(where, "need_weights", need_weights),
        _flag(where, "average_attn_weights", average_attn_weights),
        _flag(where, "is_causal", is_causal),
    )


def _flag(where: str, name: str, given: Any) -> bool:
    """An option's truth value, of whatever has one beyond doubt: bools and numbers of any kind, None.

    Raises:
        TypeError: it is something else, a mask or a string in the wrong place, say.
    """
    if isinstance(given, torch.SymBool):
        return given  # type: ignore[return-value]
    if given is None or isinstance(given, (int, float)) or type(given).__name__ in ("bool", "bool_"):  # NumPy's
        return bool(given)
    raise InvalidTypeError(f"{where}: {name} must be a bool, got {type(given).__name__}")


def number(where: str, name: str, given: object) -> None:
    """An argument is a real number, or a tensor without axes, which PyTorch takes for one.

    Raises:
        TypeError: it is not.
    """
    if isinstance(given, _NUMBERS):
        return
    if not isinstance(given, Tensor) or given.dim() != 0:
        raise InvalidTypeError(f"{where}: {name} must be a number, got {type(given).__name__}")


def real(where: str, name: str, given: Any) -> Any:
    """The argument as a ``float`` (as it is where it is symbolic).

    Raises:
        TypeError: it is no real number.
        ValueError: it is too large for one.
    """
    number(where, name, given)
    if isinstance(given, (float, torch.SymFloat, torch.SymInt)):
        return given
    try:
        return float(given)
    except OverflowError:
        raise InvalidValueError(
            f"{where}: {name} must be finite, got an {type(given).__name__} beyond float64"
        ) from None
    except (TypeError, RuntimeError):
        raise InvalidTypeError(f"{where}: {name} must be a real number, got {given}") from None


def integer(where: str, name: str, given: Any) -> int:
    """The argument as an ``int``, whatever integer type it has; bool is none.

    Raises:
        TypeError: it is not an integer.
    """
    if type(given) is int:
        return given
    if isinstance(given, torch.SymInt):  # an open size of what torch.export traces
        return cast(int, given)
    if not isinstance(given, bool):
        try:
            return operator.index(given)
        except TypeError:
            pass
    raise InvalidTypeError(f"{where}: {name} must be an int, got {type(given).__name__}")


def size(where: str, name: str, given: Any) -> int:
    """The argument as a positive ``int``.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is not positive.
    """
    result = integer(where, name, given)
    if result <= 0:
        raise InvalidValueError(f"{where}: {name} must be greater than 0, got {result}")
    return result


def _require_width(where: str, name: str, tensor: Tensor, width: int, width_name: str) -> None:
    if tensor.shape[-1] != width:
        raise InvalidValueError(
            f"{where}: {name} must have last size {width} ({width_name}), got shape {tuple(tensor.shape)}"
        )


def layer_sizes(
    where: str, inputs: tuple[Tensor, Tensor, Tensor], widths: tuple[int, int, int], batch_first: bool
) -> LayerSizes:
    """Sizes of query, key and value of a layer, ``(B, T, E)``, ``(T, B, E)`` or, unbatched, ``(T, E)``.

    Args:
        where: the function that is being called, for messages.
        inputs: query, key, value.
        widths: the last sizes they must have (``embed_dim``, ``kdim``, ``vdim``).
        batch_first: the layout of batched inputs.

    Raises:
        ValueError: ranks, last sizes, batch sizes or the lengths of key and value do not fit.
    """
    query, key, value = inputs
    rank = query.dim()
    if rank not in (2, 3):
        raise InvalidValueError(f"{where}: query must be 2-D (unbatched) or 3-D (batched), got {rank}-D")
    _require_width(where, "query", query, widths[0], "embed_dim")
    shape = query.shape
    batch_axis = 0 if batch_first else 1
    if query is key and key is value and widths[0] == widths[1] == widths[2]:
        length = shape[1 - batch_axis] if rank == 3 else shape[0]
        return LayerSizes(shape[batch_axis] if rank == 3 else 1, length, length, rank == 3)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != rank:
            raise InvalidValueError(f"{where}: {name} must be {rank}-D like query, got {tensor.dim()}-D")
    _require_width(where, "key", key, widths[1], "kdim")
    _require_width(where, "value", value, widths[2], "vdim")
    if rank == 2:
        if key.shape[0] != value.shape[0]:
            raise InvalidValueError(f"{where}: value must have key's length {key.shape[0]}, got {value.shape[0]}")
        return LayerSizes(1, shape[0], key.shape[0], False)
    batch, num_keys = shape[batch_axis], key.shape[1 - batch_axis]
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[batch_axis] != batch:
            got = f"got {tensor.shape[batch_axis]} (axis {batch_axis}: batch_first is {batch_first})"
            raise InvalidValueError(f"{where}: {name} must have query's batch size {batch}, {got}")
    if value.shape[1 - batch_axis] != num_keys:
        raise InvalidValueError(f"{where}: value must have key's length {num_keys}, got {value.shape[1 - batch_axis]}")
    return LayerSizes(batch, shape[1 - batch_axis], num_keys, True)


def same_kind(where: str, inputs: tuple[Tensor, Tensor, Tensor], weight: Tensor) -> None:
    """Query, key and value are dense and have the parameters' dtype (or one that autocast makes the same) and device.

    Raises:
        TypeError: a dtype differs or is none that the layer computes in, or a tensor is sparse.
        ValueError: a device differs.
    """
    dtype, device = weight.dtype, weight.device
    previous = None
    for name, tensor in zip(("query", "key", "value"), inputs, strict=True):
        if tensor is previous:
            continue
        previous = tensor
        if tensor.device != device:
            raise InvalidValueError(f"{where}: {name} must be on the parameters' device {device}, got {tensor.device}")
        if tensor.dtype != dtype and not cast_alike(device, tensor.dtype, dtype):
            raise InvalidTypeError(f"{where}: {name} must have the parameters' dtype {dtype}, got {tensor.dtype}")
        if tensor.layout is not torch.strided:
            strided(where, name, tensor)
    if dtype not in FLOATS:
        float_dtype(where, "query", dtype)


def cast_alike(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether autocast is on and gives tensors of these dtypes one dtype; it leaves float64 as it is."""
    return torch.is_autocast_enabled(device.type) and all(dtype in FLOATS[:3] for dtype in dtypes)


def float_dtype(where: str, name: str, dtype: object) -> None:
    """A dtype is one that attention is computed in.

    Raises:
        TypeError: it is not.
    """
    if dtype not in FLOATS:
        raise InvalidTypeError(f"{where}: {name} must be {_FLOAT_NAMES}, got {dtype}")


def dropout_probability(where: str, name: str, probability: float) -> None:
    """A dropout probability lies in [0, 1).

    Raises:
        TypeError: it is not a number.
        ValueError: it does not.
    """
    number(where, name, probability)
    if not 0.0 <= probability < 1.0:
        raise InvalidValueError(f"{where}: {name} must be in [0, 1), got {probability}")


def head_dim(where: str, embed_dim: int, num_heads: int, num_kv_heads: int, given: int | None) -> int:
    """The width of a head: ``given``, or what ``embed_dim`` leaves for each.

    Raises:
        TypeError: ``given`` is not an integer.
        ValueError: a size does not divide what it must, or ``given`` is not positive.
    """
    if num_heads % num_kv_heads:
        raise InvalidValueError(f"{where}: num_kv_heads must divide num_heads {num_heads}, got {num_kv_heads}")
    if given is None:
        if embed_dim % num_heads:
            got = f"got embed_dim {embed_dim} and num_heads {num_heads} (head_dim sets another width of a head)"
            raise InvalidValueError(f"{where}: embed_dim must be divisible by num_heads, {got}")
        return embed_dim // num_heads
    return size(where, "head_dim", given)
