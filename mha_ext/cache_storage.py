"""Where a key/value cache keeps its numbers: as they are or as int8, in one block of memory a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Codec", "Int8Codec", "PlainCodec", "RowStorage", "Sizes", "Storage", "allocate", "put_tokens", "tokens_of"]


class Sizes(NamedTuple):
    """Sizes of a cache."""

    batch: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int


class Codec(Protocol):
    """How keys and values are written: as some tensors whose last axis and dtype alone differ from theirs."""

    def columns(self, sizes: Sizes) -> list[tuple[int, torch.dtype]]:
        """Last size and dtype of each tensor."""

    def encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """What is stored for keys and values, up to the dtype."""

    def decode(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of what is stored."""


class PlainCodec:
    """Numbers as they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def columns(self, sizes: Sizes) -> list[tuple[int, torch.dtype]]:
        """Keys, values."""
        return [(sizes.head_dim, self.dtype), (sizes.value_head_dim, self.dtype)]

    def encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The tensors themselves."""
        return key, value

    def decode(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The tensors themselves."""
        key, value = stored
        return key, value


class Int8Codec:
    """Whole numbers from -127 to 127 and for each token and head a scale, the largest magnitude over 127."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.scale_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.least = torch.finfo(self.scale_dtype).tiny
        top = torch.tensor(torch.finfo(self.scale_dtype).max, dtype=self.scale_dtype) / 127
        self.top, self.below = top.item(), top.nextafter(torch.zeros_like(top)).item()

    def columns(self, sizes: Sizes) -> list[tuple[int, torch.dtype]]:
        """Keys, their scales, values, their scales."""
        scale = (1, self.scale_dtype)
        return [(sizes.head_dim, torch.int8), scale, (sizes.value_head_dim, torch.int8), scale]

    def encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Rounded to the nearest multiple of the scale."""
        return (*self._rounded(key), *self._rounded(value))

    def decode(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Multiples of the scales, rounded to ``dtype``."""
        key, key_scale, value, value_scale = stored
        return self._product(key, key_scale), self._product(value, value_scale)

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.to(self.scale_dtype)
        scale = wide.abs().amax(-1, keepdim=True).div_(127).clamp_(min=self.least)  # rows of zeros stay zeros
        scale.masked_fill_(scale == self.top, self.below)  # 127 times the scale of the largest number is infinity
        steps = wide.div(scale).round_().nan_to_num_(0.0)  # NaN or infinity: 0 times a scale that is NaN or infinity
        return steps, scale

    def _product(self, steps: Tensor, scale: Tensor) -> Tensor:
        out = torch.empty(steps.shape, dtype=self.dtype, device=steps.device)
        return torch.mul(steps, scale, out=out)


class Storage(Protocol):
    """Slots for the positions of each row; lists have one number a row, or one alone where all rows agree."""

    capacity: int
    buffers: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def write(self, held: list[int], counts: list[int], key: Tensor, value: Tensor) -> None:
        """Puts the first ``counts`` positions of key and value after the ``held`` slots of each row."""

    def read(self, num_slots: int) -> tuple[Tensor, Tensor]:
        """The first slots of all rows: keys (B, G, S, D), values (B, G, S, D_v)."""

    def roll(self, held: list[int], window: int, room: int) -> list[int]:
        """Gives up slots before each row's last ``window``, until ``room`` more fit; how many stay in each row."""

    def cut(self, held: list[int]) -> None:
        """Only the first ``held`` slots of each row are in use from now on."""

    def select(self, indices: list[int], num_slots: int) -> None:
        """Row b becomes what row ``indices[b]`` was; no row uses more than ``num_slots``."""

    def share(self, source: int, rows: list[int], num_slots: int) -> None:
        """Rows get the first slots of another."""


def allocate(shape: tuple[int, int, int], codec: Codec, sizes: Sizes, device: torch.device | None) -> list[Tensor]:
    """Memory for a codec's tensors, of this shape and a last axis of their own; usable outside inference mode."""
    with torch.inference_mode(False):
        return [torch.empty(*shape, width, dtype=dtype, device=device) for width, dtype in codec.columns(sizes)]


def index_of(numbers: list[int], like: Tensor) -> Tensor:
    """A list of indices as a tensor."""
    return torch.tensor(numbers, dtype=torch.int64, device=like.device)


def tokens_of(rows: list[int], stored: Sequence[Tensor]) -> list[Tensor]:
    """The only position of some rows of tensors (B, G, 1, W): (N, G, W) each."""
    parts = [part.select(2, 0) for part in stored]
    if len(rows) == parts[0].shape[0]:
        return parts
    chosen = index_of(rows, parts[0])
    return [part.index_select(0, chosen) for part in parts]


def put_tokens(buffers: list[Tensor], places: tuple[list[int], list[int]], stored: Sequence[Tensor]) -> None:
    """Writes one token of each of some rows, (N, G, W), to entries of the first axis and slots of the third."""
    _, heads, slots, _ = buffers[0].shape
    lines = index_of([(first * heads) * slots + slot for first, slot in zip(*places, strict=True)], buffers[0])
    lines = (lines[:, None] + torch.arange(0, heads * slots, slots, device=lines.device)).flatten()
    for buffer, tokens in zip(buffers, stored, strict=True):
        buffer.view(-1, buffer.shape[-1]).index_copy_(0, lines, tokens.flatten(0, 1).to(buffer.dtype))


class RowStorage:
    """One block of memory a row and head; a rolling cache moves what it keeps to the front when the block is full.

    Blocks have one slot more than ever is in use: what is read then never is contiguous, and compilers, which tell
    contiguous tensors from others, need no graph of its own for a full cache.

    Args:
        sizes: sizes of the cache.
        codec: how numbers are written.
        capacity: slots a row.
        device: where.
    """

    def __init__(self, sizes: Sizes, codec: Codec, capacity: int, device: torch.device | None) -> None:
        self.sizes = sizes
        self.codec = codec
        self.least = self.capacity = capacity
        self.buffers = self._allocate(capacity, device)

    def _allocate(self, capacity: int, device: torch.device | None) -> list[Tensor]:
        return allocate((self.sizes.batch, self.sizes.num_kv_heads, capacity + 1), self.codec, self.sizes, device)

    @property
    def nbytes(self) -> int:
        """What can be in use: all that is allocated but the spare slots."""
        return sum(buffer[:, :, : self.capacity].nbytes for buffer in self.buffers)

    def write(self, held: list[int], counts: list[int], key: Tensor, value: Tensor) -> None:
        """See Storage."""
        stored = self.codec.encode(key, value)
        if len(held) == len(counts) == 1:
            start, count = held[0], counts[0]
            if count == key.shape[2]:
                for buffer, part in zip(self.buffers, stored, strict=True):
                    buffer.narrow(2, start, count).copy_(part)
                return
        batch = self.sizes.batch
        held = held * batch if len(held) == 1 else held
        counts = counts * batch if len(counts) == 1 else counts
        rows = [row for row, count in enumerate(counts) if count]
        if key.shape[2] == 1:
            put_tokens(self.buffers, (rows, [held[row] for row in rows]), tokens_of(rows, stored))
            return
        for buffer, part in zip(self.buffers, stored, strict=True):
            for row in rows:
                buffer[row].narrow(1, held[row], counts[row]).copy_(part[row].narrow(1, 0, counts[row]))

    def read(self, num_slots: int) -> tuple[Tensor, Tensor]:
        """See Storage; without a copy unless numbers are int8."""
        return self.codec.decode([buffer.narrow(2, 0, num_slots) for buffer in self.buffers])

    def roll(self, held: list[int], window: int, room: int) -> list[int]:
        """See Storage. Memory that an append longer than the window asked for is given back at the next turn."""
        kept = [min(window, count) for count in held]
        capacity = max(self.least, max(kept) + room)
        targets = self.buffers
        if capacity != self.capacity:
            targets = self._allocate(capacity, self.buffers[0].device)
        for source, target in zip(self.buffers, targets, strict=True):
            for row, (before, now) in enumerate(zip(held, kept, strict=True)):
                rows = slice(None) if len(held) == 1 else slice(row, row + 1)
                part = source[rows, :, before - now : before]
                overlaps = target is source and before < 2 * now
                target[rows, :, :now].copy_(part.clone() if overlaps else part)
        self.buffers, self.capacity = targets, capacity
        return kept

    def cut(self, held: list[int]) -> None:
        """See Storage; what lies behind stays where it is and is overwritten later."""

    def select(self, indices: list[int], num_slots: int) -> None:
        """See Storage; moves only rows that change."""
        moved = [row for row, index in enumerate(indices) if row != index]
        if not moved or not num_slots:
            return
        sources, targets = (index_of(rows, self.buffers[0]) for rows in ([indices[row] for row in moved], moved))
        for buffer in self.buffers:
            used = buffer.narrow(2, 0, num_slots)
            used.index_copy_(0, targets, used.index_select(0, sources))

    def share(self, source: int, rows: list[int], num_slots: int) -> None:
        """See Storage; copies."""
        for buffer in self.buffers:
            part = buffer[source].narrow(1, 0, num_slots)
            for row in rows:
                buffer[row].narrow(1, 0, num_slots).copy_(part)
