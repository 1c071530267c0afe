"""What this machine and its libraries can do at most, measured in the same run as everything else.

Four roofs: multiply-adds in a loop of nothing else (`fma_peak.cpp`), a large matrix product of the library, reads from
memory, and, for each case, the library's own matrix products at the very shapes of the case, which is what attention
would take if it were nothing but products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.cases import DTYPES, Case
from benchmarks.fma_peak import fma_flops

UNMEASURED_PRODUCTS = ("fp16",)  # no yardstick: PyTorch's, without instructions for them, reach 1 to 20 GF/s by layout
_PRODUCT_SIZE = 2048
_READ_BYTES = 1 << 29  # well beyond any cache
_REPEATS = 5


@dataclass(frozen=True)
class Roofs:
    """The machine's limits at the thread count in use.

    Attributes:
        read_bytes: bytes a second read from memory.
        product_flops: floating-point operations a second of a large matrix product, by dtype.
        fma_flops: floating-point operations a second of multiply-adds alone, by dtype; empty without a compiler.
    """

    read_bytes: float
    product_flops: dict[str, float] = field(default_factory=dict)
    fma_flops: dict[str, float] = field(default_factory=dict)

    def most_flops(self, dtype: str) -> float | None:
        """Returns the most floating-point operations a second that were seen in a dtype, or None."""
        seen = [found[dtype] for found in (self.product_flops, self.fma_flops) if dtype in found]
        return max(seen, default=None)


def _best_seconds(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _product_flops(dtype: torch.dtype) -> float:
    left, right = (torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    right = right.mT  # float16 takes twenty times as long as it lies
    return 2 * _PRODUCT_SIZE**3 / _best_seconds(lambda: torch.mm(left, right, out=out))


def _read_bytes() -> float:
    numbers = torch.ones(_READ_BYTES // 4)
    matrix = numbers.view(-1, 1024)
    vector = torch.ones(1024)
    readers = (lambda: numbers.sum(), lambda: numbers.amax(), lambda: matrix @ vector)
    return _READ_BYTES / min(_best_seconds(reader) for reader in readers)


def measure_roofs(dtypes: Iterable[str]) -> Roofs:
    """Measures the machine for the dtypes in use; takes a second or two."""
    names = sorted(set(dtypes))
    products = {name: _product_flops(DTYPES[name]) for name in names}
    return Roofs(_read_bytes(), products, fma_flops(names))


@dataclass(frozen=True)
class LibraryProducts:
    """The matrix products of a case, ready to run, and their floating-point operations."""

    run: Callable[[], object]
    operations: int


def _attention_products(case: Case, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(left, right, out) of the products over the whole (T, S) square: the library cannot skip what a mask forbids."""
    folded = case.batch * case.heads
    square = torch.randn(folded, case.length, case.keys).to(dtype)

    def products(width: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        rows, keys = (torch.randn(folded, length, width).to(dtype) for length in (case.length, case.keys))
        return [
            (rows, keys.mT, torch.empty_like(square)),
            (square, keys, torch.empty_like(rows)),
            (square.mT, rows, torch.empty_like(keys)),
        ]

    scores, onto_queries, onto_keys = products(case.head_dim)
    grad_weights, output, onto_values = products(case.value_width)
    forward = [scores, output]
    backward = [scores, grad_weights, onto_values, onto_keys, onto_queries]
    return {"forward": forward, "backward": backward}.get(case.task, forward + backward)


def _projection_products(case: Case, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    rows, width = case.batch * case.length, case.embed_dim
    products = []
    for outputs in (3 * width, width):
        x, y = (torch.randn(rows, columns).to(dtype) for columns in (width, outputs))
        weight = torch.randn(outputs, width).to(dtype)
        products.append((x, weight.mT, torch.empty_like(y)))
        if case.task != "forward":
            products.append((y, weight, torch.empty_like(x)))
            products.append((y.mT, x, torch.empty_like(weight)))
    return products


def library_products(case: Case) -> LibraryProducts:
    """Returns the library's own matrix products at the shapes of a case, into memory that is already there."""
    dtype = DTYPES[case.dtype]
    products = _attention_products(case, dtype)
    if case.level == "layer":
        products += _projection_products(case, dtype)

    def run() -> None:
        for left, right, out in products:
            torch.matmul(left, right, out=out)

    operations = sum(2 * out.numel() * left.shape[-1] for left, _, out in products)
    return LibraryProducts(run, operations)
