"""Every way of calling ``scaled_dot_product_attention`` of the functional interface: settings, tensors and truth."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import truth
from cases import generator
from road_parts import STRIDES, limit, weights_limit
from switches import threads
from tolerances import assert_within, roundoff
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from mha_ext import functional

# Leading axes of query, key and value; the last is heads.
LEADS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "2-D": ((), (), ()),
    "3-D": ((4,), (4,), (4,)),
    "4-D": ((2, 4), (2, 4), (2, 4)),
    "5-D": ((2, 3, 4), (2, 3, 4), (2, 3, 4)),
    "groups": ((2, 4), (2, 2), (2, 2)),
    "one group": ((2, 4), (2, 1), (2, 1)),
    "groups of 5-D": ((2, 2, 4), (2, 2, 2), (2, 2, 2)),
    "groups of 3-D": ((4,), (2,), (2,)),
    "one key": ((3, 4), (1, 4), (3, 4)),
    "one query": ((1, 1), (3, 4), (3, 4)),
    "one head": ((2, 4), (2, 1), (2, 4)),
    "one value": ((2, 4), (2, 4), (1, 1)),
    "ranks": ((2, 1, 4), (3, 4), (4,)),
    "axes in turn": ((2, 1, 4), (1, 3, 4), (2, 3, 1)),
}
SIZES = ((5, 5, 4, 4), (3, 7, 5, 2), (7, 4, 3, 6), (1, 6, 8, 8), (18, 67, 4, 3))
MASKS = ("none", "bool", "empty rows", "float64", "float32", "bfloat16", "float16", "upper left", "lower right")
ASKS = (None, "lse", "per_head", "mean", "column_sum")


@dataclass(frozen=True)
class Setting:
    """One way of calling; every field is a value of FACTORS."""

    dtype: torch.dtype = torch.float64
    leads: str = "4-D"
    sizes: tuple[int, int, int, int] = (5, 5, 4, 4)
    strides: str = "plain"
    causal: str = "none"
    scale: float | None = None
    mask: str = "none"
    shape: str = "full"
    mask_strides: str = "plain"
    padding: str = "none"
    planted: str = "nothing"
    asks: str | None = None

    @property
    def dim_scale(self) -> float:
        return self.sizes[2] ** -0.5 if self.scale is None else self.scale

    def consistent(self) -> Setting:
        """The nearest setting that can be built: nothing is planted into memory that rows share."""
        shared = self.planted != "nothing" and self.strides in ("expanded", "rows alike")
        return replace(self, strides="plain") if shared else self


FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "leads": tuple(LEADS),
    "sizes": SIZES,
    "strides": (*STRIDES, "heads inside"),
    "causal": ("none", "upper_left", "lower_right"),
    "scale": (None, 0.3, -0.5, 0.0),
    "mask": MASKS,
    "shape": ("full", "TS", "1S", "T1", "S", "1", "HTS", "1TS", "H11", "batch"),
    "mask_strides": tuple(STRIDES),
    "padding": ("none", "bool", "float", "S", "batch of one"),
    "planted": ("nothing", "nan", "inf", "-inf", "visible nan"),
    "asks": ASKS,
}


@dataclass
class Call:
    """A setting's tensors, who sees whom in them, and the truth about them."""

    setting: Setting
    tensors: dict[str, Tensor]  # query, key, value, attn_mask, key_padding_mask as far as there are any
    lead: tuple[int, ...]
    grads: dict[str, Tensor] = field(default_factory=dict)
    want: dict[str, Any] = field(default_factory=dict)
    peer: dict[str, Any] = field(default_factory=dict)

    @property
    def groups(self) -> bool:
        return "group" in self.setting.leads


def _laid(x: Tensor, strides: str) -> Tensor:
    if strides != "heads inside":
        return STRIDES[strides](x)
    return x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.dim() > 2 else x


def _mask(s: Setting, lead: tuple[int, ...], g: torch.Generator) -> Tensor | None:
    if s.mask in ("none", "upper left", "lower right"):
        return None
    queries, keys = s.sizes[:2]
    heads = lead[-1:]
    shape = {
        "full": (*lead, queries, keys), "TS": (queries, keys), "1S": (1, keys), "T1": (queries, 1), "S": (keys,),
        "1": (1,), "HTS": (*heads, queries, keys), "1TS": (*heads[:0], *(1 for _ in heads), queries, keys),
        "H11": (*heads, 1, 1), "batch": (*lead[:-1], *(1 for _ in heads), 1, keys),
    }[s.shape]  # fmt: skip
    hidden = torch.rand(shape, generator=g) > 0.7
    if s.mask == "empty rows" and len(shape) > 1 and shape[-2] > 2:
        hidden[..., 1, :] = True
    if s.mask in ("bool", "empty rows"):
        return STRIDES[s.mask_strides](~hidden)
    added = torch.randn(shape, generator=g, dtype=torch.float64)
    added = added.masked_fill(hidden, -math.inf) if s.mask != "float64" else added
    return STRIDES[s.mask_strides](added.to(getattr(torch, s.mask)))


def _padding(s: Setting, batch: tuple[int, ...], g: torch.Generator) -> Tensor | None:
    if s.padding == "none":
        return None
    keys = s.sizes[1]
    shape = {"S": (keys,), "batch of one": (*(1 for _ in batch), keys)}.get(s.padding, (*batch, keys))
    lengths = torch.randint(0 if len(shape) > 1 else 1, keys, shape[:-1], generator=g)
    hidden = torch.arange(keys) >= lengths[..., None]
    if s.padding != "float":
        return hidden
    return torch.randn(shape, generator=g).masked_fill(hidden, -math.inf)


def build(setting: Setting, seed: int = 0) -> Call:
    """The tensors, the truth, and what the same equations give as matrix products in the setting's dtype."""
    s, g = setting, generator(seed)
    queries, keys, dim, dim_v = s.sizes
    leads = LEADS[s.leads]
    lead = leads[0] if "group" in s.leads else tuple(torch.broadcast_shapes(*leads))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(s.dtype)

    shapes = {"query": (*leads[0], queries, dim), "key": (*leads[1], keys, dim), "value": (*leads[2], keys, dim_v)}
    tensors = {n: normal(*shape) for n, shape in shapes.items()}
    for name, mask in (("attn_mask", _mask(s, lead, g)), ("key_padding_mask", _padding(s, lead[:-1], g))):
        tensors |= {} if mask is None else {name: mask}
    call = Call(s, tensors, lead)
    results = {"out": (*lead, queries, dim_v)}
    results |= {} if s.asks is None else {"lse": (*lead, queries)}
    if s.asks not in (None, "lse"):
        shapes = {"per_head": (*lead, queries, keys), "mean": (*lead[:-1], queries, keys), "column_sum": (*lead, keys)}
        results["weights"] = shapes[s.asks]
    call.grads = {n: normal(*shape) for n, shape in results.items()}
    with threads(1):
        call.peer = {} if s.dtype == torch.float64 else _answers(call, s.dtype)
        _plant(call)
        for name in ("query", "key", "value"):
            tensors[name] = _laid(tensors[name], s.strides)
        call.want = _answers(call, torch.float64)
    return call


# ----------------------------------------------------------------------------------------------------------- the truth
def _spread(call: Call, name: str, x: Tensor) -> Tensor:
    """An input with the problem's leading axes in full, as (B, H, length, size)."""
    lead = call.lead if call.lead else (1,)
    if call.groups and name != "query":
        x = torch.stack([x.select(-3, h // (lead[-1] // x.shape[-3])) for h in range(lead[-1])], -3)
    x = x.expand(*call.lead, *x.shape[-2:])
    return x.reshape(math.prod(lead[:-1]), lead[-1], *x.shape[-2:])


def _rules(call: Call, tensors: dict[str, Tensor], dtype: torch.dtype) -> truth.Rules:
    s = call.setting
    queries, keys = s.sizes[:2]
    lead = call.lead if call.lead else (1,)
    sizes = (math.prod(lead[:-1]), lead[-1], queries, keys)
    masks = []
    if "attn_mask" in tensors:
        mask = tensors["attn_mask"].expand(*call.lead, queries, keys).reshape(sizes)
        masks.append(~mask if mask.dtype == torch.bool else mask)
    if "key_padding_mask" in tensors:
        padding = tensors["key_padding_mask"].expand(*call.lead[:-1], keys)
        masks.append(padding.reshape(sizes[0], 1, 1, keys))
    kinds = {
        ("causal", "upper_left"): 1,
        ("causal", "lower_right"): 2,
        ("mask", "upper left"): 1,
        ("mask", "lower right"): 2,
    }
    for (name, value), kind in kinds.items():
        if getattr(s, name) == value:
            masks.append(truth.rules(sizes, [], kind).hidden)
    return truth.rules(sizes, masks, dtype=dtype)


def _answers(call: Call, dtype: torch.dtype) -> dict[str, Any]:
    """Results and gradients: pair by pair in float64, as matrix products in another dtype."""
    s, exact = call.setting, dtype == torch.float64
    leaves = {
        n: x.detach()
        .clone(memory_format=torch.contiguous_format)
        .to(torch.float64 if exact else x.dtype)
        .requires_grad_()
        for n, x in call.tensors.items()
        if x.is_floating_point()
    }
    tensors = {**call.tensors, **leaves}
    who = _rules(call, tensors, dtype)
    q, k, v = (_spread(call, n, tensors[n].to(dtype)) for n in ("query", "key", "value"))
    got = truth.attention(q, k, v, who, s.scale, pairwise=exact)
    queries, keys, _, dim_v = s.sizes
    weights = got.weights.reshape(*call.lead, queries, keys)
    results = {"out": got.out.reshape(*call.lead, queries, dim_v), "lse": got.lse.reshape(*call.lead, queries)}
    per = {"per_head": weights, "column_sum": weights.sum(-2)}
    per["mean"] = weights.mean(-3) if call.lead else weights
    results["weights"] = per.get(str(s.asks), weights)
    found = torch.autograd.grad(
        [results[n] for n in call.grads],
        [*leaves.values(), got.weights],
        [g.to(dtype) for g in call.grads.values()],
        allow_unused=True,
    )
    grads = {n: torch.zeros_like(x) if d is None else d for (n, x), d in zip(leaves.items(), found, strict=False)}
    pairs = truth.cancelling(got.weights.detach(), found[-1]).reshape(*call.lead, queries, keys)
    finite_q, finite_k = (x.detach().nan_to_num(0.0, 0.0, 0.0).abs() for x in (q, k))
    products = float((finite_q @ finite_k.mT).max()) * abs(s.dim_scale)  # what a score near zero is the sum of
    found = {"results": {n: x.detach() for n, x in results.items()}, "grads": grads, "pairs": pairs}
    return {**found, "sizes": {"lse": 1.0 + products}}


def _plant(call: Call) -> None:
    """Put what the setting says into rows of keys, values and queries that nobody uses, or one NaN into a key."""
    kind = call.setting.planted
    if kind == "nothing":
        return
    if kind == "visible nan":
        call.tensors["key"].flatten()[1] = math.nan
        return
    seen = (~_rules(call, call.tensors, torch.float64).hidden).double()
    for name, counts in (("query", seen.sum(3)), ("key", seen.sum(2)), ("value", seen.sum(2))):
        probe = torch.zeros(call.tensors[name].shape, dtype=torch.float64, requires_grad=True)
        (uses,) = torch.autograd.grad((_spread(call, name, probe) * counts[..., None]).sum(), probe)
        call.tensors[name][uses == 0] = float(kind)


# ------------------------------------------------------------------------------------------------------------ the check
def options(call: Call) -> dict[str, Any]:
    """What is passed beside query, key and value."""
    s = call.setting
    given: dict[str, Any] = {"scale": s.scale, "enable_gqa": call.groups, "is_causal": s.causal != "none"}
    given |= {"causal_alignment": s.causal} if s.causal != "none" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows that see nothing are meant
        bias = {"upper left": causal_upper_left, "lower right": causal_lower_right}.get(s.mask)
        given |= {} if bias is None else {"attn_mask": bias(*s.sizes[:2])}
    given["return_lse"] = s.asks is not None
    given["return_weights"] = s.asks if s.asks not in (None, "lse") else None
    return given


def check(call: Call) -> None:
    """Results and gradients of one call are the truth's, with gradients, without, and under inference mode."""
    s = call.setting
    leaves = {n: x.detach().requires_grad_(x.is_floating_point()) for n, x in call.tensors.items()}
    got = functional.scaled_dot_product_attention(**leaves, **options(call))
    results = dict(zip(call.grads, (got,) if isinstance(got, Tensor) else got, strict=True))
    for name, result in results.items():
        want, peer = call.want["results"][name], call.peer.get("results", {}).get(name)
        size = call.want["sizes"].get(name, 0.0)
        allowed = weights_limit(want, peer, s.dtype) if name == "weights" else limit(want, peer, s.dtype, size)
        assert_within(result, want, allowed, name)
    assert results["out"].dtype == s.dtype
    with torch.inference_mode():
        again = functional.scaled_dot_product_attention(**call.tensors, **options(call))
    assert_within(again if isinstance(again, Tensor) else again[0], results["out"], 0.0, "out without gradients")
    wanted = {n: x for n, x in leaves.items() if x.requires_grad}
    found = torch.autograd.grad(
        list(results.values()), list(wanted.values()), [call.grads[n].to(x.dtype) for n, x in results.items()]
    )
    sizes = {n: x.nan_to_num(0.0, 0.0, 0.0).abs() for n, x in call.want["grads"].items()}
    masks = ("attn_mask", "key_padding_mask")
    sizes |= {n: sizes[n] + _summed(call.want["pairs"], n, sizes[n].shape) for n in masks if n in sizes}
    inputs = max(float(x.max()) for x in (*(sizes[n] for n in ("query", "key", "value")), call.want["pairs"]))
    for (name, leaf), grad in zip(wanted.items(), found, strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype), name
        if s.planted == "visible nan" and "mask" in name:
            continue
        want, peer = call.want["grads"][name], call.peer.get("grads", {}).get(name)
        size = float(sizes[name].max()) if "mask" in name else inputs
        stored = 3 * roundoff(grad.dtype) * size  # in its own dtype: the shares of output and weights, then their sum
        assert_within(grad, want, limit(want, peer, s.dtype, size) + stored, f"grad of {name}")


def _summed(pairs: Tensor, name: str, shape: torch.Size) -> Tensor:
    """The sizes of all pairs' gradients that add up to a mask's, which may cancel each other."""
    if name == "key_padding_mask":
        pairs = pairs.sum(-2)
        pairs = pairs.sum(-2) if pairs.dim() > 1 else pairs
    return pairs.sum_to_size(shape)
