"""What is measured: a case is one shape, one kind of work, one dtype and one set of options.

Levels: ``core`` is attention alone on (B, H, T, D); ``layer`` is self-attention of a whole layer on (B, T, E).
Tasks: ``forward`` (no gradients; evaluation mode for a layer), ``backward`` (the backward pass alone), ``training``
(forward and backward together), ``memory`` (the peak of forward and backward, in a process of its own).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

SUITES = ("core", "layer", "memory")
PRESETS = ("quick", "default", "full")
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        mask: "none", "bool" (a random (T, S) mask), "float" (one that is added), "bias" (one that is added and needs a
            gradient), "padding" (keys to ignore at the end of each example), "bool+padding".
        need_weights: a layer also returns the averaged attention weights.
        length: number of queries.
        key_length: number of keys; 0 for as many as queries.
        kv_heads: number of key/value heads; 0 for as many as query heads.
    """

    level: str
    task: str
    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str = "fp32"
    causal: bool = False
    mask: str = "none"
    dropout: float = 0.0
    need_weights: bool = False
    key_length: int = 0
    kv_heads: int = 0

    @property
    def suite(self) -> str:
        """The group that ``--suite`` selects by."""
        return "memory" if self.task == "memory" else self.level

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.key_length or self.length

    @property
    def embed_dim(self) -> int:
        """Width of the layer."""
        return self.heads * self.head_dim

    @property
    def shape_name(self) -> str:
        """The sizes in a word: B,H,T,D for the core and B,T,E,H for a layer."""
        if self.level == "layer":
            return f"{self.batch},{self.length},{self.embed_dim},{self.heads}"
        length = f"{self.length}" if self.keys == self.length else f"{self.length}:{self.keys}"
        heads = f"{self.heads}" if not self.kv_heads else f"{self.heads}:{self.kv_heads}"
        return f"{self.batch},{heads},{length},{self.head_dim}"

    @property
    def options_name(self) -> str:
        """The options in some words; "full" when there are none."""
        options = ["causal"] if self.causal else []
        options += [self.mask] if self.mask != "none" else []
        options += ["dropout"] if self.dropout else []
        options += ["weights"] if self.need_weights else []
        return " ".join(options) or "full"

    @property
    def name(self) -> str:
        """The name that ``-k`` matches."""
        return f"{self.level} {self.task} {self.shape_name} {self.dtype} {self.options_name}"

    def without_dropout(self) -> Case:
        """The same case with results that do not depend on chance."""
        return replace(self, dropout=0.0)

    def as_json(self) -> dict[str, object]:
        """The case as plain values, from which ``Case(**values)`` makes it again."""
        return asdict(self)


def visible_pairs(case: Case) -> int:
    """Pairs of query and key that a causal mask leaves (all of them without one); other masks are not counted."""
    if not case.causal:
        return case.length * case.keys
    return sum(min(row + 1, case.keys) for row in range(case.length))


def floating_point_operations(case: Case) -> int:
    """Operations of the matrix products that the case asks for, two to a multiply-add.

    Attention: two products forward; five backward, the recomputed scores among them. Projections: one product forward
    and two backward for each of the four.
    """
    attention = 2 * case.batch * case.heads * visible_pairs(case) * case.head_dim
    projections = 2 * 4 * case.batch * case.length * case.embed_dim**2 if case.level == "layer" else 0
    forward = 2 * attention + projections
    backward = 5 * attention + 2 * projections
    return {"forward": forward, "backward": backward}.get(case.task, forward + backward)


def least_bytes(case: Case) -> int:
    """Bytes that must be read and written at least once by the core's forward: query, key, value and output."""
    kv_heads = case.kv_heads or case.heads
    numbers = 2 * case.batch * case.head_dim * (case.heads * case.length + kv_heads * case.keys)
    return numbers * DTYPES[case.dtype].itemsize


def _core(shapes: Iterable[tuple[int, int, int, int]], tasks: Sequence[str], **options: Any) -> list[Case]:
    return [Case("core", task, *shape, **options) for shape in shapes for task in tasks]


def _layer(shapes: Iterable[tuple[int, int, int, int]], tasks: Sequence[str], **options: Any) -> list[Case]:
    return [
        Case("layer", task, batch, heads, length, width // heads, **options)
        for batch, length, width, heads in shapes
        for task in tasks
    ]


_BOTH = ("forward", "backward")
_LAYER_TASKS = ("forward", "training")

# B, H, T, D: the shapes that the speed goals name first, then others of common models.
_GOAL_SHAPES = ((8, 8, 512, 64), (1, 8, 2048, 64), (32, 8, 64, 32))
_MORE_SHAPES = ((1, 8, 128, 64), (4, 12, 197, 64), (2, 16, 1024, 128))
# B, T, E, H
_GOAL_LAYERS = ((8, 512, 512, 8), (1, 2048, 512, 8))
_MORE_LAYERS = ((1, 128, 512, 8), (32, 64, 256, 8))
_LARGE_LAYERS = ((2, 1024, 1024, 16), (16, 192, 768, 12))


def _memory_cases() -> list[Case]:
    long = ((1, 8, 4096, 64),)
    cases = _core(long, ("memory",))
    cases += _core(long, ("memory",), mask="bool+padding")
    cases += _core(long, ("memory",), dropout=0.1)
    cases += _layer(((1, 4096, 512, 8),), ("memory",), causal=True)
    return cases


def _quick() -> list[Case]:
    cases = _core(((2, 4, 128, 64),), _BOTH)
    cases += _core(((2, 4, 128, 64),), _BOTH, causal=True)
    cases += _layer(((2, 128, 256, 4),), _LAYER_TASKS)
    cases += _core(((1, 4, 1024, 64),), ("memory",))
    return cases


def _default() -> list[Case]:
    cases = []
    for causal in (False, True):
        cases += _core((*_GOAL_SHAPES, *_MORE_SHAPES), _BOTH, causal=causal)
    cases += _core(_GOAL_SHAPES[:1], _BOTH, dtype="bf16")
    for options in ({"mask": "bool"}, {"mask": "padding"}, {"dropout": 0.1}):
        cases += _core(_GOAL_SHAPES[:1], _BOTH, **options)
    cases += _layer((*_GOAL_LAYERS, *_MORE_LAYERS), _LAYER_TASKS)
    cases += _layer(_GOAL_LAYERS[:1], _LAYER_TASKS, causal=True)
    cases += _layer(_GOAL_LAYERS[:1], _LAYER_TASKS, need_weights=True)
    return cases + _memory_cases()


def _full() -> list[Case]:
    cases = _default()
    for dtype in ("bf16", "fp16", "fp64"):
        for causal in (False, True):
            cases += _core((*_GOAL_SHAPES, *_MORE_SHAPES), _BOTH, dtype=dtype, causal=causal)
    for options in ({"mask": "float"}, {"mask": "bias"}, {"mask": "padding", "causal": True}):
        cases += _core(_GOAL_SHAPES[:2], _BOTH, **options)
    cases += _core(((1, 32, 1, 128), (4, 32, 1, 128)), ("forward",), key_length=2048)
    cases += _core(((1, 32, 1, 128), (4, 32, 1, 128), (1, 32, 512, 128)), ("forward",), key_length=2048, kv_heads=8)
    cases += _layer(_LARGE_LAYERS, _LAYER_TASKS)
    layers = (*_GOAL_LAYERS, *_MORE_LAYERS, *_LARGE_LAYERS)
    cases += _layer(layers, _LAYER_TASKS, need_weights=True)
    cases += _layer(layers, _LAYER_TASKS, mask="padding")
    cases += _layer(layers, _LAYER_TASKS, dtype="bf16")
    cases += _layer(_GOAL_LAYERS, ("training",), dropout=0.1)
    return list(dict.fromkeys(cases))


def preset(name: str) -> list[Case]:
    """Returns the cases of a preset, "quick", "default" or "full"."""
    return {"quick": _quick, "default": _default, "full": _full}[name]()


def select(
    cases: Iterable[Case], *, words: Sequence[str] = (), dtypes: Sequence[str] = (), suites: Sequence[str] = ()
) -> list[Case]:
    """Returns the cases whose name contains every word and whose dtype and suite are among those given, if any."""
    return [
        case
        for case in cases
        if all(word.lower() in case.name.lower() for word in words)
        and (not dtypes or case.dtype in dtypes)
        and (not suites or case.suite in suites)
    ]
