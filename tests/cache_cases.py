"""What a key/value cache must hold, kept as lists of tokens; random programs of operations; attention over a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tolerances import roundoff
from torch import Tensor

from mha_ext import KVCache

B, G, D, DV = 3, 2, 4, 3
MAX_LENGTH = 60

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rolling": {"window": 5},
    "int8": {"storage": "int8"},
    "pages": {"page_size": 16},
    "rolling int8": {"window": 7, "storage": "int8"},
    "int8 pages": {"page_size": 16, "storage": "int8"},
    "rolling pages": {"page_size": 16, "window": 20},
}


def make(kind: str = "plain", dtype: torch.dtype = torch.float32, **options: Any) -> KVCache:
    return KVCache(B, G, MAX_LENGTH, D, value_head_dim=DV, dtype=dtype, **{**KINDS[kind], **options})


def chunk(count: int, dtype: torch.dtype = torch.float32, batch: int = B) -> tuple[Tensor, Tensor]:
    """Keys and values as a layer makes them: views of (B, n, G, D)."""
    key, value = (torch.randn(batch, count, G, width, dtype=torch.float64).to(dtype) for width in (D, DV))
    return key.transpose(1, 2), value.transpose(1, 2)


@dataclass
class Naive:
    """Every token of every row, (G, D) and (G, D_v), and the padding of the last append."""

    window: int | None = None
    rows: list[list[tuple[Tensor, Tensor]]] = field(default_factory=lambda: [[] for _ in range(B)])
    padding: list[int] = field(default_factory=lambda: [0] * B)

    def append(self, key: Tensor, value: Tensor, lengths: list[int] | None = None) -> None:
        count = key.shape[2]
        for b, row in enumerate(self.rows):
            real = count if lengths is None else lengths[b]
            row += [(key[b, :, i].clone(), value[b, :, i].clone()) for i in range(real)]
            self.padding[b] = count - real

    def truncate(self, lengths: list[int]) -> None:
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]
        self.padding = [0] * len(self.rows)

    def reorder(self, indices: list[int]) -> None:
        self.rows = [list(self.rows[i]) for i in indices]
        self.padding = [self.padding[i] for i in indices]

    def share(self, source: int, rows: list[int], length: int) -> None:
        for b in rows:
            self.rows[b] = self.rows[source][:length]
        self.padding = [0] * len(self.rows)

    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def positions(self, num_queries: int) -> list[list[int]]:
        return [
            [len(row) + padding - num_queries + t for t in range(num_queries)]
            for row, padding in zip(self.rows, self.padding, strict=True)
        ]

    def seen(self, num_queries: int) -> list[list[list[int]]]:
        """For each row and query the positions that it sees."""
        return [
            [
                [j for j in range(len(row)) if j <= p and (self.window is None or p - j < self.window)]
                if p < len(row)
                else []
                for p in positions
            ]
            for row, positions in zip(self.rows, self.positions(num_queries), strict=True)
        ]


def int8_limit(x: Tensor) -> Tensor:
    """Of numbers written as int8 and given back in their dtype: half a step of the scale s = largest / 127, rounded to
    a (1 + a) s; x / s and steps * s are rounded once more each; the result is rounded to the dtype.
    """
    largest = x.double().abs().amax(-1, keepdim=True)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rounding = 4 * roundoff(wide) + roundoff(x.dtype)
    smallest = torch.finfo(wide).tiny + torch.finfo(x.dtype).tiny * roundoff(x.dtype)
    return largest * (1 / 254 + rounding) + smallest


def assert_stored(got: Tensor, want: Tensor, int8: bool) -> None:
    if int8:
        error = (got.double() - want.double()).abs()
        assert got.dtype == want.dtype and bool((error <= int8_limit(want)).all())
    else:
        assert got.dtype == want.dtype and torch.equal(got, want)


def assert_same(cache: KVCache, naive: Naive) -> None:
    """The cache tells of everything what the lists say."""
    lengths, held = naive.lengths(), cache.held.tolist()
    assert cache.lengths.tolist() == lengths and cache.lengths.dtype == torch.int64
    assert cache.length == max(lengths)
    key, value = cache.key_value()
    assert key.shape == (B, G, max(held), D) and value.shape == (B, G, max(held), DV)
    for b, row in enumerate(naive.rows):
        assert held[b] == lengths[b] if naive.window is None else held[b] >= min(naive.window, lengths[b])
        for got, part in ((key, 0), (value, 1)):
            if held[b]:
                want = torch.stack([token[part] for token in row[-held[b] :]], 1)
                assert_stored(got[b, :, : held[b]], want, cache.storage == "int8")
    most = min(length + padding for length, padding in zip(lengths, naive.padding, strict=True))
    for count in {0, min(1, most), min(2, most), min(most, max(naive.padding) + 1), most}:
        assert cache.positions(count).expand(B, count).tolist() == naive.positions(count)
        assert_same_range(cache, naive, count)


def assert_same_range(cache: KVCache, naive: Naive, num_queries: int) -> None:
    first = [length - held for length, held in zip(naive.lengths(), cache.held.tolist(), strict=True)]
    seen = naive.seen(num_queries)
    if any(j < first[b] for b in range(B) for positions in seen[b] for j in positions):
        with pytest.raises(ValueError, match="num_queries must be such that all see keys that are held"):
            cache.key_range(num_queries)
        return
    ranges = cache.key_range(num_queries)
    assert ranges.dtype == torch.int32 and ranges.shape in ((2, 1, num_queries), (2, B, num_queries))
    start, stop = ranges.expand(2, B, num_queries).tolist()
    for b in range(B):
        for t in range(num_queries):
            assert [first[b] + j for j in range(start[b][t], stop[b][t])] == seen[b][t]
            assert stop[b][t] <= max(cache.held.tolist())


def state(cache: KVCache) -> list[Any]:
    """All that a cache is made of, to the byte."""
    store = cache._store
    kept = [name for name in vars(store) if isinstance(getattr(store, name), (list, set, int))]
    tensors = [*store.buffers, *([store.table] if cache.page_size else [])]
    raw = [tensor.clone().view(torch.uint8).numpy().tobytes() for tensor in tensors]
    numbers = {name: repr(getattr(store, name)) for name in kept if name != "buffers"}
    return [raw, numbers, repr(vars(cache._rows))]


def poison(cache: KVCache) -> None:
    """NaN (in int8: any number) wherever no position lies."""
    store = cache._store
    used = torch.zeros(*store.buffers[0].shape[:1], store.buffers[0].shape[2], dtype=torch.bool)
    for b, held in enumerate(cache.held.tolist()):
        for j in range(held):
            if cache.page_size:
                used[int(store.page_table()[b, j // cache.page_size]), j % cache.page_size] = True
            else:
                used[b, j] = True
    for buffer in store.buffers:
        filler = math.nan if buffer.is_floating_point() else 99
        buffer.masked_fill_(~used[:, None, :, None], filler)


# ------------------------------------------------------------------------------------------------------ random programs
def programs() -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Operations whose numbers are fractions or indices that fit whatever state the cache is in."""
    fractions = st.lists(st.integers(0, 8), min_size=B, max_size=B)
    count = st.one_of(st.integers(0, 3), st.integers(0, 40))
    row = st.integers(0, B - 1)
    rows = st.lists(row, min_size=B, max_size=B)
    operations = st.one_of(
        st.tuples(st.just("append"), count, st.none() | fractions),
        st.tuples(st.just("append"), count, st.none()),
        st.tuples(st.just("truncate"), st.integers(0, 8) | fractions),
        st.tuples(st.just("reorder"), rows),
        st.tuples(st.just("share"), row, st.integers(0, 8)),
        st.tuples(st.just("fork"), row),
        st.tuples(st.just("reset")),
    )
    return st.lists(operations, max_size=14)


def share_of(eighths: int, most: int) -> int:
    return eighths * most // 8


def gone(cache: KVCache, naive: Naive, wanted: dict[int, int]) -> bool:
    """Whether the window before one of these lengths of rows is no longer held."""
    held = cache.held.tolist()
    window = naive.window or MAX_LENGTH
    return any(length and len(naive.rows[b]) - held[b] > max(0, length - window) for b, length in wanted.items())


def run(cache: KVCache, naive: Naive, operation: tuple[Any, ...]) -> None:
    """The same operation on both, or an error and nothing changed where it is refused."""
    name, *arguments = operation
    lengths = naive.lengths()
    if name == "append":
        count, eighths = arguments
        real = None if eighths is None else [share_of(part, count) for part in eighths]
        key, value = chunk(count, cache.dtype)
        fits = max(map(sum, zip(lengths, real or [count] * B, strict=True))) <= MAX_LENGTH
        if cache.window or fits:
            cache.append(key, value, real)
            naive.append(key, value, real)
        else:
            refused(cache, "max_length", cache.append, key, value, real)
    elif name == "truncate":
        (part,) = arguments
        target = share_of(part, max(lengths)) if isinstance(part, int) else list(map(share_of, part, lengths))
        new = [min(target, length) for length in lengths] if isinstance(target, int) else target
        if gone(cache, naive, dict(enumerate(new))):
            refused(cache, "length must be 0 or at least", cache.truncate, target)
        else:
            cache.truncate(target if isinstance(target, int) else torch.tensor(target))
            naive.truncate(new)
    elif name == "reorder":
        cache.reorder(torch.tensor(arguments[0]))
        naive.reorder(arguments[0])
    elif name == "reset":
        cache.reset()
        naive.truncate([0] * B)
    else:
        source = arguments[0]
        rows = [b for b in range(B) if b != source]
        length = share_of(arguments[1], lengths[source]) if name == "share" else lengths[source]
        if gone(cache, naive, {source: length}):
            refused(cache, "length must be 0 or at least", cache.share_prefix, source, rows, length)
            return
        if name == "share":
            cache.share_prefix(source, rows, length)
        else:
            cache.fork(source, rows)
        naive.share(source, rows, length)


def refused(cache: KVCache, match: str, method: Any, *arguments: Any, error: type[Exception] = ValueError) -> None:
    """An error that leaves every byte as it was."""
    before = state(cache)
    with pytest.raises(error, match=match):
        method(*arguments)
    assert state(cache) == before


# ------------------------------------------------------------------------------------------------------------ attention
def softmax_rows(query: Tensor, key: Tensor, value: Tensor, seen: list[list[int]]) -> Tensor:
    """Attention of one row in float64, query (H, T, D): query t sees the positions ``seen[t]`` and nothing else."""
    group = query.shape[0] // key.shape[0]
    key, value = (x.double().repeat_interleave(group, 0) for x in (key, value))
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=torch.float64)
    for t, visible in enumerate(seen):
        if visible:
            scores = (key[:, visible] @ query[:, t].double()[..., None])[..., 0] / math.sqrt(query.shape[-1])
            out[:, t] = (scores.softmax(-1)[:, None] @ value[:, visible])[:, 0]
    return out


def attend(cache: KVCache, query: Tensor) -> Tensor:
    """Attention of the last positions' queries (B, H, T, D) over what the cache gives."""
    key, value = cache.key_value()
    start, stop = cache.key_range(query.shape[2]).expand(2, query.shape[0], -1).tolist()
    rows = [
        softmax_rows(query[b], key[b], value[b], [list(range(*ends)) for ends in zip(start[b], stop[b], strict=True)])
        for b in range(query.shape[0])
    ]
    return torch.stack(rows)
