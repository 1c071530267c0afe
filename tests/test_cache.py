"""The key/value cache against lists of tokens: random programs, prefill in pieces, what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_cases import (
    DV,
    KINDS,
    MAX_LENGTH,
    B,
    D,
    G,
    Naive,
    assert_same,
    attend,
    chunk,
    make,
    poison,
    programs,
    refused,
    run,
    softmax_rows,
    state,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_within, double_limit

from mha_ext import KVCache

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------------------------------------- against the lists
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(program=programs(), dtype=st.sampled_from(DTYPES))
def test_random_programs(kind: str, program: list[tuple[Any, ...]], dtype: torch.dtype) -> None:
    """After each operation the cache holds what the lists hold, with NaN wherever no position lies."""
    cache, naive = make(kind, dtype), Naive(KINDS[kind].get("window"))
    poison(cache)
    assert_same(cache, naive)
    for operation in program:
        run(cache, naive, operation)
        poison(cache)
        assert_same(cache, naive)


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_and_back(kind: str) -> None:
    """Longer than any window: one token at a time, rows going their own ways, the last one taken back and put again."""
    cache, naive = make(kind), Naive(KINDS[kind].get("window"))
    prompt = chunk(9)
    for target in (cache, naive):
        target.append(*prompt, [9, 4, 6])
    for step in range(48):
        token = chunk(1)
        for _ in range(2):
            before = naive.lengths()
            real = [1, 1, int(step % 3 == 0)]
            for target in (cache, naive):
                target.append(*token, real)
            poison(cache)
            assert_same(cache, naive)
            if _ == 0:
                cache.truncate(torch.tensor(before, dtype=torch.int32))
                naive.truncate(before)


@pytest.mark.parametrize("kind", ["rolling", "rolling int8", "rolling pages"])
@pytest.mark.parametrize("count", [1, 3, 5, 8, 17, 33])
def test_the_last_append_can_be_taken_back(kind: str, count: int) -> None:
    """Whatever its size, all or in part, and what is seen afterwards is what was seen before."""
    cache, naive = make(kind), Naive(KINDS[kind]["window"])
    for index in range(70 // count + 3):
        part = chunk(count)
        cache.append(*part)
        naive.append(*part)
        for taken in {count, count // 2}:
            back = copy.deepcopy(cache), copy.deepcopy(naive)
            length = (index + 1) * count - taken
            for target, new in zip(back, (length, [length] * B), strict=True):
                target.truncate(new)
            assert_same(*back)


@pytest.mark.parametrize("kind", ["rolling", "rolling int8", "rolling pages"])
def test_truncation_needs_a_whole_window(kind: str) -> None:
    """As far back as the window before is held, one less is refused; nothing at all is always possible."""
    cache = make(kind)
    while not (lost := cache.length - int(cache.held[0])):
        cache.append(*chunk(1))
    least = lost + KINDS[kind]["window"]
    refused(cache, f"KVCache.truncate: length must be 0 or at least {least} ", cache.truncate, least - 1)
    cache.truncate(least)
    assert cache.key_range(1).flatten().tolist() == [least - lost - KINDS[kind]["window"], least - lost]
    cache.truncate(0)
    assert cache.length == 0 and cache.key_value()[0].shape[2] == 0


@pytest.mark.parametrize("kind", ["rolling", "rolling int8", "rolling pages"])
def test_what_rolled_away_cannot_be_shared(kind: str) -> None:
    """A prefix whose window is gone is refused; nothing of it, and all of it, can be had."""
    cache, naive = make(kind), Naive(KINDS[kind]["window"])
    for _ in range(100):
        part = chunk(1)
        for target in (cache, naive):
            target.append(*part, [1, 0, 1])
    match = "KVCache.share_prefix: length must be 0 or at least "
    refused(cache, match, cache.share_prefix, 0, [1], 30)
    cache.share_prefix(0, [1], 0)
    naive.share(0, [1], 0)
    assert_same(cache, naive)
    cache.fork(0, [1])
    naive.share(0, [1], 100)
    assert_same(cache, naive)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_meet_again_are_one(kind: str) -> None:
    """Rows of one length again: positions and ranges are given once for all."""
    cache = make(kind)
    cache.append(*chunk(3), [3, 1, 2])
    assert cache.ragged and cache.positions(3).shape == (B, 3)
    cache.append(*chunk(2), [0, 2, 1])
    assert cache.ragged  # the padding differs
    cache.append(*chunk(1))
    assert not cache.ragged and cache.positions(2).tolist() == [2, 3] and cache.key_range(2).shape == (2, 1, 2)


@pytest.mark.parametrize("shift", [1, 37, 3000])
def test_a_window_moves_onto_itself(shift: int, set_threads: Callable[[int], None]) -> None:
    """More than one thread's share of numbers moves to where they overlap with themselves."""
    set_threads(2)
    window = 4000
    cache = KVCache(1, 1, None, 16, window=window)
    numbers = torch.arange(3.0 * window * 16).view(1, 1, -1, 16)
    for start, stop in ((0, window + shift), (window + shift, 2 * window + 1)):
        cache.append(numbers[:, :, start:stop], -numbers[:, :, start:stop])
    key, value = cache.key_value()
    assert key.shape[2] == 2 * window + 1 - shift
    assert torch.equal(key, numbers[:, :, shift : 2 * window + 1]) and torch.equal(value, -key)


# ------------------------------------------------------------------------------------------------------------ attention
def pieces(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


@pytest.mark.parametrize("kind", ["plain", "rolling", "pages", "rolling pages"])
@pytest.mark.parametrize("size", [50, 13, 6, 1])
def test_prefill_in_pieces_is_dense_attention(kind: str, size: int) -> None:
    """At once, in chunks (longer and shorter than the window) and token by token: causal attention with the window."""
    total, heads = 50, 2 * G
    cache, window = make(kind, torch.float64), KINDS[kind].get("window", total)
    query = torch.randn(B, heads, total, D, dtype=torch.float64)
    key, value = chunk(total, torch.float64)
    outs, start = [], 0
    for count in pieces(total, size):
        part = slice(start, start + count)
        cache.append(key[:, :, part], value[:, :, part])
        poison(cache)
        outs.append(attend(cache, query[:, :, part]))
        start += count
    distance = torch.arange(total)[:, None] - torch.arange(total)
    scores = query @ key.repeat_interleave(2, 1).mT / D**0.5
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    want = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    assert_within(torch.cat(outs, 2), want, double_limit(want, total))


@pytest.mark.parametrize("kind", ["plain", "rolling", "pages", "rolling pages"])
def test_rows_of_different_length_are_rows_alone(kind: str) -> None:
    """Right-padded prompts and then tokens: each row's outputs are those of its own sequence, padding gives 0."""
    window = KINDS[kind].get("window", MAX_LENGTH)
    prompts, steps, width = [17, 4, 0], 21, 17
    cache = make(kind, torch.float64)
    sequences = [[x[0] for x in chunk(length + steps, torch.float64, batch=1)] for length in prompts]
    queries = [torch.randn(G, length + steps, D, dtype=torch.float64) for length in prompts]
    padded = [torch.full((B, G, width, size), torch.nan, dtype=torch.float64) for size in (D, DV, D)]
    for b, length in enumerate(prompts):
        for target, source in zip(padded, (*sequences[b], queries[b]), strict=True):
            target[b, :, :length] = source[:, :length]
    cache.append(padded[0], padded[1], torch.tensor(prompts))
    poison(cache)
    outs = [attend(cache, padded[2])]
    for step in range(steps):
        token = [
            torch.stack([x[:, length + step] for x, length in zip(column, prompts, strict=True)])[:, :, None]
            for column in (*zip(*sequences, strict=True), queries)
        ]
        cache.append(*token[:2])
        outs.append(attend(cache, token[2]))
    got = torch.cat(outs, 2)
    for b, length in enumerate(prompts):
        seen = [list(range(max(0, p - window + 1), p + 1)) for p in range(length + steps)]
        want = softmax_rows(queries[b], *sequences[b], seen)
        real = [*range(length), *range(width, width + steps)]
        assert_within(got[b][:, real], want, double_limit(want, length + steps))
        assert not got[b][:, length:width].any()


# -------------------------------------------------------------------------------------------------------------- refused
def filled(kind: str) -> KVCache:
    cache = make(kind)
    cache.append(*chunk(20), [20, 11, 3])
    cache.append(*chunk(5))
    return cache


BAD_CHUNKS: dict[str, tuple[Any, str, type[Exception]]] = {
    "no tensor": (lambda k, v: (k.tolist(), v), "key must be a tensor, got list", TypeError),
    "rank": (lambda k, v: (k[0], v[0]), r"key must have shape \(3, 2, n, 4\)", ValueError),
    "batch": (lambda k, v: (k[:2], v[:2]), r"key must have shape .* got \(2, 2, 4, 4\)", ValueError),
    "heads": (lambda k, v: (k[:, :1], v[:, :1]), r"key must have shape .* got \(3, 1, 4, 4\)", ValueError),
    "key's width": (lambda k, v: (k[..., :3], v), r"key must have shape .* got \(3, 2, 4, 3\)", ValueError),
    "value's width": (lambda k, v: (k, k), r"value must have shape \(3, 2, 4, 3\).* got \(3, 2, 4, 4\)", ValueError),
    "value's length": (lambda k, v: (k, v[:, :, :3]), r"value must have shape .* got \(3, 2, 3, 3\)", ValueError),
    "value's batch": (lambda k, v: (k, v[:1]), r"value must have shape .* got \(1, 2, 4, 3\)", ValueError),
    "key's dtype": (lambda k, v: (k.double(), v), "key must have the cache's dtype torch.float32", TypeError),
    "value's dtype": (lambda k, v: (k, v.half()), "value must have the cache's dtype .* got torch.float16", TypeError),
    "device": (lambda k, v: (k, v.to("meta")), "value must be on the cache's device cpu, got meta", ValueError),
    "key's gradient": (lambda k, v: (k.clone().requires_grad_(), v), "key must not require a gradient", ValueError),
    "value's gradient": (lambda k, v: (k, v.clone().requires_grad_()), "value must not require", ValueError),
    "sparse": (lambda k, v: (k.to_sparse(), v), "key must be a dense tensor", TypeError),
    "nested": (
        lambda k, v: (torch.nested.nested_tensor(list(k), layout=torch.jagged), v),
        "key must be a dense tensor",
        TypeError,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", BAD_CHUNKS)
def test_bad_chunks_change_nothing(kind: str, fault: str) -> None:
    change, match, error = BAD_CHUNKS[fault]
    cache = filled(kind)
    refused(cache, f"KVCache.append: {match}", cache.append, *change(*chunk(4)), error=error)


BAD_LENGTHS: dict[str, tuple[Any, str, type[Exception]]] = {
    "too many": ([1, 2, 3, 4], "lengths must have 3 entries", ValueError),
    "too long": ([1, 5, 0], "lengths must be from 0 to 4, got 5", ValueError),
    "negative": ([1, -1, 0], "lengths must be from 0 to 4, got -1", ValueError),
    "floats": (torch.ones(3), "lengths must be integers, got torch.float32", TypeError),
    "bools": (torch.ones(3, dtype=torch.bool), "lengths must be integers, got torch.bool", TypeError),
    "float in a list": ([1, 2.0, 3], "lengths must be an int, got float", TypeError),
    "axes": (torch.ones(3, 1, dtype=torch.int64), "lengths must have one axis", ValueError),
    "a number": (3, "lengths must be a tensor or sequence of integers, got int", TypeError),
    "a string": ("123", "lengths must be a tensor or sequence of integers, got str", TypeError),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", BAD_LENGTHS)
def test_bad_lengths_change_nothing(kind: str, fault: str) -> None:
    lengths, match, error = BAD_LENGTHS[fault]
    cache = filled(kind)
    refused(cache, f"KVCache.append: {match}", cache.append, *chunk(4), lengths, error=error)


@pytest.mark.parametrize("kind", ["plain", "int8", "pages", "int8 pages"])
def test_overflow_changes_nothing(kind: str) -> None:
    cache = filled(kind)
    match = r"key must fit into the cache's max_length 60, got 36 positions for a row \(number 0\) of length 25"
    refused(cache, match, cache.append, *chunk(36))
    match = r"got 50 positions for a row \(number 1\) of length 16"
    refused(cache, match, cache.append, *chunk(50), [0, 50, 2])
    cache.append(*chunk(50), [35, 44, 50])
    refused(cache, "got 1 positions", cache.append, *chunk(1))
    cache.append(*chunk(1), [0, 0, 1])


BAD_CALLS: dict[str, tuple[str, tuple[Any, ...], str, type[Exception]]] = {
    "longer": ("truncate", (26,), "length must be from 0 to 25, got 26", ValueError),
    "negative": ("truncate", (-1,), "length must be from 0 to 25, got -1", ValueError),
    "no int": ("truncate", (2.0,), "length must be an int, got float", TypeError),
    "longer than a row": ("truncate", ([25, 17, 8],), "length must be from 0 to 16 for row 1, got 17", ValueError),
    "too few": ("truncate", (torch.tensor([25, 16]),), "length must have 3 entries", ValueError),
    "index": ("reorder", ([0, 1, 3],), "batch_indices must be from 0 to 2, got 3", ValueError),
    "negative index": ("reorder", (torch.tensor([0, -1, 2]),), "batch_indices must be from 0 to 2, got -1", ValueError),
    "another batch": ("reorder", (torch.tensor([0, 1]),), "batch_indices must have 3 entries", ValueError),
    "float indices": ("reorder", (torch.zeros(3),), "batch_indices must be integers", TypeError),
    "source": ("share_prefix", (3, [0], 1), "source_row must be from 0 to 2, got 3", ValueError),
    "target": ("share_prefix", (0, [1, 3], 1), "rows must be from 0 to 2, got 3", ValueError),
    "itself": ("share_prefix", (1, [0, 1], 1), "rows must not contain source_row 1", ValueError),
    "prefix": ("share_prefix", (1, [0], 17), "length must be from 0 to 16, got 17", ValueError),
    "fork": ("fork", (0, [5]), "KVCache.fork: rows must be from 0 to 2, got 5", ValueError),
    "queries": ("positions", (9,), "num_queries must be from 0 to 8, got 9", ValueError),
    "negative queries": ("key_range", (-1,), "num_queries must be from 0 to 8, got -1", ValueError),
    "no queries": ("key_range", (None,), "num_queries must be an int", TypeError),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", BAD_CALLS)
def test_bad_calls_change_nothing(kind: str, fault: str) -> None:
    method, arguments, match, error = BAD_CALLS[fault]
    cache = filled(kind)
    refused(cache, match, getattr(cache, method), *arguments, error=error)


@pytest.mark.parametrize(
    ("options", "match", "error"),
    [
        ({"batch_size": -1}, "batch_size must not be negative, got -1", ValueError),
        ({"num_kv_heads": 0}, "num_kv_heads must be greater than 0", ValueError),
        ({"head_dim": 1.5}, "head_dim must be an int, got float", TypeError),
        ({"value_head_dim": 0}, "value_head_dim must be greater than 0", ValueError),
        ({"max_length": 0}, "max_length must be greater than 0", ValueError),
        ({"max_length": None}, "max_length must be an int, got NoneType", TypeError),
        ({"window": 0}, "window must be greater than 0", ValueError),
        ({"window": (3, 0)}, "window must be an int, got tuple", TypeError),
        ({"dtype": torch.int8}, "dtype must be float64, float32, bfloat16 or float16, got torch.int8", TypeError),
        ({"storage": "int4"}, "storage must be one of .*int8.*, got 'int4'", ValueError),
        ({"page_size": 15}, "page_size must be from 16 to 256, got 15", ValueError),
        ({"page_size": 257}, "page_size must be from 16 to 256, got 257", ValueError),
    ],
    ids=str,
)
def test_bad_sizes(options: dict[str, Any], match: str, error: type[Exception]) -> None:
    sizes: dict[str, Any] = {"batch_size": B, "num_kv_heads": G, "max_length": 8, "head_dim": D}
    with pytest.raises(error, match=f"KVCache: {match}"):
        KVCache(**{**sizes, **options})


# --------------------------------------------------------------------------------------------------------- as an object
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_are_apart(kind: str, clone: Any) -> None:
    cache = filled(kind)
    other = clone(cache)
    assert state(other) == state(cache)
    before = state(cache)
    other.append(*chunk(3))
    assert state(cache) == before
    assert repr(other) != repr(cache)


def test_repr_tells_sizes_and_length() -> None:
    text = repr(filled("pages"))
    assert text.startswith("KVCache(batch_size=3, num_kv_heads=2, max_length=60, head_dim=4, value_head_dim=3, ")
    assert "dtype=torch.float32, device=cpu, page_size=16, lengths=[25, 16, 8], nbytes=" in text
    assert "length=0, " in repr(make())


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batch(kind: str) -> None:
    cache = KVCache(0, G, MAX_LENGTH, D, value_head_dim=DV, **KINDS[kind])
    for count in (3, 40, 9):
        cache.append(*chunk(count, batch=0))
    assert cache.length == 52 and cache.lengths.shape == (0,)
    assert cache.key_value()[1].shape[:2] == (0, G) and cache.key_range(2).shape == (2, 1, 2)
    cache.reorder(torch.empty(0, dtype=torch.int64))
    cache.reset()
