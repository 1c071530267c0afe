"""Our operators as compositions of ATen operators, for tools that translate a model operator by operator: ONNX export.

``torch.onnx.export`` takes apart what it cannot translate by PyTorch's table of decompositions, so entering ours there
is all it takes, for a module as for a program that ``torch.export`` made before. Compilers keep the operators: they
read lists of their own. Fake tensors would read this table too when sizes are symbolic; the entry in the table of
Meta functions keeps them at the operators' own Meta kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._decomp import register_decomposition

from mha_ext._ops import operators

__all__: list[str] = []

# The kernels of devices that have none of their own are compositions of ATen operators without in-place steps.
_COMPOSITION, _META = DispatchKeySet(DispatchKey.CUDA), DispatchKeySet(DispatchKey.Meta)


def _kernel(operator: torch._ops.OpOverload[..., Any], keys: DispatchKeySet) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(keys, *args, **kwargs)

    return call


for _operator in (
    operators.attention,
    operators.attention_with_weights,
    operators.attention_for_backward,
    operators.multi_head_attention,
):
    _overload = _operator.default
    register_decomposition(_overload)(_kernel(_overload, _COMPOSITION))
    register_decomposition(_overload, type="meta")(_kernel(_overload, _META))
