"""Attention with every option of ``functional.scaled_dot_product_attention``, by dense float64 math and pair by pair.

``dense`` builds the whole (B, H, T, S) matrix of who sees whom and of what is added, and is differentiable; ``pairs``
does the same with Python's own numbers, one pair after the other, and is there to check the first. Neither uses a line
of the package. Options have the names, shapes and meaning of the function's keywords, with one batch axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Options = Mapping[str, Any]


class Answer(NamedTuple):
    """Output, log-sum-exp, weights after dropout and before, and what the scores are made of, all (B, H, T, ...)."""

    out: Tensor
    lse: Tensor
    weights: Tensor
    probabilities: Tensor
    bias: Tensor
    added: Tensor


def positions(queries: int, keys: int, options: Options) -> Tensor:
    """Where among the keys each query stands, (T, 1)."""
    shift = keys - queries if options.get("causal_alignment") == "lower_right" else 0
    return torch.arange(queries)[:, None] + shift


def _per_batch(value: Any) -> Tensor:
    """A number, or one an example, as something that meets (B, H, T, S)."""
    return torch.as_tensor(value).reshape(-1, 1, 1, 1)


def visible(sizes: tuple[int, int, int, int], options: Options) -> Tensor:
    """Which pairs take part, (B, H, T, S) bool: every restriction has to agree."""
    queries, keys = sizes[2:]
    place, key = positions(queries, keys, options), torch.arange(keys)[None]
    seen = torch.ones(sizes, dtype=torch.bool)
    if options.get("is_causal"):
        past = (key <= place)[None, None]
        if options.get("prefix_length") is not None:
            past = past | (key < _per_batch(options["prefix_length"]))
        seen = seen & past
    left, right = options.get("window") or (None, None)
    if left is not None and left >= 0:
        seen = seen & (key >= place - left)
    if right is not None and right >= 0:
        seen = seen & (key <= place + right)
    if options.get("segment_ids") is not None:
        ids = options["segment_ids"]
        of_queries, of_keys = ids if isinstance(ids, tuple) else (ids, ids)
        of_queries, of_keys = (x.reshape(-1, 1, x.shape[-1]) for x in (of_queries, of_keys))
        seen = seen & (of_queries[..., :, None] == of_keys[..., None, :])
    if options.get("key_range") is not None:
        first, end = (x.reshape(-1, 1, queries, 1) for x in options["key_range"])
        seen = seen & (first <= key) & (key < end)
    for mask in _masks(options):
        seen = seen & (mask if mask.dtype == torch.bool else mask != -math.inf)
    return seen


def _masks(options: Options) -> list[Tensor]:
    """Mask and padding, against (B, H, T, S), with True = may attend."""
    found = []
    if options.get("attn_mask") is not None:
        found.append(options["attn_mask"])
    padding = options.get("key_padding_mask")
    if padding is not None:
        padding = padding[..., None, None, :]
        found.append(~padding if padding.dtype == torch.bool else padding)
    return found


def biases(sizes: tuple[int, int, int, int], options: Options) -> list[Tensor]:
    """Everything that is added to the scores, in float64, each against (B, H, T, S); -inf counts as 0."""
    queries, keys = sizes[2:]
    found = [mask.double() for mask in _masks(options) if mask.dtype != torch.bool]
    found = [mask.masked_fill(mask == -math.inf, 0.0) for mask in found]
    if options.get("alibi_slopes") is not None:
        distance = (positions(queries, keys, options) - torch.arange(keys)).abs()
        found.append(-options["alibi_slopes"].double()[..., None, None] * distance)
    if options.get("relative_bias") is not None:
        offset = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        found.append(options["relative_bias"].double()[..., offset + queries - 1])
    return found


def dense(query: Tensor, key: Tensor, value: Tensor, options: Options, keep: Tensor | None = None) -> Answer:
    """The answer, differentiable in query, key, value and in what is floating among the options.

    Args:
        query: (B, H, T, D), any floating dtype, and likewise the next two; computed in float64.
        key: (B, G, S, D).
        value: (B, G, S, D_v).
        options: keywords of the function.
        keep: (B, H, T, S) bool, the pairs that dropout keeps.
    """
    query, key, value = query.double(), key.double(), value.double()
    batch, heads, queries, width = query.shape
    sizes = (batch, heads, queries, key.shape[2])
    shared = torch.arange(heads) // (heads // key.shape[1])
    key, value = key[:, shared], value[:, shared]
    scale = width**-0.5 if options.get("scale") is None else options["scale"]
    scores = scale * torch.einsum("bhid,bhjd->bhij", query, key)
    if options.get("softcap") is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    seen, parts = visible(sizes, options), biases(sizes, options)
    bias, added = torch.zeros(sizes, dtype=torch.float64), torch.zeros(sizes, dtype=torch.float64)
    for part in parts:
        bias, added = bias + part, added + part.detach().abs()
    logits = (scores + bias).masked_fill(~seen, -math.inf)
    sink = options.get("sink")
    if sink is not None:
        logits = torch.cat([logits, sink.double().reshape(1, heads, 1, 1).expand(*sizes[:3], 1)], -1)
    top = torch.nn.functional.pad(logits.detach(), (0, 1), value=-math.inf).amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    shares = (logits - top).exp()
    total = shares.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (total.log() + top).masked_fill(empty, -math.inf)[..., 0]
    probabilities = shares[..., : sizes[3]] / total
    weights = probabilities if keep is None else probabilities * keep / (1 - options["dropout_p"])
    bias = bias.detach().masked_fill(~seen, -math.inf)
    return Answer(weights @ value, lse, weights, probabilities.detach(), bias, added)


# ------------------------------------------------------------------------------------------------- one pair at a time
def _sees(options: Options, sizes: tuple[int, int, int, int], at: tuple[int, int, int, int]) -> bool:
    b, h, i, j = at
    queries, keys = sizes[2:]
    place = i + (keys - queries if options.get("causal_alignment") == "lower_right" else 0)
    if options.get("is_causal") and j > place:
        prefix = options.get("prefix_length")
        prefix = prefix if prefix is None or isinstance(prefix, int) else int(prefix[b])
        if prefix is None or j >= prefix:
            return False
    left, right = options.get("window") or (None, None)
    if (left not in (None, -1) and j < place - left) or (right not in (None, -1) and j > place + right):
        return False
    ids = options.get("segment_ids")
    if ids is not None:
        mine, its = ids if isinstance(ids, tuple) else (ids, ids)
        if int((mine if mine.dim() == 1 else mine[b])[i]) != int((its if its.dim() == 1 else its[b])[j]):
            return False
    if options.get("key_range") is not None:
        first, end = (int((x if x.dim() == 1 else x[b])[i]) for x in options["key_range"])
        if not first <= j < end:
            return False
    padding, mask = options.get("key_padding_mask"), options.get("attn_mask")
    hidden = padding is not None and float(padding[b, j]) == (1.0 if padding.dtype == torch.bool else -math.inf)
    if mask is not None:
        mask = mask.expand(sizes)
        hidden = hidden or float(mask[b, h, i, j]) == (0.0 if mask.dtype == torch.bool else -math.inf)
    return not hidden


def _added(options: Options, sizes: tuple[int, int, int, int], at: tuple[int, int, int, int]) -> float:
    b, h, i, j = at
    queries, keys = sizes[2:]
    place = i + (keys - queries if options.get("causal_alignment") == "lower_right" else 0)
    total = 0.0
    padding, mask = options.get("key_padding_mask"), options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        total += float(mask.expand(sizes)[b, h, i, j])
    if padding is not None and padding.dtype != torch.bool:
        total += float(padding[b, j])
    slopes, relative = options.get("alibi_slopes"), options.get("relative_bias")
    if slopes is not None:
        total -= float((slopes if slopes.dim() == 1 else slopes[b])[h]) * abs(place - j)
    if relative is not None:
        table = relative if relative.dim() == 2 else relative[b]
        total += float(table[h if table.shape[0] > 1 else 0][j - i + queries - 1])
    return total


def pairs(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp without dropout, by sums over lists of Python's numbers."""
    batch, heads, queries, width = query.shape
    sizes = (batch, heads, queries, key.shape[2])
    scale = width**-0.5 if options.get("scale") is None else options["scale"]
    cap, sink = options.get("softcap"), options.get("sink")
    out = torch.zeros(batch, heads, queries, value.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(queries)):
        g, powers = h // (heads // key.shape[1]), {}
        for j in range(sizes[3]):
            if _sees(options, sizes, (b, h, i, j)):
                score = scale * math.fsum(
                    x * y for x, y in zip(query[b, h, i].tolist(), key[b, g, j].tolist(), strict=True)
                )
                score = score if cap is None else cap * math.tanh(score / cap)
                powers[j] = math.exp(score + _added(options, sizes, (b, h, i, j)))
        total = math.fsum(powers.values()) + (0.0 if sink is None else math.exp(float(sink[h])))
        if total > 0:
            lse[b, h, i] = math.log(total)
        for j, power in powers.items():
            out[b, h, i] += power / total * value[b, g, j].double()
    return out, lse


def by_name(
    function: Callable[..., Any], tensors: Mapping[str, Tensor], rest: Options, grads: Mapping[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Results of ``function(**tensors, **rest)`` and the gradient of each floating tensor, from ``grads`` in order."""
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items() if x.is_floating_point()}
    results = list(function(**{**tensors, **leaves}, **rest))
    got = torch.autograd.grad(results, list(leaves.values()), list(grads.values()), allow_unused=True)
    named = {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), got, strict=True)}
    return [x.detach() for x in results], named
