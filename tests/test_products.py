"""Linear maps by kernels of our own or the faster library, with derivatives of any order."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES
from switches import cpu_capability, threads
from tolerances import assert_within, growth, roundoff, smallest
from torch import Tensor

import mha_ext
from mha_ext.layer import linear

EMBED = 256
# With AVX-512 the first two are for the kernels (csrc/cpu/short_linear.cpp), and 160 x 256 x 768 is large
# (csrc/cpu/products.cpp).
ROWS = pytest.mark.parametrize("rows", [6, 96, 160])


def problem(dtype: torch.dtype = torch.float32, rows: int = 160) -> tuple[mha_ext.MultiheadAttention, Tensor]:
    torch.manual_seed(0)
    layer = mha_ext.MultiheadAttention(EMBED, 4, batch_first=True, dtype=dtype)
    with torch.no_grad():
        layer.in_proj_bias.normal_()
        layer.out_proj.bias.normal_()
    return layer, torch.randn(2, rows // 2, EMBED, dtype=dtype)


def results(layer: torch.nn.Module, x: Tensor, need_weights: bool) -> list[Tensor]:
    """Output, weights if wanted, and gradients of input and parameters."""
    x = x.detach().requires_grad_()
    out, weights = layer(x, x, x, need_weights=need_weights)
    loss = out.square().sum() + (0.0 if weights is None else weights.square().sum())
    gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
    return [*(t.detach() for t in (out, weights) if t is not None), *gradients]


@ROWS
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("capability", mha_ext.available_cpu_capabilities())
def test_training_against_float64(capability: str, dtype: torch.dtype, need_weights: bool, rows: int) -> None:
    """Errors grow with the square root of the longest sum, of 768 terms; the layer has four products in a row, and the
    gradients as many again: 8 * sqrt(768) roundings relative to the largest value, and those of the oracle."""
    layer, x = problem(dtype, rows)
    oracle = torch.nn.MultiheadAttention(EMBED, 4, batch_first=True, dtype=torch.float64)
    oracle.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    wanted = results(oracle, x.double(), need_weights)
    with cpu_capability(capability):
        found = results(layer, x, need_weights)
    for ours, want in zip(found, wanted, strict=True):
        limit = 8 * 768**0.5 * (roundoff(dtype) + roundoff(torch.float64)) * float(want.abs().max())
        assert_within(ours, want, limit)


@pytest.mark.parametrize("capability", mha_ext.available_cpu_capabilities())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "columns"), [(1, 3), (2, 65), (30, 64), (65, 33), (130, 130), (290, 7)])
def test_linear_maps_of_every_number_of_rows(capability: str, dtype: torch.dtype, depth: int, columns: int) -> None:
    """Output and gradients beside the sums in float64; the weight is a part of a wider one."""
    torch.manual_seed(0)
    weight = torch.randn(columns, depth + depth % 2 + 2).to(dtype)[:, :depth].requires_grad_()
    bias = torch.randn(columns).to(dtype).requires_grad_()
    for rows in (1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 128, 129):
        x, grad = (torch.randn(rows, n).to(dtype) for n in (depth, columns))
        with cpu_capability(capability):
            out = linear(x.requires_grad_(), weight, bias)
            gradients = torch.autograd.grad(out, (x, weight, bias), grad)
        wide_x, wide_weight, wide_grad = (t.detach().double() for t in (x, weight, grad))
        for found, left, right, start in (
            (out, wide_x, wide_weight.mT, bias.detach().double()),
            (gradients[0], wide_grad, wide_weight, torch.zeros(())),
            (gradients[1], wide_grad.mT, wide_x, torch.zeros(())),
        ):
            want, size = left @ right + start, left.abs() @ right.abs() + start.abs()
            limit = growth(left.shape[-1] + 1, dtype) * size + roundoff(dtype) * want.abs() + smallest(dtype)
            assert_within(found, want, limit, f"{rows} rows")


@ROWS
@pytest.mark.parametrize("need_weights", [False, True])
def test_inference_is_training_s_forward_for_any_thread_count(need_weights: bool, rows: int) -> None:
    layer, x = problem(rows=rows)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(layer(x, x, x, need_weights=need_weights))
            with torch.no_grad():
                found.append(layer(x, x, x, need_weights=need_weights))
    for out, weights in found[1:]:
        assert torch.equal(out, found[0][0])
        assert weights is None or torch.equal(weights, found[0][1])


@ROWS
def test_second_derivatives_of_a_layer_with_weights(rows: int) -> None:
    """A Hessian-vector product in float32 beside the same one in float64."""
    products = []
    for dtype in (torch.float32, torch.float64):
        layer, x = problem(rows=rows)
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


@pytest.mark.parametrize("need_weights", [False, True])
def test_no_biases(need_weights: bool) -> None:
    x = problem()[1].requires_grad_()
    layer = mha_ext.MultiheadAttention(EMBED, 4, bias=False, batch_first=True)
    gradient = torch.autograd.grad(layer(x, x, x, need_weights=need_weights)[0].sum(), [x, *layer.parameters()])
    x = x.detach().double().requires_grad_()
    exact = layer.double()
    want = torch.autograd.grad(exact(x, x, x)[0].sum(), [x, *exact.parameters()])
    for found, wanted in zip(gradient, want, strict=True):
        assert float((found.double() - wanted).abs().max()) <= 8 * 768**0.5 * 2**-24 * float(wanted.abs().max())


@ROWS
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["expanded", "stepped", "a column"])
def test_biases_in_any_memory(kind: str, training: bool, need_weights: bool, rows: int) -> None:
    layer, x = problem(rows=rows)
    plain = layer(x, x, x, need_weights=need_weights)[0]
    for owner, name in ((layer, "in_proj_bias"), (layer.out_proj, "bias")):
        bias = getattr(owner, name).detach()
        if kind == "expanded":
            bias.fill_(0.25)
            moved = torch.tensor([0.25]).expand(bias.shape)
        else:
            moved = torch.full((len(bias), 2 if kind == "stepped" else 257), 7.0)[:, 1].copy_(bias)
        setattr(owner, name, torch.nn.Parameter(moved))
        assert torch.equal(moved, bias) and not moved.is_contiguous()
    if kind == "expanded":
        filled = problem()[0]
        with torch.no_grad():
            filled.in_proj_bias.fill_(0.25)
            filled.out_proj.bias.fill_(0.25)
        plain = filled(x, x, x, need_weights=need_weights)[0]
    with torch.set_grad_enabled(training):
        assert torch.equal(layer(x, x, x, need_weights=need_weights)[0], plain)


@ROWS
def test_a_bias_of_one_number_is_not_read_beyond_it(rows: int) -> None:
    """Where the layer is not one operator, torch.nn.functional.linear decides what fits."""
    layer, x = problem(rows=rows)
    with torch.no_grad():
        layer.out_proj.bias.fill_(0.5)
        want = layer(x, x, x, need_weights=True)[0]
        layer.out_proj.bias = torch.nn.Parameter(torch.tensor([0.5]))
        limit = 8 * 768**0.5 * 2**-24 * 4  # as above; outputs are below 4
        assert_within(layer(x, x, x, need_weights=True)[0], want, limit)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("rows", [2, 48, 80])
def test_memory_that_does_not_hold_the_numbers(rows: int, need_weights: bool) -> None:
    """A negative view, and zeros that are nowhere."""
    layer, x = problem()
    x, limit = x[:, :rows], 8 * 768**0.5 * 2**-24 * 4  # as above; outputs are below 4
    with torch.no_grad():
        want = layer(-x, -x, -x, need_weights=need_weights)[0]
        negative = torch._neg_view(x)
        assert_within(layer(negative, negative, negative, need_weights=need_weights)[0], want, limit)
        zeros = torch._efficientzerotensor((1, rows, EMBED))
        found = layer(zeros, zeros, zeros, need_weights=need_weights)[0]
        real = torch.zeros(1, rows, EMBED)
        assert_within(found, layer(real, real, real, need_weights=need_weights)[0], limit)


def test_transforms_of_the_backward_pass() -> None:
    layer, x = problem()
    x.requires_grad_()
    out = layer(x, x, x)[0]
    grads = torch.randn(2, *out.shape)
    (batched,) = torch.autograd.grad(out, x, grads, is_grads_batched=True, retain_graph=True)
    for found, grad in zip(batched, grads, strict=True):
        (want,) = torch.autograd.grad(out, x, grad, retain_graph=True)
        assert float((found - want).abs().max()) <= 8 * 768**0.5 * 2**-24 * float(want.abs().max())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(grads[0], grads[1])
        (gradient,) = torch.autograd.grad(out, x, dual, retain_graph=True)
        tangent = torch.autograd.forward_ad.unpack_dual(gradient).tangent
    (want,) = torch.autograd.grad(out, x, grads[1])
    assert tangent is not None
    assert float((tangent - want).abs().max()) <= 8 * 768**0.5 * 2**-24 * float(want.abs().max())


@pytest.mark.parametrize("rows", [6, 96])
def test_an_output_projection_to_nothing_is_differentiable(rows: int) -> None:
    """``out_proj_weight`` may have no rows, as in torch.nn.functional.multi_head_attention_forward."""
    x = torch.randn(rows, 1, 8, requires_grad=True)
    packed = torch.randn(24, 8), torch.randn(24)
    out_proj = torch.zeros(0, 8, requires_grad=True), torch.zeros(0, requires_grad=True)
    out, _ = mha_ext.functional.multi_head_attention_forward(
        x, x, x, 8, 2, *packed, None, None, False, 0.0, *out_proj, need_weights=True
    )
    assert out.shape == (rows, 1, 0)
    gradients = torch.autograd.grad(out.sum(), (x, *out_proj))
    assert [g.shape for g in gradients] == [x.shape, (0, 8), (0,)]
    assert not gradients[0].any()


@pytest.mark.parametrize("rows", [6, 96])
@pytest.mark.parametrize("need_weights", [False, True])
def test_tensors_that_wrap_others_outside_of_a_transform(need_weights: bool, rows: int) -> None:
    """They have no memory of their own, and no dispatch mode or transform tells of them."""
    layer, x = problem(rows=rows)
    wrapped = torch._to_functional_tensor(x)
    out = layer(wrapped, wrapped, wrapped, need_weights=need_weights)[0]
    torch._sync(out)
    want = layer(x, x, x, need_weights=need_weights)[0]
    limit = 8 * 768**0.5 * 2**-24 * 4  # as above; outputs are below 4
    assert_within(torch._from_functional_tensor(out).detach(), want.detach(), limit)
