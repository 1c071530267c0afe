"""Windows, caps, sinks, biases and caches against ONNX Runtime, JAX and PyTorch's flex attention where they have them.

As in ``test_other_libraries.py`` each comparison has three parties, the third being the exact answer in float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import LOWER_RIGHT, UPPER_LEFT
from other_libraries import JAX, ORT, flat, need, need_jax, run_onnx, three_way
from test_other_libraries import rounded_scores
from tolerances import Exact, attention_limits
from torch import Tensor
from variant_cases import Call, Variant, exact, limits_of, make
from variant_truth import visible

HALF = torch.float16


def ort_limit(call: Call, truth: Exact) -> Tensor:
    """Of the output: what ONNX Runtime rounds besides, weights and scores, it rounds in float16 alone."""
    case = call.variant
    limit = attention_limits(truth, case.dtype, case.heads_kv, grads=False, rounded=True)["out"]
    return limit + rounded_scores(truth) if case.dtype == HALF else limit


def against_ort(call: Call, oracle: Tensor) -> None:
    truth, _ = exact(call)
    limit = limits_of(call, truth, grads=False)["out"]
    three_way("out", ORT, (call.ours()[0], oracle, truth.out), (limit, ort_limit(call, truth)))


# -------------------------------------------------------------------------------------------- ONNX Runtime's own domain
@dataclass(frozen=True)
class Past:
    """How many of a call's keys and values ONNX Runtime is given as its cache."""

    length: int = 0

    def split(self, call: Call) -> tuple[dict[str, Tensor], list[str]]:
        """Query, key and value as inputs, the cache's names, and the cache."""
        query, key, value = (call.tensors[n] for n in ("query", "key", "value"))
        feeds = {"query": flat(query), "key": flat(key[:, :, self.length :]), "value": flat(value[:, :, self.length :])}
        if not self.length:
            return feeds, ["", ""]
        feeds |= {"past_k": key[:, :, : self.length], "past_v": value[:, :, : self.length]}
        return feeds, ["past_k", "past_v"]


def grouped(call: Call, past: Past) -> Tensor:
    """The output of ``com.microsoft.GroupQueryAttention``, causal and aligned to the end. Its window counts a query's
    own key; its sinks have the dtype of the heads; its bias is added after the cap, as ours is."""
    node = need("onnx").helper.make_node
    case = call.variant
    feeds, cache = past.split(call)
    feeds |= {
        "last": torch.full((case.B,), case.keys - 1, dtype=torch.int32),
        "total": torch.tensor([case.keys], dtype=torch.int32),
    }
    names = ["query", "key", "value", *cache, "last", "total", "", "", ""]
    for name, given in (("bias", call.tensors.get("attn_mask")), ("sink", call.tensors.get("sink"))):
        names.append("" if given is None else name)
        feeds |= {} if given is None else {name: given}
    while not names[-1]:
        names.pop()
    options = {"num_heads": case.H, "kv_num_heads": case.heads_kv, "domain": "com.microsoft"}
    options |= {} if case.scale is None else {"scale": case.scale}
    options |= {} if case.softcap is None else {"softcap": case.softcap}
    options |= {} if case.window is None else {"local_window_size": case.window[0] + 1}
    found = run_onnx([node("GroupQueryAttention", names, ["out", "k", "v"], **options)], feeds, ["out", "k", "v"])
    return found[0].unflatten(2, (case.H, -1)).transpose(1, 2)


GROUPED = [
    (Variant(2, 4, 2, 19, 19, 16, window=(4, None)), 0),
    (Variant(2, 4, 1, 130, 130, 24, window=(64, None), scale=0.3), 0),
    (Variant(2, 4, 2, 33, 33, 16, softcap=2.0), 0),
    (Variant(2, 4, 2, 33, 33, 16, sink="like heads"), 0),
    (Variant(2, 6, 2, 66, 66, 40, window=(9, None), softcap=20.0, sink="like heads"), 0),
    (Variant(2, 4, 2, 33, 33, 16, softcap=2.0, mask="float"), 0),
    (Variant(2, 4, 2, 1, 30, 16), 29),
    (Variant(2, 8, 2, 1, 130, 16, window=(9, None), softcap=3.0, sink="like heads"), 129),
    (Variant(1, 4, 2, 17, 70, 16), 53),
    (Variant(1, 4, 2, 17, 70, 16, window=(20, None), sink="like heads"), 53),
]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(("case", "past"), GROUPED, ids=str)
def test_grouped_query_attention(case: Variant, past: int, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    like = {"sink": name if case.sink != "none" else "none", "mask": f"{name}:1HTS" if case.mask != "none" else "none"}
    call = make(replace(case, dtype=dtype, causal=LOWER_RIGHT, **like))
    if "attn_mask" in call.tensors:  # it has no defined result for a query that sees nothing
        call.tensors["attn_mask"].nan_to_num_(neginf=-1.0)
    against_ort(call, grouped(call, Past(past)))


def test_smooth_softmax_is_a_sink_of_zero() -> None:
    node = need("onnx").helper.make_node
    call = make(Variant(2, 4, 2, 33, 33, 16, causal=UPPER_LEFT, sink="float32"))
    call.tensors["sink"].zero_()
    feeds, _ = Past().split(call)
    feeds |= {"last": torch.full((2,), 32, dtype=torch.int32), "total": torch.tensor([33], dtype=torch.int32)}
    options = {"num_heads": 4, "kv_num_heads": 2, "smooth_softmax": 1, "domain": "com.microsoft"}
    names = ["query", "key", "value", "", "", "last", "total"]
    found = run_onnx([node("GroupQueryAttention", names, ["out", "k", "v"], **options)], feeds, ["out", "k", "v"])
    against_ort(call, found[0].unflatten(2, (4, -1)).transpose(1, 2))


# ------------------------------------------------------------------------------------------------ the standard operator
STANDARD = [
    (Variant(2, 4, 2, 33, 66, 16, softcap=2.0), 0),
    (Variant(2, 4, 1, 33, 66, 16, 24, softcap=0.5, causal=UPPER_LEFT), 0),
    (Variant(2, 4, 2, 33, 66, 16, softcap=2.0, mask="bool:B1TS"), 0),
    (Variant(2, 4, 4, 33, 66, 16, softcap=2.0, mask="float"), 0),
    (Variant(2, 4, 2, 17, 28, 16, causal=LOWER_RIGHT), 11),
    (Variant(2, 4, 2, 1, 66, 16, 24, causal=LOWER_RIGHT, softcap=5.0), 65),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, HALF], ids=str)
@pytest.mark.parametrize(("case", "past"), STANDARD, ids=str)
def test_attention(case: Variant, past: int, dtype: torch.dtype) -> None:
    """Of opset 23, with a cap and with a cache, to whose end the causal order is aligned. (In float64 it takes the root
    of the scale in float32, so it is given scaled queries.)"""
    name = str(dtype).removeprefix("torch.")
    call = make(replace(case, dtype=dtype, mask=f"{name}:B1TS" if case.mask == "float" else case.mask))
    mask = call.options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        mask.nan_to_num_(neginf=-1.0)
    elif mask is not None:
        mask[..., 0] = True
    heads = {n: call.tensors[n] for n in ("query", "key", "value")}
    feeds = {n: x if n == "query" else x[:, :, past:] for n, x in heads.items()}
    options = {"is_causal": int(case.causal != 0)} | ({} if case.softcap is None else {"softcap": case.softcap})
    if dtype == torch.float64:
        feeds["query"], options["scale"] = feeds["query"] * case.D**-0.5, 1.0
    names, results = [*feeds], ["out"]
    if mask is not None:
        feeds["mask"], names = mask, [*names, "mask"]
    if past:
        feeds |= {"past_k": heads["key"][:, :, :past], "past_v": heads["value"][:, :, :past]}
        names, results = [*names, "", "past_k", "past_v"], ["out", "k", "v"]
    node = need("onnx").helper.make_node("Attention", names, results, **options)
    against_ort(call, run_onnx([node], feeds, results)[0])


# ----------------------------------------------------------------------------------------------------------------- JAX
def jax_results(call: Call) -> dict[str, Tensor]:
    """Out, lse and gradients of ``jax.nn.dot_product_attention``: windows, causal order and lengths are its own, what
    else hides pairs is a mask; what is added by distance is a bias built in JAX from its parameters."""
    jax = need_jax()
    jnp, case = jax.numpy, call.variant
    arrays = {n: jnp.asarray(x.transpose(1, 2).numpy() if x.dim() == 4 else x.numpy()) for n, x in call.tensors.items()}
    options: dict[str, Any] = {"is_causal": case.causal == UPPER_LEFT, "scale": case.scale, "return_residual": True}
    if case.window is not None:
        options["local_window_size"] = case.window
    padding = call.rest.get("key_padding_mask")
    if padding is not None:
        options["key_value_seq_lengths"] = jnp.asarray((~padding).sum(1).int().numpy())
    hiding = {n: x for n, x in call.rest.items() if n in ("segment_ids", "key_range")}
    if hiding:
        options["mask"] = jnp.asarray(visible((case.B, 1, case.T, case.keys), hiding).numpy())
    query, key = jnp.arange(case.T)[:, None], jnp.arange(case.keys)[None]

    def attention(arrays: dict[str, Any]) -> Any:
        bias = None
        if "alibi_slopes" in arrays:
            bias = -arrays["alibi_slopes"][None, :, None, None] * jnp.abs(query - key)
        if "relative_bias" in arrays:
            added = arrays["relative_bias"][None][..., key - query + case.T - 1]
            bias = added if bias is None else bias + added
        return jax.nn.dot_product_attention(arrays["query"], arrays["key"], arrays["value"], bias, **options)

    @jax.jit
    def both(arrays: dict[str, Any], grad_out: Any) -> Any:
        out, pull, lse = jax.vjp(attention, arrays, has_aux=True)
        return out, lse, pull(grad_out)[0]

    out, lse, grads = both(arrays, jnp.asarray(call.grad_out.transpose(1, 2).numpy()))
    found = {"out": out, "lse": lse, **grads}
    turned = {n: torch.from_numpy(np.array(x)) for n, x in found.items()}
    return {n: x.transpose(1, 2) if n == "lse" or x.dim() == 4 else x for n, x in turned.items()}


JAX_CASES = [
    Variant(2, 4, 2, 33, 33, 16, window=(5, 2)),
    Variant(2, 4, 1, 17, 40, 16, window=(9, 0), causal=UPPER_LEFT, padding="bool", dtype=torch.float64),
    Variant(2, 4, 2, 33, 33, 16, causal=UPPER_LEFT, alibi="float32:H", segments="one"),
    Variant(2, 4, 4, 17, 40, 8, relative="float64:H", key_range="BT", window=(20, 30), dtype=torch.float64),
]


def seen_by_all(call: Call) -> bool:
    case = call.variant
    return bool(visible((case.B, case.H, case.T, case.keys), call.options).any(-1).all())


@pytest.mark.parametrize("case", JAX_CASES, ids=str)
def test_jax(case: Variant) -> None:
    """Output, log-sum-exp and all gradients of the output alone (its other result has none). Its softmax runs in
    float32 whatever the inputs are, and it has no defined result for a query that sees nothing."""
    need_jax()
    call = next(call for call in (make(case, seed) for seed in range(1000)) if widened(call))
    call.grad_lse.zero_()
    truth, _ = exact(call)
    limits, theirs = limits_of(call, truth), limits_of(call, truth, dtype=torch.float32)
    results, grads = call.gradients()
    oracle = jax_results(call)
    for name, ours in {"out": results[0], "lse": results[1], **grads}.items():
        want = truth.grads[name] if name in truth.grads else getattr(truth, name)
        three_way(name, JAX, (ours, oracle[name], want), (limits[name], theirs[name]))


def widened(call: Call) -> bool:
    """Whether every query sees a key, once ranges that are too short are made long enough."""
    if "key_range" in call.rest:
        first = call.rest["key_range"][0].clamp(0, 3)
        call.rest["key_range"] = torch.stack([first, first + 1 + call.rest["key_range"][1].clamp(0)])
    return seen_by_all(call)


# --------------------------------------------------------------------------------------------- PyTorch's flex attention
FLEX_CASES = [
    Variant(2, 4, 2, 33, 66, 16, window=(5, 2), ends=True),
    Variant(2, 4, 2, 66, 66, 16, 24, causal=UPPER_LEFT, window=(20, None), softcap=2.0, alibi="float32:H"),
    Variant(2, 4, 4, 66, 66, 16, segments="one", relative="float32:H"),
    Variant(2, 4, 2, 66, 66, 16, causal=UPPER_LEFT, prefix=20, softcap=0.5),
    Variant(2, 4, 2, 33, 66, 16, causal=LOWER_RIGHT, alibi="float32:BH", key_range="BT"),
]


def flex_results(call: Call) -> Sequence[Tensor]:
    """Out and lse of ``flex_attention``, not compiled, with a score for the additions and the cap and a mask for what
    may be seen. It has no backward pass on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, options = call.variant, call.options
    shift = case.keys - case.T if case.alignment == "lower_right" else 0
    slopes, relative = options.get("alibi_slopes"), options.get("relative_bias")
    seen = visible((case.B, 1, case.T, case.keys), options)[:, 0]

    def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if case.softcap is not None:
            value = case.softcap * torch.tanh(value / case.softcap)
        if slopes is not None:
            value = value - (slopes[h] if slopes.dim() == 1 else slopes[b, h]) * (i + shift - j).abs()
        return value if relative is None else value + relative[h, j - i + case.T - 1]

    mask = create_block_mask(lambda b, h, i, j: seen[b, i, j], case.B, None, case.T, case.keys, device="cpu")
    heads = [call.tensors[n] for n in ("query", "key", "value")]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(*heads, score, mask, case.scale, enable_gqa=True, return_lse=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", FLEX_CASES, ids=str)
def test_flex_attention(case: Variant, dtype: torch.dtype) -> None:
    wide = {
        n: x.replace("32", "64") for n in ("alibi", "relative") if dtype == torch.float64 and (x := getattr(case, n))
    }
    call = make(replace(case, dtype=dtype, **wide))
    truth, _ = exact(call)
    limits = limits_of(call, truth, grads=False)
    for name, ours, theirs in zip(("out", "lse"), call.ours(), flex_results(call), strict=True):
        three_way(name, "flex attention", (ours, theirs, getattr(truth, name)), (limits[name], limits[name]))
