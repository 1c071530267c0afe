"""The operators of ``torch.ops.mha_ext``, typed; nothing else in the package touches that namespace.

Importing this module loads ``mha_ext._C``, which registers them. Tensors have four axes here: query ``(B, H, T, D)``,
key ``(B, H_kv, S, D)``, value ``(B, H_kv, S, D_v)``; bool ``attn_mask``: True = may attend; bool ``key_padding_mask``:
True = ignore; ``causal``: 0 none, 1 aligned to the upper left corner, 2 to the lower right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from mha_ext import _build

__all__ = [
    "Variants",
    "attention",
    "attention_backward",
    "attention_directly",
    "attention_for_backward",
    "attention_weights_backward",
    "attention_with_weights",
    "layer_directly",
    "layer_with_weights_directly",
    "linear_directly",
    "multi_head_attention",
    "multi_head_attention_backward",
    "operators",
    "paged_attention",
]


def _load() -> None:
    """Load the extension, unless it was built for another release of torch: it might load all the same, and crash."""
    built_for = _build.built_for()
    if built_for is not None and built_for.split("+")[0] != torch.__version__.split("+")[0]:
        raise _build.load_failure(built_for)
    try:
        import mha_ext._C  # noqa: F401  (registers the operators)
    except ImportError as error:
        raise _build.load_failure(built_for, error) from error


_load()
# Imported after _load(), whose error tells why the extension is missing. Called by position, or not at all: they give
# None where the operators have to be called, or refuse the arguments.
from mha_ext._C import attention as attention_directly  # noqa: E402
from mha_ext._C import linear as linear_directly  # noqa: E402
from mha_ext._C import multi_head_attention as layer_directly  # noqa: E402
from mha_ext._C import multi_head_attention_with_weights as layer_with_weights_directly  # noqa: E402

operators = torch.ops.mha_ext
_attention = operators.attention.default
_attention_backward = operators.attention_backward.default
_attention_for_backward = operators.attention_for_backward.default
_attention_with_weights = operators.attention_with_weights.default
_attention_weights_backward = operators.attention_weights_backward.default
_paged_attention = operators.paged_attention.default
_multi_head_attention = operators.multi_head_attention.default
_multi_head_attention_backward = operators.multi_head_attention_backward.default


class Variants(TypedDict, total=False):
    """What today's models add: arguments that every attention operator takes, all optional.

    Keys and lengths S are those without appended keys. A query's position among the keys is its index, or that plus
    S - T where ``causal`` is 2 (causal) or 3 (not causal).
    """

    key_range: Tensor | None  # int32 (2, B or 1, T): query i sees only keys key_range[0] <= j < key_range[1]
    relative_bias: Tensor | None  # (B or 1, H or 1, T + S - 1): entry T - 1 + j - i is added to the score of (i, j)
    sink: Tensor | None  # (H,): one more logit in every row's softmax, which has no value
    window_left: int  # keys before its own position that a query sees; -1: no limit
    window_right: int  # and behind it
    softcap: float  # when positive, scores become softcap tanh(score / softcap) before anything is added


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    causal: int = 0,
    scale: float | None = None,
    num_appended_keys: int = 0,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """``softmax(scale · Q Kᵀ + mask) V`` and the natural log-sum-exp of the masked scores.

    Returns:
        out ``(B, H, T, D_v)``, its axes stored in the order of query's, and lse ``(B, H, T)``, -inf without a key.
    """
    tensors = (query, key, value, attn_mask, key_padding_mask, dropout_seed)
    result: tuple[Tensor, Tensor] = _attention(
        *tensors, dropout_p=dropout_p, causal=causal, scale=scale, num_appended_keys=num_appended_keys, **variants
    )
    return result


def attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    dropout_seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    dropout_p: float = 0.0,
    causal: int = 0,
    scale: float | None = None,
    num_appended_keys: int = 0,
    output_mask: Sequence[bool] = (True, True, True, False, False, False, False),
    rounding: Tensor | None = None,
    **variants: Unpack[Variants],
) -> tuple[Tensor | None, ...]:
    """Gradients of :func:`attention`, as ``output_mask`` asks.

    They are those of query, key, value, attn_mask, key_padding_mask, relative_bias and sink.

    ``rounding`` is what :func:`attention_for_backward` gave beside ``out``: without it the gradients of half types are
    those of a rounded output.
    """
    result: tuple[Tensor | None, ...] = _attention_backward(
        grad_out,
        grad_lse,
        query,
        key,
        value,
        attn_mask,
        key_padding_mask,
        dropout_seed,
        out,
        lse,
        dropout_p=dropout_p,
        causal=causal,
        scale=scale,
        num_appended_keys=num_appended_keys,
        output_mask=output_mask,
        rounding=rounding,
        **variants,
    )
    return result


def attention_for_backward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`attention` as autograd calls it for bfloat16 and float16, which it does with the other arguments too.

    Returns:
        out and lse; the weights, empty here; and what rounding took from out, ``(B, H, T, D_v)`` in bfloat16, empty
            for float32 and float64.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _attention_for_backward(query, key, value, attn_mask)
    return result


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    causal: int = 0,
    scale: float | None = None,
    num_appended_keys: int = 0,
    average: bool = True,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`attention` and the weights (after dropout) that it used: ``(B, H, T, S)``, or their mean over heads."""
    result: tuple[Tensor, Tensor, Tensor] = _attention_with_weights(
        query,
        key,
        value,
        attn_mask,
        key_padding_mask,
        dropout_seed,
        dropout_p=dropout_p,
        causal=causal,
        scale=scale,
        num_appended_keys=num_appended_keys,
        average=average,
        **variants,
    )
    return result


def attention_weights_backward(
    grad_weights: Tensor,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    dropout_seed: Tensor | None,
    lse: Tensor,
    *,
    dropout_p: float = 0.0,
    causal: int = 0,
    scale: float | None = None,
    num_appended_keys: int = 0,
    average: bool = True,
    output_mask: Sequence[bool] = (True, True, False, False, False, False),
    **variants: Unpack[Variants],
) -> tuple[Tensor | None, ...]:
    """Gradients of the weights of :func:`attention_with_weights`.

    They are those of query, key, attn_mask, key_padding_mask, relative_bias and sink.
    """
    result: tuple[Tensor | None, ...] = _attention_weights_backward(
        grad_weights,
        query,
        key,
        attn_mask,
        key_padding_mask,
        dropout_seed,
        lse,
        dropout_p=dropout_p,
        causal=causal,
        scale=scale,
        num_appended_keys=num_appended_keys,
        average=average,
        output_mask=output_mask,
        **variants,
    )
    return result


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    key_range: Tensor,
    sink: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """:func:`attention` on keys and values in pages, which few queries read where they lie; without derivatives.

    Pages are ``(pages, H_kv, page size, D)``; key j of sample b lies in page ``page_table[b, j // page size]``, int32.
    ``key_range`` and ``sink`` are those of :class:`Variants`.
    """
    result: tuple[Tensor, Tensor] = _paged_attention(
        query, key_pages, value_pages, page_table, key_range, sink, scale=scale, softcap=softcap
    )
    return result


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor | None,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    shared_inputs: int = 0,
    batch_first: bool = True,
    dropout_p: float = 0.0,
    causal: int = 0,
    scale: float | None = None,
    keep_rounding: bool = False,
) -> tuple[Tensor, ...]:
    """The whole layer (eq. 20.1) as one node: packed projections, attention, output projection.

    Args:
        query: ``(B, T, E)``, or ``(T, B, E)`` when not ``batch_first``.
        key: ``(B, S, E)`` or ``(S, B, E)``.
        value: as ``key``.
        in_proj_weight: ``((H + 2 H_kv) D, E)``, rows in the order query, key, value.
        in_proj_bias: ``((H + 2 H_kv) D,)``.
        out_proj_weight: ``(E_out, H D)``.
        out_proj_bias: ``(E_out,)``.
        attn_mask: as in :func:`attention`.
        key_padding_mask: as in :func:`attention`.
        dropout_seed: as in :func:`attention`.
        num_heads: H.
        num_kv_heads: H_kv, divides H.
        shared_inputs: 2 = query, key and value are one tensor, 1 = key and value are, 0 = all differ.
        batch_first: the layout of inputs and output.
        dropout_p: as in :func:`attention`.
        causal: as in :func:`attention`.
        scale: as in :func:`attention`.
        keep_rounding: keep what rounding takes from the attention output of half types.

    Returns:
        The output in the layout of the inputs, then what the backward pass reads: the projections q, k, v
        (empty where packed into an earlier one), the attention output ``(B, T, H D)`` or ``(T, B, H D)``, lse, and
        what rounding took from the attention output, bfloat16, or empty.
    """
    result: tuple[Tensor, ...] = _multi_head_attention(
        query,
        key,
        value,
        in_proj_weight,
        in_proj_bias,
        out_proj_weight,
        out_proj_bias,
        attn_mask,
        key_padding_mask,
        dropout_seed,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        shared_inputs=shared_inputs,
        batch_first=batch_first,
        dropout_p=dropout_p,
        causal=causal,
        scale=scale,
        keep_rounding=keep_rounding,
    )
    return result


def multi_head_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor | None,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    dropout_seed: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Tensor,
    lse: Tensor,
    rounding: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    shared_inputs: int = 0,
    batch_first: bool = True,
    dropout_p: float = 0.0,
    causal: int = 0,
    scale: float | None = None,
    output_mask: Sequence[bool] = (True,) * 7 + (False, False),
) -> tuple[Tensor | None, ...]:
    """Gradients of :func:`multi_head_attention` for its first seven arguments and the two masks, in that order.

    Where inputs are shared, the gradient of all of them is the first one's (query's, or key's).
    """
    result: tuple[Tensor | None, ...] = _multi_head_attention_backward(
        grad_out,
        query,
        key,
        value,
        in_proj_weight,
        in_proj_bias,
        out_proj_weight,
        out_proj_bias,
        attn_mask,
        key_padding_mask,
        dropout_seed,
        q,
        k,
        v,
        context,
        lse,
        rounding,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        shared_inputs=shared_inputs,
        batch_first=batch_first,
        dropout_p=dropout_p,
        causal=causal,
        scale=scale,
        output_mask=output_mask,
    )
    return result
