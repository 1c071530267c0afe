"""Which operators ran."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

FUSED, PIECES = "mha_ext::multi_head_attention", "mha_ext::attention"
WITH_WEIGHTS = "mha_ext::attention_with_weights"
PYTORCHS = {
    "aten::_transformer_encoder_layer_fwd",
    "aten::_native_multi_head_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_attention_math",
    "aten::_softmax",
}


class Operators(TorchDispatchMode):
    """Counts the operators that run inside ``with``, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    @property
    def ours(self) -> int:
        """How often an attention of ours ran, in one operator or in pieces."""
        return sum(self.counts.get(name, 0) for name in (FUSED, PIECES, WITH_WEIGHTS))

    @property
    def theirs(self) -> set[str]:
        """The attention operators of PyTorch that ran."""
        return PYTORCHS & self.counts.keys()
