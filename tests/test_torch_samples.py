"""PyTorch's own samples for ``scaled_dot_product_attention`` and ``multi_head_attention_forward``, run on ours.

What is compared, and how exactly, is in ``torch_samples.py``; that it can fail is shown in
``test_torch_samples_refuse.py``. Nothing is left out: a sample that ours answers differently on purpose would have to
be named here, and none is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import DTYPES
from torch import Tensor
from torch_layer_samples import check_layer, layer_calls, layer_truth, pytorch_layer
from torch_samples import (
    SEED,
    Call,
    attention_calls,
    attention_truth,
    change,
    check_attention,
    check_derivatives,
    compare,
    evaluate,
    in_dtype,
    mild,
    operator_entry,
    pytorch_attention,
    strided,
    tame,
)

from mha_ext import functional

ATTENTION_CALLS, LAYER_CALLS = attention_calls(), layer_calls()
FEW = range(0, len(LAYER_CALLS), 15), range(5, len(LAYER_CALLS), 22)  # enough for every kind, as a test says
FEW_LAYER_CALLS = [LAYER_CALLS[i] for i in sorted({*FEW[0], *FEW[1], len(LAYER_CALLS) - 1})]
attention, layer = functional.scaled_dot_product_attention, functional.multi_head_attention_forward


def attention_kinds(call: Call) -> set[str]:
    query, key = call["query"], call["key"]
    kinds = {f"{query.dim()}-D with {key.dim()}-D"}
    kinds |= {n for n in ("is_causal", "dropout_p") if call.get(n)}
    return kinds | ({"mask"} if "attn_mask" in call else set()) or {"plain"}


def layer_kinds(call: Call) -> set[str]:
    mask, heads = call["attn_mask"], call["num_heads"]
    return {
        "batched" if call["query"].dim() == 3 else "unbatched",
        "separate weights" if call["use_separate_proj_weight"] else "packed weights",
        "no mask" if mask is None else f"{mask.dim()}-D mask",
        f"{heads} heads",
        f"width {call['embed_dim_to_check']}",
        "dropout" if call["dropout_p"] else "no dropout",
        "lengths differ" if call["query"].shape[0] != call["key"].shape[0] else "lengths equal",
    }


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The samples are too small to share."""
    torch.set_num_threads(1)


# --------------------------------------------------------------------------------------------------- nothing is missing
def test_the_samples_are_all_there_and_of_every_kind() -> None:
    assert len(ATTENTION_CALLS) >= 25 and len(LAYER_CALLS) >= 193 and len(FEW_LAYER_CALLS) >= 20
    seen = Counter(kind for call in ATTENTION_CALLS for kind in attention_kinds(call))
    assert set(seen) == {"3-D with 3-D", "4-D with 4-D", "3-D with 4-D", "is_causal", "dropout_p", "mask"}, seen
    for calls in (LAYER_CALLS, FEW_LAYER_CALLS):
        seen = Counter(kind for call in calls for kind in layer_kinds(call))
        assert set(seen) == {
            *("batched", "unbatched", "separate weights", "packed weights", "no mask", "2-D mask", "3-D mask"),
            *("1 heads", "2 heads", "width 2", "width 4", "dropout", "no dropout", "lengths differ", "lengths equal"),
        }, seen
    assert {n for c in LAYER_CALLS for n in ("bias_k", "bias_v") if c[n].dim() == 1} == {"bias_k", "bias_v"}


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "multi_head_attention_forward"])
def test_the_dtypes_are_those_of_ours_and_there_are_no_samples_of_errors(name: str) -> None:
    """As soon as PyTorch has samples of errors, this says that a test for them is missing."""
    entry = operator_entry(name)
    assert set(entry.dtypes) == set(DTYPES)
    assert entry.error_inputs_func is None


def test_pytorch_in_float64_agrees_with_the_exact_answers() -> None:
    """Two answers that share no code; so none of the samples is one on which ours is meant to differ."""
    for call in ATTENTION_CALLS:
        want, limits = attention_truth(call, torch.float64)
        compare(evaluate(pytorch_attention, call, torch.float64), want, limits, torch.float64)
    for call in map(tame, FEW_LAYER_CALLS):
        want, _ = layer_truth(call, torch.float64)
        limits = {n: 1e-13 * float(x.abs().max()) for n, x in want.items()}
        compare(evaluate(pytorch_layer, call, torch.float64), want, limits, torch.float64)


# ----------------------------------------------------------------------------------------------- results and gradients
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_samples(dtype: torch.dtype) -> None:
    for call in ATTENTION_CALLS:
        check_attention(attention, call, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_samples(dtype: torch.dtype) -> None:
    for call in FEW_LAYER_CALLS:
        check_layer(layer, call, dtype)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_layer_sample(dtype: torch.dtype) -> None:
    for call in LAYER_CALLS:
        check_layer(layer, call, dtype)
        check_layer(strided(layer), call, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_that_are_not_contiguous(dtype: torch.dtype) -> None:
    for call in ATTENTION_CALLS[::2]:
        check_attention(strided(attention), call, dtype)
    for call in FEW_LAYER_CALLS[::4]:
        check_layer(strided(layer), call, dtype)


def _part(call: Call, sizes: dict[str, int]) -> Call:
    """The first so many examples, queries or keys of a sample with four axes."""
    batch, queries, keys = (sizes.get(n) for n in ("batch", "queries", "keys"))
    cut = {"query": call["query"][:batch, :, :queries]} | {n: call[n][:batch, :, :keys] for n in ("key", "value")}
    if call.get("attn_mask") is not None:
        cut["attn_mask"] = call["attn_mask"][:queries, :keys]
    return call | cut


def extended(call: Call) -> dict[str, Call]:
    """What the generator leaves out, made from a sample with four axes. PyTorch's function refuses ``both``, and it
    gives other values to an empty row in some versions, so that only the exact answer counts for these two."""
    mask = torch.ones(call["query"].shape[-2], call["key"].shape[-2], dtype=torch.bool)
    mask[1], mask[2, ::2] = False, False
    return {
        "wide": call | {"value": torch.cat([call["value"]] * 2, -1)},
        "narrow": call | {"value": call["value"][..., :3]},
        "groups": call | {"key": call["key"][:, :2], "value": call["value"][:, :2], "enable_gqa": True},
        "one group": call | {"key": call["key"][:, :1], "value": call["value"][:, :1], "enable_gqa": True},
        "scale": call | {"scale": 0.3},
        "empty row": call | {"attn_mask": mask, "is_causal": False},
        "both": call | {"attn_mask": mask, "is_causal": True},
        "no batch": _part(call, {"batch": 0}),
        "no queries": _part(call, {"queries": 0}),
        "no keys": _part(call, {"keys": 0}),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_generator_leaves_out(dtype: torch.dtype) -> None:
    done: Counter[str] = Counter()
    for call in ATTENTION_CALLS:
        if call["query"].dim() == 4:
            for name, made in extended(call).items():
                for sample in (made, tame(made)):
                    want, limits = attention_truth(sample, dtype)
                    compare(evaluate(attention, in_dtype(sample, dtype), dtype), want, limits, dtype)
                done[name] += 1
    assert len(done) == 10 and set(done.values()) == {9}


@pytest.mark.parametrize(("function", "calls"), [(attention, ATTENTION_CALLS), (layer, FEW_LAYER_CALLS)])
def test_with_and_without_gradients_the_same_bits(function: Callable[..., Any], calls: list[Call]) -> None:
    for call in calls:
        call = change(call, lambda x: x.float())
        results = []
        for requires_grad in (False, True):
            torch.manual_seed(SEED)
            got = function(**change(call, lambda x, r=requires_grad: x.requires_grad_(r)))
            results.append([got] if isinstance(got, Tensor) else list(got))
        for plain, with_grad in zip(*results, strict=True):
            assert torch.equal(plain, with_grad) and with_grad.requires_grad and not plain.requires_grad


@pytest.mark.parametrize(("function", "calls"), [(attention, ATTENTION_CALLS), (layer, FEW_LAYER_CALLS)])
def test_shapes_and_strides_without_data(function: Callable[..., Any], calls: list[Call]) -> None:
    for call in calls:
        meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in call.items()}
        results = [[r] if isinstance(r, Tensor) else r for r in (function(**call), function(**meta))]
        for x, y in zip(*results, strict=True):
            assert (x.shape, x.stride(), x.dtype, y.device.type) == (y.shape, y.stride(), y.dtype, "meta")


@pytest.mark.parametrize(("function", "calls"), [(attention, ATTENTION_CALLS), (layer, FEW_LAYER_CALLS)])
def test_inputs_that_are_copied_on_write_stay_shared(function: Callable[..., Any], calls: list[Call]) -> None:
    """Reading is no reason to copy."""
    for call in calls:
        lazy = change(call, torch._lazy_clone)
        function(**lazy)
        copied = [n for n, x in lazy.items() if isinstance(x, Tensor) and not torch._C._is_cow_tensor(x)]
        assert not copied


# --------------------------------------------------------------------------------------------------------- derivatives
@pytest.mark.parametrize("kind", ["3-D with 3-D", "4-D with 4-D", "3-D with 4-D", "is_causal", "dropout_p", "mask"])
def test_derivatives_of_attention(kind: str) -> None:
    for call in [c for c in ATTENTION_CALLS if kind in attention_kinds(c)][:3:2]:
        check_derivatives(attention, mild(call), fast=True)


def test_derivatives_of_the_layer() -> None:
    for call in FEW_LAYER_CALLS[1::16]:
        check_derivatives(layer, mild(call), fast=True)


@pytest.mark.long
def test_derivatives_on_many_samples() -> None:
    for i, call in enumerate(ATTENTION_CALLS):
        check_derivatives(attention, call, fast=True)
        check_derivatives(attention, mild(call), fast=True)
        if i % 5:
            continue
        small = call | {
            n: call[n][..., :2, :2] if n != "query" else call[n][..., :2] for n in ("query", "key", "value")
        }
        small = small | ({"attn_mask": call["attn_mask"][:, :2]} if "attn_mask" in call else {})
        check_derivatives(attention, change(small, lambda x: x[-1:] if x.dim() == 4 else x), fast=False)
    for call in LAYER_CALLS[::8]:
        check_derivatives(layer, mild(call), fast=True)


def test_the_appended_key_may_have_one_axis_or_more() -> None:
    for call in FEW_LAYER_CALLS:
        call = call | {"training": False}
        want = layer(**call)
        for shape in ((1, -1), (1, 1, -1)):
            reshaped = {n: call[n].reshape(shape) for n in ("bias_k", "bias_v")}
            assert all(torch.equal(x, y) for x, y in zip(layer(**call | reshaped), want, strict=True))
