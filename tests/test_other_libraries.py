"""Ours against libraries that share no code with PyTorch: ONNX Runtime's attention operators on the CPU, and JAX's.

Each comparison has three parties, the third being the exact answer in float64, and says which of them is off. Limits
are those of ``tolerances.py`` for the dtype in which a party computes. Where an oracle is itself off, ``DIFFERENT``
says how, and ours is compared with the exact answer alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from cases import LOWER_RIGHT, UPPER_LEFT, Case, Problem, exact
from faults import ATTENTION, LAYER, Fault
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from layer_cases import EMBED, HEADS, MODES, causal_mask, exact_layer, last_hidden, make, mode, pair, sequence
from other_libraries import (
    DRAWN,
    JAX,
    ORT,
    drawn,
    jax_attention,
    need,
    ort_attention,
    ort_contrib_attention,
    ort_grouped_attention,
    ort_layer,
    ort_packed_layer,
    problem_of,
    run_ours,
    three_way,
    typed,
)
from tolerances import Exact, assert_within, attention_limits, bias_limit, double_limit, peer_limit, roundoff
from torch import Tensor, nn

from mha_ext import functional

HALF = torch.float16
Function = Callable[..., Any]


# ------------------------------------------------------------------------------------------------------ the comparisons
def limits_of(
    truth: Exact, case: Case, dtype: torch.dtype, got: dict[str, Tensor], rounded: bool = False
) -> dict[str, Tensor]:
    """The limits for what a party computed in ``dtype``; ``rounded``: its weights too."""
    limits = attention_limits(truth, dtype, case.heads_kv, grads=len(got) > 1, rounded=rounded)
    if "attn_mask" in got:
        limits["attn_mask"] = bias_limit(truth, limits["scores"], got["attn_mask"], case.keys, dtype)
    return limits


def rounded_scores(truth: Exact) -> Tensor:
    """What it costs the output that scores are stored in float16, after the product and after adding the mask.

    Each score gains u |s| twice, a weight p the sum of its own and its row's mean error, as in ``tolerances.py``.
    """
    size = abs(truth.scale) * (truth.query.abs() @ truth.key.abs().mT) + truth.bias.nan_to_num(neginf=0.0).abs()
    error = torch.where(truth.weights > 0, 2 * roundoff(HALF) * size, 0.0)
    return (truth.weights * (error + (truth.weights * error).sum(-1, keepdim=True))) @ truth.value.abs()


def against_ort(problem: Problem, function: Function = functional.scaled_dot_product_attention, **options: Any) -> None:
    """The output against an operator of ONNX Runtime's, the standard one unless ``run`` is another."""
    case, truth = problem.case, exact(problem)
    oracle = options.pop("run", ort_attention)(problem, **options)
    ours = run_ours(function, problem, grads=False)
    limit = limits_of(truth, case, case.dtype, ours)["out"]
    rounded = limits_of(truth, case, case.dtype, ours, rounded=True)["out"]
    theirs = rounded + rounded_scores(truth) if case.dtype == HALF else limit
    three_way("out", ORT, (ours["out"], oracle, truth.out), (limit, theirs))


def against_jax(
    problem: Problem,
    function: Function = functional.scaled_dot_product_attention,
    answers: tuple[Exact, dict[str, Tensor]] | None = None,
) -> None:
    """Output and gradients against JAX, whose softmax runs in float32 whatever the inputs; ``answers`` are the exact
    and JAX's, if they are there already."""
    case = problem.case
    truth, oracle = answers or (exact(problem), jax_attention(problem))
    ours = run_ours(function, problem, grads=True)
    limits = limits_of(truth, case, case.dtype, ours)
    theirs = limits_of(truth, case, torch.float32 if case.dtype == torch.float64 else case.dtype, ours, rounded=True)
    assert oracle.keys() == ours.keys()
    for name, got in ours.items():
        want = truth.out if name == "out" else truth.grads[name]
        three_way(name, JAX, (got, oracle[name], want), (limits[name], theirs[name]))


# ------------------------------------------------------------------------------------------------------- ONNX Runtime
SHAPES = (
    {},
    {"T": 1, "S": 1, "D": 1},
    {"T": 5, "S": 9, "D_v": 8},
    {"B": 1, "T": 65, "S": 130, "D": 64},
    {"H": 4, "H_kv": 2},
    {"H": 4, "H_kv": 1, "D": 40},
    {"scale": 0.3},
    {"causal": UPPER_LEFT},
    {"causal": UPPER_LEFT, "T": 5, "S": 9},
    {"causal": UPPER_LEFT, "T": 9, "S": 5},
)
MASKS = (
    {"mask": "bool:11TS"},
    {"mask": "bool:1HTS", "T": 5, "S": 9},
    {"mask": "bool:B1TS", "causal": UPPER_LEFT},
    {"mask": "bool:BHTS", "H": 4, "H_kv": 2},
    {"mask": "float:11TS"},
    {"mask": "float:BHTS", "scale": 0.3},
    {"mask": "float:1HTS", "causal": UPPER_LEFT, "T": 9, "S": 5},
    {"padding": "bool"},
    {"padding": "bool", "mask": "float:B1TS"},
    {"padding": "bool", "mask": "bool:11TS", "causal": UPPER_LEFT},
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, HALF], ids=str)
@pytest.mark.parametrize("sizes", SHAPES + MASKS, ids=str)
def test_onnx_attention(sizes: dict[str, Any], dtype: torch.dtype) -> None:
    """The standard operator of opset 23, empty rows included: it gives 0 there, as ours does (in float64 from release
    1.32 on, NaN before)."""
    against_ort(problem_of(typed(sizes, dtype), empty_rows=dtype != torch.float64))


CONTRIB = (
    {},
    {"T": 5, "S": 9, "D_v": 8, "scale": 0.3},
    {"causal": UPPER_LEFT},
    {"causal": UPPER_LEFT, "T": 9, "S": 5},
    {"mask": "float:11TS"},
    {"mask": "float:BHTS", "T": 5, "S": 9},
    {"padding": "bool", "causal": UPPER_LEFT},
    {"padding": "bool", "mask": "float:1HTS"},
)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("sizes", CONTRIB, ids=str)
def test_contrib_attention(sizes: dict[str, Any], dtype: torch.dtype) -> None:
    against_ort(problem_of(typed(sizes, dtype), empty_rows=False), run=ort_contrib_attention)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("padding", ["none", "bool"])
@pytest.mark.parametrize(("kv_heads", "scale"), [(4, None), (2, 0.3), (1, None)])
def test_contrib_grouped_attention(kv_heads: int, scale: float | None, padding: str, dtype: torch.dtype) -> None:
    case = Case(H=4, H_kv=kv_heads, causal=UPPER_LEFT, scale=scale, padding=padding, dtype=dtype)
    against_ort(problem_of(case, empty_rows=False), run=ort_grouped_attention)


def sweep_ort(sizes: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    against_ort(problem_of(drawn(sizes, dtype), seed, empty_rows=dtype != torch.float64))


def sweep_jax(sizes: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    try:
        against_jax(problem_of(drawn(sizes, dtype), seed, empty_rows=False))
    except RuntimeError as error:
        if "ALG_DOT_BF16" not in str(error):  # its CPU compiler has no product of bfloat16 for some tiny sizes
            raise
        reject()


ORT_DTYPES, JAX_DTYPES = (torch.float64, torch.float32, HALF), (torch.float64, torch.float32, torch.bfloat16)
SEEDS = st.integers(0, 2**31)
test_onnx_attention_sweep = settings(max_examples=60, derandomize=True)(
    given(DRAWN, st.sampled_from(ORT_DTYPES), SEEDS)(sweep_ort)
)
test_jax_sweep = settings(max_examples=3, derandomize=True)(given(DRAWN, st.sampled_from(JAX_DTYPES), SEEDS)(sweep_jax))
test_onnx_attention_long_sweep = pytest.mark.long(
    settings(max_examples=3000)(given(DRAWN, st.sampled_from(ORT_DTYPES), SEEDS)(sweep_ort))
)
test_jax_long_sweep = pytest.mark.long(
    settings(max_examples=70)(given(DRAWN, st.sampled_from(JAX_DTYPES), SEEDS)(sweep_jax))
)


# ---------------------------------------------------------------------------------------------------------------- JAX
JAX_CASES = (
    (torch.float64, {"H": 4, "H_kv": 2, "T": 5, "S": 9, "causal": UPPER_LEFT, "mask": "float:BHTS"}),
    (torch.float32, {"mask": "float:1HTS", "causal": UPPER_LEFT, "padding": "bool"}),
    (torch.bfloat16, {"H": 4, "H_kv": 2, "causal": UPPER_LEFT}),
    (torch.bfloat16, {"mask": "float:11TS", "T": 5, "S": 33}),
)
MORE_FOR_JAX = tuple(
    (dtype, sizes) for dtype in JAX_DTYPES for sizes in (*SHAPES, *MASKS, {"scale": -0.7}) if "D_v" not in sizes
)


@pytest.mark.parametrize(("dtype", "sizes"), JAX_CASES, ids=str)
def test_jax(dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    """Output and gradients of query, key, value and bias; every query sees a key."""
    against_jax(problem_of(typed(sizes, dtype), empty_rows=False))


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "sizes"), MORE_FOR_JAX, ids=str)
def test_jax_grid(dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    against_jax(problem_of(typed(sizes, dtype), empty_rows=False))


def test_jax_queries_past_a_length() -> None:
    """JAX gives 0 to queries past a length: for ours, queries that see no key."""
    lengths, problem = torch.tensor([17, 4]), problem_of(Case())
    seen = (torch.arange(17) < lengths[:, None])[:, None, :, None].expand(2, 1, 17, 17)
    oracle = jax_attention(problem, query_lengths=lengths)
    problem = replace(problem, attn_mask=seen)
    truth, ours = exact(problem), run_ours(functional.scaled_dot_product_attention, problem, grads=True)
    limits = limits_of(truth, problem.case, torch.float32, ours)
    for name, got in ours.items():
        want = truth.out if name == "out" else truth.grads[name]
        three_way(name, JAX, (got, oracle[name], want), (limits[name], limits[name]))
    assert int((ours["out"] == 0).all(-1).sum()) == 2 * 13


# -------------------------------------------------------------------------------------------- where the oracles are off
DIFFERENT = {
    # ONNX Runtime's MultiHeadAttention with T < S aligns every query to the upper left, but lets the last one see all
    # S keys; 1.4 off.
    "causal, more keys than queries": {"causal": UPPER_LEFT, "T": 5, "S": 9},
    # No operator of theirs aligns to the lower right without a cache.
    "causal to the lower right": {"causal": LOWER_RIGHT, "T": 5, "S": 9},
    # MultiHeadAttention gives NaN; JAX NaN to a bias of -inf, and to a bool mask the mean of all values, which their
    # gradients show as well: 2 off.
    "empty rows, float": {"mask": "float32:BHTS"},
    "empty rows, bool": {"mask": "bool:BHTS", "causal": UPPER_LEFT},
    # JAX's CPU backend has no product of float16 for the gradients.
    "gradients in float16": {"dtype": HALF},
    # ONNX Runtime refuses sizes of 0.
    "no keys": {"S": 0},
    "no queries": {"T": 0},
}


@pytest.mark.parametrize("sizes", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_where_an_oracle_is_off(sizes: dict[str, Any]) -> None:
    problem = problem_of(Case(**sizes))
    truth, ours = exact(problem), run_ours(functional.scaled_dot_product_attention, problem, grads=True)
    limits = limits_of(truth, problem.case, problem.case.dtype, ours)
    for name, got in ours.items():
        assert_within(got, truth.out if name == "out" else truth.grads[name], limits[name], name)


def test_nan_behind_a_mask() -> None:
    """Both oracles multiply it by a weight of 0, and every output is NaN; ours is that of finite values there."""
    problem = problem_of(Case(mask="bool:111S"))
    truth = exact(problem)
    hidden = ~problem.attn_mask[0, 0, 0]
    key, value = (x.masked_fill(hidden[:, None], math.nan) for x in (problem.key, problem.value))
    ours = run_ours(functional.scaled_dot_product_attention, replace(problem, key=key, value=value), grads=True)
    limits = limits_of(truth, problem.case, torch.float32, ours)
    for name, got in ours.items():
        assert_within(got, truth.out if name == "out" else truth.grads[name], limits[name], name)


# --------------------------------------------------------------------------------------------------------------- layers
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "grouped": ({"num_kv_heads": 2}, {"is_causal": True}),
    "separate": ({"kdim": 8, "vdim": 6}, {"attn_mask": causal_mask(5, 7)}),
    "padding": ({}, {"key_padding_mask": last_hidden(3, 7)}),
    "float": ({}, {"attn_mask": sequence(3 * HEADS, 5, 7, seed=5), "key_padding_mask": last_hidden(3, 7)}),
    "appended": ({"add_bias_kv": True}, {"key_padding_mask": last_hidden(3, 7)}),
}


def layer_inputs(kdim: int = EMBED, vdim: int = EMBED, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return sequence(3, 5), sequence(3, 7, kdim, seed=2), sequence(3, 7, vdim, seed=3)


def operator_mask(appended: int, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """A module's masks as the standard operator's, (B or 1, H or 1, T, S + appended), True = may attend."""
    if attn_mask is not None:
        attn_mask = attn_mask.reshape(-1, HEADS if attn_mask.dim() == 3 else 1, *attn_mask.shape[-2:])
        attn_mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
    if key_padding_mask is not None:
        seen = ~key_padding_mask[:, None, None, :].expand(-1, 1, 5, -1)
        attn_mask = seen if attn_mask is None else attn_mask.masked_fill(~seen, -math.inf)
    if attn_mask is None or not appended:
        return attn_mask
    return torch.cat([attn_mask, torch.ones_like(attn_mask[..., :appended])], -1)


def layer_against_ort(name: str, change: Callable[[nn.Module], nn.Module] = lambda module: module) -> None:
    """Output and weights, per head and averaged, of a float64 layer and what ``change`` makes of it."""
    options, call = LAYERS[name]
    module, inputs = make(**options), layer_inputs(**options)
    want = exact_layer(module, inputs, **call)
    mask = operator_mask(int("add_bias_kv" in options), call.get("attn_mask"), call.get("key_padding_mask"))
    out, weights = ort_layer(module, inputs, mask, call.get("is_causal", False))
    changed = change(module)
    limits = [torch.full_like(x, double_limit(x, EMBED)) for x in (want.out, want.weights)]
    for way in MODES:
        with mode(changed, way):
            got, per_head = changed(*inputs, **call, average_attn_weights=False)
            mean = changed(*inputs, **call)[1]
            plain = changed(*inputs, **call, need_weights=False)[0]
        three_way("out", ORT, (got, out, want.out), (limits[0],) * 2)
        three_way("out without weights", ORT, (plain, out, want.out), (limits[0],) * 2)
        three_way("weights", ORT, (per_head, weights, want.weights), (limits[1],) * 2)
        three_way("mean weights", ORT, (mean, weights.mean(1), want.weights.mean(1)), (limits[1].mean(1),) * 2)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_of_standard_operators(name: str) -> None:
    layer_against_ort(name)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("masks", ["none", "padding", "bias", "both"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_layer(masks: str, causal: bool, dtype: torch.dtype) -> None:
    """com.microsoft.Attention; its rounding and ours are measured by that of PyTorch's layer."""
    (ours, theirs), x = pair(dtype=dtype), sequence(3, 6, dtype=dtype)
    padding, bias = last_hidden(3, 6), sequence(3 * HEADS, 6, 6, seed=4, dtype=dtype)
    call: dict[str, Any] = {"key_padding_mask": padding} if masks in ("padding", "both") else {}
    feeds = {"padding": (~padding).int()} if call else {}
    if masks in ("bias", "both"):
        call, feeds = {**call, "attn_mask": bias}, {**feeds, "bias": bias.unflatten(0, (3, HEADS))}
    want = exact_layer(ours, (x, x, x), **call, is_causal=causal).out
    oracle = ort_packed_layer(ours, x, feeds, causal)
    peer_mask = causal_mask(6, dtype=dtype) if causal else torch.zeros(6, 6, dtype=dtype)
    peer_call = {**call, "attn_mask": peer_mask + bias if "attn_mask" in call else peer_mask}
    if "key_padding_mask" in call:
        peer_call["key_padding_mask"] = torch.zeros(3, 6, dtype=dtype).masked_fill(padding, -math.inf)
    limit = torch.full_like(want, peer_limit(theirs(x, x, x, **peer_call)[0], want, dtype))
    for way in MODES:
        with mode(ours, way):
            out = ours(x, x, x, **call, is_causal=causal, need_weights=False)[0]
        three_way("out", ORT, (out, oracle, want), (limit, limit))


# --------------------------------------------------------------------------------------- that the comparisons can fail
@cache
def worst() -> tuple[Problem, tuple[Exact, dict[str, Tensor]]]:
    """A problem on which every fault acts, and the answers."""
    case = Case(H=4, H_kv=2, T=9, S=9, D=8, mask="float32:BHTS", causal=UPPER_LEFT)
    problem = problem_of(case, empty_rows=False)
    return problem, (exact(problem), jax_attention(problem))


@pytest.mark.parametrize("name", [name for name, fault in ATTENTION.items() if "dropout" not in fault.needs])
def test_faults_of_attention_are_refused(name: str) -> None:
    fault, (problem, answers) = ATTENTION[name], worst()
    faulty = fault.attention(functional.scaled_dot_product_attention)
    with pytest.raises(AssertionError, match=r"^ours is off"):
        against_jax(problem, faulty, answers)
    if not fault.of_gradients:
        with pytest.raises(AssertionError, match=r"^ours is off"):
            against_ort(problem, faulty)


def refused(name: str, fault: Fault) -> bool:
    """Whether the comparison of one layer refuses a fault, for the right reason."""
    try:
        layer_against_ort(name, fault.module)
    except AssertionError as error:
        assert str(error).startswith("ours is off")
        return True
    return False


@pytest.mark.parametrize(
    "name", [name for name, fault in LAYER.items() if "dropout" not in fault.needs and not fault.of_gradients]
)
def test_faults_of_layers_are_refused(name: str) -> None:
    assert any(refused(layer, LAYER[name]) for layer in LAYERS)


@pytest.mark.parametrize(("off", "places"), [("ours", 0), ("JAX", 1), ("the reference", 2)])
def test_three_way_names_who_is_off(off: str, places: int) -> None:
    results, limit = [torch.ones(3) for _ in range(3)], torch.full((3,), 1e-3)
    three_way("out", JAX, tuple(results), (limit, limit))
    results[places] = results[places] + 1
    with pytest.raises(AssertionError, match=rf"^{off} is off"):
        three_way("out", JAX, tuple(results), (limit, limit))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the oracles cannot be had for Python 3.10")
def test_a_missing_oracle_fails_in_ci_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for ci, outcome in (("", pytest.skip.Exception), ("true", pytest.fail.Exception)):
        monkeypatch.setenv("CI", ci)
        with pytest.raises(outcome, match="no_such_oracle is not installed"):
            need("no_such_oracle")
