"""Interleaved timing: all participants of a case take turns, so that a disturbance hits them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Work = Callable[[], object]

_SHORTEST_SAMPLE = 2e-3  # seconds; quicker work is repeated within a sample, so that the clock's grain does not matter


@dataclass(frozen=True)
class Budget:
    """How long a case is measured.

    Attributes:
        seconds: time to spend on the rounds of a case; the number of rounds follows from it.
        least_rounds: rounds that are run even when they take longer.
        most_rounds: rounds after which more would not narrow the spread.
    """

    seconds: float
    least_rounds: int
    most_rounds: int = 101

    def rounds(self, seconds_per_round: float) -> int:
        """Returns the number of rounds that fit."""
        return max(self.least_rounds, min(self.most_rounds, int(self.seconds / seconds_per_round)))


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of some numbers."""

    median: float
    lower: float
    upper: float

    @property
    def spread(self) -> float:
        """Interquartile range as a share of the median."""
        return (self.upper - self.lower) / self.median if self.median else math.inf


def summarise(samples: Sequence[float]) -> Summary:
    """Returns the median and the quartiles of at least one number, interpolated between neighbours."""
    if len(samples) == 1:
        return Summary(samples[0], samples[0], samples[0])
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return Summary(median, lower, upper)


def ratios(peer: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Returns the peer's time over ours, round by round: above 1, ours is faster."""
    return [theirs / mine for theirs, mine in zip(peer, ours, strict=True)]


def _time(work: Work, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def interleave(participants: Mapping[str, Work], budget: Budget) -> dict[str, list[float]]:
    """Times all participants in turn, round after round, each round begun by the next one.

    Returns:
        Seconds of one call, for every participant one number a round; numbers of the same round belong together.
    """
    repeats = {}
    seconds_per_round = 0.0
    for name, work in participants.items():
        work()
        once = _time(work, 1)
        repeats[name] = max(1, math.ceil(_SHORTEST_SAMPLE / max(once, 1e-9)))
        seconds_per_round += once * repeats[name]
    samples: dict[str, list[float]] = {name: [] for name in participants}
    order = list(participants)
    for _ in range(budget.rounds(seconds_per_round)):
        for name in order:
            samples[name].append(_time(participants[name], repeats[name]))
        order.append(order.pop(0))
    return samples
