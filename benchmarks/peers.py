"""Who is measured. To add a peer: write a subclass of `Peer` and put it into `PEERS`.

A peer says what it does not support (it is then left out, with that reason) and turns a case into a `Runner`. What a
user would prepare once and keep, such as a merged mask, is prepared in `build` and costs no measured time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import mha_ext
from benchmarks.cases import Case
from benchmarks.inputs import Inputs


@dataclass(frozen=True)
class Runner:
    """One peer's way to run one case.

    Attributes:
        forward: returns the output, or the output and the averaged weights when the case wants them.
        leaves: the tensors whose gradients the backward pass computes, by name.
    """

    forward: Callable[[], tuple[Tensor, Tensor | None]]
    leaves: dict[str, Tensor]


class Peer(ABC):
    """A way to compute attention ("core") or a layer of it ("layer")."""

    name: str
    level: str
    by_default = True

    def unsupported(self, case: Case) -> str | None:
        """Returns why the peer cannot do a case of its level, or None."""
        return None

    @abstractmethod
    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Prepares a case. Called under the case's own dtype and never timed."""


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def _core_leaves(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    names = ("query", "key", "value")
    leaves = {name: _leaf(tensor) for name, tensor in zip(names, inputs.arguments, strict=True)}
    if case.mask == "bias" and inputs.mask is not None:
        leaves["mask"] = _leaf(inputs.mask)
    return leaves


def _future(case: Case) -> Tensor:
    """(T, S) mask of the pairs that a causal mask forbids."""
    return torch.ones(case.length, case.keys, dtype=torch.bool).triu(1)


def _merged_mask(case: Case, inputs: Inputs, mask: Tensor | None) -> tuple[Tensor | None, bool]:
    """Returns one mask for everything where PyTorch's function takes only one, and whether it is told `is_causal`."""
    if case.causal and mask is None and inputs.padding is None:
        return None, True
    allowed = None if inputs.padding is None else ~inputs.padding[:, None, None, :]
    if case.causal:
        allowed = ~_future(case) if allowed is None else allowed & ~_future(case)
    if mask is None or allowed is None:
        return (allowed if mask is None else mask), False
    if mask.dtype == torch.bool:
        return mask & allowed, False
    return mask.masked_fill(~allowed, float("-inf")), False


class OurAttention(Peer):
    """``mha_ext.functional.scaled_dot_product_attention``."""

    name = "mha_ext"
    level = "core"

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Hands over masks, padding and the causal flag apart, as they are."""
        leaves = _core_leaves(case, inputs)
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
        leaves = _core_leaves(case, inputs)
        mask, is_causal = _merged_mask(case, inputs, leaves.get("mask", inputs.mask))

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
        module.train(case.task != "forward")
        x = _leaf(inputs.arguments[0])
        mask = inputs.mask
        if mask is not None and mask.dtype == torch.bool:
            mask = ~mask
        if case.causal and not (self.takes_causal_alone and mask is None):
            future = _future(case)
            mask = future if mask is None else self._with_future(mask, future)

        def forward() -> tuple[Tensor, Tensor | None]:
            result: tuple[Tensor, Tensor | None] = module(
                x,
                x,
                x,
                key_padding_mask=inputs.padding,
                need_weights=case.need_weights,
                attn_mask=mask,
                is_causal=case.causal and inputs.mask is None,
            )
            return result

        return Runner(forward, {"input": x, **dict(module.named_parameters())})

    @staticmethod
    def _with_future(mask: Tensor, future: Tensor) -> Tensor:
        return mask | future if mask.dtype == torch.bool else mask.masked_fill(future, float("-inf"))


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
    by_default = False

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
        x = _leaf(inputs.arguments[0])
        parameters = {name: _leaf(parameter) for name, parameter in inputs.parameters.items()}
        mask, is_causal = _merged_mask(case, inputs, inputs.mask)
        dropout = case.dropout if case.task != "forward" else 0.0
        heads = (case.batch, case.length, 3, case.heads, case.head_dim)

        def forward() -> tuple[Tensor, None]:
            packed = F.linear(x, parameters["in_proj_weight"], parameters["in_proj_bias"])
            query, key, value = packed.view(heads).permute(2, 0, 3, 1, 4).unbind()
            context = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, is_causal=is_causal)
            joined = context.transpose(1, 2).reshape(case.batch, case.length, case.embed_dim)
            return F.linear(joined, parameters["out_proj.weight"], parameters["out_proj.bias"]), None

        return Runner(forward, {"input": x, **parameters})


OURS = {"core": OurAttention(), "layer": OurLayer()}

PEERS: tuple[Peer, ...] = (
    TorchAttention(),
    TorchMathAttention(),
    TorchLayer(),
    TorchDefaultLayer(),
    HandWrittenLayer(),
)


def peers_for(case: Case, chosen: Callable[[Peer], bool]) -> tuple[list[Peer], dict[str, str]]:
    """Returns the chosen peers that can do a case, and the reason of each chosen one that cannot."""
    able, reasons = [], {}
    for peer in PEERS:
        if peer.level == case.level and chosen(peer):
            reason = peer.unsupported(case)
            if reason is None:
                able.append(peer)
            else:
                reasons[peer.name] = reason
    return able, reasons
