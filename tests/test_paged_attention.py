"""Attention on pages, against the same keys and values gathered into one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from switches import cpu_capability, threads
from torch import Tensor
from torch.func import grad, jvp

import mha_ext
from mha_ext import _ops

BATCH, KV_HEADS, HEADS, LENGTHS = 3, 2, 6, [150, 33, 1]


def pages(size: int, dim: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A pool in which rows lie in any order, NaN wherever no row has a key, and rows 0 and 1 share their first page."""
    generator = torch.Generator().manual_seed(seed)
    need = [-(-length // size) for length in LENGTHS]
    names = (torch.randperm(sum(need) + 3, generator=generator)).tolist()
    table = torch.full((BATCH, max(need) + 1), 2**30, dtype=torch.int32)  # behind a row's pages: never looked at
    pools = [torch.full((len(names), KV_HEADS, size, width), torch.nan, dtype=dtype) for width in (dim, dim + 3)]
    for row, length in enumerate(LENGTHS):
        for page in range(need[row]):
            table[row, page] = table[0, 0] if (row, page) == (1, 0) else names.pop()
            filled = min(size, length - page * size)
            for pool in pools:
                part = pool[int(table[row, page])]
                part[:, :filled] = torch.randn(KV_HEADS, filled, part.shape[-1], generator=generator).to(dtype)
    used = max(need)
    table[table == 2**30] = 0
    return pools[0], pools[1], table[:, :used].contiguous()


def gathered(pool: Tensor, table: Tensor) -> Tensor:
    return torch.stack([torch.cat([pool[page] for page in row], 1) for row in table.tolist()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [16, 48, 256])
@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("capability", mha_ext.available_cpu_capabilities())
def test_pages_are_read_as_if_they_lay_side_by_side(
    capability: str, queries: int, size: int, dtype: torch.dtype
) -> None:
    key, value, table = pages(size, 64, dtype, seed=queries)
    query = torch.randn(BATCH, HEADS, queries, 64).to(dtype)
    stop = torch.tensor(LENGTHS, dtype=torch.int32)[:, None].expand(BATCH, queries)
    key_range = torch.stack((torch.clamp(stop - 40, min=0), stop))
    sink = torch.randn(HEADS)
    full = (gathered(key, table), gathered(value, table))
    with cpu_capability(capability):
        found = _ops.paged_attention(query, key, value, table, key_range, sink, softcap=2.0)
        expected = _ops.attention(query, *full, key_range=key_range, sink=sink, softcap=2.0)
    exact = _ops.attention(
        query.double(), *(x.double() for x in full), key_range=key_range, sink=sink.double(), softcap=2.0
    )
    for ours, side_by_side, right in zip(found, expected, exact, strict=True):
        assert ours.isfinite().all()
        # Cut into other tiles, sums come in another order: no further from the exact value than twice what the same
        # kernel is on one tensor, and a rounding of the result.
        error = (side_by_side - right).abs().max()
        rounding = torch.finfo(ours.dtype).eps * right.abs().max()
        assert (ours - right).abs().max() <= 2 * error + rounding


@torch.no_grad()
def test_the_number_of_threads_does_not_matter() -> None:
    key, value, table = pages(16, 32, torch.float32, seed=9)
    query = torch.randn(BATCH, HEADS, 1, 32)
    stop = torch.tensor(LENGTHS, dtype=torch.int32)[:, None]
    key_range = torch.stack((torch.zeros_like(stop), stop))
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(_ops.paged_attention(query, key, value, table, key_range)[0])
    assert torch.equal(*results)


def call(**changes: Any) -> Any:
    key, value, table = pages(16, 8, torch.float32, seed=0)
    stop = torch.tensor(LENGTHS, dtype=torch.int32)[:, None]
    given = {"query": torch.randn(BATCH, HEADS, 1, 8), "key_pages": key, "value_pages": value, "page_table": table}
    given["key_range"] = torch.stack((torch.zeros_like(stop), stop))
    return _ops.paged_attention(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"page_table": torch.full((BATCH, 10), 99, dtype=torch.int32)},
            ValueError,
            r"page_table must have entries in",
        ),
        ({"page_table": torch.full((BATCH, 10), -1, dtype=torch.int32)}, ValueError, r"page_table .* got -1"),
        ({"page_table": torch.zeros(BATCH, 10)}, TypeError, "page_table must be int32, got Float"),
        (
            {"page_table": torch.zeros(2, 10, dtype=torch.int32)},
            ValueError,
            "page_table must have query's batch size 3",
        ),
        ({"page_table": torch.zeros(BATCH, 2, dtype=torch.int32)}, ValueError, "key_range must end within .* got 150"),
        ({"query": torch.randn(BATCH, 5, 1, 8)}, ValueError, "key_pages must have a number of heads that divides"),
        ({"value_pages": torch.randn(2, 2, 16, 8)}, ValueError, "value_pages must have key_pages'"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive"),
        ({"query": torch.randn(BATCH, HEADS, 1, 8, requires_grad=True)}, NotImplementedError, "derivatives"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"paged_attention: .*{message}"):
        call(**changes)


@pytest.mark.parametrize("kind", ["backward", "torch.func.grad", "torch.func.jvp"])
def test_pages_of_a_cache_have_no_derivatives(kind: str) -> None:
    """The error names what has: attention on the gathered pages."""
    query, pool = torch.randn(1, 2, 1, 4), torch.randn(3, 2, 4, 4)
    table, key_range = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([[[0]], [[5]]], dtype=torch.int32)

    def total(q: Tensor) -> Tensor:
        return _ops.paged_attention(q, pool, pool, table, key_range)[0].sum()

    calls = {
        "backward": lambda: total(query.clone().requires_grad_()),
        "torch.func.grad": lambda: grad(total)(query),
        "torch.func.jvp": lambda: jvp(total, (query,), (query,)),
    }
    with pytest.raises(NotImplementedError, match=r"paged_attention: .*gather the pages and call attention"):
        calls[kind]()
