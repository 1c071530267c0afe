"""The loop that writes text, with caches or without, and how it chooses the next character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mha_ext.cache import KVCache
from mha_ext.demo.model import CharacterModel

Choice = Callable[[Tensor], Tensor]  # of logits (alphabet_size,): an index (1,) int64


def greedy(logits: Tensor) -> Tensor:
    """Chooses the likeliest character."""
    return logits.argmax(dim=-1, keepdim=True)


@dataclass(frozen=True)
class Drawn:
    """Draws a character by the probabilities of ``logits / temperature``, among the likeliest ``top_k`` if given."""

    temperature: float
    top_k: int | None
    generator: torch.Generator

    def __call__(self, logits: Tensor) -> Tensor:
        """Chooses a character."""
        logits, indices = logits.double().topk(min(self.top_k or len(logits), len(logits)))
        logits = (logits - logits[0]) / self.temperature  # the largest is first: no temperature makes it overflow
        drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=self.generator)
        return indices[drawn]


@dataclass(frozen=True)
class Written:
    """A text and the logits by which each of its new characters was chosen."""

    codes: Tensor  # (prompt + count,) int64
    logits: Tensor  # (count, alphabet_size)


@torch.no_grad()
def write(
    model: CharacterModel, prompt: Tensor, count: int, choose: Choice, caches: Sequence[KVCache] | None = None
) -> Written:
    """Continues a prompt by ``count`` characters.

    Args:
        model: the model, in eval mode.
        prompt: (T,) int64, T at least 1; what comes after what the caches hold already.
        count: how many.
        choose: chooses the next one.
        caches: of the model's layers; None: the whole text goes through the model again for every character.
    """
    codes, steps = prompt, []
    new = prompt
    for _ in range(count):
        logits = (model(new[None]) if caches is None else model(new[None], caches))[0, -1]
        chosen = choose(logits)
        codes = torch.cat((codes, chosen))
        new = codes if caches is None else chosen
        steps.append(logits)
    return Written(codes, torch.stack(steps))
