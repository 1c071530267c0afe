"""Forward mode: derivatives along directions, through dual tensors and ``torch.func``, alone and around or inside
reverse mode, of attention and of the layer, equal those of dense float64 math.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from cases import DTYPES, LOWER_RIGHT
from derivative_cases import (
    LAYERS,
    MORE,
    OPTIONS,
    SMALL,
    Twins,
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
from tolerances import assert_within, double_limit
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp
from variant_cases import Variant, exact, make

import mha_ext
from mha_ext.functional import scaled_dot_product_attention, varlen_attention


def dual_along(twins: Twins, directions: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Derivatives of ours through dual tensors; None is an input without a tangent."""
    with forward_ad.dual_level():
        duals = [x if d is None else forward_ad.make_dual(x, d) for x, d in zip(twins.inputs, directions, strict=True)]
        moved = [forward_ad.unpack_dual(x).tangent for x in twins.ours(*duals)]
        return tuple(
            torch.zeros_like(x) if t is None else t.clone()
            for x, t in zip(twins.ours(*twins.inputs), moved, strict=True)
        )


# ------------------------------------------------------------------------------------------------------------ attention
@pytest.mark.parametrize("name", OPTIONS)
def test_along_a_direction(name: str) -> None:
    """Of output and log-sum-exp, by ``torch.func.jvp`` and by dual tensors."""
    twins, inputs = (made := small_twins(name)), made.inputs
    directions = like(inputs, 6)
    want = along(twins.exact, directions)(*inputs)
    same(along(twins.ours, directions)(*inputs), want)
    same(dual_along(twins, directions), want)


@pytest.mark.parametrize("name", ["learned mask and padding", "appended keys and a learned mask", "everything"])
def test_along_some_inputs(name: str) -> None:
    """Any input alone, and all but one: those without a tangent do not move."""
    twins = small_twins(name)
    directions = like(twins.inputs, 6)
    for i in range(len(directions)):
        for chosen in ({i}, set(range(len(directions))) - {i}):
            given = tuple(d if j in chosen else torch.zeros_like(d) for j, d in enumerate(directions))
            want = along(twins.exact, given)(*twins.inputs)
            same(dual_along(twins, tuple(d if j in chosen else None for j, d in enumerate(directions))), want)
            same(along(twins.ours, given)(*twins.inputs), want)


def test_a_tangent_of_zeros_moves_nothing() -> None:
    twins = small_twins("everything")
    moved = along(twins.ours, [torch.zeros_like(x) for x in twins.inputs])(*twins.inputs)
    assert not any(x.any() for x in moved)
    lazy = tuple(torch._efficientzerotensor(x.shape, dtype=x.dtype) for x in twins.inputs)
    assert not any(x.any() for x in dual_along(twins, lazy))


@pytest.mark.parametrize("kind", ["expanded", "transposed", "stepped"])
def test_tangents_of_any_strides(kind: str) -> None:
    twins = small_twins("learned mask and padding")
    plain = like(twins.inputs, 6)
    lay = {
        "expanded": lambda x: x[..., :1].expand_as(x),
        "transposed": lambda x: x.mT.contiguous().mT,
        "stepped": lambda x: torch.stack([x, x + math.nan], -1)[..., 0],
    }[kind]
    directions = tuple(lay(x) for x in plain)
    want = along(twins.exact, directions)(*twins.inputs)
    same(along(twins.ours, directions)(*twins.inputs), want)
    same(dual_along(twins, directions), want)


@pytest.mark.parametrize("name", [n for n in OPTIONS if "appended" not in n] + list(MORE))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_within_the_rounding_of_the_dtype(name: str, dtype: torch.dtype) -> None:
    """Over several tiles: the results, and the gradients (forward over reverse), each with a bound on its error."""
    case = replace(Variant(2, 4, 2, 40, 70, 16, 24, dtype), **in_dtype({**OPTIONS, **MORE}[name], dtype))
    call, twins = make(case), attention_twins(case)
    truth, _ = exact(call)
    directions = dict(zip(twins.names, like(twins.inputs, 6), strict=True))
    moved = along(twins.ours, tuple(directions.values()))(*twins.inputs)
    for (what, answer), found in zip(forward_answers(call, truth, directions).items(), moved, strict=True):
        assert_within(found, *answer, what)
        assert found.dtype == (dtype if what == "out" or dtype == torch.float64 else torch.float32)
    gradients = gradient(twins.ours, (call.grad_out, call.grad_lse), len(twins.inputs))
    moved = along(gradients, tuple(directions.values()))(*twins.inputs)
    answers = second_answers(call, truth, directions)
    for what, found in zip(twins.names, moved, strict=True):
        assert_within(found, *answers[what], f"gradient of {what}")


@pytest.mark.parametrize(
    "name", ["plain", "dropout", "learned mask and padding", "softcap and mask", "sink", "everything"]
)
def test_gradcheck(name: str) -> None:
    """Against differences, and the directions batched by vmap."""
    twins = small_twins(name, B=1, H=2, H_kv=1, T=3, S=4, D=2, D_v=2)
    leaves = [x.detach().requires_grad_() for x in twins.inputs]
    batched = "dropout_p" not in OPTIONS[name]  # vmap refuses to draw the seed
    assert gradcheck(
        twins.ours,
        leaves,
        fast_mode=name != "plain",
        check_forward_ad=True,
        check_batched_forward_grad=batched,
        check_batched_grad=batched,
    )


@pytest.mark.parametrize("name", ["plain", "causal", "learned mask and padding", "dropout", "one key head"])
def test_jacobians(name: str) -> None:
    """Column by column and row by row."""
    twins = small_twins(name, B=1, H=2, T=3, S=4)
    places = tuple(range(len(twins.inputs)))
    want = jacrev(twins.exact, places)(*twins.inputs)
    same(jacrev(twins.ours, places)(*twins.inputs), want)
    same(jacfwd(twins.ours, places, randomness="same")(*twins.inputs), want)
    cotangent = like(twins.exact(*twins.inputs), 5)
    same(vjp(twins.ours, *twins.inputs)[1](cotangent), vjp(twins.exact, *twins.inputs)[1](cotangent))


@pytest.mark.parametrize("name", ["plain", "bool mask and padding", "relative bias", "softcap", "sink"])
def test_hessian(name: str) -> None:
    """Forward over reverse, as ``torch.func.hessian`` does it, and every other order."""
    twins = small_twins(name, B=1, H=2, H_kv=1, T=2, S=3, D=2, D_v=2)
    places, sent = tuple(range(len(twins.inputs))), like(twins.exact(*twins.inputs), 5)
    ours, theirs = loss(twins.ours, sent), loss(twins.exact, sent)
    want = hessian(theirs, places)(*twins.inputs)
    same(hessian(ours, places)(*twins.inputs), want)
    for outer in (jacfwd, jacrev):
        for inner in (jacfwd, jacrev):
            same(outer(inner(ours, places), places)(*twins.inputs), want)


@pytest.mark.parametrize("name", OPTIONS)
def test_products_with_the_hessian(name: str) -> None:
    """Forward over reverse, reverse over forward in inputs and in tangents, forward over forward."""
    twins, inputs = (made := small_twins(name)), made.inputs
    count, sent, directions = len(inputs), like(made.exact(*inputs), 5), like(inputs, 6)
    want = along(gradient(twins.exact, sent, count), directions)(*inputs)
    same(along(gradient(twins.ours, sent, count), directions)(*inputs), want)
    same(gradient(along(twins.ours, directions), sent, count)(*inputs), want)
    same(twice_back(twins.ours, inputs, sent, directions)[:count], want)

    def of_tangents(function: Any) -> Any:
        return lambda *tangents: along(function, tangents)(*inputs)

    same(
        gradient(of_tangents(twins.ours), sent, count)(*directions),
        gradient(twins.exact, sent, count)(*inputs),
    )
    twice = along(along(twins.exact, directions), like(inputs, 7))(*inputs)
    same(along(along(twins.ours, directions), like(inputs, 7))(*inputs), twice)


def test_more_pairs_than_a_block() -> None:
    """Few heads with more than a million pairs, which are cut into blocks of queries."""
    case = Variant(1, 2, 1, 1100, 700, 4, 3, torch.float64, mask="float64:11TS", causal=LOWER_RIGHT, dropout_p=0.2)
    twins = attention_twins(case)
    directions = like(twins.inputs, 6)
    with threads(2):
        same(along(twins.ours, directions)(*twins.inputs), along(twins.exact, directions)(*twins.inputs))


@pytest.mark.parametrize("filling", [math.nan, math.inf])
def test_what_lies_behind_a_mask_moves_nothing(filling: float) -> None:
    """In keys and values and in their tangents, for results, gradients and both derivatives."""
    call = make(replace(SMALL, padding="bool", softcap=2.0))
    call.rest["key_padding_mask"][:, -2:] = True
    hidden = call.rest["key_padding_mask"][:, None, :, None]
    names, directions = list(call.tensors), like(list(call.tensors.values()), 6)

    def ours(*inputs: Tensor) -> tuple[Tensor, ...]:
        return scaled_dot_product_attention(**dict(zip(names, inputs, strict=True)), **call.rest, return_lse=True)

    results = []
    for number in (0.0, filling):
        inputs, moved = (
            tuple(x.masked_fill(hidden, number) if n in ("key", "value") else x for n, x in zip(names, xs, strict=True))
            for xs in (call.tensors.values(), directions)
        )
        gradients = gradient(ours, (call.grad_out, call.grad_lse), 3)
        results.append((along(ours, moved)(*inputs), along(gradients, moved)(*inputs)))
    same(*reversed(results))


@pytest.mark.parametrize("average", [True, False])
def test_returned_weights(average: bool) -> None:
    """Output, log-sum-exp and weights together."""
    case = replace(SMALL, mask="float64:1HTS", relative="float64:H", sink="float64", dropout_p=0.2)
    call = make(case)
    names = list(call.tensors)

    def ours(*inputs: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(call.seed)
        kind = "mean" if average else "per_head"
        given = dict(zip(names, inputs, strict=True))
        return scaled_dot_product_attention(**given, **call.rest, return_lse=True, return_weights=kind)

    inputs = tuple(call.tensors.values())
    leaves = [x.detach().requires_grad_() for x in inputs]
    assert gradcheck(ours, leaves, fast_mode=True, check_forward_ad=True)
    sent, directions = like(ours(*inputs), 5), like(inputs, 6)
    back = twice_back(ours, inputs, sent, directions)[: len(inputs)]
    same(along(gradient(ours, sent, len(inputs)), directions)(*inputs), back)


def test_packed_sequences() -> None:
    starts = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    inputs = like([torch.empty(8, 2, 4, dtype=torch.float64)] * 3, 4)
    directions = like(inputs, 6)

    def ours(*tensors: Tensor) -> tuple[Tensor, ...]:
        return (varlen_attention(*tensors, starts, starts, 5, 5, is_causal=True),)

    def exact_parts(*tensors: Tensor) -> tuple[Tensor, ...]:
        parts = []
        for first, end in ((0, 3), (3, 8)):
            q, k, v = (x[first:end].transpose(0, 1) for x in tensors)
            scores = (q @ k.mT / 2).masked_fill(torch.ones(end - first, end - first).triu(1).bool(), -math.inf)
            parts.append((scores.softmax(-1) @ v).transpose(0, 1))
        return (torch.cat(parts),)

    same(along(ours, directions)(*inputs), along(exact_parts, directions)(*inputs))


def test_what_runs_is_the_operator() -> None:
    """And not a composition over all pairs: no softmax, no product of matrices above it."""
    twins = small_twins("everything")
    directions = like(twins.inputs, 6)
    with torch.profiler.profile() as profile:
        along(gradient(twins.ours, like(twins.ours(*twins.inputs), 5), len(directions)), directions)(*twins.inputs)
    ran = {event.key for event in profile.key_averages()}
    assert {"mha_ext::attention_jvp", "mha_ext::attention_backward_jvp"} & ran
    assert "mha_ext::attention" in ran and "mha_ext::attention_backward" in ran


# ---------------------------------------------------------------------------------------------------------------- layer
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    """Along inputs, masks and parameters by ``functional_call``; of the gradients too; and dual tensors."""
    twins, inputs = (made := layer(name).twins()), made.inputs
    directions = like(inputs, 6)
    want = along(twins.exact, directions)(*inputs)
    same(along(twins.ours, directions)(*inputs), want)
    same(dual_along(twins, directions), want)
    sent = like(want, 5)
    both = [along(gradient(f, sent, len(inputs)), directions)(*inputs) for f in (twins.ours, twins.exact)]
    same(*both)


@pytest.mark.parametrize("need_weights", [True, False])
def test_gradcheck_of_the_layer(need_weights: bool) -> None:
    """And the same derivative by differences, of a module called as it is."""
    made = layer("causal and padding", need_weights=need_weights)
    module, x = made.module, made.inputs()[0]
    tangent, masks = like([x], 6)[0], {**made.masks, **made.call}

    def call(y: Tensor) -> Tensor:
        return module(y, y, y, **masks)[0]

    moved, step = jvp(call, (x,), (tangent,))[1], 1e-6
    assert_within(moved, (call(x + step * tangent) - call(x - step * tangent)) / (2 * step), 1e-8)
    leaf = x.clone().requires_grad_()
    assert gradcheck(call, (leaf,), fast_mode=True, check_forward_ad=True, check_batched_grad=True)


def test_dropout_of_the_layer_is_that_of_the_forward() -> None:
    module = mha_ext.MultiheadAttention(8, 2, dropout=0.4, batch_first=True, dtype=torch.float64)
    x, tangent = like([torch.empty(2, 6, 8, dtype=torch.float64)] * 2, 2)

    def call(y: Tensor) -> Tensor:
        torch.manual_seed(3)
        return module(y, y, y, need_weights=False)[0]

    out, moved = jvp(call, (x,), (tangent,))
    same(out, call(x))
    assert_within(moved, (call(x + 1e-6 * tangent) - call(x - 1e-6 * tangent)) / 2e-6, 1e-8)


def test_under_autocast() -> None:
    """Casts are linear: the tangent is that of inputs and tangents rounded to bfloat16."""
    call = make(Variant(2, 2, 2, 9, 12, 8))
    inputs = tuple(call.tensors.values())
    directions = like(inputs, 6)

    def ours(*tensors: Tensor) -> tuple[Tensor, ...]:
        return scaled_dot_product_attention(*tensors, is_causal=True, return_lse=True)

    with torch.autocast("cpu", torch.bfloat16):
        got = along(ours, directions)(*inputs)
    want = along(ours, [d.bfloat16() for d in directions])(*[x.bfloat16() for x in inputs])
    assert got[0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_backward_under_dual_tensors(name: str) -> None:
    """Forward over reverse without ``torch.func``: a backward inside of a level of dual tensors, once and twice."""
    twins = small_twins(name)
    sent, directions = like(twins.exact(*twins.inputs), 5), like(twins.inputs, 6)

    def moved(function: Any, twice: bool) -> list[Tensor]:
        with forward_ad.dual_level():
            leaves = [x.detach().requires_grad_() for x in twins.inputs]
            duals = [forward_ad.make_dual(x, d) for x, d in zip(leaves, directions, strict=True)]
            grads = torch.autograd.grad(loss(function, sent)(*duals), duals, create_graph=True)
            if twice:
                total = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
                grads = torch.autograd.grad(total, duals)
            tangents = [forward_ad.unpack_dual(g).tangent for g in grads]
            return [x.detach().clone() for x in zeros_for(tangents, grads)]

    for twice in (False, True):
        same(moved(twins.ours, twice), moved(twins.exact, twice))


# ----------------------------------------------------------------------------------------------------------- in compile
@pytest.mark.parametrize(
    "kind",
    ["forward over reverse", *(pytest.param(n, marks=pytest.mark.long) for n in ("along", "grad of grad", "hessian"))],
)
def test_inside_of_a_compiled_function(kind: str) -> None:
    """Second derivatives that ``torch.compile`` cannot take from outside, it can from inside."""
    torch._dynamo.reset()
    x, key, value = like([torch.empty(1, 2, 3, 4, dtype=torch.float64)] * 3, 1)

    def total(q: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, key, value, is_causal=True).square().sum()

    function = {
        "along": lambda q: jvp(total, (q,), (q.cos(),))[1],
        "grad of grad": lambda q: grad(lambda p: grad(total)(p).square().sum())(q),
        "hessian": lambda q: hessian(total)(q),
        "forward over reverse": lambda q: jvp(grad(total), (q,), (q.cos(),))[1],
    }[kind]
    want = function(x)
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    assert_within(got, want, double_limit(want, 1000))
