"""The figures that goals are about, each read from the result of a case; None where something was not measured."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases import DTYPES
from benchmarks.inputs import make_inputs
from benchmarks.measure import Entry, Result
from benchmarks.peers.own import NAMES
from benchmarks.tiles import visible_share

Read = Callable[[Result], float | None]

_MIB = 1 << 20
_SCRATCH = 4 * _MIB  # of the threads, and the grain of resident pages: what no mask's gradient answers for


def _entry(result: Result, wanted: Callable[[str], bool]) -> Entry | None:
    """The entry whose ratio to ours is lowest, among those whose name is wanted."""
    entries = [entry for entry in result.peers if entry.ratio is not None and wanted(entry.peer)]
    return min(entries, key=lambda entry: entry.ratio.median) if entries else None  # type: ignore[union-attr]


def _ratio(result: Result, wanted: Callable[[str], bool]) -> float | None:
    entry = _entry(result, wanted)
    return entry.ratio.median if entry and entry.ratio else None


def against(name: str) -> Read:
    """The ratio of one peer's time or bytes to ours."""
    return lambda result: _ratio(result, lambda peer: peer == name)


def against_strongest(result: Result) -> float | None:
    """The lowest ratio of any peer to ours."""
    return _ratio(result, lambda peer: peer not in NAMES)


def against_others(result: Result) -> float | None:
    """The lowest ratio to ours of any peer but PyTorch's module."""
    return _ratio(result, lambda peer: peer not in NAMES and not peer.startswith("nn.MHA"))


def own_gain(result: Result) -> float | None:
    """Our other call's time over ours."""
    return _ratio(result, lambda peer: peer in NAMES)


def own_cost(result: Result) -> float | None:
    """Our time or bytes over those of the call of ours that it is measured beside."""
    gain = own_gain(result)
    return 1 / gain if gain else None


def cost_of_visible(result: Result) -> float | None:
    """Our time over that without masks, for each pair in a block that the masks leave visible."""
    cost = own_cost(result)
    return cost / visible_share(result.case) if cost else None


def peak_mib(result: Result) -> float | None:
    """Our peak, MiB."""
    return result.ours.peak_bytes / _MIB if result.ours.peak_bytes is not None else None


def _extra_bytes(result: Result) -> float | None:
    other = _entry(result, lambda peer: peer in NAMES)
    if other is None or other.peak_bytes is None or result.ours.peak_bytes is None:
        return None
    return result.ours.peak_bytes - other.peak_bytes


def extra_over_results(result: Result) -> float | None:
    """Our peak less that of the call without weights, over the bytes of output and weights."""
    case, extra = result.case, _extra_bytes(result)
    weights = case.batch * case.length * case.keys * (1 if case.average_weights else case.heads)
    numbers = case.batch * case.length * case.embed_dim + weights
    return extra / (numbers * DTYPES[case.dtype].itemsize) if extra is not None else None


def extra_over_mask(result: Result) -> float | None:
    """Our peak less that of a mask that is not trained and less some scratch, over the bytes of the mask."""
    extra, mask = _extra_bytes(result), make_inputs(result.case).mask
    return max(0.0, extra - _SCRATCH) / (mask.numel() * mask.element_size()) if extra is not None else None
