"""How many bytes the caches of a model take, by heads, storage and length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import mha_ext
from mha_ext.demo.model import ModelConfig

STORAGES: dict[str, tuple[torch.dtype, str | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float32, "int8"),
}
_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_BYTES_OF_A_SCALE = 4


@dataclass(frozen=True)
class Held:
    """Bytes of all layers' caches for one text.

    Attributes:
        kv_heads: number of key and value heads.
        storage: one of `STORAGES`.
        whole: bytes for each length, the whole text kept.
        rolling: bytes of a cache that keeps a window, at any length.
        expected: what ``whole`` must be.
    """

    kv_heads: int
    storage: str
    whole: tuple[int, ...]
    rolling: int
    expected: tuple[int, ...]


def _allocated(config: ModelConfig, kv_heads: int, storage: str, max_length: int | None, window: int | None) -> int:
    dtype, compressed = STORAGES[storage]
    options = {"dtype": dtype, "storage": compressed, "window": window}
    caches = [
        mha_ext.KVCache(1, kv_heads, max_length, config.width // config.heads, **options)  # type: ignore[arg-type]
        for _ in range(config.layers)
    ]
    return sum(cache.nbytes for cache in caches)


def expected_bytes(config: ModelConfig, kv_heads: int, storage: str, length: int) -> int:
    """Keys and values: 2 · layers · B · H_kv · length · head_dim · bytes with B = 1; int8 has a scale a vector."""
    vector = config.width // config.heads * _BYTES[storage] + (_BYTES_OF_A_SCALE if storage == "int8" else 0)
    return 2 * config.layers * kv_heads * length * vector


def cache_bytes(config: ModelConfig, window: int, lengths: Sequence[int]) -> list[Held]:
    """Asks caches of H, H/4 and 1 heads what they take."""
    return [
        Held(
            kv_heads,
            storage,
            whole=tuple(_allocated(config, kv_heads, storage, length, None) for length in lengths),
            rolling=_allocated(config, kv_heads, storage, None, window),
            expected=tuple(expected_bytes(config, kv_heads, storage, length) for length in lengths),
        )
        for storage in STORAGES
        for kv_heads in (config.heads, config.heads // 4, 1)
    ]
