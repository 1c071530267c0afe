"""Which cases each preset holds; ``goals`` is everything that a figure of ``benchmarks/goals.py`` is read from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cases import DERIVATIVES, HALF, Case

PRESETS = ("quick", "default", "full", "goals")

_BOTH = ("forward", "backward")
_LAYER_TASKS = ("forward", "training")

# B, H, T, D: the shapes that the speed goals name first, then others of common models.
_GOAL_SHAPES = ((8, 8, 512, 64), (1, 8, 2048, 64), (32, 8, 64, 32))
_MORE_SHAPES = ((1, 8, 128, 64), (4, 12, 197, 64), (2, 16, 1024, 128))
CORE_SHAPES = (*_GOAL_SHAPES, *_MORE_SHAPES)
# B, T, E, H
_GOAL_LAYERS = ((8, 512, 512, 8), (1, 2048, 512, 8))
_MORE_LAYERS = ((1, 128, 512, 8), (32, 64, 256, 8))
_LARGE_LAYERS = ((2, 1024, 1024, 16), (16, 192, 768, 12))
LAYER_SHAPES = (*_GOAL_LAYERS, *_MORE_LAYERS, *_LARGE_LAYERS)

ODD_LENGTHS = (1, 7, 33, 100, 197, 333, 1000, 4096)
ODD_WIDTHS = (40, 72, 80, 96, 112, 160, 256)
# T_q, T_kv, D
_UNEQUAL_LENGTHS = ((7, 197, 96), (33, 333, 80), (333, 33, 72), (1000, 197, 160), (100, 1000, 256))
_LAYER_LENGTHS = (1, 7, 16, 33, 64, 100, 197, 333, 512, 1000)
_MANY_PAIRS = 200_000  # of query and key; shapes with more get few heads, so that a round takes milliseconds

_ONE_HEAD = (1, 1, 4096, 64)
_LONG = (1, 8, 4096, 64)
_LONGEST = (1, 8, 16384, 64)
_MASK_LENGTH = 2048  # where memory of masks and weights is measured: (T, S) is 16 MiB
MASK_SHAPES = ("", "HTS", "B11S", "11TS")
_STEP_LAYER = (1, 1024, 512, 8)
_ONE_TOKEN = (1, 1, 128, 8)
_WINDOW = 256


def _core(shapes: Iterable[tuple[int, int, int, int]], tasks: Sequence[str], **options: Any) -> list[Case]:
    return [Case("core", task, *shape, **options) for shape in shapes for task in tasks]


def _layer(shapes: Iterable[tuple[int, int, int, int]], tasks: Sequence[str], **options: Any) -> list[Case]:
    return [
        Case("layer", task, batch, heads, length, width // heads, **options)
        for batch, length, width, heads in shapes
        for task in tasks
    ]


def _odd_shape(length: int, width: int, key_length: int = 0) -> tuple[int, int, int, int]:
    pairs = length * (key_length or length)
    batch, heads = (8, 8) if pairs < _MANY_PAIRS // 16 else (2, 4) if pairs < _MANY_PAIRS else (1, 2)
    return batch, heads, length, width


def _odd_sizes() -> list[Case]:
    """Every length and every width, forward and backward, full and causal: a covering choice, not the product."""
    cases = []
    for shift, causal in ((0, False), (3, True)):
        for place, length in enumerate(ODD_LENGTHS):
            width = ODD_WIDTHS[(place + shift) % len(ODD_WIDTHS)]
            cases += _core((_odd_shape(length, width),), _BOTH, causal=causal)
    for place, (queries, keys, width) in enumerate(_UNEQUAL_LENGTHS):
        shape = _odd_shape(queries, width, keys)
        cases += _core((shape,), _BOTH, key_length=keys, causal=place % 2 == 1)
    return cases


def _masked(shapes: Iterable[tuple[int, int, int, int]], masks: Sequence[str], **options: Any) -> list[Case]:
    return [case for mask in masks for case in _core(shapes, _BOTH, mask=mask, beside="unmasked", **options)]


def _visible_tiles() -> list[Case]:
    cases = _masked(_GOAL_SHAPES[1:2], ("half padding", "window"))
    return cases + _masked(_GOAL_SHAPES[1:2], ("half padding",), causal=True)


def _dropout() -> list[Case]:
    cases = _core(_GOAL_SHAPES[:2], ("training",), dropout=0.1, beside="no dropout")
    return cases + _layer(_GOAL_LAYERS, ("training",), dropout=0.1, beside="no dropout")


def _weights() -> list[Case]:
    options: dict[str, Any] = {"need_weights": True, "beside": "no weights"}
    cases = _layer(_GOAL_LAYERS, _LAYER_TASKS, **options)
    long = ((1, _MASK_LENGTH, 512, 8),)
    for average in (True, False):
        cases += _layer((_STEP_LAYER,), _LAYER_TASKS, average_weights=average, **options)
        for inference in (False, True):
            cases += _layer(long, ("memory",), average_weights=average, inference=inference, **options)
    return cases


def _trained_masks() -> list[Case]:
    shape = ((2, 8, _MASK_LENGTH, 64),)
    return [
        case
        for name in MASK_SHAPES
        for case in _core(shape, ("memory",), mask="bias", mask_shape=name, beside="mask not trained")
    ]


def _memory_cases() -> list[Case]:
    cases = _core((_LONG,), ("memory",))
    cases += _core((_LONG,), ("memory",), mask="bool+padding")
    cases += _core((_LONG,), ("memory",), dropout=0.1, beside="no dropout")
    cases += _core((_LONG,), ("memory",), value_dim=80)
    cases += _core((_LONG,), ("memory",), kv_heads=2)
    return cases


def _more_memory_cases() -> list[Case]:
    cases = []
    for mask in ("bool", "float", "padding"):
        cases += _core((_LONG,), ("memory",), mask=mask)
    cases += _core((_LONG,), ("memory",), causal=True)
    return cases + _core((_LONGEST,), ("memory",), causal=True)


def _half_core() -> list[Case]:
    cases = []
    for dtype in HALF:
        for causal in (False, True):
            cases += _core(CORE_SHAPES, _BOTH, dtype=dtype, causal=causal, beside="float32")
    return cases


def _half_layer(shapes: Iterable[tuple[int, int, int, int]], **options: Any) -> list[Case]:
    return _layer(shapes, _LAYER_TASKS, dtype="bf16", beside="float32", **options)


def _half_memory() -> list[Case]:
    cases = []
    for dtype in HALF:
        cases += _core((_LONG,), ("memory",), dtype=dtype, beside="float32")
    cases += _core((_LONG,), ("memory",), dtype="bf16", causal=True, mask="bool+padding", beside="float32")
    return cases + _layer(((1, 4096, 512, 8),), ("memory",), dtype="bf16", causal=True, beside="float32")


def _variant(
    shape: tuple[int, int, int, int], variant: str, tasks: Sequence[str] = _BOTH, **options: Any
) -> list[Case]:
    return [Case("variant", task, *shape, variant=variant, **options) for task in tasks]


def _variants() -> list[Case]:
    grouped: dict[str, Any] = {"kv_heads": 8, "causal": True, "beside": "repeated keys"}
    cases = _variant((1, 32, 1024, 64), "grouped", **grouped)
    for length in (2048, 8192):
        cases += _variant((1, 8, length, 64), "window", window=_WINDOW, beside="a mask")
    cases += _variant((8, 8, 1024, 64), "packed", causal=True)
    for name in ("alibi", "softcap", "sink"):
        cases += _variant((1, 8, 2048, 64), name, causal=True)
    cases += _variant((1, 32, 4096, 64), "grouped", ("memory",), **grouped)
    cases += _variant((1, 8, 8192, 64), "window", ("memory",), window=_WINDOW, beside="a mask")
    return cases + _variant((8, 8, 2048, 64), "packed", ("memory",), causal=True)


def _decoding() -> list[Case]:
    """One query of 32 heads, with a key/value head each or for four or eight of them."""
    shapes = ((1, 32, 2048, 128), (4, 32, 2048, 128), (1, 8, 4096, 128), (4, 8, 4096, 128), (8, 4, 2048, 128))
    return [
        case
        for batch, kv_heads, keys, width in shapes
        for dtype in ("fp32", *HALF)
        for case in _variant(
            (batch, 32, 1, width), "decode", ("forward",), kv_heads=kv_heads, key_length=keys, dtype=dtype
        )
    ]


def _derivatives() -> list[Case]:
    """Time at two lengths, memory at a third."""
    cases = [
        Case("derivative", "forward", *shape, variant=name, causal=causal)
        for name in DERIVATIVES
        for shape in ((8, 8, 128, 64), (2, 8, 1024, 64))
        for causal in (False, True)
    ]
    memory = [Case("derivative", "memory", *_LONG, variant=name, inference=True) for name in DERIVATIVES]
    return cases + memory


def _more_variants() -> list[Case]:
    cases = _variant((4, 8, 512, 128), "grouped", kv_heads=1, causal=True, beside="repeated keys")
    cases += _variant((32, 8, 256, 64), "packed")
    for name in ("alibi", "softcap", "sink"):
        cases += _variant((1, 8, 4096, 64), name, ("memory",), causal=True)
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
        cases += _core(CORE_SHAPES, _BOTH, causal=causal)
    for dtype in HALF:
        cases += _core(_GOAL_SHAPES[:1], _BOTH, dtype=dtype, beside="float32")
    cases += _core(_GOAL_SHAPES[:1], _BOTH, dtype="fp64")
    cases += _odd_sizes()[4:12]
    cases += _core((_ONE_HEAD,), _BOTH, beside="1 thread")
    cases += _masked(_GOAL_SHAPES[:1], ("bool", "padding"))
    cases += _core(_GOAL_SHAPES[:1], _BOTH, dropout=0.1)
    cases += _visible_tiles()[:4:2]
    cases += _dropout()[:1]
    cases += _layer((*_GOAL_LAYERS, *_MORE_LAYERS), _LAYER_TASKS)
    cases += _layer(_GOAL_LAYERS[:1], _LAYER_TASKS, causal=True)
    cases += [case for case in _weights() if case.average_weights and (case.length != _MASK_LENGTH or case.inference)]
    cases += _layer((_ONE_TOKEN,), ("forward",), beside="two linears")
    cases += _half_layer(_GOAL_LAYERS[:1]) + _half_layer(_GOAL_LAYERS[:1], need_weights=True) + _half_memory()[:1]
    cases += _memory_cases() + _trained_masks()[:1]
    return cases + _layer(((1, 4096, 512, 8),), ("memory",), causal=True) + _variants() + _decoding() + _derivatives()


def _goals() -> list[Case]:
    cases = []
    for dtype in ("fp32", "fp64"):
        for causal in (False, True):
            cases += _core(CORE_SHAPES, _BOTH, dtype=dtype, causal=causal)
    cases += _odd_sizes()
    cases += _core((_ONE_HEAD,), _BOTH, beside="1 thread")
    cases += _masked(_GOAL_SHAPES[:2], ("bool", "float", "padding")) + _visible_tiles()
    cases += _dropout() + _weights() + _trained_masks()
    cases += _layer(LAYER_SHAPES, _LAYER_TASKS)
    cases += _layer([(1, length, 512, 8) for length in _LAYER_LENGTHS], ("forward",))
    cases += _layer((_ONE_TOKEN,), ("forward",), beside="two linears")
    cases += _half_core() + _half_layer(LAYER_SHAPES) + _half_layer(_GOAL_LAYERS, need_weights=True)
    return (
        cases
        + _memory_cases()
        + _more_memory_cases()
        + _half_memory()
        + _variants()
        + _decoding()
        + _more_variants()
        + _derivatives()
    )


def _compiled() -> list[Case]:
    """Small layers, where what a compiled call costs by itself shows, beside the same call uncompiled."""
    shapes = (_ONE_TOKEN, (1, 16, 512, 8), (8, 64, 256, 8))
    cases = _layer(shapes, _LAYER_TASKS, beside="compiled", causal=True)
    return cases + _layer(shapes[1:], ("forward",), beside="compiled", causal=True, need_weights=True)


def _full() -> list[Case]:
    cases = _default() + _goals() + _compiled()
    for options in ({"mask": "float"}, {"mask": "bias"}, {"mask": "padding", "causal": True}):
        cases += _core(_GOAL_SHAPES[:2], _BOTH, **options)
    cases += _core(((1, 32, 1, 128), (4, 32, 1, 128)), ("forward",), key_length=2048)
    cases += _core(((1, 32, 1, 128), (4, 32, 1, 128), (1, 32, 512, 128)), ("forward",), key_length=2048, kv_heads=8)
    cases += _layer(LAYER_SHAPES, _LAYER_TASKS, need_weights=True)
    cases += _layer(LAYER_SHAPES, _LAYER_TASKS, mask="padding")
    cases += _layer(_GOAL_LAYERS, ("training",), dropout=0.1)
    return cases + [replace(case, dtype="bf16") for case in _variants() if case.task != "memory"]


def _unique(cases: Iterable[Case]) -> list[Case]:
    """One case a name, the first: those with something beside them come before those without."""
    found: dict[str, Case] = {}
    for case in cases:
        found.setdefault(case.name, case)
    return list(found.values())


def preset(name: str) -> list[Case]:
    """Returns the cases of a preset, one of ``PRESETS``."""
    return _unique({"quick": _quick, "default": _default, "full": _full, "goals": _goals}[name]())
