"""The demonstration's language model with grouped queries, rotary positions, a sliding window and a cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import mha_ext
from mha_ext.demo.model import CharacterModel, ModelConfig


class WindowedModel(CharacterModel):
    """Predicts the next character from those before it, at any length: positions are turns of queries and keys.

    Args:
        config: sizes.
        kv_heads: number of key and value heads, divides that of the query's.
        window: how many characters an attention layer sees, the newest included.
    """

    def __init__(self, config: ModelConfig, kv_heads: int, window: int) -> None:
        options: dict[str, Any] = {"num_kv_heads": kv_heads, "rope": True, "window": (window - 1, 0)}
        super().__init__(config, functools.partial(mha_ext.MultiheadAttention, **options))
        self.kv_heads, self.window = kv_heads, window

    def forward(self, codes: Tensor, caches: Sequence[mha_ext.KVCache] | None = None) -> Tensor:
        """Returns the logits of every next character, (B, T, alphabet_size), for codes (B, T) int64.

        With caches, one a layer, the codes go on from what these hold, and are added to it.
        """
        x = self.characters(codes)
        for number, block in enumerate(self.blocks):
            x = block(x, {"is_causal": True} if caches is None else {"kv_cache": caches[number]})
        logits: Tensor = self.head(self.norm(x))
        return logits

    def make_caches(self, max_length: int | None, storage: str | None = None) -> list[mha_ext.KVCache]:
        """Returns an empty cache for each layer and one text: of so many positions, or rolling if None."""
        window = self.window if max_length is None else None
        head_dim, dtype = self.config.width // self.config.heads, self.head.weight.dtype
        return [
            mha_ext.KVCache(1, self.kv_heads, max_length, head_dim, dtype=dtype, window=window, storage=storage)
            for _ in self.blocks
        ]


def build_windowed_model(config: ModelConfig, kv_heads: int, window: int, seed: int) -> WindowedModel:
    """Builds a model whose initial values depend on the seed alone."""
    torch.manual_seed(seed)
    return WindowedModel(config, kv_heads, window)
