"""Rows of a layer's inputs that are without influence, cleaned.

What is hidden reaches no output, but the gradient of a projection's weight is ``dYᵀ X``: a row of X that holds NaN
would reach it as 0 · NaN. And in self-attention a hidden key is also a query: its own output is NaN, but as long as the
loss leaves that output out, no gradient may be. So the row is replaced by zeros on the way in, and its output by NaN,
which passes no gradient, on the way out.

The layer's operator cleans what is only a key, or only a query, in its own backward pass.
"""

from __future__ import annotations

from math import inf, nan
from typing import NamedTuple

import torch
from torch import Tensor

from mha_ext.layer import QKV, Options

__all__ = ["Cleaned", "restore", "without_unused_rows"]


class Cleaned(NamedTuple):
    """Inputs of a layer, and the queries ``(B or 1, T)`` whose result was NaN before they were cleaned, if any."""

    inputs: QKV
    lost: Tensor | None = None


def without_unused_rows(inputs: QKV, options: Options, appends: bool, batch_first: bool, fused: bool) -> Cleaned:
    """Query, key and value with zeros in the keys that no query sees and in the queries that see no key.

    Args:
        inputs: ``(B, T, E)`` or ``(T, B, E)``; what was one tensor stays one tensor.
        options: resolved.
        appends: whether keys are appended, which every query sees.
        batch_first: the layout of the inputs.
        fused: whether the layer's operator follows.
    """
    query, key, value = inputs
    is_self = query is key
    masked = options.attn_mask is not None or options.key_padding_mask is not None
    # The causal mask of self-attention hides no key, and no query, entirely.
    if not torch.is_grad_enabled() or not (masked or (options.causal and not is_self)) or (fused and not is_self):
        return Cleaned(inputs)
    if all(_is_finite(x) for x in ((query,) if fused and value is key else inputs)):
        return Cleaned(inputs)
    length = 1 if batch_first else 0
    no_query, no_key = _unused(options, query.shape[length], key.shape[length], query.device)
    if appends:
        no_key = torch.zeros_like(no_key)

    def clean(x: Tensor, unused: Tensor) -> Tensor:
        return x.masked_fill((unused if batch_first else unused.transpose(0, 1)).unsqueeze(-1), 0.0)

    if is_self:
        broken = query.detach().isfinite().all(-1).logical_not()
        cut = no_query.logical_and(broken if batch_first else broken.transpose(0, 1))
        query = key_cleaned = clean(query, cut)
        lost = cut.logical_and(no_key.logical_not())
    else:
        query, key_cleaned, lost = clean(query, no_key), clean(key, no_query), None
    return Cleaned((query, key_cleaned, key_cleaned if value is key else clean(value, no_query)), lost)


def restore(
    out: Tensor, weights: Tensor | None, lost: Tensor | None, batch_first: bool
) -> tuple[Tensor, Tensor | None]:
    """A layer's results with NaN where they were lost: ``(B, T, E)`` or ``(T, B, E)``, and ``(B, [H,] T, S)``."""
    if lost is None:
        return out, weights
    out = out.masked_fill((lost if batch_first else lost.transpose(0, 1)).unsqueeze(-1), nan)
    if weights is not None:
        rows = lost.unsqueeze(-1) if weights.dim() == 3 else lost[:, None, :, None]
        weights = weights.masked_fill(rows.logical_and(weights.detach() != 0), nan)
    return out, weights


def _is_finite(x: Tensor) -> bool:
    """Whether all values are known to be finite; nobody can look while x is traced, batched or without data."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    try:
        return bool(x.detach().sum().isfinite())
    except RuntimeError:
        return False


def _unused(options: Options, num_queries: int, num_keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """True at keys ``(B or 1, S)`` that no query sees, and at queries ``(B or 1, T)`` that see no key, in any head."""
    if options.attn_mask is None and options.key_padding_mask is not None and not options.causal:
        hidden = _hides(options.key_padding_mask)
        return hidden, hidden.all(1, keepdim=True).expand(-1, num_queries)
    pairs = _hidden_pairs(options, num_queries, num_keys, device)
    return pairs.all(2).all(1), pairs.all(3).all(1)


def _hides(mask: Tensor) -> Tensor:
    """True where a padding mask hides its key."""
    return mask if mask.dtype == torch.bool else mask == -inf


def _hidden_pairs(options: Options, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """True where a query does not see a key, broadcastable to ``(B, H, T, S)``, with full T and S."""
    queries = torch.arange(num_queries, device=device).unsqueeze(1)
    hidden = torch.arange(num_keys, device=device) > (queries if options.causal else num_keys)
    hidden = hidden.expand(1, 1, num_queries, num_keys)
    if options.attn_mask is not None:
        mask = options.attn_mask
        hidden = hidden | (mask.logical_not() if mask.dtype == torch.bool else mask == -inf)
    if options.key_padding_mask is not None:
        hidden = hidden | _hides(options.key_padding_mask)[:, None, None]
    return hidden
