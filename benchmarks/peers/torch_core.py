"""Attention alone: ours, and PyTorch's function."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mha_ext
from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.peers.base import Peer, Runner, core_leaves, merged_mask


class OurAttention(Peer):
    """``mha_ext.functional.scaled_dot_product_attention``."""

    name = "mha_ext"
    level = "core"

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Hands over masks, padding and the causal flag apart, as they are."""
        leaves = core_leaves(case, inputs)
        mask = leaves.get("mask", inputs.mask)

        def forward() -> tuple[Tensor, None]:
            output = mha_ext.functional.scaled_dot_product_attention(
                leaves["query"],
                leaves["key"],
                leaves["value"],
                mask,
                dropout_p=case.dropout,
                is_causal=case.causal,
                enable_gqa=case.kv_heads > 0,
                key_padding_mask=inputs.padding,
            )
            return output, None

        return Runner(forward, leaves)


class TorchAttention(Peer):
    """``F.scaled_dot_product_attention`` as PyTorch dispatches it."""

    name = "F.sdpa"
    level = "core"

    def unsupported(self, case: Case) -> str | None:
        """Two masks at once need merging, which must happen before the measurement."""
        if case.mask == "bias" and case.causal:
            return "one mask only: a causal mask cannot be merged beforehand into one that is trained"
        return None

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Merges padding and causal mask into one mask beforehand, in the peer's favour."""
        leaves = core_leaves(case, inputs)
        mask, is_causal = merged_mask(case, inputs, leaves.get("mask", inputs.mask))

        def forward() -> tuple[Tensor, None]:
            output = F.scaled_dot_product_attention(
                leaves["query"],
                leaves["key"],
                leaves["value"],
                mask,
                dropout_p=case.dropout,
                is_causal=is_causal,
                enable_gqa=case.kv_heads > 0,
            )
            return output, None

        return Runner(forward, leaves)


class TorchMathAttention(TorchAttention):
    """``F.scaled_dot_product_attention`` held to its composition of plain operators."""

    name = "F.sdpa (math)"
    by_default = False

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Adds the choice of the backend to each call."""
        runner = super().build(case, inputs)

        def forward() -> tuple[Tensor, Tensor | None]:
            with sdpa_kernel(SDPBackend.MATH):
                return runner.forward()

        return Runner(forward, runner.leaves)
