"""A small causal transformer language model; the attention layer is the only part that is handed in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_LONGEST_WAVELENGTH = 1000.0  # positions; a few times the context


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model and of a training batch."""

    alphabet_size: int
    batch: int = 16
    context: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 3


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a normalisation and beside a skip connection."""

    def __init__(self, config: ModelConfig, attention_class: Callable[..., nn.MultiheadAttention]) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = attention_class(config.width, config.heads, batch_first=True)
        self.perceptron_norm = nn.LayerNorm(config.width)
        self.perceptron = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Maps (B, T, d) to (B, T, d); `options` are the attention layer's, such as a mask of the future."""
        y = self.attention_norm(x)
        y, _ = self.attention(y, y, y, need_weights=False, **options)
        x = x + y
        x = x + self.perceptron(self.perceptron_norm(x))
        return x


def sinusoids(length: int, width: int) -> Tensor:
    """Returns fixed position vectors, (length, width): sines and cosines of geometrically spaced wavelengths."""
    frequencies = torch.exp(-math.log(_LONGEST_WAVELENGTH) * torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class CharacterModel(nn.Module):
    """Embedding, blocks and the logits of the next character; `forward` is what says how blocks attend."""

    def __init__(self, config: ModelConfig, attention_class: Callable[..., nn.MultiheadAttention]) -> None:
        super().__init__()
        self.config = config
        self.characters = nn.Embedding(config.alphabet_size, config.width)
        self.blocks = nn.ModuleList(Block(config, attention_class) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.alphabet_size)

    def attention_layers(self) -> list[nn.MultiheadAttention]:
        """Returns the attention layer of every block."""
        return [module for module in self.modules() if isinstance(module, nn.MultiheadAttention)]

    def loss(self, codes: Tensor, following: Tensor) -> Tensor:
        """Returns the mean cross-entropy, in nats per character."""
        return nn.functional.cross_entropy(self(codes).flatten(0, 1), following.flatten())

    @torch.no_grad()
    def sample(self, prompt: Tensor, length: int, generator: torch.Generator, temperature: float = 0.6) -> Tensor:
        """Continues a prompt by `length` characters drawn from the model's own predictions."""
        codes = prompt
        for _ in range(length):
            logits = self(codes[None, -self.config.context :])[0, -1]
            drawn = torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator)
            codes = torch.cat([codes, drawn])
        return codes


class LanguageModel(CharacterModel):
    """Predicts the next character from those before it; positions are fixed vectors, up to the context's length."""

    future: Tensor
    positions: Tensor

    def __init__(self, config: ModelConfig, attention_class: Callable[..., nn.MultiheadAttention]) -> None:
        super().__init__(config, attention_class)
        future = torch.ones(config.context, config.context, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)
        self.register_buffer("positions", sinusoids(config.context, config.width), persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        """Returns the logits of every next character, (B, T, alphabet_size), for codes (B, T) int64."""
        length = codes.shape[1]
        x = self.characters(codes) + self.positions[:length]
        options = {"attn_mask": self.future[:length, :length], "is_causal": True}
        for block in self.blocks:
            x = block(x, options)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model(config: ModelConfig, attention_class: Callable[..., nn.MultiheadAttention], seed: int) -> LanguageModel:
    """Builds a model whose initial values depend on the seed alone."""
    torch.manual_seed(seed)
    return LanguageModel(config, attention_class)
