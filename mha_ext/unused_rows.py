"""Rows of a layer's inputs that are without influence, cleaned, for the layer in pieces.

What is hidden reaches no output, but the gradient of a projection's weight is ``dYᵀ X``: a row of X that holds NaN
would reach it as 0 · NaN. The layer's operator sees to this in its own backward pass.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from mha_ext.layer import QKV, Options

__all__ = ["without_unused_rows"]


def without_unused_rows(inputs: QKV, options: Options, appends: bool, batch_first: bool) -> QKV:
    """Query, key and value with zeros in the keys that no query sees and in the queries that see no key.

    Args:
        inputs: ``(B, T, E)`` or ``(T, B, E)``; what was one tensor stays one tensor.
        options: resolved.
        appends: whether keys are appended, which every query sees.
        batch_first: the layout of the inputs.
    """
    if not torch.is_grad_enabled():
        return inputs
    if options.attn_mask is None and options.key_padding_mask is None and options.causal == 0:
        return inputs
    if all(_is_finite(x) for x in inputs):
        return inputs
    query, key, value = inputs
    length = 1 if batch_first else 0
    hidden = _hidden_pairs(options, query.shape[length], key.shape[length], query.device)
    no_query, no_key = hidden.all(2).all(1), hidden.all(3).all(1)
    if appends:
        no_key = torch.zeros_like(no_key)

    def clean(x: Tensor, unused: Tensor) -> Tensor:
        return x.masked_fill((unused if batch_first else unused.transpose(0, 1)).unsqueeze(-1), 0.0)

    if query is key and key is value:
        query = clean(query, no_key.logical_and(no_query))
        return query, query, query
    cleaned_key = clean(key, no_query)
    return clean(query, no_key), cleaned_key, cleaned_key if value is key else clean(value, no_query)


def _is_finite(x: Tensor) -> bool:
    """Whether all values are known to be finite; nobody can look while x is traced, batched or without data."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    try:
        return bool(x.detach().sum().isfinite())
    except RuntimeError:
        return False


def _hidden_pairs(options: Options, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """True where a query does not see a key, broadcastable to ``(B, H, T, S)``, with full T and S."""
    queries = torch.arange(num_queries, device=device).unsqueeze(1)
    hidden = torch.arange(num_keys, device=device) > (queries if options.causal else num_keys)
    hidden = hidden.expand(1, 1, num_queries, num_keys)
    if options.attn_mask is not None:
        mask = options.attn_mask
        hidden = hidden | (mask.logical_not() if mask.dtype == torch.bool else mask == -inf)
    if options.key_padding_mask is not None:
        padding = options.key_padding_mask
        hidden = hidden | (padding if padding.dtype == torch.bool else padding == -inf)[:, None, None]
    return hidden
