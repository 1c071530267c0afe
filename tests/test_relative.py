"""Slopes and bucketed biases against scalar loops written from the papers, their layout, derivatives and errors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from cases import generator
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from mha_ext.functional import alibi_slopes_for, bucketed_relative_bias, scaled_dot_product_attention


# --------------------------------------------------------------------------------------------------------------- slopes
def slopes_of_the_paper(num_heads: int) -> list[float]:
    """The appendix of the paper: a geometric series that starts with its own ratio, 2^(-8/n)."""

    def series(n: int) -> list[float]:
        ratio, slopes = 2.0 ** (-8.0 / n), [2.0 ** (-8.0 / n)]
        while len(slopes) < n:
            slopes.append(slopes[-1] * ratio)
        return slopes

    if math.log2(num_heads).is_integer():
        return series(num_heads)
    power = 2 ** math.floor(math.log2(num_heads))
    return series(power) + slopes_of_the_paper(2 * power)[0::2][: num_heads - power]


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 7, 8, 9, 12, 16, 31, 40, 64, 100])
def test_slopes(num_heads: int) -> None:
    got = alibi_slopes_for(num_heads)
    assert got.shape == (num_heads,) and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.tensor(slopes_of_the_paper(num_heads)).double(), rtol=1e-6, atol=0)


def test_slopes_of_eight_heads_by_hand() -> None:
    assert alibi_slopes_for(8).tolist() == [2.0**-n for n in range(1, 9)]


# -------------------------------------------------------------------------------------------------------------- buckets
def bucket(distance: int, bidirectional: bool, num_buckets: int, max_distance: int) -> int:
    """One distance, key's position less query's, by the rule of the paper's code, in Python's floats.

    A quotient of logarithms within 1e-9 of a whole number is that number: 16 = 8 · 2 is the start of a bucket.
    """
    first = 0
    if bidirectional:
        num_buckets //= 2
        if distance > 0:
            first = num_buckets
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    steps = math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    return first + min(exact + math.floor(steps + 1e-9), num_buckets - 1)


RULES = [(32, 128), (32, 20), (8, 16), (6, 5), (4, 2), (64, 1000), (10, 77), (256, 2048)]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), RULES)
@pytest.mark.parametrize(
    ("queries", "keys", "offset"), [(7, 5, 0), (1, 300, 299), (300, 300, 0), (4, 9, -3), (3, 1, 5)]
)
def test_buckets(
    queries: int, keys: int, offset: int, num_buckets: int, max_distance: int, bidirectional: bool
) -> None:
    """Every pair of a T x S matrix finds its own bucket's number where the documented layout puts it."""
    if not bidirectional:
        num_buckets, max_distance = num_buckets // 2, max(max_distance, num_buckets // 4 + 1)
    table = torch.randn(num_buckets, 3, generator=generator(1))
    options: dict[str, Any] = {"bidirectional": bidirectional, "max_distance": max_distance}
    got = bucketed_relative_bias(table, queries, keys, **options, offset=offset)
    assert got.shape == (3, queries + keys - 1) and got.dtype == table.dtype
    for i in range(queries):
        for j in {0, keys - 1, keys // 2, min(i, keys - 1)}:
            want = table[bucket(j - (i + offset), bidirectional, num_buckets, max_distance)]
            assert torch.equal(got[:, j - i + queries - 1], want), (i, j)


def test_buckets_of_t5_by_hand() -> None:
    """T5's 32 buckets up to 128, as its paper describes them: 8 exact ones a side; 8, 12, 16, 23, 32, 46, 64 and 91
    start the others."""
    table = torch.arange(32.0).unsqueeze(1)
    back = bucketed_relative_bias(table, 300, 1)[0].flip(0).tolist()  # distances 0 ... 299 behind
    starts = [n for n in range(300) if n == 0 or back[n] != back[n - 1]]
    assert starts == [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    ahead = bucketed_relative_bias(table, 1, 300)[0].tolist()
    assert ahead[1:] == [n + 16 for n in back[1:]] and ahead[0] == 0


@pytest.mark.parametrize(("queries", "keys", "offset"), [(5, 9, 0), (9, 5, 0), (4, 9, 5)])
def test_attention_adds_it_where_the_pair_is(queries: int, keys: int, offset: int) -> None:
    """As a float mask made pair by pair, output and the table's gradient."""
    table = torch.randn(8, 2, dtype=torch.float64, generator=generator(1), requires_grad=True)
    sizes = ((1, 2, queries, 4), (1, 2, keys, 4), (1, 2, keys, 4))
    heads = [torch.randn(size, dtype=torch.float64, generator=generator(n)) for n, size in enumerate(sizes)]
    bias = bucketed_relative_bias(table, queries, keys, max_distance=6, offset=offset)
    rows = [[table[bucket(j - i - offset, True, 8, 6)] for j in range(keys)] for i in range(queries)]
    mask = torch.stack([torch.stack(row) for row in rows]).permute(2, 0, 1)
    got = scaled_dot_product_attention(*heads, relative_bias=bias)
    want = (heads[0] @ heads[1].mT / 2 + mask).softmax(-1) @ heads[2]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(out.square().sum(), table, retain_graph=True)[0] for out in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


def test_no_queries_and_no_keys() -> None:
    table = torch.randn(8, 2)
    for queries, keys in ((0, 0), (0, 1), (0, 5), (5, 0), (1, 0)):
        assert bucketed_relative_bias(table, queries, keys).shape == (2, max(queries + keys - 1, 0))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_derivatives_of_the_table(bidirectional: bool) -> None:
    table = torch.randn(8, 2, dtype=torch.float64, generator=generator(1), requires_grad=True)

    def call(table: Tensor) -> Tensor:
        return bucketed_relative_bias(table, 9, 12, bidirectional=bidirectional, max_distance=10).sin()

    assert gradcheck(call, (table,)) and gradgradcheck(call, (table,))


def test_transforms() -> None:
    tables = torch.randn(3, 8, 2)
    want = torch.stack([bucketed_relative_bias(table, 5, 6) for table in tables])
    assert torch.equal(torch.func.vmap(lambda table: bucketed_relative_bias(table, 5, 6))(tables), want)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(table: Tensor, x: Tensor) -> Tensor:
        return bucketed_relative_bias(table, x.shape[0], x.shape[1], offset=x.shape[1] - x.shape[0])

    for shape in ((5, 6), (7, 3), (9, 40)):
        want = bucketed_relative_bias(tables[0], *shape, offset=shape[1] - shape[0])
        assert torch.equal(compiled(tables[0], torch.zeros(shape)), want)


TABLE = torch.zeros(8, 2)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"table": [[1.0]]}, TypeError, "table must be a tensor, got list"),
    ({"table": TABLE.long()}, TypeError, "table must be float64, float32, bfloat16 or float16, got torch.int64"),
    ({"table": TABLE[0]}, ValueError, "table must have shape (num_buckets, H), got (2,)"),
    ({"table": TABLE[:2]}, ValueError, "table must have an even number of at least 4 buckets, got 2"),
    ({"table": TABLE[:7]}, ValueError, "table must have an even number of at least 4 buckets, got 7"),
    ({"table": TABLE[:1], "bidirectional": False}, ValueError, "table must have at least 2 buckets, got 1"),
    ({"num_queries": -1}, ValueError, "num_queries must not be negative, got -1"),
    ({"num_keys": 2.0}, TypeError, "num_keys must be an int, got float"),
    ({"max_distance": 2}, ValueError, "max_distance must be greater than 2 (buckets of one distance), got 2"),
    ({"max_distance": 0.5}, TypeError, "max_distance must be an int, got float"),
    ({"bidirectional": "yes"}, TypeError, "bidirectional must be a bool, got str"),
    ({"offset": 1.0}, TypeError, "offset must be an int, got float"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG, ids=lambda v: v if isinstance(v, str) else None)
def test_refused(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(f"bucketed_relative_bias: {message}")):
        bucketed_relative_bias(**{"table": TABLE, "num_queries": 3, "num_keys": 3, **changes})


def test_refused_slopes() -> None:
    with pytest.raises(ValueError, match="alibi_slopes_for: num_heads must be greater than 0, got 0"):
        alibi_slopes_for(0)
    with pytest.raises(TypeError, match="alibi_slopes_for: num_heads must be an int, got float"):
        alibi_slopes_for(4.0)  # type: ignore[arg-type]
