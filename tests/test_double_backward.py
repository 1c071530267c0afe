"""Double backward: second and third derivatives in reverse mode are those of dense float64 math, for every option,
dtype and block of pairs, and nothing stored behind a mask reaches them. Memory: ``test_derivatives_memory.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DTYPES, LOWER_RIGHT, UPPER_LEFT, Case, build, ops
from derivative_cases import (
    LAYERS,
    MORE,
    OPTIONS,
    SMALL,
    Layer,
    along,
    attention_twins,
    gradient,
    in_dtype,
    layer,
    like,
    loss,
    same,
    small_twins,
    twice_back,
    zeros_for,
)
from second_limits import forward_answers, second_answers
from switches import threads
from tolerances import assert_within
from torch import Tensor
from torch.autograd import gradgradcheck
from torch.func import functional_call, grad
from variant_cases import Call, Variant, exact, make

import mha_ext
from mha_ext.functional import scaled_dot_product_attention


# ------------------------------------------------------------------------------------------------------------ attention
@pytest.mark.parametrize("name", OPTIONS)
def test_second_derivatives(name: str) -> None:
    """Of the output and the log-sum-exp, in every tensor and in what is sent back."""
    twins = small_twins(name)
    sent = like(twins.exact(*twins.inputs), 5)
    directions = like(twins.inputs, 6)
    got = twice_back(twins.ours, twins.inputs, sent, directions)
    same(got, twice_back(twins.exact, twins.inputs, sent, directions))


@pytest.mark.parametrize("name", ["plain", "bool mask and padding", "dropout", "softcap and mask", "everything"])
def test_gradgradcheck(name: str) -> None:
    twins = small_twins(name, B=1, H=2, H_kv=1, T=3, S=4, D=2, D_v=2)
    leaves = [x.detach().requires_grad_() for x in twins.inputs]
    assert gradgradcheck(twins.ours, leaves, fast_mode=name != "plain")


@pytest.mark.parametrize("name", [n for n in OPTIONS if "appended" not in n] + list(MORE))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_within_the_rounding_of_the_dtype(name: str, dtype: torch.dtype) -> None:
    """Over several tiles, against formulas in float64 that carry a bound on the error of each step."""
    options = in_dtype({**OPTIONS, **MORE}[name], dtype)
    case = replace(Variant(2, 4, 2, 40, 70, 16, 24, dtype), **options)
    call = make(case)
    truth, _ = exact(call)
    twins = attention_twins(case)
    directions = dict(zip(twins.names, like(twins.inputs, 6), strict=True))
    got = twice_back(twins.ours, twins.inputs, (call.grad_out, call.grad_lse), tuple(directions.values()))
    answers = {**second_answers(call, truth, directions), **forward_answers(call, truth, directions)}
    for what, found in zip([*twins.names, "out", "lse"], got, strict=True):
        assert_within(found, *answers[what], what)


@pytest.mark.parametrize("name", [n for n in OPTIONS if "appended" not in n])
def test_those_formulas_are_what_autograd_gives(name: str) -> None:
    case = replace(SMALL, **OPTIONS[name])
    call, twins = make(case), attention_twins(case)
    truth, _ = exact(call)
    directions = dict(zip(twins.names, like(twins.inputs, 6), strict=True))
    want = twice_back(twins.exact, twins.inputs, (call.grad_out, call.grad_lse), tuple(directions.values()))
    answers = {**second_answers(call, truth, directions), **forward_answers(call, truth, directions)}
    same(tuple(answers[n][0] for n in [*twins.names, "out", "lse"]), want)


# More pairs than a block holds: cut along the batch, along the heads and along the queries, evenly or not.
BLOCKS = {
    "samples": Variant(5, 2, 1, 450, 520, 4, 3, torch.float64, mask="bool:B1TS", sink="float64", causal=UPPER_LEFT),
    "heads": Variant(2, 6, 3, 800, 600, 4, 3, torch.float64, dropout_p=0.1, relative="float64:H", mask="float64:1HT1"),
    "queries": Variant(
        1, 1, 1, 1100, 1000, 4, 3, torch.float64, relative="float64:1", padding="float64", window=(300, 20), ends=True
    ),
    "queries of a group": Variant(
        1, 2, 1, 1100, 1000, 4, 3, torch.float64, softcap=2.0, mask="float64:11TS", causal=LOWER_RIGHT, dropout_p=0.2
    ),
    "ranges": Variant(2, 2, 2, 1100, 1000, 4, 3, torch.float64, key_range="BT", alibi="float64:BH"),
    "appended": Variant(1, 2, 1, 1100, 1000, 4, 3, torch.float64, appended=3, mask="float64:1HTS", causal=LOWER_RIGHT),
}


@pytest.mark.parametrize("name", ["queries", pytest.param("heads", marks=pytest.mark.long), *(
    pytest.param(n, marks=pytest.mark.long) for n in ("samples", "queries of a group", "ranges", "appended")
)])  # fmt: skip
@threads(2)
def test_more_pairs_than_a_block(name: str) -> None:
    twins = attention_twins(BLOCKS[name])
    sent, directions = like(twins.exact(*twins.inputs), 5), like(twins.inputs, 6)
    got = twice_back(twins.ours, twins.inputs, sent, directions)
    same(got, twice_back(twins.exact, twins.inputs, sent, directions))


@pytest.mark.parametrize("name", ["learned mask and padding", "relative bias", "sink"])
def test_any_part_of_them(name: str) -> None:
    """Gradients of some tensors, differentiated in others, are those of all."""
    twins = small_twins(name)
    sent, directions = like(twins.exact(*twins.inputs), 5), like(twins.inputs, 6)
    count = len(twins.inputs)
    for first, second in itertools.product(range(count), repeat=2):
        both = {first, second}
        leaves = [x.detach().requires_grad_(i in both) for i, x in enumerate(twins.inputs)]
        total = loss(twins.ours, sent)(*leaves)
        (once,) = torch.autograd.grad(total, leaves[first], create_graph=True)
        got = zeros_for(
            torch.autograd.grad(once, leaves[second], directions[first], allow_unused=True)
            if once.requires_grad
            else [None],
            [leaves[second]],
        )
        alone = [x if i == first else torch.zeros_like(x) for i, x in enumerate(directions)]
        want = twice_back(twins.exact, twins.inputs, sent, alone)[second]
        same(got[0], want)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (0, 6), (1, 2, 8), (3, 4, 5)])
def test_output_mask_of_the_operator(wanted: tuple[int, ...]) -> None:
    """What is not asked for is not returned; what is has the bits of the whole."""
    call = make(replace(SMALL, mask="float64:B1TS", padding="float64", relative="float64:H", sink="float64"))
    names = ("query", "key", "value", "attn_mask", "key_padding_mask")
    five = [call.tensors[n] for n in names]
    extra = {"relative_bias": call.tensors["relative_bias"][None], "sink": call.tensors["sink"]}
    plain = {"dropout_p": 0.0, "causal": 0, "scale": None, "num_appended_keys": 0, **extra}
    results = ops.attention(*five, None, **extra)
    tangents = like([*five, *extra.values(), call.grad_out, call.grad_lse], 6)

    def second(mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
        given = (call.grad_out, call.grad_lse, *five, None, *results, *tangents)
        return ops.attention_backward_jvp(*given, **plain, output_mask=mask)

    every = second([True] * 9)
    some = second([n in wanted for n in range(9)])
    for n, (part, whole) in enumerate(zip(some, every, strict=True)):
        assert (part is None) != (n in wanted)
        if part is not None:
            same(part, whole)


@pytest.mark.parametrize("only", ["out", "lse"])
@pytest.mark.parametrize("name", ["plain", "causal", "sink and empty rows", "softcap"])
def test_one_result_alone(name: str, only: str) -> None:
    """A loss of the log-sum-exp (a z-loss) or of the output, the other never used."""
    twins = small_twins(name)
    index = ("out", "lse").index(only)
    sent, directions = like(twins.exact(*twins.inputs)[index : index + 1], 5), like(twins.inputs, 6)
    found = [
        twice_back(lambda *x, f=f: (f(*x)[index],), twins.inputs, sent, directions) for f in (twins.ours, twins.exact)
    ]
    same(*found)


def test_backward_operator_is_linear_in_the_incoming_gradients() -> None:
    """Its derivative along a direction is its value there."""
    problem = build(Case(1, 2, 1, 4, 6, 3, dtype=torch.float64, causal=1))
    out, lse = ops.attention(*problem.tensors, causal=1)
    sent = [problem.grad_out.clone().requires_grad_(), problem.grad_lse.clone().requires_grad_()]

    def backward(grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
        wanted = [True, True, True, False, False, False, False]
        results = ops.attention_backward(
            grad_out, grad_lse, *problem.tensors, out, lse, **problem.options, output_mask=wanted
        )
        return results[:3]

    assert torch.autograd.gradcheck(backward, sent)


@pytest.mark.parametrize("name", OPTIONS)
def test_third_derivatives(name: str) -> None:
    """The gradient of a product with the second derivative, by compositions over all pairs."""
    twins = small_twins(name)
    count = len(twins.inputs)
    sent, directions = like(twins.exact(*twins.inputs), 5), like(twins.inputs, 6)

    def third(function: Any) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in twins.inputs]
        first = torch.autograd.grad(loss(function, sent)(*leaves), leaves, create_graph=True)
        total = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
        second = torch.autograd.grad(total, leaves, create_graph=True)
        total = sum((g * d).sum() for g, d in zip(second, directions, strict=True))
        return torch.autograd.grad(total, leaves)

    want = third(twins.exact)
    same(third(twins.ours), want)
    mixed = gradient(along(gradient(twins.ours, sent, count), directions), directions, count)
    same(mixed(*twins.inputs), want)


# --------------------------------------------------------------------------------------------------------- behind masks
HIDING = {
    "padding": {"padding": "bool"},
    "float padding": {"padding": "float64"},
    "mask": {"mask": "bool:11TS"},
    "causal": {"causal": UPPER_LEFT, "T": 4, "S": 7},
    "window": {"window": (1, 0), "T": 4, "S": 7},
    "range": {"key_range": "BT"},
    "softcap and padding": {"padding": "bool", "softcap": 1.0, "sink": "float64"},
    "dropout and padding": {"padding": "bool", "dropout_p": 0.3},
}


def hiding(name: str) -> Call:
    """A call in which some keys are seen by nobody."""
    call = make(replace(SMALL, **HIDING[name]))
    padding = {**call.tensors, **call.rest}.get("key_padding_mask")
    if padding is not None:
        padding[1, -2:] = True if padding.dtype == torch.bool else -math.inf
    if name == "mask":
        call.rest["attn_mask"][..., 3] = False
    return call


@pytest.mark.parametrize("filling", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", HIDING)
def test_what_lies_behind_a_mask_reaches_no_second_derivative(name: str, filling: float) -> None:
    """Keys and values that no query sees, and queries that see no key."""
    call = hiding(name)
    hidden = exact(call)[1].bias == -math.inf
    unseen = hidden.all(2).unflatten(1, (-1, call.variant.H // call.variant.heads_kv)).all(2)
    blind = hidden.all(3)
    assert unseen.any()
    results = []
    for number in (0.0, filling):
        places = {"query": blind, "key": unseen, "value": unseen}
        tensors = {
            n: x.masked_fill(places[n][..., None], number) if n in places else x for n, x in call.tensors.items()
        }
        names = list(tensors)

        def ours(*inputs: Tensor, names: list[str] = names) -> tuple[Tensor, ...]:
            torch.manual_seed(call.seed)
            found = scaled_dot_product_attention(**dict(zip(names, inputs, strict=True)), **call.rest, return_lse=True)
            return tuple(torch.where(x == -torch.inf, 0.0, x) for x in found)

        directions = like(list(tensors.values()), 6)
        results.append(twice_back(ours, list(tensors.values()), (call.grad_out, call.grad_lse), directions))
    assert all(x.isfinite().all() for x in results[1])
    same(results[1], results[0])


def test_a_nan_that_is_seen_stays_in_the_rows_that_see_it() -> None:
    """Causal order, NaN in key 4: second derivatives of the queries before are finite, of the others not."""
    leaves = [x.requires_grad_() for x in like([torch.empty(1, 2, 6, 4, dtype=torch.float64)] * 3, 3)]
    with torch.no_grad():
        leaves[1][:, :, 4] = math.nan
    out = scaled_dot_product_attention(*leaves, is_causal=True)
    (first,) = torch.autograd.grad(out[:, :, :4].square().sum(), leaves[0], create_graph=True)
    (second,) = torch.autograd.grad(first[:, :, :4].square().sum(), leaves[0])
    assert second[:, :, :4].isfinite().all()
    (first,) = torch.autograd.grad(
        scaled_dot_product_attention(*leaves, is_causal=True).square().sum(), leaves[0], create_graph=True
    )
    (second,) = torch.autograd.grad(first.sum(), leaves[0])
    assert second[:, :, :4].isfinite().all() and second[:, :, 4:].isnan().any(-1).all()


# ---------------------------------------------------------------------------------------------------------------- layer
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    """Second derivatives in inputs, masks and every parameter."""
    twins = layer(name).twins()
    sent, directions = like(twins.exact(*twins.inputs), 5), like(twins.inputs, 6)
    got = twice_back(twins.ours, twins.inputs, sent, directions)
    same(got, twice_back(twins.exact, twins.inputs, sent, directions))


@pytest.mark.parametrize("need_weights", [True, False])
def test_gradgradcheck_of_the_layer(need_weights: bool) -> None:
    made: Layer = layer("causal and padding", need_weights=need_weights)
    parameters, x = made.parameters, made.inputs()[0][:, :3].clone().requires_grad_()
    masks = {n: m[:, :3] for n, m in made.masks.items()}
    assert gradgradcheck(lambda y: made.ours((y,), parameters, masks), (x,), fast_mode=True)


@pytest.mark.parametrize("need_weights", [True, False])
def test_unseen_inputs_of_the_layer_may_hold_anything(need_weights: bool) -> None:
    """NaN in the padding of a memory: second derivatives, and ``torch.func.grad``, see zeros there."""
    module = mha_ext.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    query, memory = like([torch.empty(2, n, 8, dtype=torch.float64) for n in (3, 5)], 1)
    hidden = torch.arange(5) >= torch.tensor([[5], [3]])
    results = []
    for filling in (0.0, math.nan):
        key = memory.masked_fill(hidden[..., None], filling)
        leaf = query.clone().requires_grad_()
        out = module(leaf, key, key, key_padding_mask=hidden, need_weights=need_weights)[0]
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        wanted = [leaf, module.in_proj_weight, module.in_proj_bias, module.out_proj.weight]
        second = torch.autograd.grad(first.square().sum(), wanted)

        def total(p: dict[str, Tensor], key: Tensor = key) -> Tensor:
            options = {"key_padding_mask": hidden, "need_weights": need_weights}
            return functional_call(module, p, (query, key, key), options)[0].square().sum()

        parameters = {n: p.detach() for n, p in module.named_parameters()}
        results.append((*second, *grad(total)(parameters).values()))
    same(results[1], results[0])


def test_gradient_penalty_of_a_layer_with_dropout() -> None:
    """The mask of the forward is that of every derivative: differences of the penalty with the same seed."""
    module = mha_ext.MultiheadAttention(8, 2, dropout=0.4, batch_first=True, dtype=torch.float64)
    x, step = like([torch.empty(2, 6, 8, dtype=torch.float64)] * 2, 2)

    def penalty(y: Tensor) -> Tensor:
        torch.manual_seed(11)
        y = y.detach().requires_grad_() if not y.requires_grad else y
        out = module(y, y, y, need_weights=False)[0]
        (first,) = torch.autograd.grad(out.square().sum(), y, create_graph=True)
        return first.square().sum()

    leaf = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(penalty(leaf), leaf)
    near = [penalty(x + sign * 1e-5 * step).detach() for sign in (1, -1)]
    want = (near[0] - near[1]) / 2e-5
    assert_within((got * step).sum(), want, 1e-6 * float(want.abs()))


# ---------------------------------------------------------------------------------------------------------- what cannot
def test_outside_of_a_compiled_function_is_refused_and_inside_works() -> None:
    """AOTAutograd compiles one backward; ``torch.func`` inside of what is compiled, or the eager backend, work."""
    torch._dynamo.reset()
    x, key, value = like([torch.empty(1, 2, 3, 4, dtype=torch.float64)] * 3, 1)

    def total(q: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, key, value, is_causal=True).square().sum()

    def penalty_gradient(function: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    want = penalty_gradient(total)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        penalty_gradient(torch.compile(total, backend="aot_eager"))
    same(penalty_gradient(torch.compile(total, backend="eager")), want)
    inside = torch.compile(lambda q: grad(lambda p: grad(total)(p).square().sum())(q), backend="aot_eager")
    same(inside(x), want)


def test_a_tensor_changed_between_the_two_backwards_is_noticed() -> None:
    """Inputs, and gradients that were sent, are read again: their version is checked."""
    for changed in ("key", "grad_out"):
        query, key, grad_out = like([torch.empty(1, 2, 3, 4, dtype=torch.float64)] * 3, 1)
        leaf, tensors = query.requires_grad_(), {"key": key, "grad_out": grad_out.requires_grad_() * 1}
        out = scaled_dot_product_attention(leaf, key, key)
        (first,) = torch.autograd.grad(out, leaf, tensors["grad_out"], create_graph=True)
        with torch.no_grad():
            tensors[changed].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.sum().backward()


def test_a_graph_serves_once_unless_it_is_kept() -> None:
    (leaf,) = like([torch.empty(1, 2, 3, 4, dtype=torch.float64)], 1)
    leaf.requires_grad_()
    out = scaled_dot_product_attention(leaf, leaf, leaf)
    (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    kept = torch.autograd.grad(first.sum(), leaf, retain_graph=True)
    same(torch.autograd.grad(first.sum(), leaf), kept)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(first.sum(), leaf)
