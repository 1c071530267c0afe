"""The module's window, softcap, sink, qk_norm and rope: values and gradients against a dense layer in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from layer_cases import EMBED, HEADS, MODES, gradients, inputs_for, last_hidden, mode, sequence
from module_variant_cases import KEYWORDS, dense_layer, exact_variant, variant
from tolerances import assert_within, double_limit, peer_limit
from torch import Tensor

from mha_ext import reference

OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_first": False},
    {"num_kv_heads": 2, "bias": False},
    {"num_heads": 6, "num_kv_heads": 3, "head_dim": 4, "add_bias_kv": True},
    {"kdim": 8, "vdim": 6, "add_bias_kv": True, "add_zero_attn": True},
]
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "padding": {"key_padding_mask": last_hidden(2, 7).flip(0)},
    "float padding, causal": {"key_padding_mask": torch.linspace(-1, 1, 14).view(2, 7), "is_causal": True},
    "mask": {"attn_mask": torch.arange(35).view(5, 7) % 3 == 1},
    "float mask, padding": {
        "attn_mask": torch.linspace(-1, 1, 35, dtype=torch.float64).view(5, 7),
        "key_padding_mask": last_hidden(2, 7),
    },
    "rows with nothing": {"attn_mask": torch.arange(5)[:, None] % 2 == torch.zeros(7)},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", KEYWORDS)
def test_against_the_dense_layer(name: str, options: dict[str, Any], masks: str) -> None:
    """Output, weights and the gradients of every input, parameter and float mask, with weights and without."""
    keywords, given = KEYWORDS[name], MASKS[masks]
    module = variant(keywords, **options)
    inputs = inputs_for(module)
    grad_out = torch.randn(inputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    truth = exact_variant(module, keywords, inputs, grad_out, **given)
    for need, average in ((False, True), (True, True), (True, False)):
        out, weights = module(*inputs, need_weights=need, average_attn_weights=average, **given)
        assert_within(out, truth.out, double_limit(truth.out, EMBED), "output")
        assert out.is_contiguous()
        if need:
            assert_within(weights, truth.weights.mean(1) if average else truth.weights, 1e-13, "weights")
        got = gradients(module, inputs, grad_out, need_weights=need, average_attn_weights=average, **given)
        assert got.keys() == truth.grads.keys()
        for parameter, grad in got.items():
            loose = 1e7 if grad.dtype == torch.float32 else 1
            assert_within(grad, truth.grads[parameter], loose * double_limit(truth.grads[parameter], 100), parameter)


@pytest.mark.parametrize("name", KEYWORDS)
def test_modes_self_attention_and_unbatched_inputs(name: str) -> None:
    """Train, eval and no-grad, one shared tensor and separate ones, batched and not: one answer."""
    keywords = KEYWORDS[name]
    module, x = variant(keywords), sequence(3, 7)
    truth = exact_variant(module, keywords, (x, x, x), is_causal=True)
    for mode_name, inputs in itertools.product(MODES, ((x, x, x), (x, x.clone(), x.clone()))):
        with mode(module, mode_name):
            out = module(*inputs, is_causal=True, need_weights=False)[0]
            assert_within(out, truth.out, double_limit(truth.out, EMBED))
            alone = module(*(i[1] for i in inputs), is_causal=True, need_weights=False)[0]
            assert_within(alone, truth.out[1], double_limit(truth.out, EMBED))


@pytest.mark.parametrize("name", KEYWORDS)
def test_derivatives_of_weights(name: str) -> None:
    """Gradients through the weights, of every parameter, by the dense layer's."""
    module, keywords = variant(KEYWORDS[name], num_kv_heads=2), KEYWORDS[name]
    inputs = inputs_for(module)
    grad = torch.randn(2, HEADS, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    wanted = {n: p for n, p in module.named_parameters() if "out_proj" not in n}
    eps = torch.finfo(torch.float64).eps
    truth = dense_layer(module, dict(module.named_parameters()), list(inputs), {**keywords, "eps": eps})[1]
    weights = module(*inputs, average_attn_weights=False)[1]
    assert_within(weights, truth, 1e-13)
    got = torch.autograd.grad(weights, list(wanted.values()), grad, allow_unused=True)
    want = torch.autograd.grad(truth, list(wanted.values()), grad, allow_unused=True)
    for parameter, a, b in zip(wanted, got, want, strict=True):
        assert_within(a, b, double_limit(b, 100), parameter)
    (again,) = torch.autograd.grad(module(*inputs, average_attn_weights=False)[1].square().sum(), module.in_proj_weight)
    averaged = module(*inputs)[1]
    assert_within(averaged, truth.mean(1), 1e-13)
    assert bool(again.isfinite().all())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", KEYWORDS)
def test_dropout_drops_the_documented_pairs(name: str, need_weights: bool) -> None:
    keywords = KEYWORDS[name]
    module, x = variant(keywords, dropout=0.4), sequence(2, 7)
    torch.manual_seed(11)
    seed = int(torch.randint(-(1 << 63), (1 << 63) - 1, (1,)))
    keep = reference.dropout_keep(seed, 2, HEADS, 7, 7, 0.4).double()
    truth = exact_variant(module, keywords, (x, x, x), keep=keep, dropout_p=0.4)
    torch.manual_seed(11)
    out, weights = module(x, x, x, need_weights=need_weights, average_attn_weights=False)
    assert_within(out, truth.out, double_limit(truth.out, EMBED))
    if weights is not None:
        assert_within(weights, truth.weights, 1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", KEYWORDS)
def test_half_types(name: str, need_weights: bool, dtype: torch.dtype) -> None:
    """Within twice the error of the same steps by plain operators in that dtype; all gradients finite."""
    keywords = KEYWORDS[name]
    module = variant(keywords, dtype=dtype, num_kv_heads=2)
    inputs = tuple(x.to(dtype) for x in inputs_for(module))
    truth = exact_variant(module, keywords, inputs, is_causal=True)
    eps = torch.finfo(dtype).eps
    peer = dense_layer(module, dict(module.named_parameters()), list(inputs), {**keywords, "eps": eps}, is_causal=True)
    out, weights = module(*inputs, need_weights=need_weights, is_causal=True, average_attn_weights=False)
    assert out.dtype == dtype
    assert_within(out, truth.out, peer_limit(peer[0], truth.out, dtype))
    if weights is not None:
        assert_within(weights, truth.weights, peer_limit(peer[1], truth.weights, dtype))
    out.float().sum().backward()
    assert all(p.grad.dtype == dtype and bool(p.grad.isfinite().all()) for p in module.parameters())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", KEYWORDS)
def test_autocast(name: str, need_weights: bool, dtype: torch.dtype) -> None:
    """A float32 layer gives what autocast gives a linear layer's dtype; parameters get float32 gradients."""
    keywords = KEYWORDS[name]
    module = variant(keywords, dtype=torch.float32, add_bias_kv=True)
    inputs = tuple(x.float() for x in inputs_for(module))
    truth = exact_variant(module, keywords, inputs)
    half = [x.to(dtype) for x in inputs]
    parameters = {n: p.detach().to(dtype) for n, p in module.named_parameters()}
    peer = dense_layer(module, parameters, half, {**keywords, "eps": torch.finfo(torch.float32).eps})[0]
    with torch.autocast("cpu", dtype):
        out = module(*inputs, need_weights=need_weights)[0]
    assert out.dtype == dtype
    assert_within(out, truth.out, peer_limit(peer, truth.out, dtype))
    out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and bool(p.grad.isfinite().all()) for p in module.parameters())


# ------------------------------------------------------------------------------------------------ what nobody looks at
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("name", KEYWORDS)
def test_hidden_rows_reach_no_gradient(name: str, poison: float, need_weights: bool) -> None:
    """Padding that is not finite, or is not any more on its way: gradients are those of finite padding."""
    keywords = KEYWORDS[name]
    module, hidden = variant(keywords), last_hidden(3, 7)
    x, grad_out = sequence(3, 7), sequence(3, 7, seed=5).masked_fill(hidden[..., None], 0.0)
    dirty = x.masked_fill(hidden[..., None], poison)
    options = {"key_padding_mask": hidden, "need_weights": need_weights}
    for others in ((False, False), (True, False)):
        inputs, broken = [(y, y.clone() if others[0] else y, y) for y in (x, dirty)]
        want, got = (gradients(module, i, grad_out, **options) for i in (inputs, broken))
        for parameter, grad in got.items():
            assert_within(grad, want[parameter], double_limit(want[parameter], 100), parameter)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(("window", "is_causal"), [((2, 1), False), ((-1, 0), False), ((2, 3), True), ((1, -1), True)])
@pytest.mark.parametrize("extra", [{}, {"qk_norm": True, "rope": True}, {"sink": True}], ids=str)
def test_keys_beyond_every_window_reach_no_gradient(
    extra: dict[str, Any], window: tuple[int, int], is_causal: bool, need_weights: bool
) -> None:
    """Four queries and nine keys: the last are behind all windows; with padding, single queries see none at all."""
    module = variant({"window": window, **extra})
    query, key = sequence(2, 4), sequence(2, 9, seed=2)
    right = 0 if is_causal else window[1]
    beyond = torch.arange(9) >= 4 + right
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, :5] = True
    for options in ({}, {"key_padding_mask": padding}, {"attn_mask": padding[1].expand(4, 9)}):
        options = {**options, "is_causal": is_causal, "need_weights": need_weights}
        want = gradients(module, (query, key, key), grad_out := sequence(2, 4, seed=7), **options)
        dirty = key.masked_fill(beyond[:, None], math.nan)
        got = gradients(module, (query, dirty, dirty), grad_out, **options)
        for name, grad in got.items():
            assert_within(grad, want[name], double_limit(want[name], 100), name)


@pytest.mark.parametrize("mask", [None, torch.zeros(6, 4, dtype=torch.bool)], ids=["no mask", "mask"])
def test_queries_without_keys_in_their_window_are_not_read(mask: Tensor | None) -> None:
    """Query 5 sees keys 4 to 6 of which none is there, query 0 the keys 0 and 1, which are padding: their NaN reaches
    no gradient."""
    module = variant({"window": (1, 1)})
    query, key, grad_out = sequence(1, 6), sequence(1, 4, seed=2), sequence(1, 6, seed=7)
    padding = torch.tensor([[True, True, False, False]])
    options = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": False}
    want = gradients(module, (query, key, key), grad_out, **options)
    dirty = query.clone()
    dirty[:, [0, 5]] = math.nan
    got = gradients(module, (dirty, key, key), grad_out, **options)
    for name, grad in got.items():
        assert_within(grad, want[name], double_limit(want[name], 100), name)


@pytest.mark.parametrize("name", KEYWORDS)
def test_hidden_keys_that_overflow_in_their_projection_reach_no_gradient(name: str) -> None:
    """Finite keys of another sequence, whose heads are not finite: the gradient of a norm would be NaN there."""
    module = variant(KEYWORDS[name])
    with torch.no_grad():
        module.in_proj_weight[EMBED : 2 * EMBED].mul_(1e4)
    query, key, grad_out = sequence(2, 4), sequence(2, 9, seed=2), sequence(2, 4, seed=7)
    hidden = torch.arange(9).expand(2, 9) == 2
    options = {"key_padding_mask": hidden, "need_weights": False}
    want = gradients(module, (query, key, key), grad_out, **options)
    large = key.masked_fill(hidden[..., None], 1e305)  # whose sum is finite as well
    assert not (large @ module.in_proj_weight.mT).isfinite().all()
    got = gradients(module, (query, large, large), grad_out, **options)
    for parameter, grad in got.items():
        assert_within(grad, want[parameter], double_limit(want[parameter], 100), parameter)


def test_a_visible_nan_shows_in_the_rows_that_use_it() -> None:
    for keywords in KEYWORDS.values():
        module, x = variant(keywords), sequence(1, 7)
        x[0, 3] = math.nan
        out: Tensor = module(x, x, x, need_weights=False)[0]
        window = keywords.get("window") or (None, None)
        left, right = (7 if side in (None, -1) else side for side in window)
        assert out.isnan().all(-1)[0].tolist() == [i == 3 or i - left <= 3 <= i + right for i in range(7)]
        assert torch.equal(out.isnan().any(-1), out.isnan().all(-1))
        clean = sequence(1, 7)
        by_key = module(clean, x, clean, need_weights=False)[0].isnan().all(-1)[0].tolist()
        assert by_key == [i - left <= 3 <= i + right for i in range(7)]
