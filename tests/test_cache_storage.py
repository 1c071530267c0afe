"""How a key/value cache keeps its numbers: int8, rolling memory, shared pages, and what runs around it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cache_cases import DV, KINDS, MAX_LENGTH, B, D, G, Naive, assert_same, attend, chunk, int8_limit, make, poison
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_within, double_limit
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import mha_ext
from mha_ext import KVCache
from mha_ext.cache_storage import Int8Codec, RowStorage

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def token_bytes(dtype: torch.dtype = torch.float32) -> int:
    """Of the keys and values of one position of one row."""
    return G * (D + DV) * dtype.itemsize


# ----------------------------------------------------------------------------------------------------------------- int8
def one_row(key: Tensor, page_size: int | None = None) -> Tensor:
    """Keys (n, D) there and back."""
    cache = KVCache(1, 1, key.shape[0], key.shape[1], dtype=key.dtype, storage="int8", page_size=page_size)
    cache.append(key[None, None], key[None, None])
    back = cache.key_value()
    assert torch.equal(back[0].nan_to_num(7.0), back[1].nan_to_num(7.0))
    return back[0][0, 0]


@pytest.mark.parametrize("page_size", [None, 16])
@given(dtype=st.sampled_from(DTYPES), exponent=st.integers(-1074, 1023), seed=st.integers(0, 10**6), wide=st.booleans())
def test_int8_errors_stay_below_half_a_step(
    page_size: int | None, dtype: torch.dtype, exponent: int, seed: int, wide: bool
) -> None:
    """At every magnitude that the dtype has; ``wide``: magnitudes differ within a vector."""
    info = torch.finfo(dtype)
    exponent = max(round(math.log2(info.tiny)) - 10, min(exponent, round(math.log2(info.max)) - 4))
    x = torch.randn(5, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = (x * 10.0 ** torch.arange(-33, 0) if wide else x) * 2.0**exponent
    x = x.clamp(-info.max, info.max).to(dtype)
    got = one_row(x, page_size)
    assert got.dtype == dtype
    assert bool(((got.double() - x.double()).abs() <= int8_limit(x)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_ends_of_the_range(dtype: torch.dtype) -> None:
    """Zeros, the largest numbers and the smallest come back; the largest of a vector and its negative alike."""
    info = torch.finfo(dtype)
    top = torch.tensor(info.max, dtype=torch.float64)
    x = torch.tensor([[0.0, 0.0], [top, -top], [top, 1.0], [1.0, -1.0], [info.tiny, 0.0]], dtype=dtype)
    got = one_row(x)
    assert bool(got.isfinite().all()) and torch.equal(got[0], x[0])
    assert bool(((got.double() - x.double()).abs() <= int8_limit(x)).all())
    assert torch.equal(got[:, 1].sign(), torch.tensor([0, -1, 0, -1, 0], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_int8_shows_what_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    """NaN in all of the vector, and in no other."""
    x = torch.randn(4, 6, dtype=dtype)
    x[2, 3] = bad
    got = one_row(x)
    assert bool(got[2].isnan().all()) and bool(got[[0, 1, 3]].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_steps_fit_their_type(dtype: torch.dtype) -> None:
    """Whole numbers from -127 to 127 whatever is written: converting others to int8 gives anything."""
    info = torch.finfo(dtype)
    ends = [0.0, 1.0, info.max, info.tiny, info.tiny * 1.3 * info.eps, info.tiny * 190 * info.eps]
    x = torch.tensor([*ends, *(-x for x in ends), math.nan, math.inf, -math.inf], dtype=torch.float64).to(dtype)
    pairs = torch.cartesian_prod(x, x)
    key, _, value, _ = Int8Codec(dtype).encode(pairs, pairs.flip(-1))
    for steps in (key, value):
        assert bool((steps.abs() <= 127).all()) and torch.equal(steps, steps.round())


# --------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_plain_and_int8(dtype: torch.dtype) -> None:
    assert make(dtype=dtype).nbytes == B * MAX_LENGTH * token_bytes(dtype)
    scale = 8 if dtype == torch.float64 else 4
    assert make("int8", dtype).nbytes == B * MAX_LENGTH * G * (D + DV + 2 * scale)


def test_keys_and_values_are_views() -> None:
    cache = make()
    cache.append(*chunk(7))
    key, value = cache.key_value()
    token = chunk(1)
    cache.append(*token)
    longer = cache.key_value()
    for before, after, new in zip((key, value), longer, token, strict=True):
        assert before.data_ptr() == after.data_ptr() and torch.equal(before, after[:, :, :7])
        assert torch.equal(after[:, :, 7:], new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rolling_cache_stays_small(dtype: torch.dtype) -> None:
    """Twice the window; with the window and the chunk after a longer chunk, and then twice the window again."""
    window = 8
    cache = KVCache(B, G, None, D, value_head_dim=DV, window=window, dtype=dtype)
    small = B * 2 * window * token_bytes(dtype)
    for count in (1, 3, 8, 5, *[1] * 40):
        cache.append(*chunk(count, dtype))
        assert cache.nbytes == small
    cache.append(*chunk(100, dtype))
    assert cache.nbytes == B * (window + 100) * token_bytes(dtype)
    cache.append(*chunk(1, dtype))
    assert cache.nbytes == small and cache.length == 158 and cache.positions(1).tolist() == [157]


def test_rolling_pages_stay_few() -> None:
    """A window reaches into three pages of 16, and they are given up a page at a time: four a row."""
    cache = make("rolling pages")
    for _ in range(200):
        cache.append(*chunk(1))
        assert cache.nbytes <= B * 4 * (16 * token_bytes() + 4)
    assert int(cache.held.max()) <= 64 and cache.length == 200


def test_a_rolling_cache_moves_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens moved as appended, and no more than a window of them at a time."""
    moved = []
    roll = RowStorage.roll

    def counted(self: RowStorage, held: list[int], window: int, room: int) -> list[int]:
        kept = roll(self, held, window, room)
        moved.append(max(kept))
        return kept

    monkeypatch.setattr(RowStorage, "roll", counted)
    cache = make("plain", window=16)
    for _ in range(500):
        cache.append(*chunk(1))
    assert max(moved) == 16 and 0 < sum(moved) <= 500


# ---------------------------------------------------------------------------------------------------------------- pages
def pages_in_use(cache: KVCache) -> int:
    page = 16 * token_bytes()
    table = B * math.ceil(MAX_LENGTH / 16) * 4
    assert (cache.nbytes - table) % page == 0
    return (cache.nbytes - table) // page


def test_shared_pages_are_held_once() -> None:
    """Until a row writes into one: then it alone gets another, and the last owner keeps the first."""
    cache, naive = make("pages"), Naive()

    def both(method: str, *arguments: Any) -> int:
        getattr(cache, method)(*arguments)
        assert_same(cache, naive)
        return pages_in_use(cache)

    def append(count: int, lengths: list[int] | None = None) -> int:
        part = chunk(count)
        naive.append(*part, lengths)
        return both("append", *part, lengths)

    assert pages_in_use(cache) == 0
    assert append(40, [40, 0, 0]) == 3
    naive.share(0, [1, 2], 40)
    assert both("fork", 0, [1, 2]) == 3
    assert append(1, [0, 1, 0]) == 4  # a copy of the last page
    assert append(1) == 5  # another one; row 0 is alone in its own
    assert append(10) == 8  # a new page each
    naive.truncate([16, 33, 51])
    assert both("truncate", [16, 33, 51]) == 5  # two that were row 0's, one of row 1, two of row 2
    naive.share(0, [1, 2], 16)
    assert both("share_prefix", 0, [1, 2], 16) == 1
    assert append(1) == 4
    naive.truncate([0] * B)
    assert both("reset") == 0


def test_beams_share_pages() -> None:
    """Reordering copies nothing: the pools' bytes stay, and pages that no beam uses are free again."""
    cache, naive = make("pages"), Naive()
    for target in (cache, naive):
        torch.manual_seed(1)
        target.append(*chunk(35))
    assert pages_in_use(cache) == 9
    before = [pool.clone().view(torch.uint8) for pool in cache.pages()[:2]]
    cache.reorder([1, 1, 1])
    naive.reorder([1, 1, 1])
    assert pages_in_use(cache) == 3
    assert all(torch.equal(old, pool.view(torch.uint8)) for old, pool in zip(before, cache.pages(), strict=False))
    assert_same(cache, naive)
    token = chunk(1)
    for target in (cache, naive):
        target.append(*token)
        target.reorder([2, 0, 1])
    assert pages_in_use(cache) == 5
    assert_same(cache, naive)


def test_pages_can_be_read_in_place() -> None:
    cache = make("pages")
    cache.append(*chunk(50), [50, 17, 0])
    cache.pages()
    cache.reorder([2, 0, 1])
    poison(cache)
    key, value = cache.key_value()
    keys, values, table = cache.pages()
    assert table.shape == (B, 4) and table.dtype == torch.int32
    assert keys.shape[1:] == (G, 16, D) and values.shape[1:] == (G, 16, DV)
    for b, held in enumerate([0, 50, 17]):
        for j in range(held):
            page = int(table[b, j // 16])
            assert torch.equal(keys[page, :, j % 16], key[b, :, j])
            assert torch.equal(values[page, :, j % 16], value[b, :, j])
        assert not table[b, -(-held // 16) :].any()


@pytest.mark.parametrize("kind", ["plain", "int8 pages"])
def test_no_pages_to_read_in_place(kind: str) -> None:
    with pytest.raises(
        ValueError, match=r"KVCache.pages: the cache must have page_size and plain storage, got page_size"
    ):
        make(kind).pages()


# ------------------------------------------------------------------------------------------------------- around a cache
@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_inside_and_outside(kind: str) -> None:
    """A cache made, rolled and grown in inference mode goes on outside of it, and the other way round."""
    caches = [make(kind)]
    with torch.inference_mode():
        caches.append(make(kind))
    for cache in caches:
        naive = Naive(KINDS[kind].get("window"))
        for inside in (True, False, True, False):
            part = chunk(70 if cache.window else 13)
            with torch.inference_mode(inside):
                cache.append(*part)
                cache.reorder([2, 2, 0])
            naive.append(*part)
            naive.reorder([2, 2, 0])
            assert_same(cache, naive)


@contextmanager
def grad(enabled: bool) -> Iterator[None]:
    with torch.set_grad_enabled(enabled):
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_need_no_detour_without_gradients(kind: str) -> None:
    """What requires a gradient is taken where none are recorded, and the cache has none."""
    cache, naive = make(kind), Naive(KINDS[kind].get("window"))
    key, value = (x.requires_grad_() for x in chunk(4))
    with grad(False):
        cache.append(key, value)
    naive.append(key.detach(), value.detach())
    cache.append(key.detach(), value.detach())
    naive.append(key.detach(), value.detach())
    assert_same(cache, naive)
    assert not any(x.requires_grad for x in cache.key_value())


class Step(nn.Module):
    """One token: positions, append, attention over the cache."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.cache = cache
        self.key, self.value = nn.Linear(8, G * D), nn.Linear(8, G * DV)

    def forward(self, x: Tensor) -> Tensor:
        key = self.key(x).view(B, -1, G, D).transpose(1, 2)
        value = self.value(x).view(B, -1, G, DV).transpose(1, 2)
        self.cache.append(key, value)
        keys, values = self.cache.key_value()
        start, stop = self.cache.key_range(1)
        places = torch.arange(keys.shape[2])
        hidden = (places < start[..., None]) | (places >= stop[..., None])
        scores = (key @ keys.mT).masked_fill(hidden[:, None], -torch.inf)
        return scores.softmax(-1) @ values + self.cache.positions(1)[..., None, None, None]


@pytest.mark.parametrize(("kind", "more"), [("plain", 0), ("rolling int8", 3), ("pages", 1)])
def test_compiled_steps_are_not_compiled_anew(kind: str, more: int) -> None:
    """Compiled for the first length and then for all. Two more graphs when the window of 7 first moves to the front of
    its 14 slots, one when it does so again; at pages graphs break, and what lies between is compiled once more for the
    strides of a second page."""
    torch._dynamo.reset()
    counter = CompileCounter()
    plain, compiled = Step(make(kind)), Step(make(kind))
    compiled.load_state_dict(plain.state_dict())
    step = torch.compile(compiled, backend=counter)
    counts = []
    with torch.no_grad():
        for _ in range(40):
            x = torch.randn(B, 1, 8)
            torch.testing.assert_close(step(x), plain(x), rtol=0, atol=0)
            counts.append(counter.frame_count)
    assert 1 <= counts[2] == counts[13] and counts[21] == counts[-1] <= counts[2] + more


@pytest.mark.parametrize("kind", ["plain", "pages"])
def test_cross_attention_keeps_its_keys(kind: str) -> None:
    """Projected once, of different length a row: ``held`` says what each query of the other sequence may see."""
    cache = make(kind, torch.float64)
    key, value = chunk(9, torch.float64)
    cache.append(key, value, [9, 2, 5])
    poison(cache)
    keys, values = cache.key_value()
    query = torch.randn(B, G, 3, D, dtype=torch.float64)
    hidden = torch.arange(9) >= cache.held[:, None]
    got = mha_ext.functional.scaled_dot_product_attention(query, keys, values, key_padding_mask=hidden)
    for b, held in enumerate([9, 2, 5]):
        scores = query[b] @ key[b, :, :held].mT / D**0.5
        want = scores.softmax(-1) @ value[b, :, :held]
        torch.testing.assert_close(got[b], want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["plain", "rolling", "pages", "rolling pages"])
def test_kernels_attend_to_what_the_range_says(kind: str) -> None:
    """Prompts of different length, tokens and a long chunk, grouped heads, NaN behind every row."""
    cache = make(kind, torch.float64)
    for count, lengths in ((9, [9, 4, 0]), (1, None), (30, [1, 30, 7]), (1, [0, 1, 1])):
        cache.append(*chunk(count, torch.float64), lengths)
        poison(cache)
        query = torch.randn(B, 2 * G, count, D, dtype=torch.float64)
        ranges = cache.key_range(count).expand(2, B, count)
        got = mha_ext.functional.scaled_dot_product_attention(
            query, *cache.key_value(), enable_gqa=True, key_range=ranges
        )
        want = attend(cache, query)
        assert_within(got, want, double_limit(want, cache.length))


def test_attention_of_no_queries() -> None:
    cache = make()
    cache.append(*chunk(3))
    assert attend(cache, torch.randn(B, G, 0, D)).shape == (B, G, 0, DV)
