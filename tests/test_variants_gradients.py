"""Gradients of every variant: against float64 math, by differences, twice, forwards, and on every instruction set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DTYPES, LOWER_RIGHT, UPPER_LEFT
from hypothesis import given, settings
from hypothesis import strategies as st
from switches import cpu_capability, threads
from tolerances import assert_within
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from variant_cases import HEADS_AND_NUMBERS, Call, Variant, check, make, variants

import mha_ext
from mha_ext.functional import scaled_dot_product_attention

CAPABILITIES = mha_ext.available_cpu_capabilities()
SEEDS = st.integers(0, 2**31)
# One option each: sizes that make one tile and several, of few queries and of many.
ALONE = {
    "window": {"window": (20, 5), "ends": True},
    "causal window": {"window": (20, None), "causal": LOWER_RIGHT},
    "one-sided window": {"window": (None, 3)},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": "float32"},
    "sink and empty rows": {"sink": "float32", "mask": "bool:B1TS"},
    "alibi": {"alibi": "float32:H"},
    "alibi an example": {"alibi": "float64:BH", "causal": LOWER_RIGHT},
    "relative": {"relative": "float32:H"},
    "relative for all heads": {"relative": "float64:B1", "causal": UPPER_LEFT},
    "segments": {"segments": "pair"},
    "segments an example": {"segments": "batch", "causal": LOWER_RIGHT},
    "prefix": {"causal": UPPER_LEFT, "prefix": 20},
    "prefix an example": {"causal": LOWER_RIGHT, "prefix": "batch"},
    "range": {"key_range": "T"},
    "range an example": {"key_range": "BT"},
}
LENGTHS = [(3, 70), (70, 33), (65, 130)]
TOGETHER = [
    Variant(2, 4, 2, 33, 65, 16, 24, window=(20, 0), softcap=3.0, sink="float32", alibi="float32:H", mask="bool:B1TS"),
    Variant(2, 4, 1, 130, 130, 24, 8, causal=LOWER_RIGHT, segments="one", relative="float32:BH", dropout_p=0.2),
    Variant(1, 2, 2, 3, 257, 33, 17, causal=LOWER_RIGHT, window=(100, None), sink="float64", softcap=20.0),
    Variant(2, 6, 2, 66, 40, 8, 8, key_range="BT", relative="float32:1", padding="float32", sink="bfloat16"),
    Variant(1, 4, 4, 17, 63, 64, 64, causal=LOWER_RIGHT, prefix=11, softcap=1.0, mask="float32:1HTS", dropout_p=0.1),
]


# ----------------------------------------------------------------------------------------------- against float64 math
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str, dtype: torch.dtype) -> None:
    for lengths in LENGTHS:
        sizes = {"B": 2, "H": 4, "H_kv": 2, "T": lengths[0], "S": lengths[1], "D": 16, "D_v": 24}
        check(make(Variant(**sizes, dtype=dtype, **ALONE[name])))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(variants(), SEEDS)
def test_any_combination(case: Variant, seed: int) -> None:
    check(make(case, seed))


@pytest.mark.long
@settings(max_examples=1500, deadline=None)
@given(variants(long=True), SEEDS)
def test_any_combination_at_length(case: Variant, seed: int) -> None:
    check(make(case, seed))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", TOGETHER, ids=str)
def test_every_instruction_set(case: Variant, dtype: torch.dtype, capability: str) -> None:
    with cpu_capability(capability):
        check(make(replace(case, dtype=dtype)))


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
@settings(max_examples=300, deadline=None)
@given(variants(long=True), SEEDS)
def test_any_combination_on_every_instruction_set(capability: str, case: Variant, seed: int) -> None:
    with cpu_capability(capability):
        check(make(case, seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        Variant(1, 2, 1, 21, 1090, 8, 5, causal=LOWER_RIGHT, window=(700, None), sink="float32", softcap=4.0),
        Variant(1, 2, 1, 21, 1090, 8, 5, key_range="T", relative="float32:H", alibi="float32:H"),
        Variant(1, 2, 2, 4, 2111, 8, 5, ends=True, window=(1500, 0), relative="float32:1", dropout_p=0.1),
        Variant(1, 2, 2, 130, 1090, 8, 8, segments="pair", causal=LOWER_RIGHT, sink="float32"),
    ],
    ids=str,
)
def test_many_keys(case: Variant, dtype: torch.dtype) -> None:
    """Enough keys that the work on one head is cut along them and merged; the bits are those of any thread count."""
    check(make(replace(case, dtype=dtype)))
    bits_of_any_thread_count(replace(case, dtype=dtype))


# ---------------------------------------------------------------------------------------------------------------- bits
def bits_of_any_thread_count(case: Variant) -> None:
    results = []
    for count in (1, 2, 3):
        with threads(count):
            found, grads = make(case).gradients()
        results.append([*found, *grads.values()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case", [*TOGETHER, Variant(1, 1, 1, 257, 257, 16, window=(9, 9), relative="float32:1")], ids=str
)
def test_thread_count_changes_no_bit(case: Variant, dtype: torch.dtype, capability: str) -> None:
    with cpu_capability(capability):
        bits_of_any_thread_count(replace(case, dtype=dtype))


@pytest.mark.parametrize("name", ALONE)
def test_a_part_of_the_batch_gives_the_bits_of_the_whole(name: str) -> None:
    call = make(Variant(3, 2, 1, 66, 130, 16, **ALONE[name]))
    out, lse = call.ours()
    for b in range(3):
        alone = {
            n: x[b : b + 1] if n in HEADS_AND_NUMBERS or (x.dim() > 1 and x.shape[0] == 3) else x
            for n, x in call.tensors.items()
        }
        options = dict(call.rest)
        if isinstance(options.get("prefix_length"), Tensor):
            options["prefix_length"] = options["prefix_length"][b : b + 1]
        if "segment_ids" in options:
            options["segment_ids"] = tuple(x[b : b + 1] if x.dim() > 1 else x for x in options["segment_ids"])
        if "key_range" in options and options["key_range"].dim() == 3:
            options["key_range"] = options["key_range"][:, b : b + 1]
        if "attn_mask" in options:
            options["attn_mask"] = options["attn_mask"][b : b + 1]
        got = scaled_dot_product_attention(**alone, **options, return_lse=True)
        assert torch.equal(got[0], out[b : b + 1]) and torch.equal(got[1], lse[b : b + 1])


# --------------------------------------------------------------------------------- differences, twice, and forward mode
def differentiable(call: Call, results: slice = slice(None), **more: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    """A call as a function of its floating tensors, and those; the log-sum-exp of queries without keys as 0."""
    names = list(call.tensors)
    inputs = [x.detach().clone().requires_grad_() for x in call.tensors.values()]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(call.seed)
        arguments = dict(zip(names, tensors, strict=True))
        found = scaled_dot_product_attention(**arguments, **call.rest, **more, return_lse=True)
        return tuple(torch.where(x == -torch.inf, 0.0, x) for x in found)[results]

    return function, inputs


def in_float64(options: dict[str, Any]) -> dict[str, Any]:
    """With parameters of float64: a gradient rounded to less has no second derivative to compare."""
    return {n: x.replace("float32", "float64") if isinstance(x, str) else x for n, x in options.items()}


def tiny(**options: Any) -> Call:
    """The same options in float64 on 3 queries and 5 keys, with bounds that fit."""
    options = in_float64(options)
    if "window" in options:
        options["window"] = tuple(side and 1 for side in options["window"])
    if isinstance(options.get("prefix"), int):
        options["prefix"] = 2
    batch = 2 if any("B" in str(x) or x == "batch" for x in options.values()) else 1
    return make(Variant(batch, 2, 1, 3, 4, 3, 2, torch.float64, **options), seed=4)


@pytest.mark.parametrize(
    "name",
    [
        *("window", "softcap", "sink and empty rows", "alibi an example", "relative", "relative for all heads"),
        *("segments an example", "prefix an example", "range an example", "dropout", "everything"),
    ],
)
def test_gradcheck_and_gradgradcheck(name: str) -> None:
    """Reverse and forward mode, batched gradients and second derivatives."""
    everything = {
        "sink": "float64", "softcap": 2.0, "alibi": "float64:BH", "relative": "float64:H", "window": (1, 1),
        "ends": True, "dropout_p": 0.3,
    }  # fmt: skip
    options = {"dropout": {"dropout_p": 0.3, "sink": "float64"}, "everything": everything, **ALONE}[name]
    function, inputs = differentiable(tiny(**options))
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "per_head") for name in ("window", "softcap", "sink", "alibi", "relative", "prefix", "range")),
        *((name, "mean") for name in ("softcap", "sink", "relative")),
        ("sink", "column_sum"),
    ],
)
def test_gradcheck_of_the_weights(name: str, kind: str) -> None:
    function, inputs = differentiable(tiny(**ALONE[name]), slice(2, 3), return_weights=kind)
    inputs = inputs[:2] + inputs[3:]  # weights do not depend on the values
    value = torch.randn(1, 1, 4, 2, dtype=torch.float64)

    def weights(query: Tensor, key: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return function(query, key, value, *rest)

    assert gradcheck(weights, inputs)
    assert gradgradcheck(weights, inputs, fast_mode=True)


def test_only_what_needs_a_gradient_gets_one() -> None:
    case = Variant(2, 2, 2, 33, 70, 8, relative="float32:H", alibi="float32:H", sink="float32", softcap=3.0)
    call = make(case)
    _, every = call.gradients()
    for name in call.tensors:
        leaves = {n: x.detach().requires_grad_(n == name) for n, x in call.tensors.items()}
        results = scaled_dot_product_attention(**leaves, **call.rest, return_lse=True)
        sent = [(x, g) for x, g in zip(results, (call.grad_out, call.grad_lse), strict=True) if x.requires_grad]
        (got,) = torch.autograd.grad([x for x, _ in sent], [leaves[name]], [g for _, g in sent])
        assert_within(got, every[name], 1e-5 * float(every[name].abs().max()), name)


def test_only_the_log_sum_exp_is_used() -> None:
    """A z-loss: mean of lse squared; with a sink its gradient is 2 lse times the sink's share."""
    call = make(Variant(2, 2, 1, 33, 70, 8, dtype=torch.float64, sink="float64", window=(9, 0), ends=True))
    sink = call.tensors["sink"].detach().requires_grad_()
    lse = scaled_dot_product_attention(**{**call.tensors, "sink": sink}, **call.rest, return_lse=True)[1]
    (got,) = torch.autograd.grad(lse.square().sum(), sink)
    want = (2 * lse * torch.exp(sink[:, None] - lse)).sum((0, 2)).detach()
    assert_within(got, want, 1e-11 * float(want.abs().max()))
