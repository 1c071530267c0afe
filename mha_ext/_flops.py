"""Floating-point operation counts of the operators, for ``torch.utils.flop_counter.FlopCounterMode``.

Only matrix products count, two operations a multiply-add, and a pass that follows another counts the scores it
computes again: the conventions of PyTorch's own formulas for its fused attention. What hides pairs (masks, padding,
causal order, windows, ranges, lengths of rows in a cache) does not lessen a count, although it lessens the work: a
count depends on shapes alone, so it is the same for meta tensors and in graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from mha_ext._ops import operators

__all__: list[str] = []

Shape = Sequence[int]


def _scores(query: Shape, key: Shape) -> int:
    """Operations of one product with the (T, S) scores of every head, per column of the other factor."""
    batch, num_heads, num_queries, _ = query
    return 2 * batch * num_heads * num_queries * key[2]


@register_flop_formula([operators.attention, operators.attention_with_weights, operators.attention_for_backward])
def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return _scores(query, key) * (query[3] + value[3])


@register_flop_formula(operators.paged_attention)
def _paged_attention(query: Shape, key_pages: Shape, value_pages: Shape, page_table: Shape, *_: Any, **__: Any) -> int:
    """Of every key that the table has room for."""
    batch, num_heads, num_queries, head_dim = query
    num_keys = page_table[1] * key_pages[2]
    return 2 * batch * num_heads * num_queries * num_keys * (head_dim + value_pages[3])


@register_flop_formula(operators.attention_backward)
def _attention_backward(
    grad_out: Shape | None, grad_lse: Shape | None, query: Shape, key: Shape, value: Shape, *_: Any, **kwargs: Any
) -> int:
    need_query, need_key, need_value = map(int, kwargs["output_mask"][:3])
    # Q Kᵀ again and dO Vᵀ always, then dS K, dSᵀ Q, Pᵀ dO.
    return _scores(query, key) * (query[3] * (1 + need_query + need_key) + value[3] * (1 + need_value))


@register_flop_formula(operators.attention_weights_backward)
def _attention_weights_backward(grad_weights: Shape, query: Shape, key: Shape, *_: Any, **kwargs: Any) -> int:
    need_query, need_key = map(int, kwargs["output_mask"][:2])
    return _scores(query, key) * query[3] * (1 + need_query + need_key)


@register_flop_formula(operators.attention_jvp)
def _attention_jvp(query: Shape, key: Shape, value: Shape, *rest: Any, **_: Any) -> int:
    tangents = [int(x is not None) for x in rest[5:]]  # behind masks, seed, out and lse: those of the inputs
    moved = int(any(tangents[:2] + tangents[3:]))
    # Q Kᵀ again; tQ Kᵀ, Q tKᵀ; tP V, P tV.
    return _scores(query, key) * (query[3] * (1 + sum(tangents[:2])) + value[3] * (moved + tangents[2]))


@register_flop_formula(operators.attention_backward_jvp)
def _attention_backward_jvp(
    grad_out: Shape | None, grad_lse: Shape | None, query: Shape, key: Shape, value: Shape, *rest: Any, **kwargs: Any
) -> int:
    tangents = [int(x is not None) for x in rest[5:]]
    t_query, t_key, t_value, t_grad_out = *tangents[:3], tangents[7]
    moved, sent = int(any(tangents[:2] + tangents[3:7])), int(grad_out is not None)
    need = list(map(int, kwargs["output_mask"]))
    # Q Kᵀ, tQ Kᵀ, Q tKᵀ; tdS K, dS tK; tdSᵀ Q, dSᵀ tQ.
    wide = 1 + t_query + t_key + need[0] * (1 + t_key) + need[1] * (1 + t_query)
    # dO Vᵀ, dO tVᵀ, tdO Vᵀ; tPᵀ dO, Pᵀ tdO; tP V, P tV.
    deep = sent * (1 + t_value) + t_grad_out + need[2] * (moved * sent + t_grad_out) + need[7] * (moved + t_value)
    return _scores(query, key) * (query[3] * wide + value[3] * deep)


def _layer(
    query: Shape, key: Shape, in_proj_weight: Shape, out_proj_weight: Shape, kwargs: dict[str, Any]
) -> tuple[list[int], int, Shape, Shape]:
    """Operations of the projections of query, key, value and of the output, and the heads' query and key shapes."""
    num_heads, num_kv_heads, batch_first = kwargs["num_heads"], kwargs["num_kv_heads"], kwargs.get("batch_first", True)
    width, embed_dim = in_proj_weight
    head_dim = width // (num_heads + 2 * num_kv_heads)
    (batch, num_queries), num_keys = (query[:2], key[1]) if batch_first else (query[1::-1], key[0])
    key_value = 2 * prod(key[:2]) * embed_dim * num_kv_heads * head_dim
    per_query = 2 * prod(query[:2])
    queries, outputs = per_query * embed_dim * num_heads * head_dim, per_query * prod(out_proj_weight)
    return (
        [queries, key_value, key_value, outputs],
        head_dim,
        (batch, num_heads, num_queries, head_dim),
        (batch, num_kv_heads, num_keys, head_dim),
    )


@register_flop_formula(operators.multi_head_attention)
def _multi_head_attention(
    query: Shape,
    key: Shape,
    value: Shape,
    in_proj_weight: Shape,
    in_proj_bias: Shape | None,
    out_proj_weight: Shape,
    *_: Any,
    **kwargs: Any,
) -> int:
    projections, head_dim, query_heads, key_heads = _layer(query, key, in_proj_weight, out_proj_weight, kwargs)
    return sum(projections) + _scores(query_heads, key_heads) * 2 * head_dim


@register_flop_formula(operators.multi_head_attention_backward)
def _multi_head_attention_backward(
    grad_out: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    in_proj_weight: Shape,
    in_proj_bias: Shape | None,
    out_proj_weight: Shape,
    *_: Any,
    **kwargs: Any,
) -> int:
    projections, head_dim, query_heads, key_heads = _layer(query, key, in_proj_weight, out_proj_weight, kwargs)
    need, shared = list(map(int, kwargs["output_mask"])), kwargs.get("shared_inputs", 0)
    sources = ((0, 1, 2), (0, 1, 1), (0, 0, 0))[shared]  # whose gradient holds that of query, key and value
    beyond = int(any(need[:5] + need[7:]))  # something before the output projection has a gradient
    count = projections[3] * (beyond + need[5])  # dO, dW_O
    for projection, source in zip(projections, sources, strict=False):
        count += projection * (need[source] + need[3])  # dX, dW
    return count + beyond * _scores(query_heads, key_heads) * 5 * head_dim
