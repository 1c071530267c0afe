"""Arguments of the chapter's functions: tensors or NumPy arrays in, one kind out, with their checks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "like",
    "require",
    "require_array",
    "require_cache",
    "require_like_output",
    "require_params",
    "require_rank",
    "tensor",
    "tensors",
]


def tensor(where: str, name: str, x: object) -> Tensor:
    """A tensor that shares the memory of x where torch can."""
    require_array(where, name, x)
    if isinstance(x, Tensor):
        return x
    array: npt.NDArray[Any] = cast(Any, x)
    shareable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if shareable else array.copy())


def tensors(where: str, **arguments: object) -> list[Tensor]:
    """The arguments as floating-point tensors of one dtype."""
    result: list[Tensor] = []
    for name, argument in arguments.items():
        x = tensor(where, name, argument)
        if not x.is_floating_point():
            raise TypeError(f"{where}: {name} must be floating point, got {x.dtype}")
        if result and x.dtype != result[0].dtype:
            first = next(iter(arguments))
            raise TypeError(f"{where}: {name} must have {first}'s dtype {result[0].dtype}, got {x.dtype}")
        result.append(x)
    return result


def like(first: Tensor | npt.NDArray[Any], x: Tensor) -> Any:
    """A result, as a NumPy array if the first argument was one."""
    return x if isinstance(first, Tensor) else x.numpy()


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_array(where: str, name: str, x: object) -> None:
    """An argument is a tensor or a NumPy array; NumPy itself is optional."""
    numpy = sys.modules.get("numpy")
    if not isinstance(x, Tensor) and (numpy is None or not isinstance(x, numpy.ndarray)):
        raise TypeError(f"{where}: {name} must be a tensor or a NumPy array, got {type(x).__name__}")


def require_cache(where: str, cache: object, kind: type) -> None:
    """A cache is what the forward pass of the same function returned."""
    if not isinstance(cache, kind):
        origin = f"{where.removesuffix('_backward')}_forward(..., return_cache=True)"
        raise TypeError(f"{where}: cache must be the {kind.__name__} of {origin}, got {type(cache).__name__}")


def require_params(where: str, params: object) -> None:
    """The parameters of a layer are four."""
    if not hasattr(params, "__len__"):
        raise TypeError(f"{where}: params must be (W_Q, W_K, W_V, W_O), got {type(params).__name__}")
    require(len(params) == 4, f"{where}: params must be (W_Q, W_K, W_V, W_O), got {len(params)} of them")


def require_rank(where: str, name: str, shape: tuple[int, ...], rank: int) -> None:
    """An argument has ``rank`` axes."""
    require(len(shape) == rank, f"{where}: {name} must have {rank} axes, got shape {tuple(shape)}")


def require_like_output(where: str, name: str, grad: Tensor, shape: tuple[int, ...], out: Tensor) -> None:
    """A gradient has the shape and dtype of the output."""
    require(grad.shape == shape, f"{where}: {name} must have the output's shape {shape}, got {tuple(grad.shape)}")
    if grad.dtype != out.dtype:
        raise TypeError(f"{where}: {name} must have the output's dtype {out.dtype}, got {grad.dtype}")
