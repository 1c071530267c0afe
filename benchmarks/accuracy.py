"""How far the results are from exact ones: largest and root mean square error, ours beside PyTorch's own function.

Exact means the equations in the next wider type on the same inputs: float64 for float32, and for float64 the
processor's extended precision (64 bits of mantissa on x86) where NumPy has it. Errors are in units of the unit roundoff
times the largest magnitude of a head's exact result. A largest error is a matter of chance: it is taken head by head,
and the heads' differences say how far their mean may be off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import mha_ext
from benchmarks.cases import DTYPES

RESULTS = ("output", "gradient of query", "gradient of key", "gradient of value")
# B, H, T, D; every head is a sample. Extended precision has no library product: float64 is measured on small ones.
_SHAPES = {
    "fp32": ((1, 16, 64, 32), (1, 16, 128, 64), (1, 8, 197, 64), (1, 6, 512, 64), (1, 6, 512, 128), (1, 3, 2048, 64)),
    "fp64": ((1, 8, 64, 32), (1, 3, 197, 64)),
}
_QUICK_SHAPES = {"fp32": ((1, 4, 64, 32),), "fp64": ((1, 2, 64, 32),)}
_SEED = 0

Attention = Callable[..., Tensor]
Results = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Cell:
    """The errors of one result of one shape.

    Attributes:
        ours: mean of the heads' largest errors, and root mean square error.
        torch: the same of PyTorch's function.
        chance: two standard errors of the mean difference of the heads' largest errors.
    """

    shape: str
    options: str
    dtype: str
    result: str
    ours: tuple[float, float]
    torch: tuple[float, float]
    chance: float = 0.0

    @property
    def passes(self) -> bool:
        """Whether our root mean square error is at most PyTorch's, and our largest error too but for chance."""
        return self.ours[0] <= self.torch[0] + self.chance and self.ours[1] <= self.torch[1]


def cell_from_json(values: dict[str, Any]) -> Cell:
    """Makes a cell again from its values in a file, where pairs are lists."""
    return Cell(**{**values, "ours": tuple(values["ours"]), "torch": tuple(values["torch"])})


def wider(dtype: str) -> type[np.floating] | None:
    """Returns the type that exact results are computed in, or None where there is none wide enough."""
    if dtype == "fp32":
        return np.float64
    return np.longdouble if np.finfo(np.longdouble).nmant >= 63 else None


def exact(arguments: Sequence[Tensor], grad_output: Tensor, causal: bool, wide: type[np.floating]) -> Results:
    """Returns output and gradients of query, key and value, (..., T, D), by the equations in the type ``wide``."""
    query, key, value, grad = (tensor.numpy().astype(wide) for tensor in (*arguments, grad_output))
    scale = 1 / np.sqrt(wide(query.shape[-1]))
    scores = scale * (query @ key.swapaxes(-1, -2))
    if causal:
        scores[..., np.triu(np.ones(scores.shape[-2:], dtype=bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    grad_weights = grad @ value.swapaxes(-1, -2)
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdims=True))
    return (
        weights @ value,
        scale * (grad_scores @ key),
        scale * (grad_scores.swapaxes(-1, -2) @ query),
        weights.swapaxes(-1, -2) @ grad,
    )


def _computed(attention: Attention, arguments: Sequence[Tensor], grad_output: Tensor, causal: bool) -> Results:
    leaves = [tensor.clone().requires_grad_() for tensor in arguments]
    output = attention(*leaves, is_causal=causal)
    gradients = torch.autograd.grad(output, leaves, grad_output)
    return tuple(tensor.detach().numpy() for tensor in (output, *gradients))


def _errors(found: np.ndarray, wanted: np.ndarray, unit: float) -> tuple[float, float]:
    """The largest and the mean square error of a head."""
    error = (found.astype(wanted.dtype) - wanted) / (unit * np.abs(wanted).max())
    return float(np.abs(error).max()), float((error * error).mean())


def _cell(errors: np.ndarray) -> dict[str, Any]:
    """A cell's numbers from (head, ours and PyTorch's, largest and mean square)."""
    mean = errors.mean(0)
    difference = errors[:, 0, 0] - errors[:, 1, 0]
    pairs = [(float(largest), math.sqrt(square)) for largest, square in mean]
    return {"ours": pairs[0], "torch": pairs[1], "chance": float(2 * difference.std(ddof=1) / math.sqrt(len(errors)))}


def _cells(shape: tuple[int, int, int, int], dtype: str, causal: bool, wide: type[np.floating]) -> list[Cell]:
    generator = torch.Generator().manual_seed(_SEED)
    *arguments, grad_output = (torch.randn(shape, generator=generator, dtype=DTYPES[dtype]) for _ in range(4))
    functions = (mha_ext.functional.scaled_dot_product_attention, F.scaled_dot_product_attention)
    computed = [_computed(function, arguments, grad_output, causal) for function in functions]
    unit = torch.finfo(DTYPES[dtype]).eps / 2
    errors = np.empty((len(RESULTS), shape[1], len(functions), 2))
    for head in range(shape[1]):  # one at a time: a head's weights alone are many times its inputs
        wanted = exact([tensor[:, head] for tensor in arguments], grad_output[:, head], causal, wide)
        for place, want in enumerate(wanted):
            errors[place, head] = [_errors(found[place][:, head], want, unit) for found in computed]
    sizes, options = ",".join(map(str, shape)), "causal" if causal else "full"
    return [Cell(sizes, options, dtype, name, **_cell(of)) for name, of in zip(RESULTS, errors, strict=True)]


def measure(quick: bool = False) -> list[Cell]:
    """Measures every cell; takes seconds. Types without a wider one are left out."""
    cells: list[Cell] = []
    for dtype, shapes in (_QUICK_SHAPES if quick else _SHAPES).items():
        wide = wider(dtype)
        if wide is None:
            continue
        for shape in shapes:
            for causal in (False, True):
                cells += _cells(shape, dtype, causal, wide)
    return cells
