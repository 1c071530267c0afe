"""Which operators ran."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FUSED, PIECES = "mha_ext::multi_head_attention", "mha_ext::attention"
WITH_WEIGHTS = "mha_ext::attention_with_weights"
TO_DIFFERENTIATE = "mha_ext::attention_for_backward"  # either, where half types are differentiated
PYTORCHS = {
    "aten::_transformer_encoder_layer_fwd",
    "aten::_native_multi_head_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_attention_math",
    "aten::_softmax",
}
OWN_DTYPE = {"attn_mask", "key_padding_mask", "dropout_seed", "lse", "grad_lse", "rounding"}


class Operators(TorchDispatchMode):
    """Counts the operators that run inside ``with``, by name, and collects the dtypes that ours compute in: those of
    their arguments, but for masks, seeds and the log-sum-exp, which have dtypes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.counts[name] = self.counts.get(name, 0) + 1
        if name.startswith("mha_ext::"):
            given = zip(func._schema.arguments, args, strict=False)
            tensors = [x for argument, x in given if isinstance(x, Tensor) and argument.name not in OWN_DTYPE]
            self.dtypes.setdefault(name, set()).update(x.dtype for x in tensors)
        return func(*args, **(kwargs or {}))

    @property
    def ours(self) -> int:
        """How often an attention of ours ran, in one operator or in pieces."""
        return sum(self.counts.get(name, 0) for name in (FUSED, PIECES, WITH_WEIGHTS, TO_DIFFERENTIATE))

    @property
    def theirs(self) -> set[str]:
        """The attention operators of PyTorch that ran."""
        return PYTORCHS & self.counts.keys()
