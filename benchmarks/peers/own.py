"""What we compare ourselves with: our own call with something left out, timed in the same rounds as the peers.

Most such comparisons compute something else than the case asks for, so that their result is not checked against ours.
They are no competitors: only ``benchmarks/goals.py`` reads them.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import Inputs, make_inputs
from benchmarks.peers.base import Peer, Runner
from benchmarks.peers.compiled import check_compiled, compile_anew, missing_compiler
from benchmarks.peers.derivatives import OurDerivatives
from benchmarks.peers.torch_core import OurAttention
from benchmarks.peers.torch_layer import OurLayer
from benchmarks.peers.variants import OurMaskedVariant, OurRepeatedVariant, OurVariant

OURS: dict[str, Peer] = {
    "core": OurAttention(),
    "layer": OurLayer(),
    "variant": OurVariant(),
    "derivative": OurDerivatives(),
}


class Changed(Peer):
    """Our own call on a case with some options set otherwise."""

    same_result = False

    def __init__(self, level: str, name: str, **changes: object) -> None:
        self.level = level
        self.name = f"mha_ext, {name}"
        self.changes = changes

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Keeps the tensors of the case, less the masks that are left out; in another dtype they are made anew."""
        changed = replace(case, **self.changes)  # type: ignore[arg-type]
        if changed.dtype != case.dtype:
            inputs = make_inputs(changed)
        if changed.mask == "none":
            inputs = replace(inputs, mask=None, padding=None)
        return OURS[self.level].build(changed, inputs)


class OneThread(Peer):
    """Our own call on one thread."""

    level = "core"
    name = "mha_ext, 1 thread"
    same_result = False

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Asks for one thread around every call."""
        return replace(OURS["core"].build(case, inputs), threads=1)


class TwoLinears(Peer):
    """The two products of a layer and nothing else, forward only: what a call cannot be quicker than."""

    level = "layer"
    name = "two linears"
    same_result = False

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Both read the layer's input: it has the sizes of what lies between them."""
        (x,) = inputs.arguments
        in_weight, in_bias, out_weight, out_bias = (
            inputs.parameters[name] for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        )

        def forward() -> tuple[Tensor, None]:
            F.linear(x, in_weight, in_bias)
            return F.linear(x, out_weight, out_bias), None

        return Runner(forward, {})


class CompiledOurs(Peer):
    """Our own layer under ``torch.compile``, as one graph: what a compiled call costs beside an eager one.

    In the process of that one: from another, with threads of its own, it would be charged with what waking these costs.
    """

    level = "layer"
    name = "mha_ext, compiled"

    def missing(self) -> str | None:
        """The generated code is C++."""
        return missing_compiler()

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Compiles the call of the module."""
        runner = OURS["layer"].build(case, inputs)
        return check_compiled(case, replace(runner, forward=compile_anew(runner.forward)), fused=False)


_PEERS: dict[str, tuple[Peer, ...]] = {
    "1 thread": (OneThread(),),
    "unmasked": (Changed("core", "unmasked", mask="none", causal=False),),
    "no dropout": (Changed("core", "no dropout", dropout=0.0), Changed("layer", "no dropout", dropout=0.0)),
    "no weights": (Changed("layer", "no weights", need_weights=False),),
    "float32": (Changed("core", "float32", dtype="fp32"), Changed("layer", "float32", dtype="fp32")),
    "mask not trained": (Changed("core", "mask not trained", mask="float"),),
    "two linears": (TwoLinears(),),
    "compiled": (CompiledOurs(),),
    "a mask": (OurMaskedVariant(),),
    "repeated keys": (OurRepeatedVariant(),),
}
COMPARISONS = tuple(_PEERS)


EVERY = tuple(peer for peers in _PEERS.values() for peer in peers)
NAMES = frozenset(peer.name for peer in EVERY)


def comparisons(case: Case) -> list[Peer]:
    """Returns what of our own a case is measured beside: one participant or none."""
    return [peer for peer in _PEERS.get(case.beside, ()) if peer.level == case.level and not peer.missing()]
