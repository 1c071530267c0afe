"""Under ``torch.autocast("cpu")`` everything is, to the bit, what explicit casts give: inputs and parameters cast to
the half type before, gradients cast back after; and the half kernels are what runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import Case, build
from layer_cases import last_hidden, make, sequence
from torch import Tensor
from tracing import FUSED, PIECES, TO_DIFFERENTIATE, Operators

from mha_ext import functional

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
WIDTH = 24
LAYERS: list[dict[str, Any]] = [
    {},
    {"bias": False, "batch_first": False},
    {"kdim": 10, "vdim": 7},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"num_kv_heads": 2, "head_dim": 7, "dropout": 0.3},
]


def assert_half_ran(trace: Operators, dtype: torch.dtype, name: str) -> None:
    """This operator of ours ran and its backward, PyTorch's did not, and nothing of another dtype went into ours."""
    assert trace.counts[name] == trace.ours == 1 and not trace.theirs
    backward = {FUSED: f"{FUSED}_backward"}.get(name, f"{PIECES}_backward")
    assert trace.counts[backward] == 1
    assert all(dtypes == {dtype} for dtypes in trace.dtypes.values()), trace.dtypes


def assert_same(ours: list[Tensor], wanted: list[Tensor], dtypes: list[torch.dtype]) -> None:
    """To the bit, once what explicit casts gave is brought to these dtypes, which lose nothing of it."""
    for found, want, dtype in zip(ours, wanted, dtypes, strict=True):
        assert found.dtype == dtype and torch.equal(found, want.to(dtype))
        assert bool(found.isfinite().all()) and bool(found.any())


def loss(results: list[Tensor]) -> Tensor:
    """Of all results, by a gradient that autocast and casts hand over alike."""
    return sum((x.double().square().sum() for x in results), torch.zeros((), dtype=torch.float64))


def step(module: Any, inputs: list[Tensor], options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and gradients of inputs (shared ones once) and parameters."""
    torch.manual_seed(1)  # of dropout
    leaves = {id(x): x.detach().requires_grad_() for x in inputs}
    results = [x for x in module(*[leaves[id(x)] for x in inputs], **options) if x is not None]
    with torch.autocast("cpu", enabled=False):
        gradients = torch.autograd.grad(loss(results), [*leaves.values(), *module.parameters()])
    return results, list(gradients)


@HALVES
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_the_module(options: dict[str, Any], masked: bool, need_weights: bool, dtype: torch.dtype) -> None:
    module = make(**{"embed_dim": WIDTH, "dtype": torch.float32, **options})
    order = (0, 1, 2) if module.batch_first else (1, 0, 2)
    query, *others = (sequence(2, 33, n, n, torch.float32).permute(order) for n in (WIDTH, module.kdim, module.vdim))
    inputs = [query] * 3 if module.kdim == WIDTH else [query, *others]
    call: dict[str, Any] = {"need_weights": need_weights, "is_causal": masked}
    if masked:
        call |= {"key_padding_mask": last_hidden(2, 33), "attn_mask": sequence(1, 33, 33, 4, torch.float32)[0]}
    with torch.autocast("cpu", dtype):
        found, gradients = step(module, inputs, call)
        with Operators() as trace:
            step(module, inputs, call)
    lowered = {id(x): x.to(dtype) for x in inputs}
    wanted, want_gradients = step(copy.deepcopy(module).to(dtype), [lowered[id(x)] for x in inputs], call)
    assert found[0].dtype == dtype
    assert_same(found, wanted, [x.dtype for x in wanted])
    assert_same(gradients, want_gradients, [torch.float32] * len(gradients))
    is_fused = not need_weights and not (module.bias_k is not None or module.kdim != WIDTH)
    assert_half_ran(trace, dtype, FUSED if is_fused else TO_DIFFERENTIATE)


@HALVES
@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_the_module_in_inference(need_weights: bool, options: dict[str, Any], dtype: torch.dtype) -> None:
    module = make(**{"embed_dim": WIDTH, "dtype": torch.float32, **options}).eval()
    inputs = [sequence(2, 33, n, n, torch.float32) for n in (WIDTH, module.kdim, module.vdim)]
    with torch.no_grad():
        with torch.autocast("cpu", dtype):
            found = module(*inputs, need_weights=need_weights)
        wanted = copy.deepcopy(module).to(dtype)(*(x.to(dtype) for x in inputs), need_weights=need_weights)
    assert all(a is b is None or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in zip(found, wanted, strict=True))
    assert found[0].dtype == dtype


@HALVES
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("return_weights", [None, "per_head", "mean"])
def test_attention_on_heads(return_weights: Any, given: torch.dtype, dtype: torch.dtype) -> None:
    """Whatever float type the heads have; a float mask's gradient has the mask's dtype."""
    problem = build(Case(2, 4, 2, 33, 47, 17, 15, given, "float32:1HTS", "bool"))
    tensors = [problem.query, problem.key, problem.value, problem.attn_mask]
    results = []
    for cast in (False, True):
        leaves = [x.detach().requires_grad_() for x in tensors]
        inputs = [x.to(dtype) for x in leaves[:3]] if cast else leaves[:3]
        with Operators() as trace, torch.autocast("cpu", dtype, enabled=not cast):
            found = functional.scaled_dot_product_attention(
                *inputs, leaves[3], is_causal=True, enable_gqa=True, key_padding_mask=problem.key_padding_mask,
                return_lse=True, return_weights=return_weights,
            )  # fmt: skip
            with torch.autocast("cpu", enabled=False):
                gradients = torch.autograd.grad(loss([x.nan_to_num(neginf=0.0) for x in found]), leaves)
        assert_half_ran(trace, dtype, TO_DIFFERENTIATE)
        results.append([*found, *gradients])
    assert results[0][0].dtype == dtype and results[0][1].dtype == torch.float32
    for ours, want in zip(*results, strict=True):
        assert ours.dtype == want.dtype and torch.equal(ours, want)


@HALVES
@pytest.mark.parametrize("need_weights", [True, False])
def test_the_layer_as_a_function(need_weights: bool, dtype: torch.dtype) -> None:
    shapes = ((33, 2, WIDTH), (3 * WIDTH, WIDTH), (3 * WIDTH,), (5, WIDTH), (5,))
    tensors = [torch.randn(shape) for shape in shapes]
    results = []
    for cast in (False, True):
        leaves = [x.detach().requires_grad_() for x in tensors]
        x, weight, bias, *rest = [x.to(dtype) for x in leaves] if cast else leaves
        with Operators() as trace, torch.autocast("cpu", dtype, enabled=not cast):
            found = functional.multi_head_attention_forward(
                x, x, x, WIDTH, 4, weight, bias, None, None, False, 0.0, *rest, need_weights=need_weights
            )
            with torch.autocast("cpu", enabled=False):
                gradients = torch.autograd.grad(loss([y for y in found if y is not None]), leaves)
        assert_half_ran(trace, dtype, TO_DIFFERENTIATE if need_weights else FUSED)
        results.append([*(y for y in found if y is not None), *gradients])
    for ours, want in zip(*results, strict=True):
        assert ours.dtype == want.dtype and torch.equal(ours, want)
