"""Numbers at the edge of their types, sizes of zero, and values that nobody can look at: faults that were found."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import mha_ext
from mha_ext.functional import scaled_dot_product_attention as attention
from mha_ext.functional import varlen_attention

X = torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(0))


def starts(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


@pytest.mark.parametrize("kind", ["parameter", "compiled", "batched"])
def test_lengths_that_decrease_unseen_do_no_harm(kind: str) -> None:
    bad = starts(0, 9, 2, 7)

    def run(cu_seqlens: Tensor) -> Tensor:
        out: Any = varlen_attention(X, X, X, cu_seqlens, cu_seqlens, 5, 5)
        return out  # type: ignore[no-any-return]

    if kind == "parameter":
        with pytest.raises(ValueError, match="cu_seqlens_q must not decrease, got 9 before 2"):
            run(torch.nn.Parameter(bad, requires_grad=False))
    elif kind == "compiled":
        assert torch.compile(run, backend="aot_eager")(bad).shape == X.shape
    else:
        both = torch.stack((bad, starts(0, 2, 3, 7)))
        torch.testing.assert_close(torch.vmap(run)(both)[1], run(both[1]))


@pytest.mark.parametrize("side", [sys.maxsize, 2**62, 2**40, 2**31, 2**70])
def test_a_side_beyond_all_keys_is_no_limit(side: int) -> None:
    q, k = torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(1, 2, 6, 4)

    def run(query: Tensor, **options: Any) -> Tensor:
        out: Any = attention(query, k, k, causal_alignment="lower_right", **options)
        return out  # type: ignore[no-any-return]

    wide = {"window": (side, side)}
    torch.testing.assert_close(run(q, **wide), run(q))
    torch.testing.assert_close(torch.vmap(lambda a: run(a, **wide))(q[None])[0], run(q))
    grads = [torch.autograd.grad(run(q, **given).sum(), q, create_graph=True)[0] for given in (wide, {})]
    torch.testing.assert_close(*grads)
    packed = [varlen_attention(X, X, X, *[starts(0, 2, 2, 7)] * 2, 5, 5, **given) for given in (wide, {})]
    torch.testing.assert_close(*packed)


@pytest.mark.parametrize("side", [3 * 10**9, 2**62])
@torch.no_grad()
def test_a_module_with_a_window_beyond_a_ragged_cache(side: int) -> None:
    outs = []
    for window in ((side, 0), None):
        torch.manual_seed(0)
        module = mha_ext.MultiheadAttention(16, 4, batch_first=True, window=window)
        x, cache = torch.randn(2, 6, 16), mha_ext.KVCache(2, 4, 20, 4)
        padding = torch.zeros(2, 6, dtype=torch.bool)
        padding[1, 4:] = True
        module(x, x, x, padding, kv_cache=cache)
        outs.append(module(x[:, :2], x[:, :2], x[:, :2], kv_cache=cache)[0])
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("hides", ["causal", "range", "mask"])
def test_nan_behind_a_mask_stays_out_of_second_derivatives_with_a_cap(hides: str) -> None:
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.double) for n in (3, 6, 6))
    k[:, :, 5] = torch.nan
    options: dict[str, Any] = {
        "causal": {"is_causal": True},
        "range": {"key_range": torch.tensor([[0] * 3, [5] * 3])},
        "mask": {"attn_mask": torch.arange(6) < 5},
    }[hides]
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out: Any = attention(*leaves, softcap=2.0, **options)
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    seconds = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
    assert all(g.isfinite().all() for g in (*grads, *seconds))


def test_a_sink_of_minus_infinity_in_an_empty_row() -> None:
    q, k = (torch.randn(1, 2, n, 4, dtype=torch.double) for n in (2, 6))
    sink = torch.tensor([-torch.inf, 0.0], dtype=torch.double, requires_grad=True)
    out: Any = attention(q, k, k, sink=sink, key_range=torch.tensor([[0, 0], [0, 3]]))
    plain = torch.autograd.grad(out.square().sum(), sink, retain_graph=True)[0]
    closed = torch.autograd.grad(out.square().sum(), sink, create_graph=True)[0]
    assert plain[0] == 0
    torch.testing.assert_close(closed, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sink", [torch.inf, 1e300])
def test_a_sink_beyond_all_scores_takes_everything_on_every_road(sink: float, dtype: torch.dtype) -> None:
    for queries in (1, 3, 40):
        q, k = torch.randn(1, 1, queries, 4).to(dtype).requires_grad_(), torch.randn(1, 1, 6, 4).to(dtype)
        logit = torch.tensor([sink], dtype=torch.double)
        out: Any = attention(q, k, k, sink=logit)
        assert (out == 0).all()
        for create_graph in (False, True):
            grad = torch.autograd.grad(out.float().sum(), q, retain_graph=True, create_graph=create_graph)[0]
            assert (grad == 0).all()


def test_sizes_of_zero_with_options_for_each_sample() -> None:
    def z(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long)

    def run(batch: int, queries: int, keys: int, **options: Any) -> Tensor:
        q, k = torch.randn(batch, 1, queries, 4), torch.randn(batch, 1, keys, 4)
        out: Any = attention(q, k, k, **options)
        return out  # type: ignore[no-any-return]

    assert (run(2, 3, 0, segment_ids=(z(2, 3), z(2, 0))) == 0).all()
    assert run(2, 0, 5, key_range=z(2, 2, 0)).shape == (2, 1, 0, 4)
    assert run(0, 3, 6, segment_ids=(z(3), z(0, 6))).shape == (0, 1, 3, 4)
    assert run(0, 3, 6, alibi_slopes=torch.zeros(0, 1), prefix_length=z(0), is_causal=True).shape == (0, 1, 3, 4)


@pytest.mark.parametrize("wrong", ["softcap", "window", "sink", "out_proj"])
@torch.no_grad()
def test_a_call_that_is_refused_leaves_the_cache_alone(wrong: str) -> None:
    module = mha_ext.MultiheadAttention(16, 4, batch_first=True, softcap=1.0, sink=True)
    if wrong == "sink":
        module.sink = torch.nn.Parameter(torch.zeros(3))
    elif wrong == "out_proj":
        module.out_proj.weight = torch.nn.Parameter(torch.zeros(16, 12))
    else:
        setattr(module, wrong, {"softcap": -1, "window": (-3, 0)}[wrong])
    cache, x = mha_ext.KVCache(2, 4, 10, 4), torch.randn(2, 6, 16)
    with pytest.raises(ValueError, match=f"MultiheadAttention: {wrong} must"):
        module(x, x, x, kv_cache=cache)
    assert cache.length == 0


def test_a_cross_cache_knows_no_positions_and_checks_its_rows() -> None:
    x = torch.randn(2, 6, 16)
    with pytest.raises(ValueError, match="window must be None with a CrossCache"):
        mha_ext.MultiheadAttention(16, 4, batch_first=True, window=(1, 1)).project_keys(x, x)
    cache = mha_ext.MultiheadAttention(16, 4, batch_first=True).project_keys(x, x)
    for indices, kind in ((torch.tensor([True, False]), TypeError), (torch.tensor([0]), ValueError)):
        with pytest.raises(kind, match=r"CrossCache\.reorder: batch_indices"):
            cache.reorder(indices)


def test_refusals_are_short_and_name_what_was_passed() -> None:
    ids = torch.arange(5000)
    ids[77] = 3
    q = torch.randn(1, 1, 5000, 4)
    with pytest.raises(ValueError, match="segment_ids must not decrease along the sequence, got 76 before 3") as caught:
        attention(q, q, q, segment_ids=ids)
    assert len(str(caught.value)) < 200
    with pytest.raises(ValueError, match="cu_seqlens_q must be on query's device meta, got cpu"):
        varlen_attention(*[X.to("meta")] * 3, *[starts(0, 7)] * 2, 7, 7)
