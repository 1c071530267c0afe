"""How many characters a second are written after texts of several lengths: with caches, without, and by PyTorch."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mha_ext.demo.model import CharacterModel, build_model
from mha_ext.generate.model import WindowedModel
from mha_ext.generate.sampling import greedy, write

CACHE, AGAIN, TORCH = "KVCache", "re-run", "nn.MHA re-run"
WAYS = (CACHE, AGAIN, TORCH)


@dataclass
class Speeds:
    """What was measured after texts of one length, one entry a round.

    Attributes:
        length: characters before the measured ones.
        seconds: of one character, for each way.
        prefill: of the whole text's way into the caches, which is no part of the other.
    """

    length: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    prefill: list[float] = field(default_factory=list)

    def rate(self, way: str) -> tuple[float, float, float]:
        """Characters a second: lower quartile, median, upper quartile."""
        rates = [1 / seconds for seconds in self.seconds[way]]
        if len(rates) == 1:
            return rates[0], rates[0], rates[0]
        low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
        return low, middle, high

    def gain(self, way: str) -> float:
        """How many times as fast caches are as another way: median of the rounds' ratios."""
        pairs = zip(self.seconds[way], self.seconds[CACHE], strict=True)
        return statistics.median(other / mine for other, mine in pairs)


@dataclass(frozen=True)
class Measured:
    """How much is measured.

    Attributes:
        lengths: of the texts.
        rounds: times that each way has its turn at each length.
        count: characters written in a turn.
    """

    lengths: tuple[int, ...]
    rounds: int
    count: int


def torch_model(model: WindowedModel, max_length: int) -> CharacterModel:
    """The same sizes with PyTorch's layer, untrained: every query head has keys of its own, positions are fixed."""
    config = dataclasses.replace(model.config, context=max_length)
    return build_model(config, nn.MultiheadAttention, seed=0).to(model.head.weight.dtype).eval()


def _turn(way: str, models: tuple[WindowedModel, CharacterModel], text: Tensor, count: int, speeds: Speeds) -> None:
    """Lets one way write after a text, and records the time of a character."""
    ours, theirs = models
    caches, prompt = None, text
    if way == CACHE:
        caches, prompt = ours.make_caches(None), text[-1:]
        start = time.perf_counter()
        with torch.no_grad():
            ours(text[None, :-1], caches)
        speeds.prefill.append(time.perf_counter() - start)
    start = time.perf_counter()
    write(theirs if way == TORCH else ours, prompt, count, greedy, caches)
    speeds.seconds[way].append((time.perf_counter() - start) / count)


def measure(model: WindowedModel, codes: Tensor, plan: Measured, show: Callable[[int, str], None]) -> list[Speeds]:
    """Measures all ways in turns, round by round, after an untimed turn of each.

    Args:
        model: the model, in eval mode.
        codes: a text (N,) int64, N at least the greatest length.
        plan: how much.
        show: is told how many lengths of all rounds are done.
    """
    models = model, torch_model(model, max(plan.lengths) + plan.count)
    # PyTorch's fused inference path computes all T x T weights; without it the layer runs flash attention, sooner
    was_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for way in WAYS:
            _turn(way, models, codes[: min(plan.lengths)], 1, Speeds(0))
        results = [Speeds(length) for length in plan.lengths]
        for number in range(plan.rounds * len(results)):
            round_, speeds = number // len(results), results[number % len(results)]
            for way in _rotated(WAYS, round_):
                _turn(way, models, codes[: speeds.length], plan.count, speeds)
            show(number + 1, f"after {speeds.length} characters")
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fast)
    return results


def _rotated(ways: Sequence[str], first: int) -> list[str]:
    first %= len(ways)
    return [*ways[first:], *ways[:first]]
