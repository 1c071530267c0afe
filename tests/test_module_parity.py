"""Our module against ``nn.MultiheadAttention`` and the exact layer: everything that a user of the original relies
on."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_cases import (
    EMBED,
    HEADS,
    MODES,
    VARIANTS,
    causal_mask,
    exact_layer,
    gradients,
    inputs_for,
    last_hidden,
    make,
    mode,
    pair,
    sequence,
)
from tolerances import assert_within, double_limit, peer_limit
from torch import nn

import mha_ext
from mha_ext import functional

MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bool": {"attn_mask": causal_mask(5, 7)},
    "float": {"attn_mask": sequence(1, 5, 7)[0]},
    "per_head": {"attn_mask": sequence(2 * HEADS, 5, 7)},
    "padding": {"key_padding_mask": last_hidden(2, 7)},
    "float_padding": {"key_padding_mask": sequence(1, 2, 7)[0]},
    "both": {"attn_mask": causal_mask(5, 7), "key_padding_mask": last_hidden(2, 7)},
}


def masks_for(name: str, module: nn.MultiheadAttention) -> dict[str, Any]:
    masks = MASKS[name]
    if name == "per_head" and module.num_heads != HEADS:
        return {"attn_mask": sequence(2 * module.num_heads, 5, 7)}
    return masks


# ------------------------------------------------------------------------------------------------------------ the grid
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("masks", MASKS)
def test_outputs_and_weights_in_every_mode(options: dict[str, Any], masks: str) -> None:
    ours, theirs = pair(**options)
    inputs, kwargs = inputs_for(ours), masks_for(masks, ours)
    for name, need, average in itertools.product(MODES, (True, False), (True, False)):
        if not need and not average:
            continue
        call = {**kwargs, "need_weights": need, "average_attn_weights": average}
        with mode(ours, name), mode(theirs, name):
            out, weights = ours(*inputs, **call)
            want, want_weights = theirs(*inputs, **call)
        assert_within(out, want, double_limit(want, EMBED), f"output {name}")
        assert out.is_contiguous() and out.requires_grad == (name != "no_grad")
        assert (weights is None) == (not need)
        if need:
            assert_within(weights, want_weights, double_limit(want_weights, EMBED), f"weights {name}")


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_gradients_of_inputs_parameters_and_masks(options: dict[str, Any], masks: str, need_weights: bool) -> None:
    ours, theirs = pair(**options)
    inputs, kwargs = inputs_for(ours), masks_for(masks, ours)
    grad_out = torch.randn_like(inputs[0])
    got = gradients(ours, inputs, grad_out, **kwargs, need_weights=need_weights)
    want = gradients(theirs, inputs, grad_out, **kwargs, need_weights=True)
    assert list(got) == list(want)
    for name, grad in got.items():
        assert_within(grad, want[name], double_limit(want[name], 100), name)


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_shared_inputs(shared: int, batch_first: bool, bias: bool, need_weights: bool) -> None:
    """Self-attention, one memory for key and value, and three inputs: the same tensor object or an equal one."""
    ours, theirs = pair(batch_first=batch_first, bias=bias)
    inputs = inputs_for(ours, shared)
    grad_out = torch.randn_like(inputs[0])
    got = gradients(ours, inputs, grad_out, need_weights=need_weights)
    want = gradients(theirs, inputs, grad_out, need_weights=True)
    for name, grad in got.items():
        assert_within(grad, want[name], double_limit(want[name], 100), name)
    apart = tuple(x.clone() for x in inputs)
    assert_within(ours(*apart)[0], ours(*inputs)[0], 1e-13)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_gradient_of_the_weights(options: dict[str, Any]) -> None:
    ours, theirs = pair(**options)
    inputs = inputs_for(ours)
    for average in (True, False):
        results = []
        for module in (ours, theirs):
            weights = module(*inputs, average_attn_weights=average)[1]
            wanted = [
                p for n, p in module.named_parameters() if n.startswith(("in_proj", "q_proj", "k_proj", "bias_k"))
            ]
            results.append(torch.autograd.grad(weights.square().sum(), wanted, allow_unused=True))
        for got, want in zip(*results, strict=True):
            assert_within(got, want, double_limit(want, 100))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_unbatched(batch_first: bool, need_weights: bool) -> None:
    ours, theirs = pair(batch_first=batch_first)
    query, key, value = (x[0] for x in (sequence(1, 5), sequence(1, 7, seed=2), sequence(1, 7, seed=3)))
    for kwargs in (
        {},
        {"attn_mask": causal_mask(5, 7)},
        {"attn_mask": sequence(HEADS, 5, 7)},
        {"key_padding_mask": last_hidden(3, 7)[2]},
    ):
        out, weights = ours(query, key, value, need_weights=need_weights, **kwargs)
        want, want_weights = theirs(query, key, value, need_weights=need_weights, **kwargs)
        assert_within(out, want, double_limit(want, EMBED))
        if need_weights:
            assert_within(weights, want_weights, 1e-13)
    got = gradients(ours, (query, key, value), torch.ones_like(query), need_weights=need_weights)
    wanted = gradients(theirs, (query, key, value), torch.ones_like(query))
    for name, grad in got.items():
        assert_within(grad, wanted[name], double_limit(wanted[name], 100), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masks", ["plain", "both", "float"])
def test_other_dtypes_are_no_less_exact_than_pytorch(dtype: torch.dtype, masks: str) -> None:
    """Output, weights and every gradient of a wider layer against float64, beside the original's own error."""
    ours, theirs = pair(embed_dim=64, dtype=dtype)
    inputs = tuple(sequence(2, n, 64, n, dtype) for n in (5, 7, 7))
    inputs = (inputs[0], sequence(2, 7, 64, 5, dtype), inputs[2])
    kwargs = {n: m.to(dtype) if m.is_floating_point() else m for n, m in MASKS[masks].items()}
    grad_out = torch.randn(2, 5, 64).to(dtype)
    truth = exact_layer(ours, inputs, grad_out, **kwargs)
    peer_grads = gradients(theirs, inputs, grad_out, **kwargs, need_weights=False)
    peer, peer_weights = theirs(*inputs, **kwargs)
    peer = min(
        peer,
        theirs(*inputs, **kwargs, need_weights=False)[0],
        key=lambda o: float((o.detach() - truth.out).abs().max()),
    )
    for need_weights in (True, False):
        out, weights = ours(*inputs, **kwargs, need_weights=need_weights)
        assert out.dtype == dtype
        assert_within(out, truth.out, peer_limit(peer, truth.out, dtype), "output")
        if weights is not None:
            mean = truth.weights.mean(1)
            assert weights.dtype == peer_weights.dtype
            assert_within(weights, mean, peer_limit(peer_weights, mean, dtype), "weights")
        for name, grad in gradients(ours, inputs, grad_out, **kwargs, need_weights=need_weights).items():
            assert_within(grad, truth.grads[name], peer_limit(peer_grads[name], truth.grads[name], dtype), name)


# --------------------------------------------------------------------------------------------------- the same object
def test_signature_and_class() -> None:
    assert issubclass(mha_ext.MultiheadAttention, nn.MultiheadAttention)
    for function in ("__init__", "forward"):
        ours = inspect.signature(getattr(mha_ext.MultiheadAttention, function)).parameters
        theirs = inspect.signature(getattr(nn.MultiheadAttention, function)).parameters
        assert list(ours)[: len(theirs)] == list(theirs)
        for name, parameter in theirs.items():
            assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)
        assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])
    theirs = inspect.signature(F.multi_head_attention_forward).parameters
    ours = inspect.signature(functional.multi_head_attention_forward).parameters
    assert [(n, p.default) for n, p in ours.items()][: len(theirs)] == [(n, p.default) for n, p in theirs.items()]


# -------------------------------------------------------------------------------------------------- the function form
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_functional_form(options: dict[str, Any], need_weights: bool) -> None:
    module = make(nn.MultiheadAttention, **{**options, "batch_first": False})
    query, key, value = inputs_for(module)
    separate = module.in_proj_weight is None
    kwargs = {
        "training": False, "need_weights": need_weights, "attn_mask": causal_mask(5, 7), "key_padding_mask":
        last_hidden(2, 7), "use_separate_proj_weight": separate, "q_proj_weight": module.q_proj_weight,
        "k_proj_weight": module.k_proj_weight, "v_proj_weight": module.v_proj_weight,
    }  # fmt: skip
    positional = (
        query, key, value, EMBED, module.num_heads, module.in_proj_weight, module.in_proj_bias, module.bias_k,
        module.bias_v, module.add_zero_attn, 0.0, module.out_proj.weight, module.out_proj.bias,
    )  # fmt: skip
    got = functional.multi_head_attention_forward(*positional, **kwargs)
    want = F.multi_head_attention_forward(*positional, **kwargs)
    assert_within(got[0], want[0], double_limit(want[0], EMBED))
    assert (got[1] is None) == (want[1] is None)
    if need_weights:
        assert_within(got[1], want[1], 1e-13)


def test_functional_form_with_static_keys_and_values() -> None:
    module = make(nn.MultiheadAttention, batch_first=False)
    query, key, value = inputs_for(module)
    static = [sequence(2 * HEADS, 9, EMBED // HEADS, s) for s in (5, 6)]
    positional = (query, key, value, EMBED, HEADS, module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0)
    out = (module.out_proj.weight, module.out_proj.bias)
    got = functional.multi_head_attention_forward(*positional, *out, static_k=static[0], static_v=static[1])
    want = F.multi_head_attention_forward(*positional, *out, static_k=static[0], static_v=static[1])
    assert_within(got[0], want[0], double_limit(want[0], EMBED))
    assert_within(got[1], want[1], 1e-13)


# ------------------------------------------------------------------------------------------------------ shared heads
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("head_dim", [None, 6])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 8, "vdim": 6}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str
)
def test_grouped_heads_and_head_dim(kv_heads: int, head_dim: int | None, options: dict[str, Any]) -> None:
    module = make(num_kv_heads=kv_heads, head_dim=head_dim, **options)
    dim = head_dim or EMBED // HEADS
    assert (module.num_kv_heads, module.head_dim) == (kv_heads, dim)
    if "kdim" not in options:
        assert module.in_proj_weight.shape == ((HEADS + 2 * kv_heads) * dim, EMBED)
    assert module.out_proj.weight.shape == (EMBED, HEADS * dim)
    inputs = inputs_for(module)
    grad_out = torch.randn_like(inputs[0])
    truth = exact_layer(module, inputs, grad_out, is_causal=True)
    for need_weights in (True, False):
        out, weights = module(*inputs, need_weights=need_weights, is_causal=True, average_attn_weights=False)
        assert_within(out, truth.out, double_limit(truth.out, EMBED))
        if need_weights:
            assert_within(weights, truth.weights, 1e-13)
        for name, grad in gradients(module, inputs, grad_out, need_weights=need_weights, is_causal=True).items():
            assert_within(grad, truth.grads[name], double_limit(truth.grads[name], 100), name)
