"""One case measured: every peer's result checked against ours, then all of them timed in turn, or their peaks taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.cases import Case, floating_point_operations, least_bytes
from benchmarks.inputs import make_inputs
from benchmarks.memory import peak_bytes
from benchmarks.peers import OURS, Peer, peers_for
from benchmarks.roofs import library_products
from benchmarks.timing import Budget, Summary, interleave, ratios, summarise
from benchmarks.work import TOLERANCES, largest_difference, results, timed_work

_PRODUCTS = "library products"


@dataclass(frozen=True)
class Entry:
    """What was measured of one participant; times for the speed suites, bytes for the memory suite."""

    peer: str
    seconds: Summary | None = None
    peak_bytes: int | None = None
    ratio: Summary | None = None  # the peer's time or bytes over ours; None for ours
    difference: float | None = None  # from our result, relative to the largest magnitude


@dataclass(frozen=True)
class Result:
    """A case with our own numbers and those of the peers that could do it."""

    case: Case
    ours: Entry
    peers: list[Entry]
    left_out: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    library_flops: float | None = None

    @property
    def flops(self) -> float | None:
        """Our floating-point operations a second."""
        return floating_point_operations(self.case) / self.ours.seconds.median if self.ours.seconds else None

    @property
    def bytes_per_second(self) -> float | None:
        """The least traffic that the core's forward needs, over our time; None for other work."""
        if self.ours.seconds is None or (self.case.level, self.case.task) != ("core", "forward"):
            return None
        return least_bytes(self.case) / self.ours.seconds.median

    def as_json(self) -> dict[str, Any]:
        """The result as plain values, derived ones included."""
        derived = {"name": self.case.name, "flops": self.flops, "bytes_per_second": self.bytes_per_second}
        return {**asdict(self), **derived}


def _entry_from_json(values: Mapping[str, Any]) -> Entry:
    summaries = {name: Summary(**values[name]) if values[name] else None for name in ("seconds", "ratio")}
    return Entry(**{**values, **summaries})


def result_from_json(values: Mapping[str, Any]) -> Result:
    """Makes a result again from what `Result.as_json` gave."""
    return Result(
        case=Case(**values["case"]),
        ours=_entry_from_json(values["ours"]),
        peers=[_entry_from_json(entry) for entry in values["peers"]],
        left_out=values["left_out"],
        wrong=values["wrong"],
        rounds=values["rounds"],
        library_flops=values["library_flops"],
    )


def _agreeing(case: Case, peers: list[Peer]) -> tuple[dict[str, float], dict[str, str]]:
    """Returns each peer's difference from ours where it is within rounding, and what is wrong where it is not."""
    ours = results(case, OURS[case.level])
    tolerance = TOLERANCES[case.dtype]
    differences, wrong = {}, {}
    for peer in peers:
        name, difference = largest_difference(ours, results(case, peer))
        if difference <= tolerance:
            differences[peer.name] = difference
        else:
            wrong[peer.name] = f"{name} differs from ours by {difference:.1e}, more than {tolerance:.0e}"
    return differences, wrong


def _measure_memory(case: Case, peers: list[Peer]) -> tuple[Entry, list[Entry]]:
    mine = peak_bytes(case, OURS[case.level])
    entries = []
    for peer in peers:
        theirs = peak_bytes(case, peer)
        ratio = theirs / max(1, mine)
        entries.append(Entry(peer.name, peak_bytes=theirs, ratio=Summary(ratio, ratio, ratio)))
    return Entry(OURS[case.level].name, peak_bytes=mine), entries


def measure_case(case: Case, chosen: Callable[[Peer], bool], budget: Budget) -> Result:
    """Measures one case with our implementation and the chosen peers."""
    peers, left_out = peers_for(case, chosen)
    if case.task == "memory":
        ours, entries = _measure_memory(case, peers)
        return Result(case, ours, entries, left_out)

    differences, wrong = _agreeing(case, peers)
    own = OURS[case.level]
    inputs = make_inputs(case)
    participants = {
        peer.name: timed_work(case, peer.build(case, inputs), inputs)
        for peer in (own, *(peer for peer in peers if peer.name in differences))
    }
    products = library_products(case)
    samples = interleave({**participants, _PRODUCTS: products.run}, budget)
    entries = [
        Entry(
            name,
            seconds=summarise(samples[name]),
            ratio=summarise(ratios(samples[name], samples[own.name])),
            difference=difference,
        )
        for name, difference in differences.items()
    ]
    return Result(
        case,
        Entry(own.name, seconds=summarise(samples[own.name])),
        entries,
        left_out,
        wrong,
        rounds=len(samples[own.name]),
        library_flops=products.operations / summarise(samples[_PRODUCTS]).median,
    )
