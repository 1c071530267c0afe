"""The module with a cache: prefill at once, in chunks and token by token, against the same layer without a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import mha_ext

EMBED, HEADS, KV_HEADS, BATCH, LENGTH = 24, 4, 2, 3, 37
CHUNKS = {"at once": [37], "chunks": [16, 1, 20], "token by token": [1] * 37, "few": [3, 30, 2, 2]}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": KV_HEADS},
    "rope": {"rope": True, "num_kv_heads": KV_HEADS},
    "window": {"window": (6, 0), "rope": True},
    "all": {"window": (9, None), "rope": True, "qk_norm": True, "softcap": 3.0, "sink": True, "num_kv_heads": 1},
}


def layer(dtype: torch.dtype = torch.float64, **keywords: Any) -> mha_ext.MultiheadAttention:
    torch.manual_seed(0)
    made = mha_ext.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=dtype, **keywords).eval()
    if made._has_variants and made.sink is not None:
        torch.nn.init.normal_(made.sink)
    return made


def cache_for(
    module: mha_ext.MultiheadAttention, dtype: torch.dtype = torch.float64, **keywords: Any
) -> mha_ext.KVCache:
    return mha_ext.KVCache(BATCH, module.num_kv_heads, LENGTH, module.head_dim, dtype=dtype, **keywords)


def decode(module: Any, x: Tensor, cache: mha_ext.KVCache, chunks: list[int], **keywords: Any) -> Tensor:
    parts = [module(part, part, part, kv_cache=cache, need_weights=False, **keywords)[0] for part in x.split(chunks, 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
@pytest.mark.parametrize("keywords", LAYERS.values(), ids=LAYERS.keys())
@torch.no_grad()
def test_any_chunks_give_what_one_causal_call_gives(keywords: dict[str, Any], chunks: list[int]) -> None:
    module, x = layer(**keywords), torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    expected = module(x, x, x, is_causal=True, need_weights=False)[0]
    # 37 keys and 24 features summed in another order
    torch.testing.assert_close(decode(module, x, cache_for(module), chunks), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("keywords", LAYERS.values(), ids=LAYERS.keys())
@torch.no_grad()
def test_float32_in_chunks_is_the_same_to_rounding(keywords: dict[str, Any]) -> None:
    """Few queries are summed along the head, many along the keys: not bitwise, but within a few roundings."""
    module, x = layer(torch.float32, **keywords), torch.randn(BATCH, LENGTH, EMBED)
    inputs = (x.double(),) * 3
    exact = copy.deepcopy(module).double()(*inputs, is_causal=True, need_weights=False)[0]
    for chunks in CHUNKS.values():
        out = decode(module, x, cache_for(module, torch.float32), chunks)
        # 2^-24 a sum: 24 terms each in two projections and the scores, up to 37 in the weighted sum; outputs below 4
        assert (out - exact).abs().max() <= 4 * (3 * 24 + 37) * 2**-24


@pytest.mark.parametrize("options", [{"window": 5}, {"page_size": 16}, {"page_size": 16, "window": 5}], ids=str)
@torch.no_grad()
def test_other_storage(options: dict[str, Any]) -> None:
    keywords = {"window": (4, 0)} if "window" in options else {}
    module, x = layer(rope=True, **keywords), torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    expected = module(x, x, x, is_causal=True, need_weights=False)[0]
    for chunks in CHUNKS.values():
        out = decode(module, x, cache_for(module, **options), chunks)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("keywords", [LAYERS["plain"], LAYERS["all"]], ids=["plain", "all"])
@torch.no_grad()
def test_prompts_of_different_length_go_on_as_each_alone(keywords: dict[str, Any]) -> None:
    module = layer(**keywords)
    lengths, steps = [4, 11, 7], 5
    prompts = [torch.randn(1, n + steps, EMBED, dtype=torch.float64) for n in lengths]
    expected = [module(x, x, x, is_causal=True, need_weights=False)[0] for x in prompts]
    padded = torch.full((BATCH, max(lengths), EMBED), torch.nan, dtype=torch.float64)
    padding = torch.ones(BATCH, max(lengths), dtype=torch.bool)
    for row, (x, n) in enumerate(zip(prompts, lengths, strict=True)):
        padded[row, :n], padding[row, :n] = x[0, :n], False
    cache = cache_for(module)
    out, _ = module(padded, padded, padded, padding, kv_cache=cache, need_weights=False)
    for row, n in enumerate(lengths):
        torch.testing.assert_close(out[row, :n], expected[row][0, :n], rtol=0, atol=1e-13)
    for step in range(steps):
        token = torch.stack([x[0, n + step] for x, n in zip(prompts, lengths, strict=True)]).unsqueeze(1)
        out, _ = module(token, token, token, kv_cache=cache, need_weights=False)
        for row, n in enumerate(lengths):
            torch.testing.assert_close(out[row, 0], expected[row][0, n + step], rtol=0, atol=1e-13)


@torch.no_grad()
def test_beams_unbatched_calls_and_weights() -> None:
    module, x = layer(num_kv_heads=2), torch.randn(BATCH, 9, EMBED, dtype=torch.float64)
    cache, order = cache_for(module), torch.tensor([2, 0, 0])
    module(x[:, :8], x[:, :8], x[:, :8], kv_cache=cache)
    cache.reorder(order)
    last = x[:, 8:]
    out, weights = module(last, last, last, kv_cache=cache)
    joined = torch.cat((x[order, :8], last), 1)
    expected, expected_weights = module(joined, joined, joined, is_causal=True)
    torch.testing.assert_close(out, expected[:, 8:], rtol=0, atol=1e-13)
    torch.testing.assert_close(weights, expected_weights[:, 8:], rtol=0, atol=1e-13)
    single = mha_ext.KVCache(1, 2, 9, module.head_dim, dtype=torch.float64)
    out = torch.cat([module(part, part, part, kv_cache=single)[0] for part in x[0].split([5, 4])])
    torch.testing.assert_close(out, module(x[0], x[0], x[0], is_causal=True)[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_projected_once_for_many_calls(batch_first: bool) -> None:
    torch.manual_seed(1)
    module = mha_ext.MultiheadAttention(
        EMBED, HEADS, batch_first=batch_first, kdim=10, vdim=14, qk_norm=True, sink=True, dtype=torch.float64
    ).eval()
    key, value = torch.randn(BATCH, 8, 10, dtype=torch.float64), torch.randn(BATCH, 8, 14, dtype=torch.float64)
    padding, x = torch.rand(BATCH, 8) > 0.6, torch.randn(BATCH, 3, EMBED, dtype=torch.float64)
    if not batch_first:
        key, value, x = (t.transpose(0, 1) for t in (key, value, x))
    cache = module.project_keys(key, value, padding)
    expected = module(x, key, value, padding)
    for got, want in zip(module(x, None, None, kv_cache=cache), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    cache.reorder(torch.tensor([1, 1, 0]))
    dim = 0 if batch_first else 1
    rows = [t.index_select(dim, torch.tensor([1, 1, 0])) for t in (key, value)]
    want = module(x, *rows, padding[[1, 1, 0]])[0]
    torch.testing.assert_close(module(x, None, None, kv_cache=cache)[0], want, rtol=0, atol=1e-13)


def refusals() -> list[tuple[str, dict[str, Any], dict[str, Any], str]]:
    x = torch.randn(BATCH, 4, EMBED)
    return [
        ("attn_mask", {}, {"attn_mask": torch.zeros(4, 4)}, "attn_mask must not be set together with kv_cache"),
        ("bias_kv", {"add_bias_kv": True}, {}, "add_bias_kv must not be set together with kv_cache"),
        ("padding dtype", {}, {"key_padding_mask": torch.zeros(BATCH, 4)}, "key_padding_mask must be bool .* got"),
        (
            "left padding",
            {},
            {"key_padding_mask": torch.eye(4)[:3].bool()},
            "key_padding_mask must mark padding behind",
        ),
        ("key length", {}, {"key": x[:, :2], "value": x[:, :2]}, "key must have query's length .* 4, got 2"),
        ("full", {}, {"query": x.repeat(1, 3, 1), "key": x.repeat(1, 3, 1), "value": x.repeat(1, 3, 1)}, "max_length"),
        ("gradient", {}, {}, "gradient"),
    ]


@pytest.mark.parametrize(
    ("name", "keywords", "changes", "message"), refusals(), ids=lambda v: v if type(v) is str else ""
)
def test_what_does_not_fit_is_refused_and_leaves_the_cache_alone(
    name: str, keywords: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    module, x = layer(torch.float32, **keywords), torch.randn(BATCH, 4, EMBED)
    cache = mha_ext.KVCache(BATCH, HEADS, 10, EMBED // HEADS)
    call = {"query": x, "key": x, "value": x, "kv_cache": cache, **changes}
    with torch.set_grad_enabled(name == "gradient"), pytest.raises(ValueError, match=message):
        module(**call)
    assert cache.length == 0


@pytest.mark.parametrize(
    ("window", "held", "message"),
    [
        (None, 5, "no window, got 5"),
        ((4, 0), 4, "a window of at least 5, .* got 4"),
        ((None, 0), 9, "no window, got 9"),
    ],
)
@torch.no_grad()
def test_a_cache_that_forgets_what_the_layer_sees_is_refused(window: Any, held: int, message: str) -> None:
    module, x = layer(torch.float32, window=window, rope=True), torch.randn(BATCH, 4, EMBED)
    cache = cache_for(module, torch.float32, window=held)
    with pytest.raises(ValueError, match=f"MultiheadAttention: kv_cache must have {message}"):
        module(x, x, x, kv_cache=cache)
    assert cache.length == 0


@torch.no_grad()
def test_other_objects_and_cross_caches_are_refused_by_name() -> None:
    module, x = layer(torch.float32), torch.randn(BATCH, 4, EMBED)
    with pytest.raises(TypeError, match=r"kv_cache must be a mha_ext\.KVCache or mha_ext\.CrossCache, got dict"):
        module(x, x, x, kv_cache={})
    cache = module.project_keys(x, x)
    with pytest.raises(ValueError, match="key and value must be None with a CrossCache"):
        module(x, x, x, kv_cache=cache)
    with pytest.raises(ValueError, match="is_causal must not be set with a CrossCache"):
        module(x, None, None, kv_cache=cache, is_causal=True)
    with pytest.raises(ValueError, match="query must have kv_cache's batch size 3, got 2"):
        module(x[:2], None, None, kv_cache=cache)
    with pytest.raises(ValueError, match="rope must be None with a CrossCache"):
        layer(torch.float32, rope=True).project_keys(x, x)
