"""A whole layer of self-attention: ours, PyTorch's, and the one that a user writes by hand."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_ext
from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.peers.base import Peer, Runner, future, leaf, merged_mask


class _ModulePeer(Peer):
    """An ``nn.MultiheadAttention`` or something with its interface."""

    level = "layer"
    attention_class: type[nn.MultiheadAttention]
    takes_causal_alone = False

    def unsupported(self, case: Case) -> str | None:
        """Leaves trained masks to the core."""
        if case.mask == "bias":
            return "masks that need a gradient are measured in the core only"
        return None

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Loads the case's parameters; masks follow the module's convention, True = must not attend."""
        dtype = inputs.arguments[0].dtype
        module = self.attention_class(case.embed_dim, case.heads, dropout=case.dropout, batch_first=True).to(dtype)
        module.load_state_dict(inputs.parameters)
        module.train(case.needs_gradients)
        x = leaf(inputs.arguments[0])
        mask = inputs.mask
        if mask is not None and mask.dtype == torch.bool:
            mask = ~mask
        if case.causal and not (self.takes_causal_alone and mask is None):
            mask = future(case) if mask is None else self._with_future(mask, future(case))

        def forward() -> tuple[Tensor, Tensor | None]:
            result: tuple[Tensor, Tensor | None] = module(
                x,
                x,
                x,
                key_padding_mask=inputs.padding,
                need_weights=case.need_weights,
                attn_mask=mask,
                average_attn_weights=case.average_weights,
                is_causal=case.causal and inputs.mask is None,
            )
            return result

        return Runner(forward, {"input": x, **dict(module.named_parameters())})

    @staticmethod
    def _with_future(mask: Tensor, hidden: Tensor) -> Tensor:
        return mask | hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, float("-inf"))


class OurLayer(_ModulePeer):
    """``mha_ext.MultiheadAttention``."""

    name = "mha_ext"
    attention_class = mha_ext.MultiheadAttention
    takes_causal_alone = True


class TorchLayer(_ModulePeer):
    """``nn.MultiheadAttention``, asked for weights when the case wants them."""

    name = "nn.MHA"
    attention_class = nn.MultiheadAttention


class TorchDefaultLayer(TorchLayer):
    """``nn.MultiheadAttention`` as it is called by default: it computes weights although the case wants none."""

    name = "nn.MHA (default call)"

    def unsupported(self, case: Case) -> str | None:
        """Only where no weights are wanted does the default call differ."""
        return "the same as nn.MHA in this case" if case.need_weights else super().unsupported(case)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Computes the weights and drops them."""
        runner = super().build(replace(case, need_weights=True), inputs)
        return Runner(lambda: (runner.forward()[0], None), runner.leaves)


class HandWrittenLayer(Peer):
    """The fastest layer a PyTorch user has today: one packed linear, ``F.scaled_dot_product_attention``, one linear."""

    name = "linear+sdpa+linear"
    level = "layer"

    def unsupported(self, case: Case) -> str | None:
        """The fused function gives no weights."""
        if case.need_weights:
            return "F.scaled_dot_product_attention returns no weights"
        if case.mask == "bias":
            return "masks that need a gradient are measured in the core only"
        return None

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Splits the packed projection into views, without copies."""
        x = leaf(inputs.arguments[0])
        parameters = {name: leaf(parameter) for name, parameter in inputs.parameters.items()}
        mask, is_causal = merged_mask(case, inputs, inputs.mask)
        dropout = case.dropout if case.needs_gradients else 0.0
        heads = (case.batch, case.length, 3, case.heads, case.head_dim)

        def forward() -> tuple[Tensor, None]:
            packed = F.linear(x, parameters["in_proj_weight"], parameters["in_proj_bias"])
            query, key, value = packed.view(heads).permute(2, 0, 3, 1, 4).unbind()
            context = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, is_causal=is_causal)
            joined = context.transpose(1, 2).reshape(case.batch, case.length, case.embed_dim)
            return F.linear(joined, parameters["out_proj.weight"], parameters["out_proj.bias"]), None

        return Runner(forward, {"input": x, **parameters})
