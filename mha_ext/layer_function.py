"""The whole layer as a function: a drop-in for ``torch.nn.functional.multi_head_attention_forward``."""

from __future__ import annotations

from torch import Tensor

from mha_ext import checks, layer, parameters, unused_rows

__all__ = ["multi_head_attention_forward"]


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
