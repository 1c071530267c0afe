"""Drop-ins for functions of ``torch.nn.functional``: attention on heads, and the whole layer as a function."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from mha_ext import _ops, axes, checks, errors, layer, masks, parameters, unused_rows
from mha_ext.errors import InvalidValueError

__all__ = ["multi_head_attention_forward", "scaled_dot_product_attention"]

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
    window: None = None,
    softcap: None = None,
    alibi_slopes: None = None,
    sink: None = None,
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
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
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
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_weights: WeightsKind | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``softmax(scale · Q Kᵀ + mask) V`` on heads, without a tensor of T x S numbers.

    Args:
        query: ``(..., H, T, D)``, any number of leading axes (also none) and any strides.
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
        causal_alignment: ``"upper_left"``, or ``"lower_right"``: ``j <= i + S - T``.
        window: not implemented.
        softcap: not implemented.
        alibi_slopes: not implemented.
        sink: not implemented.
        return_lse: also return the natural log-sum-exp of the scaled, masked scores, ``(..., H, T)``.
        return_weights: also return the weights after dropout: ``"per_head"`` ``(..., H, T, S)``, ``"mean"`` over heads
            ``(..., T, S)``, ``"column_sum"`` over queries ``(..., H, S)``.

    Returns:
        The output ``(..., H, T, D_v)``, its axes stored in the order of query's; with ``return_lse`` or
        ``return_weights`` a tuple of output, lse and weights as far as asked for.

    Raises:
        ValueError: shapes do not fit, or an option is out of range.
        TypeError: a dtype does not fit, or an argument is of the wrong type.
        NotImplementedError: an option that is not implemented is set, or an input is nested or sparse; that is a
            TypeError as well.

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
        and (window is None and softcap is None and alibi_slopes is None and sink is None)
        and (type(is_causal) is bool and enable_gqa is False and return_lse is False)
        and (type(dropout_p) is float and dropout_p == 0.0 and causal_alignment is _ALIGNMENT_NAMES[0])
        and not torch.compiler.is_compiling()
    ):
        directly = _ops.attention_directly(query, key, value, 1 if is_causal else 0)
        if directly is not None:
            return directly
    if not (type(is_causal) is type(enable_gqa) is type(return_lse) is bool):
        checks.flags(where, is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse)
    if not (window is None and softcap is None and alibi_slopes is None and sink is None):
        checks.unsupported(where, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sink=sink)
    checks.tensors(where, query, key, value)
    checks.dense(where, (query, key, value))
    checks.one_of(where, "causal_alignment", causal_alignment, _ALIGNMENT_NAMES)
    if return_weights is not None and return_weights not in _WEIGHTS:
        raise InvalidValueError(f"{where}: return_weights must be None or one of {_WEIGHTS}, got {return_weights!r}")
    query, key, value, layout = axes.align(where, (query, key, value), enable_gqa)
    num_queries, num_keys = query.shape[2], key.shape[2]
    causal = _ALIGNMENTS[causal_alignment] if is_causal else 0
    if attn_mask is not None:
        if masks.is_causal_bias(attn_mask):
            causal, attn_mask = _causal_of_bias(where, attn_mask, (num_queries, num_keys), causal), None
        else:
            sizes = (query.shape[1], num_queries, num_keys)
            attn_mask = masks.broadcast_mask(where, attn_mask, layout.batch, sizes)
    if key_padding_mask is not None:
        key_padding_mask = masks.broadcast_padding(where, key_padding_mask, layout.batch, num_keys)
    checks.dropout_probability(where, "dropout_p", dropout_p)
    if scale is not None:
        scale = checks.real(where, "scale", scale)
    seed = _ops.draw_seed(query.device) if dropout_p > 0.0 else None
    tensors = (query, key, value, attn_mask, key_padding_mask, seed)
    average = return_weights == "mean"
    weights = None
    try:
        if return_weights is None:
            out, lse = _ops.attention(*tensors, dropout_p=dropout_p, causal=causal, scale=scale)
        else:
            out, lse, weights = _ops.attention_with_weights(
                *tensors, dropout_p=dropout_p, causal=causal, scale=scale, average=average
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


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The whole layer as a function, with the signature of ``torch.nn.functional.multi_head_attention_forward``.

    Args:
        query: ``(T, B, E)`` or, unbatched, ``(T, E)``.
        key: ``(S, B, kdim)`` or ``(S, kdim)``.
        value: ``(S, B, vdim)`` or ``(S, vdim)``.
        embed_dim_to_check: E.
        num_heads: H, divides E.
        in_proj_weight: ``(3 E, E)``, unless ``use_separate_proj_weight``.
        in_proj_bias: ``(3 E,)``.
        bias_k: ``(1, 1, E)``, ``(1, E)`` or ``(E,)``, a key appended to every sequence; given with ``bias_v``.
        bias_v: likewise, its value.
        add_zero_attn: append a key and a value of zeros.
        dropout_p: probability in [0, 1) of dropping a weight.
        out_proj_weight: ``(E_out, E)``.
        out_proj_bias: ``(E_out,)``.
        training: dropout acts only then.
        key_padding_mask: ``(B, S)`` or ``(S,)``; bool, True = ignore the key; floating, added.
        need_weights: also return the weights.
        attn_mask: ``(T, S)``, ``(B * H, T, S)`` and what else ``mha_ext.MultiheadAttention`` takes; bool, True = may
            not attend; floating, added.
        use_separate_proj_weight: use the next three weights instead of ``in_proj_weight``.
        q_proj_weight: ``(E, E)``.
        k_proj_weight: ``(E, kdim)``.
        v_proj_weight: ``(E, vdim)``.
        static_k: ``(B * H, S, E / H)``, keys used as they are, instead of projecting ``key``.
        static_v: likewise for ``value``.
        average_attn_weights: weights ``(B, T, S)``, the mean over heads, instead of ``(B, H, T, S)``.
        is_causal: query i sees key j only if ``j <= i``, besides all masks.

    Returns:
        The output ``(T, B, E_out)`` or ``(T, E_out)``, and the weights, or None.

    Raises:
        ValueError: shapes do not fit, or an option is out of range.
        TypeError: a dtype does not fit, or an argument is of the wrong type.

    Differs from PyTorch as ``mha_ext.MultiheadAttention`` does: a query with every key masked gives the output bias,
    ``is_causal`` needs no mask and is never just a hint, appended keys stay visible under it.

    Example:
        >>> import torch
        >>> from mha_ext.functional import multi_head_attention_forward
        >>> x, weight = torch.ones(3, 2, 4), torch.zeros(12, 4)
        >>> out, weights = multi_head_attention_forward(
        ...     x, x, x, 4, 2, weight, None, None, None, False, 0.0, torch.eye(4), None, is_causal=True)
        >>> out.shape, weights[0, 1].tolist()
        (torch.Size([3, 2, 4]), [0.5, 0.5, 0.0])
    """
    where = "multi_head_attention_forward"
    inputs = (query, key, value)
    checks.tensors(where, *inputs)
    checks.dense(where, inputs)
    checks.dropout_probability(where, "dropout_p", dropout_p)
    whole = type(num_heads) is int and type(embed_dim_to_check) is int
    if not whole or num_heads < 1 or embed_dim_to_check < 1 or embed_dim_to_check % num_heads:
        parameters.function_heads(where, embed_dim_to_check, num_heads)
    packed = None if use_separate_proj_weight else parameters.given(where, in_proj_weight=in_proj_weight)[0]
    if packed is None:
        separate = {"q_proj_weight": q_proj_weight, "k_proj_weight": k_proj_weight, "v_proj_weight": v_proj_weight}
        weights = parameters.given(where, **separate)
    else:
        weights = (packed,)
    widths = parameters.function_parameters(
        where, embed_dim_to_check, weights, (in_proj_bias, bias_k, bias_v), (out_proj_weight, out_proj_bias)
    )
    sizes = checks.layer_sizes(where, inputs, widths, batch_first=False)
    checks.same_kind(where, inputs, out_proj_weight)
    static = (static_k, static_v)
    if not (static_k is static_v is None):
        static = parameters.static_heads(where, static, bias_k, sizes, num_heads, query)
    if not sizes.batched:
        inputs = layer.add_batch_axis(inputs, 1)
    inputs, sizes = _without_replaced(inputs, static, sizes)
    need_weights, average_attn_weights, is_causal = checks.layer_flags(
        where, need_weights, average_attn_weights, is_causal
    )
    dropout_p = dropout_p if training else 0.0
    causal = 1 if is_causal else 0
    options = layer.Options(attn_mask, key_padding_mask, dropout_p, None, causal, need_weights, average_attn_weights)
    options = layer.resolve(where, options, sizes, num_heads, query.device)
    heads = (num_heads, num_heads)
    appends = add_zero_attn or bias_k is not None
    fused = not (packed is None or need_weights or appends or static != (None, None))

    def compute(inputs: layer.QKV) -> tuple[Tensor, Tensor | None]:
        if packed is not None and fused:
            projections = (packed, in_proj_bias, out_proj_weight, out_proj_bias)
            return layer.fused(inputs, projections, options, heads, batch_first=False), None
        q, k, v = layer.project(inputs, weights, in_proj_bias, heads, batch_first=False)
        k, v = (x if given is None else given for x, given in zip((k, v), static, strict=True))
        k, v, appended = layer.append_keys(k, v, bias_k, bias_v, add_zero_attn)
        context, attention_weights = layer.attend(q, k, v, options, appended, batch_first=False)
        return layer.linear(context, out_proj_weight, out_proj_bias), attention_weights

    situation = unused_rows.Situation(options, appends, False, fused)
    out, attention_weights = unused_rows.run_without_unused_rows(compute, inputs, situation)
    if not sizes.batched:
        out = out.squeeze(1)
        attention_weights = None if attention_weights is None else attention_weights.squeeze(0)
    return out, attention_weights


def _without_replaced(
    inputs: layer.QKV, static: tuple[Tensor | None, Tensor | None], sizes: checks.LayerSizes
) -> tuple[layer.QKV, checks.LayerSizes]:
    """The inputs with zeros in place of a key or value that static heads replace, and the sizes with their length."""
    heads = static[0] if static[0] is not None else static[1]
    if heads is None:
        return inputs, sizes
    num_keys = heads.shape[2]
    query, *others = inputs
    key, value = (
        other if given is None else other.new_zeros(()).expand(num_keys, sizes.batch, other.shape[2])
        for given, other in zip(static, others, strict=True)
    )
    return (query, key, value), sizes._replace(num_keys=num_keys)
