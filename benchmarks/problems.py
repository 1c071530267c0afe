"""What the table of errors is measured on: inputs with one option each, exact results, and who computes them.

Exact means the equations in a wider type on the very inputs that are handed over, rounded to the measured dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mha_ext
from benchmarks.cases import DTYPES

OPTIONS = ("full", "causal", "peaked", "large", "bool", "float", "dropout")

_SEED = 0
_PEAKED = 16.0  # times the query: scores of deviation 16, of which the largest takes nearly the whole row
_LARGE = 4096.0  # times query and key: scores of deviation 2^24, beyond float16's 65504; one weight a row is 1
_VISIBLE_SHARE = 0.8
_DROPOUT = 0.25
_EYE_WIDTH = 256  # columns of the identity in one call: the widest value head

Attention = Callable[["Problem", Sequence[Tensor]], Tensor]
Results = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Problem:
    """Inputs of one call.

    Attributes:
        arguments: query, key and value, (1, H, T, D).
        grad_output: gradient of the output, (1, H, T, D).
        mask: None, or (T, T): bool with True = may attend, or float, added.
        kept: (1, H, T, T) bool, the pairs that our dropout of this seed keeps; None without dropout.
    """

    arguments: tuple[Tensor, Tensor, Tensor]
    grad_output: Tensor
    causal: bool = False
    mask: Tensor | None = None
    kept: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """That of query, key and value."""
        return self.arguments[0].dtype

    @property
    def dropout(self) -> float:
        """Probability that a pair is dropped."""
        return 0.0 if self.kept is None else _DROPOUT

    def head(self, number: int) -> Problem:
        """The same with one head alone, (1, T, D)."""
        query, key, value = (tensor[:, number] for tensor in self.arguments)
        kept = None if self.kept is None else self.kept[:, number]
        return replace(self, arguments=(query, key, value), grad_output=self.grad_output[:, number], kept=kept)


def make_problem(shape: tuple[int, int, int, int], dtype: str, option: str) -> Problem:
    """Makes the inputs of (B, H, T, D) with one of ``OPTIONS``; the same call always makes the same ones."""
    generator = torch.Generator().manual_seed(_SEED)
    query, key, value, grad_output = (torch.randn(shape, generator=generator, dtype=DTYPES[dtype]) for _ in range(4))
    length = shape[2]
    if option == "peaked":
        query = query * _PEAKED
    if option == "large":
        query, key = query * _LARGE, key * _LARGE
    mask = None
    if option == "bool":
        mask = torch.rand(length, length, generator=generator) < _VISIBLE_SHARE
        mask[:, 0] = True  # PyTorch's paths differ on a query that sees nothing
    if option == "float":
        mask = torch.randn(length, length, generator=generator, dtype=DTYPES[dtype])
    kept = kept_pairs(shape) if option == "dropout" else None
    return Problem((query, key, value), grad_output, option == "causal", mask, kept)


@lru_cache
def kept_pairs(shape: tuple[int, int, int, int]) -> Tensor:
    """Returns the pairs that our dropout keeps, (B, H, T, T) bool, read from its output on an identity."""
    batch, heads, length, _ = shape
    zeros = torch.zeros(batch, heads, length, 1)
    found = []
    for columns in torch.eye(length).split(_EYE_WIDTH, dim=1):
        found.append(_seeded(zeros, zeros, columns.expand(batch, heads, -1, -1), dropout_p=_DROPOUT) != 0)
    return torch.cat(found, -1)


def _seeded(*arguments: Tensor | None, **options: Any) -> Tensor:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        return mha_ext.functional.scaled_dot_product_attention(*arguments, **options)  # type: ignore[arg-type]


def numbers(tensor: Tensor, wide: type[np.floating]) -> np.ndarray:
    """Returns a tensor's numbers in the type ``wide``; NumPy has no bfloat16."""
    narrow = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return narrow.numpy().astype(wide)


def equations(problem: Problem, wide: type[np.floating]) -> Results:
    """Returns output and gradients of query, key and value, (..., T, D), by the equations in the type ``wide``."""
    query, key, value, grad = (numbers(tensor, wide) for tensor in (*problem.arguments, problem.grad_output))
    scale = 1 / np.sqrt(wide(query.shape[-1]))
    weights = scale * (query @ key.swapaxes(-1, -2))
    if problem.mask is not None and problem.mask.dtype == torch.bool:
        weights[..., ~problem.mask.numpy()] = -np.inf
    elif problem.mask is not None:
        weights += numbers(problem.mask, wide)
    if problem.causal:
        weights[..., np.triu(np.ones(weights.shape[-2:], dtype=bool), 1)] = -np.inf
    weights -= weights.max(-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(-1, keepdims=True)
    grad_scores = grad @ value.swapaxes(-1, -2)
    dropped = weights
    if problem.kept is not None:
        kept = problem.kept.numpy() / (1 - wide(problem.dropout))
        grad_scores *= kept
        dropped = kept * weights
    output = dropped @ value
    grad_scores -= (grad * output).sum(-1, keepdims=True)
    grad_scores *= weights
    return (
        output,
        scale * (grad_scores @ key),
        scale * (grad_scores.swapaxes(-1, -2) @ query),
        dropped.swapaxes(-1, -2) @ grad,
    )


def computed(attention: Attention, problem: Problem) -> tuple[Tensor, ...]:
    """Returns output and gradients of query, key and value by a function."""
    leaves = [tensor.clone().requires_grad_() for tensor in problem.arguments]
    output = attention(problem, leaves)
    gradients = torch.autograd.grad(output, leaves, problem.grad_output)
    return tuple(tensor.detach() for tensor in (output, *gradients))


def ours(problem: Problem, leaves: Sequence[Tensor]) -> Tensor:
    """Our function, with the seed that ``problem.kept`` was read with."""
    return _seeded(*leaves, problem.mask, dropout_p=problem.dropout, is_causal=problem.causal)


def default_way(problem: Problem, leaves: Sequence[Tensor]) -> Tensor:
    """PyTorch's function as it dispatches itself."""
    query, key, value = leaves
    return F.scaled_dot_product_attention(query, key, value, problem.mask, is_causal=problem.causal)


def flash(problem: Problem, leaves: Sequence[Tensor]) -> Tensor:
    """PyTorch's function held to its fused kernel, which takes no dropout."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return default_way(problem, leaves)


def composed(problem: Problem, leaves: Sequence[Tensor]) -> Tensor:
    """PyTorch's function held to its composition, which takes the pairs that our dropout keeps (and warns once)."""
    if problem.kept is None:
        with sdpa_kernel(SDPBackend.MATH):
            return default_way(problem, leaves)
    output: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        *leaves, problem.mask, problem.dropout, problem.causal, problem.kept
    )[0]
    return output
