"""Training of several models side by side: the same batches, step by step in turn, so that timings are comparable."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import mha_ext
from mha_ext.demo.model import CharacterModel, ModelConfig, build_model
from mha_ext.demo.text import draw_batch

ATTENTION_CLASSES: dict[str, type[nn.MultiheadAttention]] = {
    "torch": nn.MultiheadAttention,
    "mha_ext": mha_ext.MultiheadAttention,
}

_LEARNING_RATE = 5e-3
_FINAL_RATE_SHARE = 0.05
_WARMUP_SHARE = 0.05
_GRADIENT_NORM = 1.0
_UNTIMED_STEPS = 2  # the first steps also pay for allocation and for the libraries' start


def _rate_share(step: int, steps: int) -> float:
    """Share of the full learning rate at a step: linear warm-up, then a cosine down to a small rest."""
    warmup = max(1, round(steps * _WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return _FINAL_RATE_SHARE + (1 - _FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass
class Learner:
    """A model in training, with what was recorded at each of its steps.

    Attributes:
        autocast: the dtype that the model's products and attention are computed in; None for that of its parameters.
    """

    name: str
    model: CharacterModel
    steps: int
    autocast: torch.dtype | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: _rate_share(step, self.steps))

    def loss(self, codes: Tensor, following: Tensor) -> Tensor:
        """Returns the model's loss on one batch."""
        if self.autocast is None:
            return self.model.loss(codes, following)
        with torch.autocast("cpu", self.autocast):
            return self.model.loss(codes, following)

    def step(self, codes: Tensor, following: Tensor) -> None:
        """Trains on one batch and records its loss and its time."""
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(codes, following)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), _GRADIENT_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)

    @property
    def timed_seconds(self) -> list[float]:
        """Times of the steps after the first few."""
        return self.seconds[_UNTIMED_STEPS:] or self.seconds

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self.timed_seconds)


def make_learner(name: str, config: ModelConfig, steps: int, seed: int) -> Learner:
    """Returns an untrained model with the named attention layer, initialised from the seed."""
    return Learner(name, build_model(config, ATTENTION_CLASSES[name], seed), steps)


def same_start(learners: Sequence[Learner]) -> bool:
    """Whether all models hold the very same initial values under the same names."""
    states = [learner.model.state_dict() for learner in learners]
    return all(
        state.keys() == states[0].keys() and all(torch.equal(state[name], states[0][name]) for name in state)
        for state in states[1:]
    )


def train(learners: Sequence[Learner], codes: Tensor, seed: int, on_step: Callable[[int], None]) -> None:
    """Trains all models on the same batches; within a step they take turns in going first."""
    generator = torch.Generator().manual_seed(seed)
    config = learners[0].model.config
    for step in range(learners[0].steps):
        batch = draw_batch(codes, config.batch, config.context, generator)
        first = step % len(learners)
        for learner in [*learners[first:], *learners[:first]]:
            learner.step(*batch)
        on_step(step + 1)


@torch.no_grad()
def held_out_loss(learner: Learner, codes: Tensor, batches: int, seed: int) -> float:
    """Returns the mean loss, in nats per character, on text that training never saw."""
    generator = torch.Generator().manual_seed(seed)
    config = learner.model.config
    losses = [learner.loss(*draw_batch(codes, config.batch, config.context, generator)).item() for _ in range(batches)]
    return statistics.fmean(losses)


def median_ratio(numerator: Learner, denominator: Learner) -> float:
    """Returns the median, over the steps, of the ratio of the two models' times for the same step."""
    pairs = zip(numerator.timed_seconds, denominator.timed_seconds, strict=True)
    return statistics.median(above / below for above, below in pairs)
