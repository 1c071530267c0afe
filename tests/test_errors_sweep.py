"""One argument of a good call with a random shape or dtype: the right answer or an error naming it, nothing else."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import MODES, exact_layer, make, mode
from original_errors import outcome
from tolerances import assert_within, double_limit
from torch import Tensor

from mha_ext import functional

E, H = 6, 3
DTYPES = [torch.float64] * 20 + [torch.float32, torch.float16, torch.bool, torch.int64, torch.uint8, torch.complex64]


@st.composite
def near(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape like the given one, but for one size, an axis more or less, or their order; or any small shape."""
    sizes = list(shape)
    how = draw(st.sampled_from(["resize", "resize", "drop", "insert", "swap", "any", "one"]))
    axis = draw(st.integers(0, len(sizes) - 1))
    if how == "resize":
        sizes[axis] = draw(st.integers(0, 9))
    elif how == "one":
        sizes[axis] = 1
    elif how == "drop":
        del sizes[axis]
    elif how == "insert":
        sizes.insert(axis, draw(st.integers(0, 4)))
    elif how == "swap":
        sizes = sizes[::-1]
    else:
        sizes = draw(st.lists(st.integers(0, 8), max_size=5))
    return tuple(sizes)


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def named_in(error: Exception, names: set[str]) -> None:
    """The error is a ValueError or TypeError, has the form, and its message names one of the arguments."""
    assert isinstance(error, (ValueError, TypeError)), f"{type(error).__name__}: {error}"
    function, colon, rest = str(error).partition(": ")
    assert function.isidentifier() and colon and " must " in rest and ", got " in rest, str(error)
    assert any(name in rest for name in names), f"{error}\nnames none of {names}"


# ----------------------------------------------------------------------------------------------------------- the module
def layer_mask(mask: Tensor, batch: int, queries: int, keys: int) -> Tensor | None:
    """A mask as (B, H, T, S), by the module's rules, or None where they give it no meaning."""
    if mask.dim() == 3 and mask.shape[0] == batch * H and batch > 1:
        mask = mask.unflatten(0, (batch, H))
    elif mask.dim() == 3 and mask.shape[0] == H and batch == 1:
        mask = mask[None]
    elif mask.dim() == 3:
        mask = mask[:, None]
    try:
        return mask.expand(batch, H, queries, keys) if mask.dim() else None
    except RuntimeError:
        return None


@st.composite
def layer_calls(draw: st.DrawFn) -> dict[str, Any]:
    batch, queries, keys = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    separate, unbatched = draw(st.booleans()), draw(st.integers(0, 3)) == 0
    widths = (4, 5) if separate else (E, E)
    shapes = {"query": (batch, queries, E), "key": (batch, keys, widths[0]), "value": (batch, keys, widths[1])}
    if unbatched:
        batch, shapes = 1, {name: shape[1:] for name, shape in shapes.items()}
    if draw(st.booleans()):
        shapes["attn_mask"] = (batch * H, queries, keys) if draw(st.booleans()) else (queries, keys)
    if draw(st.booleans()):
        shapes["key_padding_mask"] = (keys,) if unbatched else (batch, keys)
    wrong = draw(st.sampled_from(sorted(shapes)))
    return {
        "sizes": (batch, queries, keys),
        "wrong": wrong,
        "shapes": {**shapes, wrong: draw(near(shapes[wrong]))},
        "dtype": draw(st.sampled_from(DTYPES)),
        "options": {
            **({"kdim": 4, "vdim": 5} if separate else {}),
            "batch_first": draw(st.booleans()),
            "add_bias_kv": draw(st.booleans()),
            "add_zero_attn": draw(st.booleans()),
        },
        "mode": draw(st.sampled_from(MODES)),
        "need_weights": draw(st.booleans()),
        "is_causal": draw(st.booleans()),
    }


def exact_output(module: Any, tensors: dict[str, Tensor], is_causal: bool) -> Tensor:
    """The output of a layer on (B, T, E) inputs, from the reference."""
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    masks = {}
    if "attn_mask" in tensors:
        masks["attn_mask"] = layer_mask(tensors["attn_mask"], query.shape[0], query.shape[1], key.shape[1])
        assert masks["attn_mask"] is not None, f"taken: attn_mask {tuple(tensors['attn_mask'].shape)}"
    if "key_padding_mask" in tensors:
        masks["key_padding_mask"] = tensors["key_padding_mask"].expand(key.shape[:2])
    return exact_layer(module, (query, key, value), is_causal=is_causal, **masks).out


@given(layer_calls())
def test_layer(case: dict[str, Any]) -> None:
    module = make(embed_dim=E, num_heads=H, **case["options"])
    tensors = {name: numbers(shape, seed) for seed, (name, shape) in enumerate(case["shapes"].items())}
    tensors[case["wrong"]] = tensors[case["wrong"]].to(case["dtype"])
    batched, turn = tensors["query"].dim() == 3, not case["options"]["batch_first"]
    given_ = {
        name: tensor.transpose(0, 1) if turn and tensor.dim() == 3 and "mask" not in name else tensor
        for name, tensor in tensors.items()
    }
    result: list[Tensor] = []
    with mode(module, case["mode"]):
        options = {"need_weights": case["need_weights"], "is_causal": case["is_causal"]}
        error = outcome(lambda: result.append(module(**given_, **options)[0]))
    if error is not None:
        masks = {name for name in ("attn_mask", "key_padding_mask") if name in tensors and "mask" not in case["wrong"]}
        return named_in(error, {case["wrong"]} | masks)
    if not batched:
        tensors = {n: t if "mask" in n else t[None] for n, t in tensors.items()}
    want = exact_output(module, tensors, case["is_causal"])
    got = result[0] if batched else result[0].unsqueeze(1 if turn else 0)
    assert_within(got.transpose(0, 1) if turn else got, want, double_limit(want, E))


@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 4), st.booleans())
def test_good_inputs_are_taken(batch: int, queries: int, keys: int, need_weights: bool) -> None:
    """Every length and batch size, none included; an error for these would be a fault."""
    tensors = {n: numbers((batch, queries if n == "query" else keys, E), 1) for n in ("query", "key", "value")}
    module = make(embed_dim=E, num_heads=H)
    want = exact_output(module, tensors, False)
    assert_within(module(**tensors, need_weights=need_weights)[0], want, double_limit(want, E))


# -------------------------------------------------------------------------------------------------------- the functions
GOOD_LAYER = {
    "query": (4, 2, E), "key": (5, 2, E), "value": (5, 2, E), "in_proj_weight": (18, E), "in_proj_bias": (18,),
    "bias_k": (1, 1, E), "bias_v": (1, 1, E), "out_proj_weight": (E, E), "out_proj_bias": (E,),
}  # fmt: skip
SEPARATE = {"q_proj_weight": (E, E), "k_proj_weight": (E, E), "v_proj_weight": (E, E)}
STATIC = {"static_k": (6, 5, 2), "static_v": (6, 5, 2)}


@st.composite
def function_calls(draw: st.DrawFn) -> tuple[dict[str, Any], str, torch.dtype]:
    shapes: dict[str, Any] = dict(GOOD_LAYER)
    if draw(st.booleans()):
        shapes = {**shapes, **SEPARATE, "in_proj_weight": None}
    if draw(st.booleans()):
        shapes = {**shapes, **STATIC, "bias_k": None, "bias_v": None}
    if draw(st.booleans()):
        shapes["out_proj_bias"] = None
    wrong = draw(st.sampled_from(sorted(name for name, shape in shapes.items() if shape is not None)))
    return {**shapes, wrong: draw(near(shapes[wrong]))}, wrong, draw(st.sampled_from(DTYPES))


@given(function_calls(), st.booleans())
def test_layer_as_a_function(case: tuple[dict[str, Any], str, torch.dtype], need_weights: bool) -> None:
    """Against the original, which has to take what ours takes. A wrong shape may show in what has to fit it."""
    shapes, wrong, dtype = case
    arguments = {n: None if s is None else numbers(s, i) / (1 + len(s)) for i, (n, s) in enumerate(shapes.items())}
    arguments[wrong] = arguments[wrong].to(dtype)
    options = {
        "embed_dim_to_check": E, "num_heads": H, "add_zero_attn": False, "dropout_p": 0.0,
        "need_weights": need_weights, "use_separate_proj_weight": shapes["in_proj_weight"] is None,
    }  # fmt: skip
    result: list[Tensor] = []
    error = outcome(lambda: result.append(functional.multi_head_attention_forward(**arguments, **options)[0]))
    if error is None:
        want = F.multi_head_attention_forward(**arguments, **options)[0]
        return assert_within(result[0], want, double_limit(want, E))
    width = {"k_proj_weight": "kdim", "v_proj_weight": "vdim", "out_proj_weight": "out_proj_bias"}.get(wrong, wrong)
    named_in(error, {wrong, width})


def math_attention(tensors: dict[str, Tensor]) -> Tensor | None:
    """Attention by broadcasting matrix products, or None where they do not fit."""
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    if min(query.dim(), key.dim(), value.dim()) < 2:
        return None
    try:
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if "attn_mask" in tensors:
            mask = tensors["attn_mask"]
            mask = torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
            one_head = mask[0] if scores.dim() == 2 and mask.dim() == 3 and len(mask) == 1 else mask
            scores = scores + one_head.expand(scores.shape)
        return torch.softmax(scores, -1).nan_to_num(0.0) @ value
    except RuntimeError:
        return None


@st.composite
def head_calls(draw: st.DrawFn) -> tuple[dict[str, Any], str, torch.dtype]:
    lead = draw(st.sampled_from([(), (3,), (2, 3), (2, 1, 3)]))
    shapes = {"query": (*lead, 4, 2), "key": (*lead, 5, 2), "value": (*lead, 5, 6)}
    if draw(st.booleans()):
        shapes["attn_mask"] = (*lead, 4, 5)
    wrong = draw(st.sampled_from(sorted(shapes)))
    return {**shapes, wrong: draw(near(shapes[wrong]))}, wrong, draw(st.sampled_from(DTYPES))


@given(head_calls())
def test_heads(case: tuple[dict[str, Any], str, torch.dtype]) -> None:
    shapes, wrong, dtype = case
    tensors = {name: numbers(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    tensors[wrong] = tensors[wrong].to(dtype)
    result: list[Tensor] = []
    error = outcome(lambda: result.append(functional.scaled_dot_product_attention(**tensors)))
    want = math_attention(tensors)
    if error is not None:
        assert want is None or dtype != torch.float64 or 0 in tensors[wrong].shape, f"refused: {shapes}"
        return named_in(error, {wrong, "attn_mask"} if "attn_mask" in tensors else {wrong})
    assert want is not None, f"taken: {shapes}"
    assert_within(result[0], want, double_limit(want, 5))
