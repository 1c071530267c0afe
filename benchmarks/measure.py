"""One case measured: every peer's result checked against ours, then all of them timed in turn, or their peaks taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.cases import Case, floating_point_operations, least_bytes
from benchmarks.memory import peak_bytes
from benchmarks.peers import OURS, Peer, peers_for
from benchmarks.peers.own import NAMES, comparisons
from benchmarks.processes import WorkerError, Workers
from benchmarks.roofs import UNMEASURED_PRODUCTS
from benchmarks.timing import Budget, Sample, Summary, cores, interleave, ratios, summarise
from benchmarks.work import TOLERANCES, largest_difference
from benchmarks.worker import PRODUCTS


@dataclass(frozen=True)
class Entry:
    """What was measured of one participant; times for the speed suites, bytes for the memory suite."""

    peer: str
    seconds: Summary | None = None
    peak_bytes: int | None = None
    ratio: Summary | None = None  # the peer's time or bytes over ours; None for ours
    difference: float | None = None  # from our result, relative to the largest magnitude
    cores: float | None = None  # processors that were busy on average: its processor time over its time


@dataclass(frozen=True)
class Result:
    """A case with our own numbers and those of the peers that could do it.

    Attributes:
        left_out: the reason of each chosen peer that was not measured.
        wrong: what went wrong with a peer that should have been: another result, or an error.
    """

    case: Case
    ours: Entry
    peers: list[Entry]
    left_out: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    library_flops: float | None = None

    @property
    def strongest(self) -> Entry | None:
        """The peer that leads us by most, or comes closest: the one with the lowest ratio."""
        rated = [(e.ratio.median, e) for e in self.peers if e.ratio is not None and e.peer not in NAMES]
        return min(rated, key=lambda pair: pair[0])[1] if rated else None

    @property
    def flops(self) -> float | None:
        """Our floating-point operations a second."""
        return floating_point_operations(self.case) / self.ours.seconds.median if self.ours.seconds else None

    @property
    def bytes_per_second(self) -> float | None:
        """The least traffic that the core's forward, or decoding, needs, over our time; None for other work."""
        reads = self.case.level == "core" or self.case.variant == "decode"
        if self.ours.seconds is None or self.case.task != "forward" or not reads:
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


def _agreeing(case: Case, peers: list[Peer], workers: Workers) -> tuple[dict[str, float | None], dict[str, str]]:
    """Returns each peer's difference from ours where it is within rounding, and what is wrong where it is not."""
    ours = workers.results(case, OURS[case.level])
    tolerance = TOLERANCES[case.dtype]
    differences: dict[str, float | None] = {}
    wrong = {}
    for peer in peers:
        if not peer.same_result:
            differences[peer.name] = None
            continue
        try:
            name, difference = largest_difference(ours, workers.results(case, peer))
        except WorkerError as error:
            wrong[peer.name] = str(error)
            continue
        if difference <= tolerance:
            differences[peer.name] = difference
        else:
            wrong[peer.name] = f"{name} differs from ours by {difference:.1e}, more than {tolerance:.0e}"
    return differences, wrong


def _prepared(case: Case, peers: list[Peer], wrong: dict[str, str], workers: Workers) -> dict[str, Peer]:
    """Makes the peers ready that computed the right thing; what goes wrong with one is added to the rest."""
    ready = {}
    for peer in peers:
        if peer.name not in wrong:
            try:
                workers.prepare(case, peer, peer.name)
                ready[peer.name] = peer
            except WorkerError as error:
                wrong[peer.name] = str(error)
    return ready


def _measure_memory(case: Case, peers: list[Peer]) -> tuple[Entry, list[Entry]]:
    mine = peak_bytes(case, OURS[case.level])
    entries = []
    for peer in peers:
        theirs = peak_bytes(case, peer)
        ratio = theirs / max(1, mine)
        entries.append(Entry(peer.name, peak_bytes=theirs, ratio=Summary(ratio, ratio, ratio)))
    return Entry(OURS[case.level].name, peak_bytes=mine), entries


def _walls(samples: list[Sample]) -> list[float]:
    return [sample.wall for sample in samples]


def _measure_time(case: Case, peers: list[Peer], budget: Budget, workers: Workers) -> Result:
    own = OURS[case.level]
    differences, wrong = _agreeing(case, peers, workers)
    workers.prepare(case, own, own.name)
    places = {own.name: own, **_prepared(case, peers, wrong, workers)}
    operations = 0
    if case.dtype not in UNMEASURED_PRODUCTS and not case.variant:  # a variant's are not those of a full square
        places[PRODUCTS] = own
        operations = workers.prepare(case, own, PRODUCTS)["operations"]
    samples = interleave(list(places), lambda name, repeats: workers.time(places[name], name, repeats), budget)
    walls = {name: _walls(found) for name, found in samples.items()}
    entries = [
        Entry(
            name,
            seconds=summarise(walls[name]),
            ratio=summarise(ratios(walls[name], walls[own.name])),
            difference=difference,
            cores=cores(samples[name]),
        )
        for name, difference in differences.items()
        if name in places
    ]
    return Result(
        case,
        Entry(own.name, seconds=summarise(walls[own.name]), cores=cores(samples[own.name])),
        entries,
        wrong=wrong,
        rounds=len(samples[own.name]),
        library_flops=operations / summarise(walls[PRODUCTS]).median if operations else None,
    )


def measure_case(case: Case, chosen: Callable[[Peer], bool], budget: Budget, workers: Workers) -> Result:
    """Measures one case with our implementation and the chosen peers.

    Raises:
        WorkerError: our own implementation failed, or a process died while it was timed.
    """
    peers, left_out = peers_for(case, chosen)
    peers += comparisons(case)
    if case.task == "memory":
        ours, entries = _measure_memory(case, peers)
        return Result(case, ours, entries, left_out)
    try:
        return replace(_measure_time(case, peers, budget, workers), left_out=left_out)
    finally:
        workers.release()
