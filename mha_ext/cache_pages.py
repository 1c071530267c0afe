"""A key/value cache in pages of a pool, which rows may share (Kwon et al. 2023, vLLM's paged attention)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mha_ext.cache_storage import Codec, Sizes, allocate, put_tokens, tokens_of

__all__ = ["PageStorage"]


class PageStorage:
    """Slots of a row lie in pages of fixed size, in any order; a page belongs to all rows whose table names it.

    A row that writes into a page of others first gets a copy of its own. The pool grows by half when it is full.

    Args:
        sizes: sizes of the cache.
        codec: how numbers are written.
        num_slots: slots a row, before the first roll.
        page_size: slots a page.
        device: where.
    """

    def __init__(self, sizes: Sizes, codec: Codec, num_slots: int, page_size: int, device: torch.device | None) -> None:
        self.sizes = sizes
        self.codec = codec
        self.page_size = page_size
        self.capacity = num_slots
        self.pages: list[list[int]] = [[] for _ in range(sizes.batch)]
        self.owners: list[int] = []  # of each page; 0: free
        self.free: list[int] = []
        self.buffers = self._allocate(0, device)
        self.changed = set(range(sizes.batch))  # rows whose table is out of date
        with torch.inference_mode(False):
            self.table = torch.zeros(sizes.batch, self._pages_for(num_slots), dtype=torch.int32, device=device)

    def _pages_for(self, slots: int) -> int:
        return -(-slots // self.page_size)

    def _allocate(self, num_pages: int, device: torch.device | None) -> list[Tensor]:
        return allocate((num_pages, self.sizes.num_kv_heads, self.page_size), self.codec, self.sizes, device)

    @property
    def nbytes(self) -> int:
        """Pages in use, each once, and the page table."""
        page = sum(buffer.stride(0) * buffer.element_size() for buffer in self.buffers)
        return (len(self.owners) - len(self.free)) * page + self.table.nbytes

    def page_table(self) -> Tensor:
        """The pages of each row, (B, max_pages) int32; 0 after a row's last page."""
        for row in self.changed:
            pages = self.pages[row]
            line = pages + [0] * (self.table.shape[1] - len(pages))
            self.table[row] = torch.tensor(line, dtype=torch.int32)
        self.changed.clear()
        return self.table

    def write(self, held: list[int], counts: list[int], key: Tensor, value: Tensor) -> None:
        """See Storage."""
        batch, size = self.sizes.batch, self.page_size
        stored = self.codec.encode(key, value)
        held = held * batch if len(held) == 1 else held
        counts = counts * batch if len(counts) == 1 else counts
        self._make_pages(held, counts)
        rows = [row for row, count in enumerate(counts) if count]
        if key.shape[2] == 1 and len(rows) > 1:
            places = [self.pages[row][held[row] // size] for row in rows], [held[row] % size for row in rows]
            put_tokens(self.buffers, places, tokens_of(rows, stored))
            return
        for buffer, part in zip(self.buffers, stored, strict=True):
            for row in rows:
                for page, slot, column, count in self._segments(row, held[row], counts[row]):
                    buffer[page].narrow(1, slot, count).copy_(part[row].narrow(1, column, count))

    def _segments(self, row: int, start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Page, slot in it, column of the new positions and number of them, for each page that they reach."""
        column = 0
        while column < count:
            index, slot = divmod(start + column, self.page_size)
            length = min(self.page_size - slot, count - column)
            yield self.pages[row][index], slot, column, length
            column += length

    def _make_pages(self, held: list[int], counts: list[int]) -> None:
        """Gives every row the pages it is about to write into, and to itself alone."""
        size, missing, shared = self.page_size, [], []
        for row, (before, count) in enumerate(zip(held, counts, strict=True)):
            if not count:
                continue
            if before % size and self.owners[self.pages[row][-1]] > 1:
                shared.append(row)
            missing.append((row, self._pages_for(before + count) - len(self.pages[row])))
        self._reserve(sum(number for _, number in missing) + len(shared))
        for row in shared:  # the last of several owners keeps the page
            old = self.pages[row][-1]
            if self.owners[old] > 1:
                new = self._take()
                for buffer in self.buffers:
                    buffer[new].copy_(buffer[old])
                self.owners[old] -= 1
                self.pages[row][-1] = new
                self.changed.add(row)
        for row, number in missing:
            if number:
                self.pages[row].extend(self._take() for _ in range(number))
                self.changed.add(row)

    def _reserve(self, number: int) -> None:
        """Lets the pool grow until ``number`` pages are free."""
        if number <= len(self.free):
            return
        before = len(self.owners)
        after = max(before + number - len(self.free), before + before // 2)
        pools = self._allocate(after, self.buffers[0].device)
        for pool, old in zip(pools, self.buffers, strict=True):
            pool[:before].copy_(old)
        self.buffers = pools
        self.owners += [0] * (after - before)
        self.free += range(after - 1, before - 1, -1)

    def _take(self) -> int:
        page = self.free.pop()
        self.owners[page] = 1
        return page

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                self.free.append(page)

    def read(self, num_slots: int) -> tuple[Tensor, Tensor]:
        """See Storage; a copy."""
        heads = torch.arange(self.sizes.num_kv_heads, device=self.table.device)[:, None]
        pages = self.page_table()[:, None, : self._pages_for(num_slots)].long()  # (B, 1, M), beside heads (B, G, M)
        parts = [buffer[pages, heads].flatten(2, 3) for buffer in self.buffers]
        return self.codec.decode([part.narrow(2, 0, num_slots) for part in parts])

    def roll(self, held: list[int], window: int, room: int) -> list[int]:
        """See Storage; whole pages only, and nothing is moved."""
        spread = held * self.sizes.batch if len(held) == 1 else held
        kept = []
        for row, count in enumerate(spread):
            number = max(0, count - window) // self.page_size
            self._release(self.pages[row][:number])
            del self.pages[row][:number]
            kept.append(count - number * self.page_size)
        self.changed.update(range(self.sizes.batch))
        most = self._pages_for(max(kept, default=0) + room)
        if most > self.table.shape[1]:
            with torch.inference_mode(False):
                self.table = self.table.new_zeros(self.sizes.batch, most)
        return (kept[:1] or held) if len(held) == 1 else kept

    def cut(self, held: list[int]) -> None:
        """See Storage; pages that nobody uses any more are free."""
        for row, count in enumerate(held * self.sizes.batch if len(held) == 1 else held):
            number = self._pages_for(count)
            if number < len(self.pages[row]):
                self._release(self.pages[row][number:])
                del self.pages[row][number:]
                self.changed.add(row)

    def select(self, indices: list[int], num_slots: int) -> None:
        """See Storage; rows share pages instead of copying them."""
        self._point(list(range(self.sizes.batch)), [self.pages[index] for index in indices])

    def share(self, source: int, rows: list[int], num_slots: int) -> None:
        """See Storage; rows share pages instead of copying them."""
        self._point(rows, [self.pages[source][: self._pages_for(num_slots)]] * len(rows))

    def _point(self, rows: list[int], tables: list[list[int]]) -> None:
        """Gives rows the pages of these tables; none is freed that another of the rows gets."""
        for pages in tables:
            for page in pages:
                self.owners[page] += 1
        for row in rows:
            self._release(self.pages[row])
        for row, pages in zip(rows, tables, strict=True):
            self.pages[row] = pages.copy()
        self.changed.update(rows)
