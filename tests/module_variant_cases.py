"""A layer with today's variants by the textbook: every pair's score on its own axis, in any dtype, with plain torch."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from layer_cases import Answer, leaf, make
from switches import threads
from torch import Tensor

import mha_ext

KEYWORDS: dict[str, dict[str, Any]] = {
    "norm": {"qk_norm": True},
    "rope": {"rope": True},
    "norm and rope": {"qk_norm": True, "rope": mha_ext.RotaryEmbedding(4, base=100.0, interleaved=True, rotary_dim=2)},
    "window": {"window": (2, 0)},
    "left window": {"window": [1, None]},
    "right window": {"window": (-1, 1)},
    "softcap": {"softcap": 0.7},
    "sink": {"sink": True},
    "all": {"window": (3, 1), "softcap": 2, "sink": True, "qk_norm": True, "rope": True},
}


def variant(keywords: dict[str, Any], seed: int = 0, **options: Any) -> Any:
    """A layer whose sinks, norms and biases are not what they start as."""
    module = make(seed=seed, **options, **keywords)
    g = torch.Generator().manual_seed(seed + 9)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "sink" in name or "norm" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=g, dtype=torch.float64) + 0.5)
    return module


def rotated(heads: Tensor, base: float, interleaved: bool, rotary_dim: int) -> Tensor:
    """(B, H, T, D) turned pair by pair, each a complex number."""
    columns = list(heads.unbind(-1))
    position = torch.arange(heads.shape[2], dtype=torch.float64)
    for n in range(rotary_dim // 2):
        i, j = (2 * n, 2 * n + 1) if interleaved else (n, n + rotary_dim // 2)
        angle = position * base ** (-2.0 * n / rotary_dim)
        c, s = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
        columns[i], columns[j] = columns[i] * c - columns[j] * s, columns[i] * s + columns[j] * c
    return torch.stack(columns, -1)


def normed(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def visible_pairs(queries: int, keys: int, keywords: dict[str, Any], is_causal: bool) -> Tensor:
    """(T, S), True where the causal order and the window let a query see a key."""
    left, right = keywords.get("window") or (None, None)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            early = left not in (None, -1) and j < i - left
            late = right not in (None, -1) and j > i + right
            seen[i, j] = not (early or late or (is_causal and j > i))
    return seen


def projected_heads(module: Any, p: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Query, key and value heads (B, H, T, D), through weights that are packed or not."""
    heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
    rows = [count * module.head_dim for count in heads]
    if "in_proj_weight" in p:
        weights = p["in_proj_weight"].split(rows)
    else:
        weights = tuple(p[f"{name}_proj_weight"] for name in "qkv")
    biases = p["in_proj_bias"].split(rows) if "in_proj_bias" in p else (0.0, 0.0, 0.0)
    return [
        (x @ w.mT + b).unflatten(-1, (count, module.head_dim)).transpose(1, 2)
        for x, w, b, count in zip(inputs, weights, biases, heads, strict=True)
    ]


def dense_layer(
    module: Any, p: dict[str, Tensor], inputs: list[Tensor], keywords: dict[str, Any], **masks: Any
) -> tuple[Tensor, Tensor]:
    """Output (B, T, E) and weights (B, H, T, S) from parameters by name and inputs (B, T, E); masks in the module's
    conventions, float masks added, ``keep`` for dropout."""
    q, k, v = projected_heads(module, p, inputs)
    if keywords.get("qk_norm"):
        q, k = normed(q, p["q_norm.weight"], keywords["eps"]), normed(k, p["k_norm.weight"], keywords["eps"])
    rope = keywords.get("rope")
    if rope:
        rope = {"base": 1e4, "interleaved": False, "rotary_dim": module.head_dim} if rope is True else vars_of(rope)
        q, k = rotated(q, **rope), rotated(k, **rope)
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    if "bias_k" in p:
        row = (batch, module.num_kv_heads, 1, module.head_dim)
        k = torch.cat((k, p["bias_k"].view(1, *row[1:]).expand(row)), 2)
        v = torch.cat((v, p["bias_v"].view(1, *row[1:]).expand(row)), 2)
    if module.add_zero_attn:
        k, v = (torch.cat((x, torch.zeros_like(x[:, :, :1])), 2) for x in (k, v))
    group = module.num_heads // module.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(module.head_dim)
    if keywords.get("softcap"):
        scores = keywords["softcap"] * torch.tanh(scores / keywords["softcap"])
    hidden = torch.zeros(batch, module.num_heads, queries, k.shape[2], dtype=torch.bool)
    real = hidden[..., :keys]
    real |= ~visible_pairs(queries, keys, keywords, masks.get("is_causal", False))
    extra = torch.zeros(batch, module.num_heads, queries, keys, dtype=scores.dtype)
    attn_mask, padding = masks.get("attn_mask"), masks.get("key_padding_mask")
    for mask in (attn_mask, None if padding is None else padding[:, None, None]):
        if mask is not None and mask.dtype == torch.bool:
            real |= mask
        elif mask is not None:
            extra = extra + mask
    scores = scores + torch.nn.functional.pad(extra, (0, k.shape[2] - keys))
    return attended(module, p, scores.masked_fill(hidden, -math.inf), v, masks)


def attended(
    module: Any, p: dict[str, Tensor], scores: Tensor, v: Tensor, masks: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Softmax with a sink's column, dropout, values, output projection."""
    sink = p["sink"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1) if "sink" in p else scores[..., :0]
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.cat((scores.masked_fill(empty, 0.0), sink), -1).softmax(-1)[..., : scores.shape[-1]]
    weights = weights.masked_fill(empty, 0.0)
    if "keep" in masks:
        weights = weights * masks["keep"] / (1 - masks["dropout_p"])
    out = (weights @ v).transpose(1, 2).flatten(2) @ p["out_proj.weight"].mT
    return out + p.get("out_proj.bias", 0.0), weights


def vars_of(rope: mha_ext.RotaryEmbedding) -> dict[str, Any]:
    return {"base": rope.base, "interleaved": rope.interleaved, "rotary_dim": rope.rotary_dim}


@threads(1)
def exact_variant(
    module: Any, keywords: dict[str, Any], inputs: tuple[Tensor, ...], grad_out: Tensor | None = None, **masks: Any
) -> Answer:
    """The answer in float64 with gradients by name, inputs in the module's layout."""
    keywords = {**keywords, "eps": torch.finfo(next(module.parameters()).dtype).eps}
    parameters = {n: leaf(x) for n, x in copy.deepcopy(module).named_parameters()}
    leaves = {n: leaf(x) for n, x in zip(("query", "key", "value"), inputs, strict=True)}
    for name in ("attn_mask", "key_padding_mask"):
        if name in masks and masks[name].is_floating_point():
            leaves[name] = leaf(masks[name])
    given = {**masks, **{n: x for n, x in leaves.items() if n in masks}}
    turned = [x if module.batch_first else x.transpose(0, 1) for x in list(leaves.values())[:3]]
    out, weights = dense_layer(module, parameters, turned, keywords, **given)
    out = out if module.batch_first else out.transpose(0, 1)
    answer = Answer(out.detach(), weights.detach())
    if grad_out is not None:
        wanted = {**leaves, **parameters}
        got = torch.autograd.grad(out, list(wanted.values()), grad_out.double(), allow_unused=True)
        answer.grads = {
            n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(wanted.items(), got, strict=True)
        }
    return answer
