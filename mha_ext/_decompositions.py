"""Our operators as other operators, for tools that translate a model operator by operator: ONNX export.

``torch.onnx.export`` takes apart what it cannot translate by the table ``torch._decomp.decomposition_table``, so ours
are added to that name, for a module as for a program that ``torch.export`` made before. For operator set 23 and later
an attention becomes ONNX's Attention where that can say it, else a composition of ATen operators.

Compilers keep the operators. They ask PyTorch's registry itself, which ours stay out of: where the environment says
``CI``, inductor refuses any operator found there that it has not been told to take apart. Fake tensors read the table
when sizes are symbolic; the entry in the table of Meta functions keeps them at the operators' own Meta kernels.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from typing import Any

import torch
import torch._decomp
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._decomp import register_decomposition

from mha_ext import onnx_nodes
from mha_ext._ops import operators

__all__: list[str] = []

# The kernels of devices that have none of their own are compositions of ATen operators.
_COMPOSITION, _META = DispatchKeySet(DispatchKey.CUDA), DispatchKeySet(DispatchKey.Meta)


def _kernel(operator: torch._ops.OpOverload[..., Any], keys: DispatchKeySet) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(keys, *args, **kwargs)

    return call


def _attention(operator: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    """An attention operator whose output is a node's; the node's weights are those of ``attention_with_weights``.

    What nobody reads of the composition, the exporter removes.
    """
    composition = _kernel(operator, _COMPOSITION)
    gives_weights = operator is operators.attention_with_weights.default

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        dropout_seed: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        tensors, masks = (query, key, value), (attn_mask, key_padding_mask)
        composed: tuple[Tensor, ...] = composition(*tensors, *masks, dropout_seed, **options)
        added = (*masks, options.get("relative_bias"), options.get("sink"))
        possible = onnx_nodes.expressible(query, dropout_seed, added) and not options.get("weights", 0)
        if not possible or not onnx_nodes.wanted(query):
            return composed
        node = onnx_nodes.node(tensors, *masks, options)
        if not gives_weights:
            return (node.out, *composed[1:])
        weights = node.weights.mean(1) if options.get("average", True) else node.weights
        return node.out, composed[1], weights

    return call


# A view of both, though the name is declared a dict: a copy would not see what PyTorch registers later.
_ours: dict[torch._ops.OperatorBase, Callable[..., Any]] = {}
torch._decomp.decomposition_table = ChainMap(torch._decomp.decomposition_table, _ours)  # type: ignore[assignment]


def _register(operator: torch._ops.OpOverload[..., Any], function: Callable[..., Any]) -> None:
    register_decomposition(operator, registry=_ours)(function)
    register_decomposition(operator, type="meta")(_kernel(operator, _META))


for _packet in (operators.attention, operators.attention_with_weights, operators.attention_for_backward):
    _register(_packet.default, _attention(_packet.default))
_layer = operators.multi_head_attention.default
_register(_layer, _kernel(_layer, _COMPOSITION))
