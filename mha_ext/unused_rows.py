"""Rows of a layer's inputs that are without influence, kept out of the gradients.

What is hidden reaches no output, but the gradient of a projection's weight is ``dYᵀ X``: a row of X that holds NaN
would reach it as 0 · NaN. And in self-attention a hidden key is also a query: its own output is NaN, but as long as the
loss leaves that output out, no gradient may be. So the row is replaced by zeros on the way in, and its output by NaN,
which passes no gradient, on the way out. Where the row is finite but overflows on its way, only the output tells: then
the layer runs again without the row, whose output stays what it was.

The layer's operator cleans what is only a key, or only a query, in its own backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import NamedTuple

import torch
from torch import Tensor

from mha_ext.layer import NO_WINDOW, QKV, Options

__all__ = ["Situation", "is_finite", "run_without_unused_rows"]

Results = tuple[Tensor, Tensor | None]


class Situation(NamedTuple):
    """How a layer is about to run."""

    options: Options  # resolved
    appends: bool  # whether keys are appended, which every query sees
    batch_first: bool
    fused: bool  # whether the layer's operator does it


def run_without_unused_rows(compute: Callable[[QKV], Results], inputs: QKV, situation: Situation) -> Results:
    """The results of a layer, such that what has no influence on them has none on gradients.

    Args:
        compute: the layer, from query, key and value to ``(B, T, E)`` or ``(T, B, E)`` and weights
            ``(B, [H,] T, S)`` or None.
        inputs: ``(B, T, E)`` or ``(T, B, E)``; what was one tensor stays one tensor.
        situation: how the layer runs.
    """
    options, _, batch_first, fused = situation
    masked = options.attn_mask is not None or options.key_padding_mask is not None
    hides = masked or options.causal or options.window != NO_WINDOW
    # The graph of a trace must not depend on the mode.
    if not (hides and (torch.is_grad_enabled() or torch._C._get_tracing_state() is not None)):
        return compute(inputs)
    query, key, value = inputs
    length = 1 if batch_first else 0
    is_self = query.shape[length] == key.shape[length]  # or may be: position i of one goes with i of the other
    if is_self and not masked:  # neither causal order nor a window hides all of a key, or of a query, from itself
        return compute(inputs)
    if fused and not is_self:
        return compute(inputs)
    lost = None
    looked_at = (query,) if fused else (query, key, value)
    if not all(is_finite(x) for x in looked_at):
        inputs, lost = _cleaned(inputs, situation, is_self)
    results = compute(inputs)
    if is_self and is_finite(results[0]) is False:
        results = _again_without_overflow(compute, inputs, situation, results)
    return results if lost is None else _with_nan(results, lost, batch_first)


def _cleaned(inputs: QKV, situation: Situation, is_self: bool) -> tuple[QKV, Tensor | None]:
    """The inputs with zeros in unused rows, and the queries ``(B or 1, T)`` whose results are lost by that, if any."""
    query, key, value = inputs
    batch_first = situation.batch_first
    no_query, no_key = _unused(inputs, situation)
    cut, lost = no_key, None
    if is_self:
        broken = _by_batch(query.detach().isfinite().all(-1).logical_not(), batch_first)
        hidden = no_query.logical_and(broken)
        lost = hidden.logical_and(no_key.logical_not())
        cut = hidden if query is key else hidden.logical_or(no_key)
    query = _zero(query, cut, batch_first)
    if situation.fused:
        key = query if inputs[1] is inputs[0] else key
        return (query, key, key if inputs[2] is inputs[1] else value), lost
    key = query if inputs[1] is inputs[0] else _zero(key, no_query, batch_first)
    return (query, key, key if inputs[2] is inputs[1] else _zero(value, no_query, batch_first)), lost


def _again_without_overflow(
    compute: Callable[[QKV], Results], inputs: QKV, situation: Situation, results: Results
) -> Results:
    """The results where hidden positions gave no finite output, computed without these; their own stay, constants.

    Those that would not be finite with zeros either see a NaN of somebody else's, and keep their place.
    """
    out, weights = results
    batch_first = situation.batch_first
    no_query, _ = _unused(inputs, situation)

    def without(rows: Tensor) -> Results:
        query = _zero(inputs[0], rows, batch_first)
        key = query if inputs[1] is inputs[0] else inputs[1]
        return compute((query, key, key if inputs[2] is inputs[1] else inputs[2]))

    def broken(out: Tensor) -> Tensor:
        return _by_batch(out.detach().isfinite().all(-1).logical_not(), batch_first)

    cut = no_query.logical_and(broken(out))
    while cut.any():
        out_again, weights_again = without(cut)
        innocent = cut.logical_and(broken(out_again))
        if not innocent.any():
            out = torch.where(_by_batch(cut, batch_first).unsqueeze(-1), out.detach(), out_again).contiguous()
            if weights is not None and weights_again is not None:
                weights = torch.where(_as_rows(cut, weights), weights.detach(), weights_again)
            break
        cut = cut.logical_and(innocent.logical_not())
    return out, weights


def _with_nan(results: Results, lost: Tensor, batch_first: bool) -> Results:
    """The results with NaN in the rows that were lost."""
    out, weights = results
    out = out.masked_fill(_by_batch(lost, batch_first).unsqueeze(-1), nan)
    if weights is not None:
        weights = weights.masked_fill(_as_rows(lost, weights).logical_and(weights.detach() != 0), nan)
    return out, weights


def _by_batch(rows: Tensor, batch_first: bool) -> Tensor:
    """``(B, T)`` from a layer's layout, and back."""
    return rows if batch_first else rows.transpose(0, 1)


def _as_rows(rows: Tensor, weights: Tensor) -> Tensor:
    return rows.unsqueeze(-1) if weights.dim() == 3 else rows[:, None, :, None]


def _zero(x: Tensor, unused: Tensor, batch_first: bool) -> Tensor:
    return x.masked_fill(_by_batch(unused, batch_first).unsqueeze(-1), 0.0)


def is_finite(x: Tensor) -> bool | None:
    """Whether all values are finite; None where nobody can look: traced, batched or without data."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return None
    try:
        return bool(x.detach().sum().isfinite())
    except RuntimeError:
        return None


def _unused(inputs: QKV, situation: Situation) -> tuple[Tensor, Tensor]:
    """True at keys ``(B or 1, S)`` that no query sees, and at queries ``(B or 1, T)`` that see no key, in any head."""
    options, length = situation.options, 1 if situation.batch_first else 0
    num_queries, num_keys = inputs[0].shape[length], inputs[1].shape[length]
    mask = options.attn_mask
    if mask is None or mask.shape[2] == 1:
        no_query, no_key = _unused_by_key(options, num_queries, num_keys, inputs[0].device)
    else:
        pairs = _hidden_pairs(options, num_queries, num_keys, mask)
        no_query, no_key = pairs.all(2).all(1), pairs.all(3).all(1)
    return no_query, torch.zeros_like(no_key) if situation.appends else no_key


def _unused_by_key(options: Options, num_queries: int, num_keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same where masks hide a key from all queries alike, so that no T x S tensor is needed."""
    hidden = torch.zeros(1, 1, num_keys, dtype=torch.bool, device=device)
    if options.attn_mask is not None:
        hidden = hidden | _hides(options.attn_mask, True)[:, :, 0]
    if options.key_padding_mask is not None:
        hidden = hidden | _hides(options.key_padding_mask, False)[:, None]
    left, right = _reach(options)
    end = num_keys if right < 0 else num_queries + right
    beyond = torch.arange(num_keys, device=device) >= (end if num_queries else 0)
    if left < 0 and right < 0:
        return hidden.all(1) | beyond, hidden.all(2).all(1, keepdim=True).expand(-1, num_queries)
    seen = torch.nn.functional.pad(hidden.logical_not().cumsum(2), (1, 0))  # how many of the first j keys
    queries = torch.arange(num_queries, device=device)
    first = (queries - left).clamp(0, num_keys) if left >= 0 else torch.zeros_like(queries)
    stop = (queries + right + 1).clamp(max=num_keys) if right >= 0 else torch.full_like(queries, num_keys)
    return hidden.all(1) | beyond, seen[:, :, stop].eq(seen[:, :, first]).all(1)


def _reach(options: Options) -> tuple[int, int]:
    """How far a query sees to the left and to the right, -1 for no limit."""
    left, right = options.window
    return left, 0 if options.causal else right


def _hides(mask: Tensor, true_shows: bool) -> Tensor:
    """True where a mask hides a key."""
    if mask.dtype == torch.bool:
        return mask.logical_not() if true_shows else mask
    return mask == -inf


def _hidden_pairs(options: Options, num_queries: int, num_keys: int, mask: Tensor) -> Tensor:
    """True where a query does not see a key, broadcastable to ``(B, H, T, S)``, with full T and S."""
    hidden = _hides(mask, True).expand(-1, -1, num_queries, num_keys)
    left, right = _reach(options)
    ahead = torch.arange(num_keys, device=mask.device) - torch.arange(num_queries, device=mask.device).unsqueeze(1)
    if right >= 0:
        hidden = hidden | (ahead > right)
    if left >= 0:
        hidden = hidden | (ahead < -left)
    if options.key_padding_mask is not None:
        hidden = hidden | _hides(options.key_padding_mask, False)[:, None, None]
    return hidden
