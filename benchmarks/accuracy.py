"""How far the results are from exact ones: largest and root mean square error, ours beside PyTorch's own function.

Exact means the equations in a wider type on the same inputs: float64, and for float64 itself the processor's extended
precision (64 bits of mantissa on x86) where NumPy has it. Errors are in units of the unit roundoff times the largest
magnitude of a head's exact result. A largest error is a matter of chance: it is taken head by head, and the heads'
differences say how far their mean may be off.

In bfloat16 and float16 we are beside the better of PyTorch's two ways, its fused kernel and its composition, number by
number. The composition computes in float32 and rounds once, which nothing can beat by more than float32's own errors.
These are left open: the errors of the equations in float32 on the same inputs, with the gradient of the scores written
as every fused kernel has it (Dao et al., FlashAttention, 2022, equation 4 of the backward pass).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import problems
from benchmarks.cases import DTYPES, HALF
from benchmarks.problems import Attention, Problem, Results

RESULTS = ("output", "gradient of query", "gradient of key", "gradient of value")

_TRIANGLE = ("full", "causal")
_LONG_OPTIONS = ("full", "causal", "peaked", "large")
_SHORT = ((1, 16, 64, 32), (1, 16, 128, 64), (1, 8, 197, 64), (1, 6, 512, 64), (1, 6, 512, 128))
_LONG = ((1, 3, 2048, 64),)
# B, H, T, D; every head is a sample. Extended precision has no library product: float64 is measured on small ones.
_SHAPES = {"fp32": _SHORT + _LONG, "fp64": ((1, 8, 64, 32), (1, 3, 197, 64))}
_HALF_SHAPES = (*_SHORT[:1], *_SHORT[2:])
_QUICK_SHAPES = {"fp32": ((1, 4, 64, 32),), "fp64": ((1, 2, 64, 32),)}


@dataclass(frozen=True)
class Cell:
    """The errors of one result of one shape.

    Attributes:
        ours: mean of the heads' largest errors, and root mean square error.
        torch: the same of PyTorch's function.
        chance: two standard errors of the mean difference of the heads' largest errors.
        open: errors of the equations in float32, where the results are rounded to fewer bits afterwards.
    """

    shape: str
    options: str
    dtype: str
    result: str
    ours: tuple[float, float]
    torch: tuple[float, float]
    chance: float = 0.0
    open: tuple[float, float] = (0.0, 0.0)

    @property
    def allowed(self) -> tuple[float, float]:
        """The most that our errors may be.

        Where PyTorch's are less than float32's, because a composition subtracts a number from itself, float32's count.
        """
        largest, square = (max(theirs, left) + left for theirs, left in zip(self.torch, self.open, strict=True))
        return largest + self.chance, square

    @property
    def passes(self) -> bool:
        """Whether our errors are at most PyTorch's, but for chance and for what float32 leaves open."""
        return self.ours[0] <= self.allowed[0] and self.ours[1] <= self.allowed[1]

    @property
    def share(self) -> float:
        """The larger of our errors as a share of what is allowed: above 1, the cell does not pass."""
        pairs = zip(self.ours, self.allowed, strict=True)
        return max(mine / allowed if allowed else math.inf if mine else 0.0 for mine, allowed in pairs)


def cell_from_json(values: dict[str, Any]) -> Cell:
    """Makes a cell again from its values in a file, where pairs are lists."""
    return Cell(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def wider(dtype: str) -> type[np.floating] | None:
    """Returns the type that exact results are computed in, or None where there is none wide enough."""
    if dtype != "fp64":
        return np.float64
    return np.longdouble if np.finfo(np.longdouble).nmant >= 63 else None


def torch_ways(problem: Problem) -> tuple[Attention, ...]:
    """Returns PyTorch's ways that we are compared with; its fused kernel takes no dropout."""
    if problem.dtype in (torch.float32, torch.float64):
        return (problems.default_way,)
    return (problems.composed,) if problem.dropout else (problems.flash, problems.composed)


def _sizes(problem: Problem, wanted: Results, unit: float) -> list[float]:
    """The magnitude that errors of each result are counted against.

    It is the result's own, unless what the result is a sum of cancels beyond the dtype's bits: rows with one weight
    have gradients of scores that are exactly 0.
    """
    query, key, value = problem.arguments
    terms = (float(tensor.abs().max()) for tensor in (value, key, query, problem.grad_output))
    return [max(float(np.abs(want).max()), unit * term) for want, term in zip(wanted, terms, strict=True)]


def _errors(found: Results, wanted: Results, sizes: Sequence[float], unit: float) -> np.ndarray:
    """The largest and the mean square error of every result of a head, (result, 2)."""
    errors = np.empty((len(RESULTS), 2))
    for place, (got, want, size) in enumerate(zip(found, wanted, sizes, strict=True)):
        error = (got.astype(want.dtype) - want) / (unit * size)
        errors[place] = np.abs(error).max(), (error * error).mean()
    return errors


def _cell(errors: np.ndarray, left_open: np.ndarray) -> dict[str, Any]:
    """A cell's numbers from (head, ours and PyTorch's ways, largest and mean square) and what is open of every head.

    An error of PyTorch's that is not a number is one beyond all bounds; one of ours stays what it is and does not pass.
    """
    errors[:, 1:] = np.nan_to_num(errors[:, 1:], nan=np.inf, posinf=np.inf)
    largest, square = errors.mean(0).T
    best = 1 + int(largest[1:].argmin())
    difference = errors[:, 0, 0] - errors[:, best, 0]
    known = np.isfinite(difference).all()
    return {
        "ours": (float(largest[0]), math.sqrt(square[0])),
        "torch": (float(largest[best]), math.sqrt(square[1:].min())),
        "chance": float(2 * difference.std(ddof=1) / math.sqrt(len(errors))) if known else 0.0,
        "open": (float(left_open[:, 0].mean()), math.sqrt(left_open[:, 1].mean())),
    }


def _cells(shape: tuple[int, int, int, int], dtype: str, option: str, wide: type[np.floating]) -> list[Cell]:
    problem = problems.make_problem(shape, dtype, option)
    computed = [problems.computed(way, problem) for way in (problems.ours, *torch_ways(problem))]
    unit = torch.finfo(DTYPES[dtype]).eps / 2
    errors = np.empty((len(RESULTS), shape[1], len(computed), 2))
    left_open = np.zeros((len(RESULTS), shape[1], 2))
    for number in range(shape[1]):  # one at a time: a head's weights alone are many times its inputs
        head = problem.head(number)
        wanted = problems.equations(head, wide)
        sizes = _sizes(head, wanted, unit)
        for place, results in enumerate(computed):
            found = tuple(problems.numbers(tensor[:, number], wide) for tensor in results)
            errors[:, number, place] = _errors(found, wanted, sizes, unit)
        if dtype in HALF:
            left_open[:, number] = _errors(problems.equations(head, np.float32), wanted, sizes, unit)
    name = ",".join(map(str, shape))
    return [
        Cell(name, option, dtype, result, **_cell(errors[place], left_open[place]))
        for place, result in enumerate(RESULTS)
    ]


def grid(quick: bool = False) -> Iterator[tuple[tuple[int, int, int, int], str, str]]:
    """Yields shape, dtype and option of every problem; of the longest shape only options that its length bears on."""
    for dtype, shapes in (_QUICK_SHAPES if quick else _SHAPES).items():
        yield from ((shape, dtype, option) for shape in shapes for option in _TRIANGLE)
    for dtype in HALF:
        for shape in _QUICK_SHAPES["fp32"] if quick else _HALF_SHAPES:
            yield from ((shape, dtype, option) for option in problems.OPTIONS)
        for shape in () if quick else _LONG:
            yield from ((shape, dtype, option) for option in _LONG_OPTIONS)


def measure(quick: bool = False) -> list[Cell]:
    """Measures every cell; takes seconds, or a minute. Types without a wider one are left out."""
    cells: list[Cell] = []
    for shape, dtype, option in grid(quick):
        wide = wider(dtype)
        if wide is not None:
            cells += _cells(shape, dtype, option, wide)
    return cells
