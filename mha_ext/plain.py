"""Whether modules and tensors are no more than they seem, so that one operator may do the work of several calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

__all__ = ["are_tensors", "is_linear"]

_PLAIN_LINEAR = (NonDynamicallyQuantizableLinear, nn.Linear)
_PLAIN_FUNCTIONS = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


def are_tensors(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether no tensor is of a class that defines PyTorch's functions for itself: those may know only ``F.linear``."""
    for tensor in tensors:
        kind = type(tensor)
        if not (kind is nn.Parameter or kind is Tensor or tensor is None or _is_plain_kind(kind)):
            return False
    return True


def _is_plain_kind(kind: type[Any]) -> bool:
    function = kind.__torch_function__
    return getattr(function, "__func__", function) in _PLAIN_FUNCTIONS


def is_linear(module: nn.Module) -> bool:
    """Whether calling the module is no more than a linear map by its weight and bias: no hooks, no other forward."""
    return type(module) in _PLAIN_LINEAR and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
        or "forward" in module.__dict__
    )
