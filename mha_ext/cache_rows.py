"""How many positions each row of a key/value cache holds, where they lie, and which of them a query sees."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Rows"]


class Rows:
    """Of a row's ``dropped + held`` positions the last ``held``, which lie in its slots 0 ... held - 1.

    The lists have one entry a row, or a single one where all rows agree: then a step of decoding costs no loop.

    Attributes:
        held: number of positions that are still there.
        dropped: number of positions before them that a rolling cache has given up.
        padding: how many of the positions appended last were padding.
        made_in_export: torch.export follows them from the start.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.held = [0]
        self.dropped = [0]
        self.padding = [0]
        self.made_in_export = torch.compiler.is_exporting()

    @property
    def ragged(self) -> bool:
        """Whether rows differ."""
        return len(self.held) > 1

    def each(self, numbers: list[int]) -> list[int]:
        """One number a row, of such a list or of a single number."""
        return numbers * self.batch if len(numbers) == 1 else numbers

    def lengths(self) -> list[int]:
        """Number of positions of each row, those that were dropped included; a single number where rows agree."""
        return [held + dropped for held, dropped in zip(self.held, self.dropped, strict=True)]

    def ends(self, counts: list[int]) -> list[int]:
        """The slot after the last one when each row takes ``counts`` more."""
        if len(counts) == len(self.held):
            return [held + count for held, count in zip(self.held, counts, strict=True)]
        return [held + count for held, count in zip(self.each(self.held), self.each(counts), strict=True)]

    def assign(self, held: list[int], dropped: list[int], padding: list[int]) -> None:
        """Sets the three lists, of one entry or of one a row each, and joins the rows where all agree."""
        if all(number == numbers[0] for numbers in (held, dropped, padding) for number in numbers):
            held, dropped, padding = held[:1], dropped[:1], padding[:1]
        else:
            held, dropped, padding = self.each(held), self.each(dropped), self.each(padding)
        self.held, self.dropped, self.padding = held, dropped, padding

    def append(self, ends: list[int], counts: list[int], num_positions: int) -> None:
        """Rows go to ``ends`` by ``counts`` of the ``num_positions`` that were appended; the others were padding."""
        if len(ends) == 1:
            self.held, self.padding = ends, [num_positions - counts[0]]
        else:
            self.assign(ends, self.dropped, [num_positions - count for count in counts])

    def keep(self, held: list[int]) -> None:
        """Only the last ``held`` positions of each row stay: one number for each entry of the lists."""
        lost = [before - now for before, now in zip(self.held, held, strict=True)]
        self.dropped = [dropped + count for dropped, count in zip(self.dropped, lost, strict=True)]
        self.held = held

    def cut(self, lengths: list[int]) -> None:
        """Each row ends at its entry of ``lengths``, which it reaches; a row cut to nothing starts anew."""
        rows = zip(self.each(lengths), self.each(self.dropped), strict=True)
        dropped = [dropped if length else 0 for length, dropped in rows]
        held = [length - lost for length, lost in zip(self.each(lengths), dropped, strict=True)]
        self.assign(held or [0], dropped or [0], [0])

    def select(self, indices: Iterable[int]) -> None:
        """Row b becomes what row ``indices[b]`` was."""
        if self.ragged:
            held, dropped, padding = (
                [numbers[index] for index in indices] for numbers in (self.held, self.dropped, self.padding)
            )
            self.assign(held, dropped, padding)

    def furthest(self) -> int:
        """The most queries that can be asked for: rows' positions up to the last one appended, padding included."""
        return min(length + padding for length, padding in zip(self.lengths(), self.padding, strict=True))

    def blind(self, num_queries: int, window: int) -> int | None:
        """A row in which one of the last ``num_queries`` positions sees what has been dropped, or None."""
        for row, (held, dropped, padding) in enumerate(zip(self.held, self.dropped, self.padding, strict=True)):
            if dropped and padding < num_queries and held + padding - num_queries + 1 < window:
                return row
        return None

    def positions(self, num_queries: int, device: torch.device) -> Tensor:
        """The numbers of the last ``num_queries`` positions appended: (T,), or (B, T) where rows differ."""
        first = [length + padding - num_queries for length, padding in zip(self.lengths(), self.padding, strict=True)]
        if len(first) == 1:
            return torch.arange(first[0], first[0] + num_queries, device=device)
        return torch.tensor(first, device=device)[:, None] + torch.arange(num_queries, device=device)

    def key_range(self, num_queries: int, window: int | None, device: torch.device) -> Tensor:
        """First slot that each of the last ``num_queries`` positions sees, and the one after the last: (2, 1 or B, T).

        int32; padding sees nothing.
        """
        if num_queries == 1:
            return torch.tensor(self._last_range(window), dtype=torch.int32, device=device).unsqueeze(-1)
        held = torch.tensor(self.held, dtype=torch.int32, device=device)[:, None]
        ends = torch.tensor(self.ends(self.padding), dtype=torch.int32, device=device)[:, None]
        stop = ends + torch.arange(1 - num_queries, 1, dtype=torch.int32, device=device)
        start = torch.zeros_like(stop) if window is None else (stop - window).clamp_(min=0)
        return torch.stack((start, stop)).mul_(stop <= held)

    def _last_range(self, window: int | None) -> tuple[list[int], list[int]]:
        stop = [0 if padding else held for held, padding in zip(self.held, self.padding, strict=True)]
        return [0 if window is None else max(0, end - window) for end in stop], stop
