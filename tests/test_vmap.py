"""vmap: over any operands and axes, nested, around and inside of derivatives, of attention and of the layer, equals a
loop over the examples; the fused operators run, without PyTorch's fallback. Memory: ``test_derivatives_memory.py``.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, build, kept, ops
from derivative_cases import (
    BATCH,
    LAYERS,
    LENGTH,
    OPTIONS,
    SMALL,
    along,
    gradient,
    layer,
    like,
    same,
    small_twins,
)
from layer_cases import sequence
from torch import Tensor
from torch.func import grad, jacrev, stack_module_state, vmap
from variant_cases import make

import mha_ext
from mha_ext import reference
from mha_ext.functional import scaled_dot_product_attention, varlen_attention

COUNT = 3


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """An operator without a rule for vmap is run in a loop, with a warning: both are errors here."""
    functorch = torch._C._functorch
    enabled = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield
    functorch._set_vmap_fallback_enabled(enabled)


def at(tensors: tuple[Tensor, ...], axes: tuple[int | None, ...], place: int) -> tuple[Tensor, ...]:
    return tuple(x if a is None else x.select(a, place) for x, a in zip(tensors, axes, strict=True))


def looped(function: Callable[..., Any], axes: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> Any:
    """What vmap should give."""
    found = [function(*at(tensors, axes, i)) for i in range(COUNT)]
    if isinstance(found[0], Tensor):
        return torch.stack(found)
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


def many(tensors: tuple[Tensor, ...], axes: tuple[int | None, ...]) -> tuple[Tensor, ...]:
    """Other numbers along each axis that is mapped over, hidden where they were."""
    return tuple(
        x if a is None else torch.stack([x, x / 2 + 0.1, torch.where(x == -torch.inf, x, -x)], a)
        for x, a in zip(tensors, axes, strict=True)
    )


def agrees(function: Callable[..., Any], exact: Callable[..., Any], tensors: tuple[Tensor, ...], axes: Any) -> None:
    given = many(tensors, axes)
    same(vmap(function, axes, randomness="same")(*given), looped(exact, axes, given))


# ------------------------------------------------------------------------------------------------------------ attention
@pytest.mark.parametrize("name", OPTIONS)
def test_over_any_floating_operands(name: str) -> None:
    """All, each alone, all but one; and the first along its last axis."""
    twins = small_twins(name)
    count = len(twins.inputs)
    for chosen in [set(range(count)), *({i} for i in range(count)), *(set(range(count)) - {i} for i in range(count))]:
        agrees(twins.ours, twins.exact, twins.inputs, tuple(0 if i in chosen else None for i in range(count)))
    agrees(twins.ours, twins.exact, twins.inputs, (-1, *[None] * (count - 1)))
    agrees(twins.ours, twins.exact, twins.inputs, (2, *[1] * 2, *[0] * (count - 3)))


@pytest.mark.parametrize("name", OPTIONS)
def test_derivatives_of_each_example(name: str) -> None:
    """vmap of gradients, of directional derivatives and of products with the Hessian, per example."""
    twins = small_twins(name, B=1, T=3, S=4) if name == "causal from the end" else small_twins(name)
    count, sent = len(twins.inputs), like(twins.exact(*twins.inputs), 5)
    directions = like(twins.inputs, 6)
    for axes in ((0,) * count, (0, *(None,) * (count - 1)), (None, *(0,) * (count - 1))):
        for derivative in (
            lambda f: gradient(f, sent, count),
            lambda f: along(f, directions),
            lambda f: along(gradient(f, sent, count), directions),
        ):
            agrees(derivative(twins.ours), derivative(twins.exact), twins.inputs, axes)


@pytest.mark.parametrize("name", ["plain", "learned mask and padding", "sink", "dropout", "everything"])
def test_over_what_is_sent_and_over_directions(name: str) -> None:
    """As ``jacrev`` and ``jacfwd`` do: the tensors themselves do not vary."""
    twins = small_twins(name)
    sent, directions = like(twins.exact(*twins.inputs), 5), like(twins.inputs, 6)
    count = len(directions)

    def back(function: Any) -> Callable[..., Any]:
        return lambda *g: gradient(function, g, count)(*twins.inputs)

    def forward(function: Any) -> Callable[..., Any]:
        return lambda *d: along(gradient(function, sent, count), d)(*twins.inputs)

    agrees(back(twins.ours), back(twins.exact), sent, (0, 0))
    agrees(back(twins.ours), back(twins.exact), sent, (0, None))
    agrees(forward(twins.ours), forward(twins.exact), directions, (0,) * count)
    agrees(forward(twins.ours), forward(twins.exact), directions, (None, 0, *(None,) * (count - 2)))


@pytest.mark.parametrize("name", ["plain", "bool mask", "learned mask and padding", "relative bias", "range", "sink"])
def test_nested(name: str) -> None:
    """Two levels: the same operand by both, and different ones by each; and around a gradient."""
    twins = small_twins(name)
    count = len(twins.inputs)
    everywhere, first, rest = (0,) * count, (0, *(None,) * (count - 1)), (None, *(0,) * (count - 1))
    for outer, inner in ((everywhere, everywhere), (first, rest), (rest, first), (first, first)):
        given = many(many(twins.inputs, inner), outer)
        for function in (lambda f: f, lambda f: gradient(f, like(twins.exact(*twins.inputs), 5), count)):
            got = vmap(vmap(function(twins.ours), inner), outer)(*given)
            same(got, looped(lambda *x, f=function, a=inner: looped(f(twins.exact), a, x), outer, given))


@pytest.mark.parametrize("chosen", [{"attn_mask"}, {"key_padding_mask"}, {"attn_mask", "query"}, {"key_range"}, set()])
def test_over_masks_and_ranges(chosen: set[str]) -> None:
    """Bool masks and ranges of keys that differ between examples, with gradients; none chosen: all of them."""
    case = replace(SMALL, mask="bool:11TS", padding="bool", key_range="T")
    call = make(case)
    tensors = {**call.tensors, **{n: x for n, x in call.rest.items() if isinstance(x, Tensor)}}
    rest = {n: x for n, x in call.rest.items() if n not in tensors}
    chosen = chosen or set(tensors)
    varied = {
        "attn_mask": lambda x: torch.stack([x, ~x, x.flip(-1)]),
        "key_padding_mask": lambda x: torch.stack([x, x.flip(-1), torch.zeros_like(x)]),
        "key_range": lambda x: torch.stack([x, x + 1, x - 2]),
    }
    given = {
        n: (varied[n](x) if n in varied else many((x,), (0,))[0]) if n in chosen else x for n, x in tensors.items()
    }
    axes = tuple(0 if n in chosen else None for n in given)

    def total(*values: Tensor) -> Tensor:
        found = dict(zip(given, values, strict=True))
        out, lse = scaled_dot_product_attention(**found, **rest, return_lse=True)
        return (out * call.grad_out).sum() + torch.where(lse.isfinite(), lse, 0.0).square().sum()

    for function in (total, grad(total, (0, 1, 2))):
        same(vmap(function, axes)(*given.values()), looped(function, axes, tuple(given.values())))


@pytest.mark.parametrize("operand", ["seed", "query and seed", "sink", "mask"])
def test_operator_over_its_seed(operand: str) -> None:
    """A seed for each example: its dropout is that of a call with that seed."""
    problem = build(Case(2, 2, 1, 5, 7, 4, 3, torch.float64, mask="float64:1HTS", dropout_p=0.4))
    seeds = torch.tensor([[5], [-9], [2**40]])
    sink = torch.randn(2, dtype=torch.float64)
    axes = {"seed": (0, None, None, None), "query and seed": (0, 0, None, None), "sink": (0, None, 0, None)}.get(
        operand, (0, None, None, 0)
    )
    tensors = (seeds, *many((problem.query, sink, problem.attn_mask), axes[1:]))

    def ours(seed: Tensor, query: Tensor, sink: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return ops.attention(query, problem.key, problem.value, mask, None, seed, dropout_p=0.4, sink=sink)

    def total(query: Tensor, *rest: Tensor) -> Tensor:
        return ours(rest[0], query, *rest[1:])[0].square().sum()

    same(vmap(ours, axes)(*tensors), looped(ours, axes, tensors))
    turned, order = (tensors[1], tensors[0], *tensors[2:]), (axes[1], axes[0], *axes[2:])
    same(vmap(grad(total), order)(*turned), looped(grad(total), order, turned))


@pytest.mark.parametrize("kind", ["paged", "weights", "mean weights", "varlen"])
def test_other_functions(kind: str) -> None:
    starts = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    pages = torch.randn(5, 2, 4, 3, dtype=torch.float64)
    table = torch.tensor([[0, 2], [4, 1]], dtype=torch.int32)
    key_range = torch.tensor([[[0, 1]] * 2, [[5, 7]] * 2], dtype=torch.int32)
    q, k = torch.randn(2, 4, 2, 3, dtype=torch.float64), torch.randn(2, 2, 6, 3, dtype=torch.float64)
    packed = torch.randn(8, 2, 4, dtype=torch.float64)
    plain = {"causal": 1, "average": kind == "mean weights"}
    function, tensors = {
        "paged": (lambda q, kp, vp, t: ops.paged_attention(q, kp, vp, t, key_range), (q, pages, pages, table)),
        "varlen": (lambda *x: (varlen_attention(*x, starts, starts, 5, 5, is_causal=True),), (packed,) * 3),
    }.get(kind, (lambda *x: ops.attention_with_weights(*x, **plain), (q, k, k)))
    count = len(tensors)
    for chosen in itertools.product((0, None), repeat=count):
        if any(a == 0 for a in chosen):
            given = tuple(
                x if a is None else torch.stack([x, x.flip(0), x.flip(0) if x.dtype == torch.int32 else -x])
                for x, a in zip(tensors, chosen, strict=True)
            )
            same(vmap(function, chosen)(*given), looped(function, chosen, given))


@pytest.mark.parametrize("name", ["plain", "bool mask and padding", "learned mask", "relative bias", "dropout"])
def test_what_runs_is_the_fused_operator(name: str) -> None:
    """Once for all examples, forward and backward: no softmax and no product of matrices."""
    twins = small_twins(name)
    count = len(twins.inputs)
    axes = (0,) * count
    given, sent = many(twins.inputs, axes), like(twins.exact(*twins.inputs), 5)
    with torch.profiler.profile() as profile:
        vmap(gradient(twins.ours, sent, count), axes, randomness="same")(*given)
    ran = {event.key: event.count for event in profile.key_averages()}
    for operator in ("mha_ext::attention", "mha_ext::attention_backward"):
        assert ran[operator] > 0
    assert not {"aten::bmm", "aten::mm", "aten::matmul", "aten::softmax", "aten::_softmax", "aten::exp"} & ran.keys()


def test_jacobian_in_chunks() -> None:
    twins = small_twins("learned mask and padding", B=1, T=3, S=4)
    want = jacrev(twins.exact, (0, 3))(*twins.inputs)
    for chunk in (None, 1, 5):
        same(jacrev(twins.ours, (0, 3), chunk_size=chunk)(*twins.inputs), want)


def test_under_autocast() -> None:
    """The bits of a loop under autocast, with gradients of float32."""
    x = sequence(COUNT, LENGTH, 8, dtype=torch.float32)[:, None]
    module = mha_ext.MultiheadAttention(8, 2, batch_first=True)

    def total(y: Tensor) -> Tensor:
        return module(y, y, y, need_weights=False)[0].float().square().sum()

    def attend(y: Tensor) -> Tensor:
        return scaled_dot_product_attention(y, y, y, is_causal=True)

    with torch.autocast("cpu", torch.bfloat16):
        assert vmap(attend)(x).dtype == torch.bfloat16
        assert torch.equal(vmap(attend)(x), looped(attend, (0,), (x,)))
        got, want = vmap(grad(total))(x), looped(grad(total), (0,), (x,))
    assert got.dtype == torch.float32
    assert float((got - want).detach().abs().max()) <= 2**-7 * float(want.detach().abs().max())


def test_half_types() -> None:
    """Examples are rows of one batch: the bits of a loop."""
    x = sequence(COUNT, LENGTH, 8, dtype=torch.bfloat16)[:, None, None]

    def attend(y: Tensor) -> tuple[Tensor, Tensor]:
        return scaled_dot_product_attention(y, y, y, is_causal=True, return_lse=True)

    def total(y: Tensor) -> Tensor:
        return attend(y)[0].float().square().sum()

    assert all(torch.equal(a, b) for a, b in zip(vmap(attend)(x), looped(attend, (0,), (x,)), strict=True))
    assert torch.equal(vmap(grad(total))(x), looped(grad(total), (0,), (x,)))


# -------------------------------------------------------------------------------------------------------------- dropout
@pytest.mark.parametrize("kind", ["function", "layer", "layer with weights"])
def test_randomness(kind: str) -> None:
    """``different``: each example has its own mask; ``same``: all have one; gradients are those of the masks drawn."""
    module = mha_ext.MultiheadAttention(8, 2, dropout=0.5, batch_first=True, dtype=torch.float64)
    x = sequence(1, 9, 8).expand(COUNT, 1, 9, 8)

    def call(y: Tensor) -> Tensor:
        if kind == "function":
            return scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], dropout_p=0.5)
        return module(y, y, y, need_weights=kind != "layer")[0]

    def total(y: Tensor) -> Tensor:
        return call(y).square().sum()

    torch.manual_seed(4)
    together = vmap(call, randomness="same")(x)
    same((together[1], together[2]), (together[0], together[0]))
    torch.manual_seed(4)
    same(together[0], call(x[0]))
    apart = vmap(call, randomness="different")(x)
    assert all((apart[i] - apart[j]).abs().max() > 1e-3 for i, j in ((0, 1), (0, 2), (1, 2)))
    for randomness in ("same", "different"):
        torch.manual_seed(5)
        got = vmap(grad(total), randomness=randomness)(x)
        step = like([x], 6)[0]
        near = []
        for sign in (1, -1):
            torch.manual_seed(5)
            near.append(vmap(total, randomness=randomness)(x + sign * 1e-6 * step))
        want = (near[0] - near[1]) / 2e-6
        assert ((got * step).sum((1, 2, 3)) - want).abs().max() < 1e-6 * want.abs().max()


def test_masks_of_different_examples_are_those_of_the_seeds_drawn() -> None:
    """``different`` draws a seed for each example from the generator; each mask is the hash of its seed."""
    case = Case(2, 2, 2, 5, 7, 4, 3, torch.float64, dropout_p=0.4)
    problem = build(case)
    torch.manual_seed(8)
    seeds = vmap(lambda _: torch.randint(-(1 << 63), (1 << 63) - 1, (1,)), randomness="different")(torch.zeros(COUNT))
    torch.manual_seed(8)
    got = vmap(
        lambda _: scaled_dot_product_attention(problem.query, problem.key, problem.value, dropout_p=0.4),
        randomness="different",
    )(torch.zeros(COUNT))
    for i in range(COUNT):
        keep = kept(case, seeds[i])
        want = reference.attention(problem.query, problem.key, problem.value, keep=keep, dropout_p=0.4)[0]
        same(got[i], want)


def test_without_a_word_about_randomness_dropout_is_refused() -> None:
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda y: scaled_dot_product_attention(y, y, y, dropout_p=0.5))(torch.randn(2, 1, 3, 4))


# ---------------------------------------------------------------------------------------------------------------- layer
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_per_example(name: str) -> None:
    """vmap over grad of a functional call, inputs and padding per example, against one example at a time."""
    made = layer(name)
    parameters, inputs = made.parameters, made.inputs()
    padding = made.masks.pop("key_padding_mask", torch.zeros(BATCH, LENGTH, dtype=torch.bool))

    def total(of: Callable[..., Any]) -> Callable[..., Tensor]:
        def loss(p: dict[str, Tensor], row: Tensor, *examples: Tensor) -> Tensor:
            masks = {**made.masks, "key_padding_mask": row[None]}
            return sum(x.square().sum() for x in of([y[None] for y in examples], p, masks))  # type: ignore[return-value]

        return loss

    got = vmap(grad(total(made.ours)), (None, 0, *(0,) * len(inputs)))(parameters, padding, *inputs)
    for i in range(BATCH):
        want = grad(total(made.exact))(parameters, padding[i], *[x[i] for x in inputs])
        same({n: g[i] for n, g in got.items()}, want)


@pytest.mark.parametrize("name", LAYERS)
def test_ensemble(name: str) -> None:
    """Several layers as one, by ``stack_module_state``: the same input, and another for each."""
    made = [layer(name) for _ in range(COUNT)]
    with torch.no_grad():
        for i, one in enumerate(made):
            for parameter in one.module.parameters():
                parameter.mul_(1 + 0.1 * i).add_(0.05 * i)
    parameters, _ = stack_module_state([one.module for one in made])
    parameters = {n: p.detach() for n, p in parameters.items()}
    inputs = made[0].inputs()
    others = tuple(torch.stack([x, -x, x / 2]) for x in inputs)

    def call(p: dict[str, Tensor], *given: Tensor) -> tuple[Tensor, ...]:
        return made[0].ours(given, p, made[0].masks)

    def gradients(p: dict[str, Tensor], *given: Tensor) -> dict[str, Tensor]:
        return grad(lambda q: sum(x.square().sum() for x in call(q, *given)))(p)

    shared, apart = (0, *(None,) * len(inputs)), (0, *(0,) * len(inputs))
    for axes, given in ((shared, inputs), (apart, others)):
        got, slopes = vmap(call, axes)(parameters, *given), vmap(gradients, axes)(parameters, *given)
        for i, one in enumerate(made):
            mine = [x if axes is shared else x[i] for x in given]
            want = one.exact(mine, one.parameters, one.masks)
            same(tuple(x[i] for x in got), want)

            def total(p: dict[str, Tensor], one: Any = one, mine: Any = mine) -> Tensor:
                return sum(x.square().sum() for x in one.exact(mine, p, one.masks))  # type: ignore[return-value]

            same({n: g[i] for n, g in slopes.items()}, grad(total)(one.parameters))
