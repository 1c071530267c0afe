"""Who is measured. To add a peer: write a subclass of `Peer` and put it into `PEERS`.

A peer says what it does not support (it is then left out, with that reason) and turns a case into a `Runner`. What a
user would prepare once and keep, such as a merged mask, is prepared in `build` and costs no measured time.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases import Case
from benchmarks.peers.base import Peer, Runner
from benchmarks.peers.compiled import CompiledAttention, CompiledLayer
from benchmarks.peers.derivatives import MathDerivatives
from benchmarks.peers.jax_peers import JaxAttention
from benchmarks.peers.onnx_peers import OnnxAttention, OnnxContribAttention, OnnxContribLayer, OnnxLayer
from benchmarks.peers.openvino_peers import OpenVinoAttention, OpenVinoLayer
from benchmarks.peers.own import EVERY, OURS
from benchmarks.peers.torch_core import TorchAttention, TorchMathAttention
from benchmarks.peers.torch_layer import HandWrittenLayer, TorchDefaultLayer, TorchLayer
from benchmarks.peers.variants import (
    CompiledFlexAttention,
    ComposedAttention,
    FoldedAttention,
    GroupedProducts,
    LoopOfAttention,
    MaskedAttention,
    PaddedAttention,
    RepeatedAttention,
)

__all__ = ["OURS", "PEERS", "Peer", "Runner", "find_peer", "peers_for"]

PEERS: tuple[Peer, ...] = (
    TorchAttention(),
    TorchMathAttention(),
    CompiledAttention(),
    OnnxAttention(),
    OnnxContribAttention(),
    OpenVinoAttention(),
    JaxAttention(),
    TorchLayer(),
    TorchDefaultLayer(),
    HandWrittenLayer(),
    CompiledLayer(),
    OnnxLayer(),
    OnnxContribLayer(),
    OpenVinoLayer(),
    MaskedAttention(),
    RepeatedAttention(),
    FoldedAttention(),
    GroupedProducts(),
    PaddedAttention(),
    LoopOfAttention(),
    ComposedAttention(),
    CompiledFlexAttention(),
    MathDerivatives(),
)


def find_peer(level: str, name: str) -> Peer:
    """Returns ours, or the peer or comparison of a level that has this name."""
    return next(peer for peer in (OURS[level], *PEERS, *EVERY) if peer.level == level and peer.name == name)


def peers_for(case: Case, chosen: Callable[[Peer], bool]) -> tuple[list[Peer], dict[str, str]]:
    """Returns the chosen peers that can do a case, and the reason of each chosen one that cannot."""
    able, reasons = [], {}
    for peer in PEERS:
        if peer.level == case.level and chosen(peer):
            reason = peer.missing() or peer.unsupported(case)
            if reason is None:
                able.append(peer)
            else:
                reasons[peer.name] = reason
    return able, reasons
