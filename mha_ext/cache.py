"""A key/value cache for decoding: what attention has seen so far, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from mha_ext import cache_checks, checks
from mha_ext.cache_pages import PageStorage
from mha_ext.cache_rows import Rows
from mha_ext.cache_storage import Int8Codec, PlainCodec, RowStorage, Storage
from mha_ext.errors import InvalidValueError
from mha_ext.uncompiled import outside_graphs, outside_graphs_unless_followed

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of the positions that a batch of sequences has passed through attention.

    A chunk of n positions is appended, then its queries attend to all that is held: causally aligned to the end, which
    `key_range` spells out for each query. Prefill at once, in chunks or token by token leave the same numbers behind.

    Rows (the sequences of the batch) may have different lengths: ``append(..., lengths=)`` takes right-padded chunks
    and stores only what is real, so that row b lies in the first ``held[b]`` of the S = max(held) key positions that
    `key_value` gives. What lies behind is left as it was, NaN perhaps; `key_range` hides it.

    With ``window`` the cache rolls. It holds at least the last ``window`` positions of each row and about twice as many
    (and the largest chunk) at most; keys stay in order, and moving them to the front when the memory is full costs no
    more than another copy of each token. Positions are counted from the start of the sequence all the same.

    With ``page_size`` the positions lie in pages of a pool that grows as it is used, and rows with a common beginning
    share its pages (`share_prefix`, `fork`, `reorder`) until one of them writes (Kwon et al. 2023).

    It is state of inference: it passes no gradients, and refuses tensors that expect one. Every error is raised before
    anything has changed. Under ``torch.compile`` appending and reading join the graph, without ``page_size`` and
    ``lengths``; with these, and at its other methods, graphs break.

    Args:
        batch_size: number of rows B.
        num_kv_heads: number of key/value heads G.
        max_length: most positions of a row; with ``window`` it limits nothing and may be None.
        head_dim: width D of a head of key, and of value unless ``value_head_dim`` says otherwise.
        value_head_dim: width D_v of a head of value.
        dtype: float64, float32, bfloat16 or float16, of what is appended and given back.
        device: where; PyTorch's default if None.
        window: each position sees itself and the ``window - 1`` before it.
        storage: None: numbers as they are. "int8": as whole numbers from -127 to 127 and a scale (float32; float64 for
            float64) for each token and head, its largest magnitude over 127. A number then comes back within
            largest/254 and the rounding of ``dtype`` (and of the scale, 4 roundings of its dtype); magnitudes below
            float32's normal numbers may become 0. A vector with NaN or infinity comes back as NaN.
        page_size: number of positions in a page, 16 to 256, or None: one block of memory a row, allocated at once.

    Raises:
        TypeError: a size is no int, or dtype is none of the four.
        ValueError: a size is out of range, or storage unknown.

    Example:
        >>> import torch
        >>> from mha_ext import KVCache
        >>> cache = KVCache(2, num_kv_heads=4, max_length=100, head_dim=16)
        >>> for n in (5, 1, 1):
        ...     cache.append(torch.randn(2, 4, n, 16), torch.randn(2, 4, n, 16))
        >>> key, value = cache.key_value()
        >>> key.shape, cache.length, cache.positions(1).tolist()
        (torch.Size([2, 4, 7, 16]), 7, [6])
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_length: int | None,
        head_dim: int,
        *,
        value_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        window: int | None = None,
        storage: str | None = None,
        page_size: int | None = None,
    ) -> None:
        where = "KVCache"
        value_dim = head_dim if value_head_dim is None else value_head_dim
        self._sizes = cache_checks.sizes(where, batch_size, num_kv_heads, head_dim, value_dim)
        checks.float_dtype(where, "dtype", dtype)
        self._dtype = dtype
        self._window = None if window is None else checks.size(where, "window", window)
        no_limit = max_length is None and window is not None
        self._max_length = None if no_limit else checks.size(where, "max_length", max_length)
        if storage is not None:
            checks.one_of(where, "storage", storage, ("int8",))
        self._int8 = storage is not None
        self._page_size = None if page_size is None else cache_checks.page_size(where, page_size)
        self._store = self._make_storage(None if device is None else torch.device(device))
        self._device = self._store.buffers[0].device
        self._rows = Rows(self._sizes.batch)

    def _make_storage(self, device: torch.device | None) -> Storage:
        codec = Int8Codec(self._dtype) if self._int8 else PlainCodec(self._dtype)
        page_size, window = self._page_size, self._window
        if page_size is not None:
            slots = (-(-window // page_size) + 2) * page_size if window else cast(int, self._max_length)
            return PageStorage(self._sizes, codec, slots, page_size, device)
        return RowStorage(self._sizes, codec, 2 * window if window else cast(int, self._max_length), device)

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self._sizes.batch

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads G."""
        return self._sizes.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width D of a head of key."""
        return self._sizes.head_dim

    @property
    def value_head_dim(self) -> int:
        """Width D_v of a head of value."""
        return self._sizes.value_head_dim

    @property
    def max_length(self) -> int | None:
        """Most positions of a row, unless the cache rolls."""
        return self._max_length

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values that are appended and given back."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self._device

    @property
    def window(self) -> int | None:
        """How many positions each one sees, itself included; None: all before it."""
        return self._window

    @property
    def storage(self) -> str | None:
        """How numbers are kept: None as they are, or "int8"."""
        return "int8" if self._int8 else None

    @property
    def page_size(self) -> int | None:
        """Positions in a page, or None."""
        return self._page_size

    @property
    def length(self) -> int:
        """Number of positions of the longest row, those that have rolled out of a window included."""
        return max(self._rows.lengths())

    @property
    def lengths(self) -> Tensor:
        """Number of positions of each row, (B,) int64."""
        return torch.tensor(self._rows.each(self._rows.lengths()), dtype=torch.int64, device=self._device)

    @property
    def held(self) -> Tensor:
        """How many of `key_value`'s positions are each row's, (B,) int64; less than `lengths` once a window rolled."""
        return torch.tensor(self._rows.each(self._rows.held), dtype=torch.int64, device=self._device)

    @property
    def ragged(self) -> bool:
        """Whether rows differ in what they hold; if not, causal order aligned to the end says all (and a window)."""
        return self._rows.ragged

    @property
    def nbytes(self) -> int:
        """Bytes of the memory for keys, values and scales; with pages, of those in use, a shared one counted once."""
        return self._store.nbytes

    @outside_graphs_unless_followed
    def append(self, key: Tensor, value: Tensor, lengths: Tensor | Sequence[int] | None = None) -> None:
        """Adds n positions to every row, or the first ``lengths[b]`` of them to row b.

        Args:
            key: (B, G, n, D), of the cache's dtype, with any strides.
            value: (B, G, n, D_v).
            lengths: (B,) integers from 0 to n, the rest is padding; None: all n are real.

        Raises:
            TypeError: an argument is no tensor, or of another dtype.
            ValueError: a shape or device differs, ``lengths`` are out of range, a tensor requires a gradient (while
                gradients are enabled), or a row would exceed ``max_length``.

        Example:
            >>> import torch
            >>> from mha_ext import KVCache
            >>> cache = KVCache(2, 1, 10, 4)
            >>> cache.append(torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4), lengths=[3, 1])
            >>> cache.lengths.tolist(), cache.key_range(3)[1].tolist()
            ([3, 1], [[1, 2, 3], [1, 0, 0]])
        """
        where = "KVCache.append"
        count = cache_checks.chunk(where, (key, value), self._sizes, self._dtype, self._device)
        rows, store = self._rows, self._store
        counts = [count] if lengths is None else cache_checks.counts(where, lengths, self._sizes.batch, count)
        ends = rows.ends(counts)
        if max(ends) > store.capacity:
            if self._window is None:
                cache_checks.overflow(where, store.capacity, rows.held, ends)
            rows.keep(store.roll(rows.held, self._window, max(counts)))
            ends = rows.ends(counts)
        store.write(rows.held, counts, key, value)
        rows.append(ends, counts, count)

    @outside_graphs_unless_followed
    def key_value(self) -> tuple[Tensor, Tensor]:
        """Keys (B, G, S, D) and values (B, G, S, D_v) of the S = max(held) positions that are held.

        Views of the cache's memory, right until the next change of it; with ``page_size`` or "int8" they are copies.
        Without ``window`` S is `length`. A row that holds less has anything behind its ``held[b]`` positions.
        """
        return self._store.read(max(self._rows.held))

    @outside_graphs_unless_followed
    def positions(self, num_queries: int) -> Tensor:
        """The numbers, from the start of each sequence, of the last ``num_queries`` positions appended (for RoPE).

        They count on through the padding of the last append: query t of its n has the number of positions before it in
        its row. Taking them back (`truncate`) makes them end at each row's last position.

        Args:
            num_queries: T, at most what every row has passed.

        Returns:
            int64, (T,), or (B, T) where rows differ.

        Raises:
            TypeError: ``num_queries`` is no int.
            ValueError: it is negative or more than the positions of a row.
        """
        num_queries = cache_checks.queries("KVCache.positions", num_queries, self._rows.furthest())
        return self._rows.positions(num_queries, self._device)

    @outside_graphs_unless_followed
    def key_range(self, num_queries: int) -> Tensor:
        """Which of `key_value`'s positions each of the last ``num_queries`` positions sees: start <= j < end.

        A position sees itself, what came before it in its row and no more than ``window`` of these. Padding of the last
        append sees nothing (0, 0), so its attention output is 0.

        Args:
            num_queries: T, usually the n of the last append.

        Returns:
            int32, (2, B, T), or (2, 1, T) where rows agree.

        Raises:
            TypeError: ``num_queries`` is no int.
            ValueError: it is negative or more than the positions of a row, or one of them sees what has rolled away.
        """
        where, rows = "KVCache.key_range", self._rows
        num_queries = cache_checks.queries(where, num_queries, rows.furthest())
        if self._window is not None and rows.blind(num_queries, self._window) is not None:
            raise InvalidValueError(
                f"{where}: num_queries must be such that all see keys that are held, got {num_queries} with rows "
                f"holding {rows.held} and a window of {self._window}"
            )
        return rows.key_range(num_queries, self._window, self._device)

    @outside_graphs
    def truncate(self, length: int | Tensor | Sequence[int]) -> None:
        """Takes back all positions from ``length`` on, where a row has any.

        With ``window`` the last append can always be taken back, what came before it only as far as each row's last
        ``window`` positions are still held; 0 always works.

        Args:
            length: for all rows, at most `length`; or (B,) integers, each at most the row's length.

        Raises:
            TypeError: not integers.
            ValueError: negative or more than there is, or the window before it is gone.
        """
        where, rows = "KVCache.truncate", self._rows
        lengths = cache_checks.new_lengths(where, length, rows.each(rows.lengths()))
        cache_checks.reachable(where, lengths, rows.each(rows.dropped), self._window)
        rows.cut(lengths)
        self._store.cut(rows.held)

    def reset(self) -> None:
        """Forgets everything; the memory stays."""
        self.truncate(0)

    @outside_graphs
    def reorder(self, batch_indices: Tensor | Sequence[int]) -> None:
        """Lets row b go on from what row ``batch_indices[b]`` holds (beam search).

        Copies the rows that change; with ``page_size`` it copies nothing.

        Args:
            batch_indices: (B,) integers from 0 to B - 1, repeated at will.

        Raises:
            TypeError: not integers.
            ValueError: another number of them, or out of range.
        """
        batch = self._sizes.batch
        indices = cache_checks.integers("KVCache.reorder", "batch_indices", batch_indices, (batch, 0, batch - 1))
        self._store.select(indices, max(self._rows.held))
        self._rows.select(indices)

    @outside_graphs
    def share_prefix(self, source_row: int, rows: Sequence[int] | Tensor, length: int) -> None:
        """Lets rows begin with the first ``length`` positions of another row, in place of what they hold.

        With ``page_size`` they share its pages, otherwise it is a copy.

        Args:
            source_row: whose positions.
            rows: which rows get them; not the source.
            length: how many, at most the source's length.

        Raises:
            TypeError: not integers.
            ValueError: out of range, or the window before ``length`` is gone.

        Example:
            >>> import torch
            >>> from mha_ext import KVCache
            >>> cache = KVCache(4, 2, 100, 8, page_size=16)
            >>> prompt = torch.randn(4, 2, 40, 8)
            >>> cache.append(prompt, prompt, lengths=[40, 0, 0, 0])
            >>> before = cache.nbytes
            >>> cache.share_prefix(0, [1, 2, 3], 40)
            >>> cache.lengths.tolist(), cache.nbytes == before
            ([40, 40, 40, 40], True)
        """
        self._share("KVCache.share_prefix", source_row, rows, length)

    @outside_graphs
    def fork(self, source_row: int, rows: Sequence[int] | Tensor) -> None:
        """Lets rows go on from all that another row holds: `share_prefix` of its whole length.

        Args:
            source_row: whose positions.
            rows: which rows get them; not the source.

        Raises:
            TypeError: not integers.
            ValueError: out of range.
        """
        self._share("KVCache.fork", source_row, rows, None)

    def _share(self, where: str, source_row: int, rows: Sequence[int] | Tensor, length: int | None) -> None:
        batch, state = self._sizes.batch, self._rows
        source = cache_checks.bounded(where, "source_row", source_row, batch - 1)
        targets = cache_checks.integers(where, "rows", rows, (None, 0, batch - 1))
        if source in targets:
            raise InvalidValueError(f"{where}: rows must not contain source_row {source}, got {targets}")
        lengths, dropped = state.each(state.lengths()), state.each(state.dropped)
        most = lengths[source]
        length = most if length is None else cache_checks.bounded(where, "length", length, most)
        cache_checks.reachable(where, [length], [dropped[source]], self._window)
        lost = dropped[source] if length else 0
        self._store.share(source, targets, length - lost)
        held = state.each(state.held).copy()
        for row in targets:
            held[row], dropped[row] = length - lost, lost
        state.assign(held, dropped, [0])

    @outside_graphs
    def pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """The memory itself, to be read in place: position j of row b is slot j % page_size of one page of the pools.

        Returns:
            Keys (num_pages, G, page_size, D), values (num_pages, G, page_size, D_v) and the page table (B, max_pages),
            int32, whose entry [b, j // page_size] names that page for j < held[b]; entries behind are 0. The pools are
            others after an append that needed more pages.

        Raises:
            ValueError: the cache has no pages, or its numbers are int8.
        """
        if not isinstance(self._store, PageStorage) or self._int8:
            got = f"page_size {self._page_size}, storage {self.storage!r}"
            raise InvalidValueError(f"KVCache.pages: the cache must have page_size and plain storage, got {got}")
        key, value = self._store.buffers
        return key, value, self._store.page_table()

    def __repr__(self) -> str:
        names = ("batch_size", "num_kv_heads", "max_length", "head_dim", "value_head_dim", "dtype", "device")
        options = [name for name in ("window", "storage", "page_size") if getattr(self, name) is not None]
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in (*names, *options))
        lengths = self._rows.lengths()
        length = f"lengths={lengths}" if len(lengths) > 1 else f"length={lengths[0]}"
        return f"KVCache({sizes}, {length}, nbytes={self.nbytes})"
