"""Whether a model writes the same with a cache as without, and how far the logits are apart."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mha_ext.generate.model import WindowedModel
from mha_ext.generate.sampling import Written, greedy, write

# How far logits may be off, in units of what a change of each parameter in its last place does to them. That stands for
# the roundings on the way: with 17 small models of each dtype the error was at most 2.1 units in bfloat16, whose sums
# are float32's, and 4.6 in float32, where sums of hundreds of terms round as well. Two results differ by twice that.
_UNITS = {torch.bfloat16: 8, torch.float32: 16}


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
        bound: what ``rounding`` may be, and how far the logits with an exact cache may be from those without.
        exact: caches in the model's dtype.
        rounded: int8 caches, for which no bound is claimed.
    """

    rounding: float
    bound: float
    exact: Sequence[Agreement]
    rounded: Sequence[Agreement]

    @property
    def passed(self) -> bool:
        """Whether re-running and all exact caches keep the bound.

        They then choose the same character, but where the two likeliest are so near that rounding decides.
        """
        return self.rounding <= self.bound and all(found.apart <= self.bound for found in self.exact)


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


def _bound(exact_model: WindowedModel, codes: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """How far rounding to a dtype may move logits, by what the last place of every parameter does; changes them."""
    generator = torch.Generator().manual_seed(0)
    unit = torch.finfo(dtype).eps / 2
    for parameter in exact_model.parameters():
        signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
        parameter.mul_(1 + unit * signs)
    moved = exact_model(codes[None])[0, -len(truth) :]
    return _UNITS[dtype] * float((moved - truth).abs().max())


@torch.no_grad()
def compare(model: WindowedModel, prompt: Tensor, count: int) -> Comparison:
    """Lets the model continue a prompt greedily, without a cache and with every kind of it."""
    again = write(model, prompt, count, greedy)
    exact_model = copy.deepcopy(model).double()
    truth = exact_model(again.codes[None, :-1])[0, -count:]
    length = len(prompt) + count

    def cached(name: str, max_length: int | None, storage: str | None) -> Agreement:
        return _compare(name, write(model, prompt, count, greedy, model.make_caches(max_length, storage)), again, truth)

    return Comparison(
        rounding=float((again.logits.double() - truth).abs().max()),
        bound=_bound(exact_model, again.codes[:-1], truth, again.logits.dtype),
        exact=[cached("whole text kept", length, None), cached("rolling", None, None)],
        rounded=[cached("whole text kept, int8", length, "int8"), cached("rolling, int8", None, "int8")],
    )
