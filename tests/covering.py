"""Few combinations that hold every pair of values: a covering array, chosen greedily and always the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Combinations of one value a factor, such that every two values of two factors meet in one of them."""
    values = {name: list(dict.fromkeys(choices)) for name, choices in factors.items()}
    order = {name: place for place, name in enumerate(values)}

    def pair(*two: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
        return tuple(sorted(two, key=lambda item: order[item[0]]))

    missing = {
        pair((a, x), (b, y)): None
        for a, b in itertools.combinations(values, 2)
        for x, y in itertools.product(values[a], values[b])
    }
    rng, rows = random.Random(seed), []
    while missing:
        row = dict(rng.choice(list(missing)))
        for name in sorted(values, key=lambda name: rng.random()):
            if name not in row:
                gain = {
                    value: sum(pair((name, value), other) in missing for other in row.items()) for value in values[name]
                }
                best = max(gain.values())
                row[name] = rng.choice([value for value in values[name] if gain[value] == best])
        for two in itertools.combinations(row.items(), 2):
            missing.pop(pair(*two), None)
        rows.append(row)
    return rows
