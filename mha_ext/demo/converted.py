"""A whole ``nn.Transformer`` that learns to copy: as it is, and converted."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import mha_ext

_ALPHABET, _LENGTH, _WIDTH, _HEADS, _BATCH = 5, 6, 16, 4, 16
_LEARNING_RATE = 5e-3
_STEPS = 60
_TOLERANCE = 1e-9  # nats; in float64 both losses carry roundings of 1e-16, which so few steps amplify little


class Copier(nn.Module):
    """An encoder reads symbols, a decoder is to say them again, one after the other."""

    future: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(_ALPHABET + 1, _WIDTH)  # the last one begins the target
        self.places = nn.Parameter(torch.randn(_LENGTH, _WIDTH))
        self.transformer = nn.Transformer(_WIDTH, _HEADS, 1, 1, 2 * _WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(_WIDTH, _ALPHABET)
        self.register_buffer("future", nn.Transformer.generate_square_subsequent_mask(_LENGTH), persistent=False)

    def loss(self, told: Tensor) -> Tensor:
        """Returns the mean cross-entropy of (B, T) symbols, in nats per symbol."""
        begin = torch.full_like(told[:, :1], _ALPHABET)
        source, target = (self.symbols(x) + self.places for x in (told, torch.cat([begin, told[:, :-1]], 1)))
        said = self.head(self.transformer(source, target, tgt_mask=self.future, tgt_is_causal=True))
        return nn.functional.cross_entropy(said.flatten(0, 1), told.flatten())


def learn(model: Copier, steps: int, seed: int) -> list[float]:
    """Trains on random sequences and returns the loss of every step."""
    optimizer = torch.optim.Adam(model.parameters(), _LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model.loss(torch.randint(_ALPHABET, (_BATCH, _LENGTH), generator=generator))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def converted_losses(seed: int) -> Mapping[str, list[float]]:
    """Trains one ``nn.Transformer`` twice from the same start, in float64: PyTorch's own, and converted."""
    torch.manual_seed(seed)
    original = Copier().double()
    converted = copy.deepcopy(original)
    mha_ext.convert(converted)
    return {"torch": learn(original, _STEPS, seed), "converted": learn(converted, _STEPS, seed)}


def agree(losses: Mapping[str, list[float]]) -> bool:
    """Whether both trainings went the same way, step by step."""
    return all(abs(mine - other) <= _TOLERANCE for mine, other in zip(*losses.values(), strict=True))
