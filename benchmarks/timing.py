"""Interleaved timing: all participants of a case take turns, so that a disturbance hits them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Work = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """Seconds of one call, on the clock and of processors (of all threads, those that wait in a loop included)."""

    wall: float
    processor: float


Turn = Callable[[str, int], Sample]  # runs a participant, by its name, so many times

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


def run_timed(work: Work, repeats: int) -> Sample:
    """Runs some work a number of times and returns the seconds of one."""
    processor, start = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        work()
    wall, processor = time.perf_counter() - start, time.process_time() - processor
    return Sample(wall / repeats, processor / repeats)


def cores(samples: Sequence[Sample]) -> float:
    """Returns how many processors were busy on average: of two threads, 1.0 when one of them did nothing."""
    return sum(sample.processor for sample in samples) / sum(sample.wall for sample in samples)


def interleave(participants: Sequence[str], turn: Turn, budget: Budget) -> dict[str, list[Sample]]:
    """Times all participants in turn, round after round, each round begun by the next one.

    Returns:
        For every participant one sample a round; samples of the same round belong together.
    """
    repeats = {}
    for name in participants:
        turn(name, 1)
        repeats[name] = max(1, math.ceil(_SHORTEST_SAMPLE / max(turn(name, 1).wall, 1e-9)))
    samples: dict[str, list[Sample]] = {name: [] for name in participants}
    order = list(participants)

    def play_round() -> float:
        start = time.perf_counter()
        for name in order:
            samples[name].append(turn(name, repeats[name]))
        order.append(order.pop(0))
        return time.perf_counter() - start

    for _ in range(budget.rounds(play_round()) - 1):
        play_round()
    return samples
