"""Tensors without data: the meta device, ``FakeTensorMode``, ``make_fx`` and symbolic sizes.

Sizes, strides and dtypes are the kernels', for every operator in every family of cases; nothing reads data, which both
kinds of tensors refuse; sizes may be symbols, or not known at all, and stay so; calls on 10^6 tokens return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import LAYOUTS, LOWER_RIGHT, Case
from layer_cases import SHARED_HEADS, VARIANTS, causal_mask, inputs_for, last_hidden, make
from module_variant_cases import KEYWORDS, variant
from operator_cases import ATTENTION, BASE, CALLS, FAMILIES, Attention, Call, ops, with_kind
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only

import mha_ext
from mha_ext.functional import scaled_dot_product_attention, varlen_attention

PAIRS = [(operator, family) for operator, families in CALLS.items() for family in families]
MODULES = [({}, o) for o in (*VARIANTS, *SHARED_HEADS)] + [(k, {}) for k in KEYWORDS.values()]
MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "masks": lambda: {"attn_mask": causal_mask(5), "key_padding_mask": last_hidden(2, 5)},
    "float masks": lambda: {"attn_mask": causal_mask(5, dtype=torch.float64)},
}


def without_data(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def described(results: Any) -> list[Any]:
    """Sizes, strides and dtypes of the tensors of a call."""
    results = results if isinstance(results, (tuple, list)) else (results,)
    return [None if x is None else (tuple(x.shape), x.stride(), x.dtype) for x in results]


def assert_described_alike(operator: str, call: Call) -> None:
    real = getattr(ops, operator)(*call.args, **call.kwargs)
    moved = tree_map_only(Tensor, without_data, (call.args, call.kwargs))
    meta = getattr(ops, operator)(*moved[0], **moved[1])
    assert described(meta) == described(real)
    assert all(x is None or x.is_meta for x in meta)
    with FakeTensorMode() as mode:
        args, kwargs = tree_map_only(Tensor, mode.from_tensor, (call.args, call.kwargs))
        fake = getattr(ops, operator)(*args, **kwargs)
    assert described(fake) == described(real)
    assert all(x is None or isinstance(x, FakeTensor) for x in fake)


# ------------------------------------------------------------------------------------------------------- the operators
@pytest.mark.parametrize(("operator", "family"), PAIRS)
def test_results_are_described_as_the_kernels_are(operator: str, family: str) -> None:
    for call in CALLS[operator][family]():
        assert_described_alike(operator, call)


@pytest.mark.parametrize("operator", ATTENTION)
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
def test_any_layout(operator: str, layout: str) -> None:
    problem, options = with_kind(
        Case(**{**BASE.__dict__, "layout": "plain" if layout == "expanded" else layout, "causal": LOWER_RIGHT}), None
    )
    if layout == "expanded":
        for name in ("query", "key", "value", "grad_out"):
            setattr(problem, name, getattr(problem, name)[:1].expand(2, -1, -1, -1))
    for call in ATTENTION[operator](Attention(problem, options)):
        assert_described_alike(operator, call)


@pytest.mark.parametrize("operator", CALLS)
def test_time_does_not_grow_with_length(operator: str) -> None:
    """10^6 queries and keys: the products of the sizes would fill terabytes, and a loop over them would not end."""
    family = next(iter(CALLS[operator]))
    call, long, short = CALLS[operator][family]()[0], 10**6, (5, 7)

    def stretched(x: Tensor) -> Tensor:
        return torch.empty([long if n in short else n for n in x.shape], dtype=x.dtype, device="meta")

    args, kwargs = tree_map_only(Tensor, stretched, (call.args, call.kwargs))
    results = [x for x in getattr(ops, operator)(*args, **kwargs) if x is not None]
    assert all(x.is_meta for x in results) and (operator == "paged_attention" or long in results[0].shape)


# ----------------------------------------------------------------------------------------------------------- the module
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(("keywords", "options"), MODULES, ids=str)
def test_module_on_meta_and_fake_tensors(keywords: dict[str, Any], options: dict[str, Any], masks: str) -> None:
    """Made on the meta device, moved to it, and made under fake tensors: output, weights, gradients."""
    real, given = variant(keywords, **options), MASKS[masks]()
    query, key, value = inputs_for(real)
    length = 0 if not real.batch_first else 1
    inputs = (query, key.narrow(length, 0, 5), value.narrow(length, 0, 5))
    for need_weights in (True, False):
        want = real(*inputs, need_weights=need_weights, **given)
        grads = torch.autograd.grad(want[0].sum(), list(real.parameters()), allow_unused=True)
        for module in (make(device="meta", **options, **keywords), variant(keywords, **options).to("meta")):
            moved = tree_map_only(Tensor, without_data, (inputs, given))
            got = module(*moved[0], need_weights=need_weights, **moved[1])
            assert described(got) == described(want)
            again = torch.autograd.grad(got[0].sum(), list(module.parameters()), allow_unused=True)
            assert [g is None or g.shape for g in again] == [g is None or g.shape for g in grads]
        with FakeTensorMode() as mode:
            moved = tree_map_only(Tensor, mode.from_tensor, (inputs, given))
            got = make(**options, **keywords)(*moved[0], need_weights=need_weights, **moved[1])
        assert described(got) == described(want)


@pytest.mark.parametrize(("keywords", "options"), MODULES, ids=str)
def test_module_from_meta_holds_what_is_loaded(keywords: dict[str, Any], options: dict[str, Any]) -> None:
    want = variant(keywords, **options)
    module = variant(keywords, **options).to("meta").to_empty(device="cpu")
    module.load_state_dict(want.state_dict())
    inputs = inputs_for(want)
    assert torch.equal(module(*inputs)[0], want(*inputs)[0])


# -------------------------------------------------------------------------------------------------------- the functions
def test_functions_on_fake_tensors() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    starts = torch.tensor([0, 2, 5])
    padding = last_hidden(2, 7)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (scaled_dot_product_attention, (q, k, k), {"enable_gqa": True, "return_lse": True, "window": (2, 1)}),
        (scaled_dot_product_attention, (q, k, k), {"enable_gqa": True, "key_padding_mask": padding, "dropout_p": 0.1}),
        (scaled_dot_product_attention, (q, q, q), {"segment_ids": torch.tensor([0, 0, 1, 1, 2]), "softcap": 2.0}),
        (scaled_dot_product_attention, (q, q, q), {"is_causal": True, "prefix_length": torch.tensor([1, 2])}),
        (scaled_dot_product_attention, (q, q, q), {"alibi_slopes": torch.rand(4), "sink": torch.rand(4)}),
        (scaled_dot_product_attention, (q, q, q), {"return_weights": "column_sum", "return_lse": True}),
        (varlen_attention, (*[q[0].transpose(0, 1)] * 3, starts, starts, 3, 3), {"is_causal": True}),
    ]
    for function, args, kwargs in calls:
        want = function(*args, **kwargs)
        moved = tree_map_only(Tensor, without_data, (args, kwargs))
        assert described(function(*moved[0], **moved[1])) == described(want), (function, kwargs)
        with FakeTensorMode() as mode:
            moved = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
            assert described(function(*moved[0], **moved[1])) == described(want), (function, kwargs)


@pytest.mark.parametrize("kind", [{}, {"window": 5}, {"storage": "int8"}], ids=str)
def test_cache_of_fake_tensors(kind: dict[str, Any]) -> None:
    def decode() -> list[Any]:
        cache = mha_ext.KVCache(2, num_kv_heads=2, max_length=16, head_dim=8, **kind)
        results = []
        for n in (3, 1):
            q, k, v = torch.randn(2, 4, n, 8), torch.randn(2, 2, n, 8), torch.randn(2, 2, n, 8)
            cache.append(k, v)
            options = {"key_range": cache.key_range(n), "enable_gqa": True}
            results += described(scaled_dot_product_attention(q, *cache.key_value(), **options))
        return results

    want = decode()
    with FakeTensorMode():
        assert decode() == want


def test_cached_layer_of_fake_tensors() -> None:
    def decode() -> list[Any]:
        layer = mha_ext.MultiheadAttention(16, 4, batch_first=True, num_kv_heads=2, rope=True).eval()
        cache = mha_ext.KVCache(2, num_kv_heads=2, max_length=16, head_dim=4)
        with torch.no_grad():
            parts = [torch.randn(2, n, 16) for n in (3, 1)]
            return [described(layer(x, x, x, kv_cache=cache, need_weights=False)) for x in parts]

    want = decode()
    with FakeTensorMode():
        assert decode() == want


# -------------------------------------------------------------------------------------------------- traced and symbolic
@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("family", ["plain", "masks and causal", "dropout", "appended keys", "all", "bfloat16"])
def test_traced_graphs_give_the_values_of_the_call(family: str, tracing: str) -> None:
    sizes, kind = FAMILIES[family]
    problem, options = with_kind(Case(**{**BASE.__dict__, **sizes}), kind)

    def step(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
        out, lse = ops.attention(query, key, value, *rest, **options)
        sent = (problem.grad_out, problem.grad_lse)
        return (out, lse, *torch.autograd.grad((out, lse), (query, key, value), sent))

    leaves = [x.requires_grad_() for x in problem.tensors[:3]]
    arguments = (*leaves, *problem.tensors[3:])
    graph = make_fx(step, tracing_mode=tracing, _allow_non_fake_inputs=True)(*arguments)
    assert any("mha_ext.attention_backward" in str(node.target) for node in graph.graph.nodes)
    for a, b in zip(graph(*arguments), step(*arguments), strict=True):
        assert torch.equal(a, b)


def test_symbolic_sizes_stay_open() -> None:
    """Forward and backward with masks: no guard ties a batch or a length to a number."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    shapes = ((6, 4, 11, 8), (6, 2, 13, 8), (6, 2, 13, 8), (6, 1, 11, 13), (6, 13))
    q, k, v, mask, padding = [mode.from_tensor(torch.empty(*shape)) for shape in shapes]
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    with mode:
        leaves = [x.requires_grad_() for x in (q, k, v, mask)]
        out, lse = ops.attention(*leaves, padding, causal=1)
        grads = torch.autograd.grad((out.sum() + lse.sum()), leaves)
    assert out.shape[0] is batch or str(out.shape[0]) == str(batch)
    assert [str(n) for n in (*out.shape[::2], grads[1].shape[2])] == [str(n) for n in (batch, queries, keys)]
    open_sizes = {n.node.expr for n in (batch, queries, keys)}
    tied = [g.expr for g in env.guards if g.expr.func.__name__ == "Equality" and g.expr.free_symbols & open_sizes]
    assert tied == []
    assert not open_sizes & set(env.replacements)


@pytest.mark.parametrize("masks", [False, True])
def test_sizes_that_nobody_knows(masks: bool) -> None:
    """Batch and lengths that depend on data."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        batch, queries, keys = (env.create_unbacked_symint() for _ in range(3))
        for n in (batch, queries, keys):
            torch._check(n >= 2)
        q, k, v = torch.empty(batch, 4, queries, 8), torch.empty(batch, 2, keys, 8), torch.empty(batch, 2, keys, 8)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        given = (torch.empty(batch, 1, queries, keys), torch.empty(batch, keys)) if masks else ()
        out, lse = ops.attention(*leaves, *given, causal=1)
        grads = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert [str(n) for n in out.shape] == [str(batch), "4", str(queries), "8"]
    assert [str(n) for n in grads[1].shape] == [str(batch), "2", str(keys), "8"]
