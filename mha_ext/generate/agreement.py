"""Whether a model writes the same with a cache as without, and how far the logits are apart."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mha_ext.generate.model import WindowedModel
from mha_ext.generate.sampling import Written, greedy, write

_TIMES = 3  # two results with errors like that of re-running are at most 2 of it apart; a third for chance
_ROUNDINGS_OF_A_LAYER = 11  # norm, projection, turn, attention, projection, sum; norm, linear, gelu, linear, sum
_LAST_ROUNDINGS = 2  # norm, head


@dataclass(frozen=True)
class Agreement:
    """A cached text compared with the one that re-running the model over the prefix gives.

    Attributes:
        name: of the cache.
        same: number of new characters before the first that differs.
        total: number of new characters.
        apart: largest difference of two logits, over the characters up to the first that differs.
        error: largest difference of the cached logits from the float64 model's.
        gap: by how much, where the texts part, re-running preferred its own character; 0 if they do not part.
    """

    name: str
    same: int
    total: int
    apart: float
    error: float
    gap: float


@dataclass(frozen=True)
class Comparison:
    """What was found; logits of exact caches may be ``bound`` apart.

    Attributes:
        rounding: largest difference of the logits of re-running from the float64 model's.
        expected: what ``rounding`` may be: u times the largest logit for each rounding on the way to one, u being half
            the distance of neighbouring numbers at 1.
        exact: caches in the model's dtype.
        rounded: int8 caches, for which no bound is claimed.
    """

    rounding: float
    expected: float
    exact: Sequence[Agreement]
    rounded: Sequence[Agreement]

    @property
    def bound(self) -> float:
        """How far the logits with an exact cache may be from those without."""
        return _TIMES * self.rounding

    @property
    def passed(self) -> bool:
        """Whether all exact caches keep the bound, which itself is one of rounding.

        They then choose the same character, but where the two likeliest are so near that rounding decides.
        """
        return self.rounding <= self.expected and all(found.apart <= self.bound for found in self.exact)


def _compare(name: str, cached: Written, again: Written, truth: Tensor) -> Agreement:
    total = len(again.logits)
    new, expected = (written.codes[-total:] for written in (cached, again))
    differs = (new != expected).nonzero()
    same = int(differs[0]) if len(differs) else total
    compared = slice(0, same + 1)
    mine, others = cached.logits[compared].double(), again.logits[compared].double()
    gap = float(others[same, expected[same]] - others[same, new[same]]) if same < total else 0.0
    return Agreement(
        name,
        same,
        total,
        apart=float((mine - others).abs().max()),
        error=float((mine - truth[compared]).abs().max()),
        gap=gap,
    )


@torch.no_grad()
def compare(model: WindowedModel, prompt: Tensor, count: int) -> Comparison:
    """Lets the model continue a prompt greedily, without a cache and with every kind of it."""
    again = write(model, prompt, count, greedy)
    exact_model = copy.deepcopy(model).double()
    truth = exact_model(again.codes[None, :-1])[0, len(prompt) - 1 :]
    length = len(prompt) + count
    roundings = _ROUNDINGS_OF_A_LAYER * model.config.layers + _LAST_ROUNDINGS
    unit = torch.finfo(again.logits.dtype).eps / 2

    def cached(name: str, max_length: int | None, storage: str | None) -> Agreement:
        return _compare(name, write(model, prompt, count, greedy, model.make_caches(max_length, storage)), again, truth)

    return Comparison(
        rounding=float((again.logits.double() - truth).abs().max()),
        expected=roundings * unit * float(truth.abs().max()),
        exact=[cached("whole text kept", length, None), cached("rolling", None, None)],
        rounded=[cached("whole text kept, int8", length, "int8"), cached("rolling, int8", None, "int8")],
    )
