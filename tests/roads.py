"""Every road through the layer: a setting, its tensors, its truth, and all the ways of calling that must agree."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import truth
from cases import generator
from layer_cases import make
from road_parts import STRIDES, limit, weights_limit
from switches import threads
from tolerances import assert_within, roundoff
from torch import Tensor

from mha_ext import functional

EMBED = 12
HEADS = {"4": (4, 4, 3), "4 on 2": (4, 2, 3), "4 on 1": (4, 1, 3), "2 wide": (2, 2, 10), "1": (1, 1, 12)}
WIDTHS = {"same": (12, 12), "kdim": (8, 12), "vdim": (12, 6), "both": (8, 6)}
SIZES = {
    "square": (3, 5, 5),
    "more keys": (3, 4, 7),
    "more queries": (2, 7, 4),
    "one query": (2, 1, 6),
    "tiles": (2, 18, 67),
}
SHAPES = ("TS", "BHxTS", "B.TS", "BHTS", "B1TS", "1HTS", "S", "1S", "T1", "B11S", "1.TS", "1x1")
KINDS = ("bool", "float64", "float32", "bfloat16", "float16", "empty rows", "-inf float32")
SELVES = ("self", "query is key", "query is value")
NEEDS = (None, "mean", "per_head")


@dataclass(frozen=True)
class Setting:
    """One way of building and calling a layer; every field is one of the lists above or below."""

    dtype: torch.dtype = torch.float64
    autocast: torch.dtype | None = None
    layout: str = "batch first"  # "sequence first", "unbatched"
    heads: str = "4"
    widths: str = "same"
    bias: bool = True
    appended: str = "none"  # "bias", "zero", "both"
    sharing: str = "self"  # "key is value", "query is key", "query is value", "none"
    sizes: str = "square"
    causal: bool = False
    mask: str = "none"  # KINDS
    shape: str = "TS"
    strides: str = "plain"
    padding: str = "none"  # "bool", "float", "own", "one for all"
    planted: str = "nothing"  # "nan", "inf", "-inf" behind masks, "visible nan"

    def consistent(self) -> Setting:
        """The nearest setting that can be built."""
        s = self
        if s.widths != "same":
            s = replace(s, sharing="none")
        if s.sharing in SELVES:
            s = replace(s, sizes="square")
        if s.planted != "nothing" and s.padding == "none" and s.mask == "none":
            s = replace(s, padding="bool")
        return s


FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "autocast": (None, None, torch.bfloat16, torch.float16),
    "layout": ("batch first", "sequence first", "unbatched"),
    "heads": tuple(HEADS),
    "widths": ("same", "same", "kdim", "vdim", "both"),
    "bias": (True, False),
    "appended": ("none", "none", "bias", "zero", "both"),
    "sharing": (*SELVES, "key is value", "none"),
    "sizes": tuple(SIZES),
    "causal": (False, True),
    "mask": ("none", *KINDS),
    "shape": SHAPES,
    "strides": tuple(STRIDES),
    "padding": ("none", "bool", "float", "own", "one for all"),
    "planted": ("nothing", "nan", "inf", "-inf", "visible nan"),
}


@dataclass
class Layer:
    """A setting's module and tensors, inputs (B, T, E), and the truth about them."""

    setting: Setting
    module: Any
    inputs: tuple[Tensor, Tensor, Tensor]
    attn_mask: Tensor | None
    padding: Tensor | None
    grad_out: Tensor
    grad_weights: Tensor
    who: truth.Rules
    want: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Of the results: autocast leaves float64 alone."""
        s = self.setting
        return s.dtype if s.autocast is None or s.dtype == torch.float64 else s.autocast


# ------------------------------------------------------------------------------------------------------------ building
def make_mask(s: Setting, sizes: tuple[int, int, int, int], g: torch.Generator) -> Tensor | None:
    if s.mask == "none":
        return None
    batch, heads, queries, keys = sizes
    shape = {
        "TS": (queries, keys), "BHxTS": (batch * heads, queries, keys), "B.TS": (batch, queries, keys),
        "BHTS": (batch, heads, queries, keys), "B1TS": (batch, 1, queries, keys), "1HTS": (1, heads, queries, keys),
        "S": (keys,), "1S": (1, keys), "T1": (queries, 1), "B11S": (batch, 1, 1, keys), "1.TS": (1, queries, keys),
        "1x1": (1, 1),
    }[s.shape]  # fmt: skip
    hidden = torch.rand(shape, generator=g) > 0.7
    if len(shape) > 1 and shape[-2] > 2 and s.mask == "empty rows":
        hidden[..., 1, :] = True
    if s.mask in ("bool", "empty rows"):
        return STRIDES[s.strides](hidden)
    added = torch.randn(shape, generator=g, dtype=torch.float64)
    if s.mask == "-inf float32":
        added = torch.zeros(shape).masked_fill(hidden, -math.inf)
    elif s.mask in ("float32", "float16"):
        added = added.masked_fill(hidden, -math.inf)
    return STRIDES[s.strides](added.to(getattr(torch, s.mask.removeprefix("-inf "))))


def make_padding(s: Setting, batch: int, keys: int, g: torch.Generator) -> Tensor | None:
    if s.padding == "none":
        return None
    hidden = torch.arange(keys) >= keys - torch.tensor([1, 2, keys])[:batch, None]
    if s.padding == "bool":
        return hidden
    if s.padding == "one for all":
        return hidden[0]
    added = torch.randn(batch, keys, generator=g, dtype=torch.float64).masked_fill(hidden, -math.inf)
    return added.to(s.dtype if s.padding == "own" else torch.float32)


def build(setting: Setting, seed: int = 0) -> Layer:
    """Module, inputs and masks of a setting, its truth and its limits."""
    s, g = setting, generator(seed)
    batch, queries, keys = SIZES[s.sizes]
    batch = 1 if s.layout == "unbatched" else batch
    heads, kv_heads, dim = HEADS[s.heads]
    kdim, vdim = WIDTHS[s.widths]
    module = make(
        seed=seed, embed_dim=EMBED, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, kdim=kdim, vdim=vdim,
        bias=s.bias, add_bias_kv=s.appended in ("bias", "both"), add_zero_attn=s.appended in ("zero", "both"),
        batch_first=s.layout != "sequence first", dtype=s.dtype,
    )  # fmt: skip
    appended = {"none": 0, "bias": 1, "zero": 1, "both": 2}[s.appended]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(s.dtype)

    query, key, value = normal(batch, queries, EMBED), normal(batch, keys, kdim), normal(batch, keys, vdim)
    sizes = (batch, heads, queries, keys)
    mask, padding = make_mask(s, sizes, g), make_padding(s, batch, keys, g)
    who = truth.rules(sizes, _hides(mask, padding, sizes), int(s.causal), appended)
    shared = {
        "self": (key, key, key),
        "key is value": (query, key, key),
        "query is key": (key, key, value),
        "query is value": (value, key, value),
    }
    inputs = shared.get(s.sharing, (query, key, value))
    result = Layer(s, module, inputs, mask, padding, normal(batch, queries, EMBED), torch.empty(0), who)
    result.grad_out = result.grad_out.to(result.dtype)
    result.grad_weights = normal(batch, heads, queries, keys + appended).to(result.dtype)
    with threads(1):
        result.limits = {} if result.dtype == torch.float64 else _answers(result, result.dtype)
        plant(result)
        result.want = _answers(result, torch.float64)
    return result


def _hides(mask: Tensor | None, padding: Tensor | None, sizes: tuple[int, int, int, int]) -> list[Tensor]:
    """Both masks with four axes."""
    masks = [] if mask is None else [truth.four_axes(mask, *sizes[:2])]
    return masks if padding is None else [*masks, padding.expand(sizes[0], sizes[3])[:, None, None]]


def plant(layer: Layer) -> None:
    """Put what the setting says into rows that nobody uses, or one NaN into a key that may be used."""
    kind = layer.setting.planted
    if kind == "nothing":
        return
    query, key, value = layer.inputs
    unseen = layer.who.unseen_keys()[:, : key.shape[1]]
    if kind == "visible nan":
        key[0, 0, 3] = math.nan
        return
    for x in {id(key): key, id(value): value}.values():
        x[unseen] = float(kind)
    if layer.setting.sharing not in SELVES:
        query[layer.who.blind_queries()] = float(kind)


# ----------------------------------------------------------------------------------------------------------- the truth
def _places(layer: Layer) -> list[str]:
    """For query, key and value the name of the first place where the same tensor appears."""
    names = ("query", "key", "value")
    return [names[[y is x for y in layer.inputs].index(True)] for x in layer.inputs]


def _named(layer: Layer) -> dict[str, Tensor]:
    """Inputs by the name of the first place where they appear, and floating masks."""
    named = dict(zip(reversed(_places(layer)), reversed(layer.inputs), strict=True))
    for name, mask in (("attn_mask", layer.attn_mask), ("key_padding_mask", layer.padding)):
        if mask is not None and mask.is_floating_point():
            named[name] = mask
    return named


def _answers(layer: Layer, dtype: torch.dtype) -> dict[str, Any]:
    """Output, weights and all gradients by the equations: pair by pair in float64, as matrix products otherwise."""
    exact = dtype == torch.float64
    named = {
        n: x.detach().clone(memory_format=torch.contiguous_format).to(torch.float64 if exact else x.dtype)
        for n, x in _named(layer).items()
    }
    parameters = {
        n: p.detach().clone().to(torch.float64 if exact else p.dtype) for n, p in layer.module.named_parameters()
    }
    leaves = {n: x.requires_grad_() for n, x in {**named, **parameters}.items()}
    mask = named.get("attn_mask", layer.attn_mask)
    padding = named.get("key_padding_mask", layer.padding)
    module = layer.module
    batch, queries, _ = layer.inputs[0].shape
    sizes = (batch, module.num_heads, queries, layer.inputs[1].shape[1])
    appended = int(module.bias_k is not None) + int(module.add_zero_attn)
    who = truth.rules(sizes, _hides(mask, padding, sizes), int(layer.setting.causal), appended, dtype)
    inputs = tuple(named[n].to(dtype) for n in _places(layer))
    heads = (module.num_heads, module.num_kv_heads, module.head_dim)
    cast = {n: p.to(dtype) for n, p in parameters.items()}
    out, each = truth.layer(cast, inputs, heads, who, module.add_zero_attn, pairwise=exact)
    weights = torch.cat(each, 1)
    answers: dict[str, Any] = {
        "masks": mask,
        "out": out.detach(),
        "per_head": weights.detach(),
        "mean": weights.detach().mean(1),
    }
    sources = [*leaves.values(), *each]
    for need in NEEDS:
        sent = [(out, layer.grad_out.to(dtype))]
        sent += [] if need is None else [(_weights(weights, need), _weights(layer.grad_weights, need, True).to(dtype))]
        got = torch.autograd.grad(
            [o for o, _ in sent], sources, [g for _, g in sent], retain_graph=True, allow_unused=True
        )
        answers[f"grads of {need}"] = {
            n: torch.zeros_like(x) if d is None else d for (n, x), d in zip(leaves.items(), got, strict=False)
        }
        answers[f"pairs of {need}"] = truth.cancelling(weights.detach(), torch.cat(got[len(leaves) :], 1))
    return answers


def _weights(per_head: Tensor, need: str, incoming: bool = False) -> Tensor:
    return per_head if need == "per_head" else per_head[:, 0] if incoming else per_head.mean(1)


# ----------------------------------------------------------------------------------------------------------- the roads
@contextmanager
def _mode(module: Any, name: str, autocast: torch.dtype | None) -> Iterator[None]:
    """A mode of calling; outside training a dropout probability is set, which must not act."""
    module.train(name == "train")
    module.dropout = 0.0 if name == "train" else 0.4
    quiet = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(name, nullcontext)
    with warnings.catch_warnings(), quiet(), torch.autocast("cpu", autocast, enabled=autocast is not None):
        warnings.simplefilter("ignore")
        yield


def as_function(module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """The module's answer by ``functional.multi_head_attention_forward``, which knows no batch_first."""
    turned = module.batch_first and query.dim() == 3
    if turned:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    packed = module.in_proj_weight
    weights = {} if packed is not None else {f"{n}_proj_weight": getattr(module, f"{n}_proj_weight") for n in "qkv"}
    out, attended = functional.multi_head_attention_forward(
        query, key, value, module.embed_dim, module.num_heads, packed,
        module.in_proj_bias, module.bias_k, module.bias_v, module.add_zero_attn, module.dropout,
        module.out_proj.weight, module.out_proj.bias, module.training,
        use_separate_proj_weight=packed is None, **weights, **options,
    )  # fmt: skip
    return out.transpose(0, 1) if turned else out, attended


def as_hooked(module: Any, *inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """The module with a hook on its output projection, which takes it off the one-operator road."""
    handle = module.out_proj.register_forward_hook(lambda *_: None)
    try:
        result: tuple[Tensor, Tensor | None] = module(*inputs, **options)
        return result
    finally:
        handle.remove()


def roads(setting: Setting) -> Iterator[tuple[str, str | None, Callable[..., Any], bool]]:
    """Mode, what is asked of the weights, how the layer is called, and whether gradients are compared."""
    for need in NEEDS:
        for mode in ("train", "eval", "no_grad", "inference"):
            yield mode, need, lambda module, *inputs, **options: module(*inputs, **options), mode == "train"
        if setting.heads in ("4", "1"):
            yield "eval", need, as_function, need != "per_head"
    yield "train", None, as_hooked, True
    if setting.heads in ("4", "1"):
        yield "train", None, as_function, False


def call(
    layer: Layer, road: tuple[str, str | None, Callable[..., Any], bool]
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Output (B, T, E), weights with a batch axis, and gradients where the road has them."""
    mode, need, how, grads = road
    s, module = layer.setting, layer.module
    named = {n: x.detach() for n, x in _named(layer).items()}
    leaves = {n: x.requires_grad_(grads) for n, x in named.items()}
    lay = {"sequence first": lambda x: x.transpose(0, 1), "unbatched": lambda x: x[0]}.get(s.layout, lambda x: x)
    shaped = {n: lay(leaves[n]) for n in dict.fromkeys(_places(layer))}
    inputs = [shaped[n] for n in _places(layer)]
    with _mode(module, mode, s.autocast):
        out, weights = how(
            module, *inputs,
            attn_mask=leaves.get("attn_mask", layer.attn_mask),
            key_padding_mask=leaves.get("key_padding_mask", layer.padding),
            is_causal=s.causal, need_weights=need is not None, average_attn_weights=need != "per_head",
        )  # fmt: skip
    assert how is as_function or out.is_contiguous()
    assert (weights is None) == (need is None)
    out = out[None] if s.layout == "unbatched" else lay(out)
    weights = weights[None] if weights is not None and s.layout == "unbatched" else weights
    got = {}
    if grads:
        leaves |= dict(module.named_parameters())
        sent = [(out, layer.grad_out)]
        sent += [] if weights is None else [(weights, _weights(layer.grad_weights, str(need), True))]
        found = torch.autograd.grad(
            [o for o, _ in sent], list(leaves.values()), [g for _, g in sent], allow_unused=True
        )
        got = {n: torch.zeros_like(x) if d is None else d for (n, x), d in zip(leaves.items(), found, strict=True)}
        for name, grad in got.items():
            assert (grad.shape, grad.dtype) == (leaves[name].shape, leaves[name].dtype), name
    return out, weights, got


def check_every_road(layer: Layer) -> None:
    """All roads give the truth: output, weights and gradients."""
    want, peers, dtype = layer.want, layer.limits, layer.dtype
    for road in roads(layer.setting):
        name = f"{road[0]}, weights {road[1]}, {road[2].__name__}"
        out, weights, grads = call(layer, road)
        assert out.dtype == dtype and (weights is None or weights.dtype == dtype), name
        assert_within(out, want["out"], limit(want["out"], peers.get("out"), dtype), f"out of {name}")
        if weights is not None:
            key = str(road[1])
            assert_within(weights, want[key], weights_limit(want[key], peers.get(key), dtype), f"weights of {name}")
        check_gradients(layer, name, road[1], grads)


def check_gradients(layer: Layer, name: str, need: str | None, grads: dict[str, Tensor]) -> None:
    """Gradients are the truth's; beside a visible NaN those of the inputs, which are NaN in the same places."""
    s, want = layer.setting, layer.want[f"grads of {need}"]
    peers = layer.limits.get(f"grads of {need}", {})
    if s.planted != "nothing" and s.sharing in SELVES:  # test_unused_rows.py: a NaN query passes no gradient
        return
    # Rounding stays of scores' gradients that cancel, whatever is made of them.
    sizes = dict.fromkeys(("input", "parameter", "mask"), float(layer.want[f"pairs of {need}"].max()))
    for n, x in want.items():
        summed = x.nan_to_num(0.0).abs().max() + _summed_pairs(layer, n, need) if "mask" in n else x
        sizes[_kind(n)] = max(sizes[_kind(n)], float(summed.nan_to_num(0.0, 0.0, 0.0).abs().max()))
    for n, grad in grads.items():
        if s.planted == "visible nan" and _kind(n) != "input":
            continue
        allowed = limit(want[n], peers.get(n), layer.dtype, sizes[_kind(n)])
        allowed += 3 * roundoff(grad.dtype) * sizes[_kind(n)]  # stored in its own dtype: two shares, then their sum
        assert_within(grad, want[n], allowed, f"grad of {n}, {name}")


def _kind(name: str) -> str:
    return "mask" if "mask" in name else "input" if name in ("query", "key", "value") else "parameter"


def _summed_pairs(layer: Layer, name: str, need: str | None) -> Tensor:
    """The sizes of all pairs' gradients that add up to a mask's, which may cancel each other."""
    batch, keys = layer.inputs[1].shape[:2]
    pairs = layer.want[f"pairs of {need}"].abs()[..., :keys]
    if name == "key_padding_mask":
        return pairs.sum((1, 2))
    return pairs.sum_to_size(truth.four_axes(layer.want["masks"], batch, layer.module.num_heads).shape)
