"""Large linear maps outside the layer's operator: the faster library, with derivatives of any order."""

from __future__ import annotations

import pytest
import torch
from switches import threads
from torch import Tensor

import mha_ext

ROWS, EMBED = 96, 256  # 96 x 256 x 768 is large (csrc/cpu/products.cpp)


def problem(dtype: torch.dtype = torch.float32) -> tuple[mha_ext.MultiheadAttention, Tensor]:
    torch.manual_seed(0)
    layer = mha_ext.MultiheadAttention(EMBED, 4, batch_first=True, dtype=dtype)
    with torch.no_grad():
        layer.in_proj_bias.normal_()
        layer.out_proj.bias.normal_()
    return layer, torch.randn(2, ROWS // 2, EMBED, dtype=dtype)


def results(need_weights: bool, dtype: torch.dtype) -> list[Tensor]:
    """Output, weights if wanted, and gradients of input and parameters, of the same numbers in every dtype."""
    layer, x = problem()
    layer, x = layer.to(dtype), x.to(dtype).requires_grad_()
    out, weights = layer(x, x, x, need_weights=need_weights)
    loss = out.square().sum() + (0.0 if weights is None else weights.square().sum())
    gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
    return [*(t.detach() for t in (out, weights) if t is not None), *gradients]


@pytest.mark.parametrize("need_weights", [False, True])
def test_training_against_float64(need_weights: bool) -> None:
    """Errors grow with the square root of the longest sum, of 768 terms; the layer has four products in a row, and the
    gradients as many again: 8 * sqrt(768) roundings of 2^-24 relative to the largest value."""
    for found, want in zip(results(need_weights, torch.float32), results(need_weights, torch.float64), strict=True):
        limit = 8 * 768**0.5 * 2**-24 * float(want.abs().max())
        assert float((found.double() - want).abs().max()) <= limit


@pytest.mark.parametrize("need_weights", [False, True])
def test_inference_is_training_s_forward_for_any_thread_count(need_weights: bool) -> None:
    layer, x = problem()
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(layer(x, x, x, need_weights=need_weights))
            with torch.no_grad():
                found.append(layer(x, x, x, need_weights=need_weights))
    for out, weights in found[1:]:
        assert torch.equal(out, found[0][0])
        assert weights is None or torch.equal(weights, found[0][1])


def test_second_derivatives_of_a_large_layer_with_weights() -> None:
    """A Hessian-vector product in float32 beside the same one in float64."""
    products = []
    for dtype in (torch.float32, torch.float64):
        layer, x = problem()
        layer, x = layer.to(dtype), x.to(dtype).requires_grad_()
        out, weights = layer(x, x, x)
        (gradient,) = torch.autograd.grad(out.square().mean() + weights.square().sum(), x, create_graph=True)
        direction = torch.linspace(-1, 1, x.numel(), dtype=dtype).view_as(x)
        products.append(torch.autograd.grad((gradient * direction).sum(), [x, layer.in_proj_weight]))
    for found, want in zip(*products, strict=True):
        assert float((found.double() - want).abs().max()) <= 16 * 768**0.5 * 2**-24 * float(want.abs().max())


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_only_what_is_wanted_is_computed(frozen: str) -> None:
    layer, x = problem()
    x.requires_grad_(frozen != "x")
    layer.in_proj_weight.requires_grad_(frozen != "weight")
    layer(x, x, x)[0].sum().backward()
    assert (x.grad is None) == (frozen == "x")
    assert (layer.in_proj_weight.grad is None) == (frozen == "weight")
