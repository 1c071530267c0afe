"""Drop-ins for functions of ``torch.nn.functional``: attention on heads, and the whole layer as a function."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from mha_ext import _ops, axes, checks, errors, jagged, masks, variants
from mha_ext.errors import InvalidValueError
from mha_ext.layer_function import multi_head_attention_forward
from mha_ext.merging import merge_attention
from mha_ext.relative import alibi_slopes_for, bucketed_relative_bias
from mha_ext.rotary import apply_rotary
from mha_ext.seeds import draw_seed
from mha_ext.varlen import varlen_attention

__all__ = [
    "alibi_slopes_for",
    "apply_rotary",
    "bucketed_relative_bias",
    "merge_attention",
    "multi_head_attention_forward",
    "scaled_dot_product_attention",
    "varlen_attention",
]

_ALIGNMENTS = {"upper_left": 1, "lower_right": 2}
_ALIGNMENT_NAMES = tuple(_ALIGNMENTS)
_WEIGHTS = ("per_head", "mean", "column_sum")
WeightsKind = Literal["per_head", "mean", "column_sum"]


@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_padding_mask: Tensor | None = None,
    causal_alignment: str = "upper_left",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    sink: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    prefix_length: int | Tensor | None = None,
    key_range: Tensor | None = None,
    return_lse: Literal[False] = False,
    return_weights: None = None,
) -> Tensor: ...


@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_padding_mask: Tensor | None = None,
    causal_alignment: str = "upper_left",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    sink: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    prefix_length: int | Tensor | None = None,
    key_range: Tensor | None = None,
    return_lse: bool = False,
    return_weights: WeightsKind | None = None,
) -> Tensor | tuple[Tensor, ...]: ...


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_padding_mask: Tensor | None = None,
    causal_alignment: str = "upper_left",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    sink: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    prefix_length: int | Tensor | None = None,
    key_range: Tensor | None = None,
    return_lse: bool = False,
    return_weights: WeightsKind | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``softmax(scale · Q Kᵀ + mask) V`` on heads, without a tensor of T x S numbers.

    Args:
        query: ``(..., H, T, D)``, any number of leading axes (also none) and any strides; or, as key and value then,
            a jagged nested tensor ``(B, H, length, D)``, computed as :func:`varlen_attention` does.
        key: ``(..., G, S, D)``.
        value: ``(..., G, S, D_v)``.
        attn_mask: broadcastable to ``(..., H, T, S)``; bool, True = may attend; any floating dtype, added to the
            scores; or a ``torch.nn.attention.bias.CausalBias``.
        dropout_p: probability in [0, 1) of dropping a weight, whatever the caller's training mode.
        is_causal: query i sees key j only if ``j <= i`` (or as ``causal_alignment`` says), besides all masks.
        scale: factor of the scores, ``1 / sqrt(D)`` by default.
        enable_gqa: G may divide H; query head h uses key and value head ``h // (H / G)``.
        key_padding_mask: broadcastable to ``(..., S)`` (the axes of query before H); bool, True = ignore the key;
            floating, added to the scores.
        causal_alignment: ``"upper_left"``, or ``"lower_right"``: ``j <= i + S - T``. A CausalBias brings its own, for
            positions too.
        window: ``(left, right)``: query i sees key j only if ``p - left <= j <= p + right``, where p is i, or
            ``i + S - T`` if ``causal_alignment`` is ``"lower_right"`` (causal or not); None or -1 is no limit. Time
            grows with T times the window's width.
        softcap: scores become ``softcap · tanh(score / softcap)`` before masks and biases are added (Gemma 2, 2024).
        alibi_slopes: ``(H,)`` or ``(..., H)``: adds ``-slope · |p - j|`` (Press et al. 2022), p as for ``window``.
        relative_bias: ``(H or 1, T + S - 1)`` or with leading axes: entry n is added to the score of every pair with
            ``j - i = n - (T - 1)``, such as T5's bias (:func:`bucketed_relative_bias`; T5 has ``scale=1.0``). Where
            rows of a cache differ in length, give each its own.
        sink: ``(H,)``, one more logit in the softmax of every row, without a value (Xiao et al. 2023; gpt-oss): a row
            may attend to nothing.
        segment_ids: integers that do not decrease along the sequence, ``(query's (..., T), key's (..., S))`` or one
            tensor for both: only pairs with equal ids see each other, as documents packed into one sequence do.
            Padding behind them takes a larger id.
        prefix_length: int, or integers of query's leading axes: with ``is_causal``, keys before it are visible to
            every query.
        key_range: integers of any width, ``(2, ..., T)``: query i sees key j only if
            ``key_range[0] <= j < key_range[1]``. It says what neither window nor prefix can, and who sees what in a
            ``KVCache`` whose rows differ in length (p above counts keys of all rows alike).
        return_lse: also return the natural log-sum-exp of the scaled, masked scores, ``(..., H, T)``, sink included,
            float32 for half types. It has gradients: a z-loss trains.
        return_weights: also return the weights after dropout: ``"per_head"`` ``(..., H, T, S)``, ``"mean"`` over heads
            ``(..., T, S)``, ``"column_sum"`` over queries ``(..., H, S)``.

    Returns:
        The output ``(..., H, T, D_v)``, its axes stored in the order of query's; with ``return_lse`` or
        ``return_weights`` a tuple of output, lse and weights as far as asked for.

    Raises:
        ValueError: shapes do not fit, or an option is out of range.
        TypeError: a dtype does not fit, or an argument is of the wrong type.
        NotImplementedError: an input is nested or sparse; that is a TypeError as well.

    Differs from PyTorch: a query with every key masked gives 0 and an lse of -inf, not NaN; what is stored behind a
    mask (NaN, infinity) reaches nothing; ``is_causal`` may be combined with masks; a floating mask need not have
    query's dtype; masks get gradients on every path.

    Example:
        >>> import torch
        >>> from mha_ext.functional import scaled_dot_product_attention
        >>> query, key, value = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 5, 8), torch.ones(2, 4, 5, 8)
        >>> out, lse = scaled_dot_product_attention(query, key, value, is_causal=True, return_lse=True)
        >>> out.shape, lse[0, 0].exp().round().tolist()
        (torch.Size([2, 4, 3, 8]), [1.0, 2.0, 3.0])
    """
    where = "scaled_dot_product_attention"
    if (  # the likely call: with one token, looking at every option would take longer than attending
        (attn_mask is None and key_padding_mask is None and scale is None and return_weights is None)
        and (window is None and softcap is None and alibi_slopes is None and relative_bias is None and sink is None)
        and (segment_ids is None and prefix_length is None and key_range is None)
        and (type(is_causal) is bool and enable_gqa is False and return_lse is False)
        and (type(dropout_p) is float and dropout_p == 0.0 and causal_alignment is _ALIGNMENT_NAMES[0])
        and not torch.compiler.is_compiling()
    ):
        directly = _ops.attention_directly(query, key, value, 1 if is_causal else 0)
        if directly is not None:
            return directly
    if not (type(is_causal) is type(enable_gqa) is type(return_lse) is bool):
        checks.flags(where, is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse)
    checks.tensors(where, query, key, value)
    if query.is_nested and query.layout == torch.jagged:
        out: Tensor = jagged.attend(**locals())
        return out
    checks.dense(where, (query, key, value))
    checks.one_of(where, "causal_alignment", causal_alignment, _ALIGNMENT_NAMES)
    if return_weights is not None and return_weights not in _WEIGHTS:
        raise InvalidValueError(f"{where}: return_weights must be None or one of {_WEIGHTS}, got {return_weights!r}")
    query, key, value, layout = axes.align(where, (query, key, value), enable_gqa)
    sizes = variants.Sizes(layout.batch, query.shape[1], query.shape[2], key.shape[2])
    causal = _ALIGNMENTS[causal_alignment] if is_causal else 0
    if attn_mask is not None:
        if masks.is_causal_bias(attn_mask):
            causal, attn_mask = _causal_of_bias(where, attn_mask, sizes[2:], causal), None
        else:
            attn_mask = masks.broadcast_mask(where, attn_mask, layout.batch, sizes[1:])
    if key_padding_mask is not None:
        key_padding_mask = masks.broadcast_padding(where, key_padding_mask, layout.batch, sizes.keys)
    given = variants.Given(window, softcap, alibi_slopes, relative_bias, sink, segment_ids, prefix_length, key_range)
    causal, extra = variants.resolve(where, given, sizes, causal, causal_alignment == "lower_right", query)
    checks.dropout_probability(where, "dropout_p", dropout_p)
    if scale is not None:
        scale = checks.real(where, "scale", scale)
    seed = draw_seed(query.device) if dropout_p > 0.0 else None
    tensors = (query, key, value, attn_mask, key_padding_mask, seed)
    average = return_weights == "mean"
    weights = None
    try:
        if return_weights is None:
            out, lse = _ops.attention(*tensors, dropout_p=dropout_p, causal=causal, scale=scale, **extra)
        else:
            out, lse, weights = _ops.attention_with_weights(
                *tensors, dropout_p=dropout_p, causal=causal, scale=scale, average=average, **extra
            )
    except (ValueError, TypeError) as error:
        errors.pass_on(error, where)
    out = layout.restore(out)
    if not return_lse and weights is None:
        return out
    results = [out, layout.restore(lse)] if return_lse else [out]
    if weights is not None:
        weights = weights.sum(-2) if return_weights == "column_sum" else weights
        results.append(layout.restore(weights, has_heads=not average))
    return tuple(results)


def _causal_of_bias(where: str, bias: Any, sizes: tuple[int, int], causal: int) -> int:
    """The operators' causal alignment for a CausalBias and, if ``causal`` is set, that alignment as well."""
    if (bias.seq_len_q, bias.seq_len_kv) != sizes:
        raise InvalidValueError(
            f"{where}: attn_mask must be a CausalBias of size {sizes}, got {bias.seq_len_q, bias.seq_len_kv}"
        )
    alignment = _ALIGNMENTS[bias.variant.name.lower()]
    if causal in (0, alignment):
        return alignment
    return 1 if sizes[1] >= sizes[0] else 2  # the stricter of the two
