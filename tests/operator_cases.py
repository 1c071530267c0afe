"""Calls of every operator of ``torch.ops.mha_ext``: one list of case families, and arguments for each operator from it.

A new operator needs a maker in ``ATTENTION`` (arguments from an attention problem) or a list in ``CALLS``;
``test_opcheck.py`` fails for one that has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from cases import Case, Problem, build, ops
from layer_cases import last_hidden
from torch import Tensor

BASE = Case(2, 4, 2, 5, 7, 8, 6)
WINDOWS = {"window_left": 2, "window_right": 1}
KINDS: dict[str, dict[str, Any]] = {
    "window": WINDOWS,
    "window from the end": {**WINDOWS, "causal": 3},
    "causal window": {"window_left": 2, "causal": 2},
    "range": {"key_range": "B"},
    "shared range": {"key_range": "1"},
    "bias": {"relative_bias": (2, 4)},
    "shared bias": {"relative_bias": (1, 1)},
    "sink": {"sink": True},
    "softcap": {"softcap": 1.5},
    "all": {"key_range": "B", "relative_bias": (1, 4), "sink": True, "softcap": 1.5, "window_left": 4, "causal": 3},
}
MASKS = ("bool:BHTS", "bool:B1TS", "bool:11TS", "bool:1H1S", "bool:BH1S", "bool:B1T1", "bool:1111")
FLOAT_MASKS = ("float32:BHTS", "float32:1HTS", "float32:B11S", "float64:11TS", "bfloat16:BH1S")
FAMILIES: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({}, None),
    **{f"mask {name}": ({"mask": name}, None) for name in (*MASKS, *FLOAT_MASKS)},
    "padding": ({"padding": "bool"}, None),
    "float padding": ({"padding": "float32"}, None),
    "causal": ({"causal": 1}, None),
    "causal from the end": ({"causal": 2}, None),
    "masks and causal": ({"mask": "bool:B1TS", "padding": "bool", "causal": 1}, None),
    "float masks and an appended key": (
        {"dtype": torch.float64, "mask": "float64:1HTS", "padding": "float64", "causal": 2, "appended": 1},
        None,
    ),
    "dropout": ({"dropout_p": 0.3}, None),
    "dropout and masks": ({"dropout_p": 0.3, "mask": "float32:B1TS", "padding": "bool", "causal": 2}, None),
    "appended keys": ({"appended": 2, "causal": 1}, None),
    "own heads": ({"H_kv": 4}, None),
    "one key head": ({"H_kv": 1}, None),
    "scale": ({"scale": 0.3}, None),
    "double": ({"dtype": torch.float64, "mask": "float64:11TS"}, None),
    "bfloat16": ({"dtype": torch.bfloat16, "causal": 1, "layout": "bthd"}, None),
    "float16": ({"dtype": torch.float16, "mask": "float16:BHTS", "padding": "bool"}, None),
    "one query": ({"T": 1, "S": 40}, None),
    "no sample": ({"B": 0, "mask": "float32:1HTS"}, None),
    "no query": ({"T": 0, "mask": "bool:B1TS"}, None),
    "no key": ({"S": 0}, None),
    **{kind: ({}, kind) for kind in KINDS},
    "variants in bfloat16": ({"dtype": torch.bfloat16, "mask": "bool:B1TS"}, "all"),
    "variants in float16": ({"dtype": torch.float16}, "all"),
    "variants, masks, dropout": ({"mask": "float32:1HTS", "padding": "float32", "dropout_p": 0.3}, "all"),
    "variants and an appended key": ({"appended": 1, "padding": "bool"}, "all"),
}
FLOATING = ("relative_bias", "sink")


class Call(NamedTuple):
    """One call: positional arguments and keywords."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def problem_of(name: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> tuple[Problem, dict[str, Any]]:
    """A problem with a kind of ``KINDS``, and every option of its call."""
    return with_kind(replace(BASE, dtype=dtype, **sizes), name)


def with_kind(case: Case, name: str | None) -> tuple[Problem, dict[str, Any]]:
    problem, kind = build(case), dict(KINDS[name]) if name else {}
    options = {**problem.options, **kind}
    if "key_range" in kind:
        first = torch.randint(0, 3, (2 if kind["key_range"] == "B" else 1, case.T))
        options["key_range"] = torch.stack([first, first + torch.randint(0, case.keys, first.shape)]).int()
    if "relative_bias" in kind:
        options["relative_bias"] = torch.randn(*kind["relative_bias"], case.T + case.keys - case.appended - 1)
    if "sink" in kind:
        options["sink"] = torch.randn(case.H)
    return problem, options


def floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def needing_gradients(given: Any) -> Any:
    """The same arguments, their floating tensors as leaves."""
    if isinstance(given, dict):
        return {n: x.detach().requires_grad_() if floating(x) else x for n, x in given.items()}
    return tuple(x.detach().requires_grad_() if floating(x) else x for x in given)


# ------------------------------------------------------------------------------------------- attention and what derives
@dataclass
class Attention:
    """A problem with every option of its call; results are computed once."""

    problem: Problem
    options: dict[str, Any]

    def forward(self, weights: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Out, lse, weights, rounding."""
        return ops.attention_for_backward(*self.problem.tensors, **self.options, weights=weights)

    @property
    def inputs(self) -> list[Tensor | None]:
        """What has gradients, in the operators' order, where it is floating."""
        p = self.problem
        given = [*p.tensors[:5], *(self.options.get(n) for n in FLOATING)]
        return [x if floating(x) else None for x in given]

    def wanted(self) -> list[bool]:
        return [x is not None for x in self.inputs]

    def tangents(self) -> list[Tensor | None]:
        return [None if x is None else torch.randn_like(x) for x in self.inputs]


def _masks_to_ask(all_: list[bool]) -> Iterator[list[bool]]:
    """All of them, each alone, none."""
    yield all_
    yield from ([i == j for j in range(len(all_))] for i, wanted in enumerate(all_) if wanted)
    yield [False] * len(all_)


def _forward(a: Attention) -> list[Call]:
    return [Call(a.problem.tensors, a.options)]


def _for_backward(a: Attention) -> list[Call]:
    return [Call(a.problem.tensors, {**a.options, "weights": weights}) for weights in (0, 1, 2)]


def _with_weights(a: Attention) -> list[Call]:
    return [Call(a.problem.tensors, {**a.options, "average": average}) for average in (True, False)]


def _backward(a: Attention) -> list[Call]:
    """With both gradients and with one of them, of the output as it is and with what rounding took from it."""
    p, (out, lse, _, rounding) = a.problem, a.forward()
    rest, options = (*p.tensors, out, lse), {**a.options, "output_mask": a.wanted()}
    return [
        Call((p.grad_out, p.grad_lse, *rest), options),
        Call((p.grad_out, None, *rest), {**options, "rounding": rounding}),
        Call((None, p.grad_lse, *rest), options),
    ]


def _weights_backward(a: Attention) -> list[Call]:
    query, key, _, *masks = a.problem.tensors
    wanted = [w for i, w in enumerate(a.wanted()) if i != 2]
    calls = []
    for average in (True, False):
        _, lse, weights, _ = a.forward(1 if average else 2)
        options = {**a.options, "average": average, "output_mask": wanted}
        calls.append(Call((torch.randn_like(weights), query, key, *masks, lse), options))
    return calls


def _jvp(a: Attention) -> list[Call]:
    """Along every input, and along query alone."""
    out, lse, _, rounding = a.forward()
    every = a.tangents()
    first = (*a.problem.tensors, out, lse)
    options = {**a.options, "rounding": rounding}
    return [Call((*first, *every), options), Call((*first, every[0], *[None] * 6), options)]


def _backward_jvp(a: Attention) -> list[Call]:
    p, (out, lse, _, rounding) = a.problem, a.forward()
    every = a.tangents()
    first = (p.grad_out, p.grad_lse, *p.tensors, out, lse)
    options = {**a.options, "rounding": rounding, "output_mask": [*a.wanted(), True, True]}
    both = (torch.randn_like(p.grad_out), torch.randn_like(p.grad_lse))
    return [
        Call((*first, *every, *both), options),
        Call((p.grad_out, None, *first[2:], None, every[1], *[None] * 7), options),
    ]


ATTENTION: dict[str, Callable[[Attention], list[Call]]] = {
    "attention": _forward,
    "attention_backward": _backward,
    "attention_backward_jvp": _backward_jvp,
    "attention_for_backward": _for_backward,
    "attention_jvp": _jvp,
    "attention_weights_backward": _weights_backward,
    "attention_with_weights": _with_weights,
}


def attention_calls(operator: str, family: str) -> list[Call]:
    sizes, kind = FAMILIES[family]
    return ATTENTION[operator](Attention(*with_kind(replace(BASE, **sizes), kind)))


def attention_subsets(operator: str) -> list[Call]:
    """Every gradient alone and none at all, of a call that has all of them."""
    first = attention_calls(operator, "variants, masks, dropout")[0]
    asked = list(_masks_to_ask(first.kwargs["output_mask"]))
    return [Call(first.args, {**first.kwargs, "output_mask": wanted}) for wanted in asked]


# ------------------------------------------------------------------------------------------------------------ the layer
LAYERS: dict[str, dict[str, Any]] = {
    **{
        f"shared {shared}, {'batch' if batch_first else 'length'} first": {"shared": shared, "batch_first": batch_first}
        for shared in (0, 1, 2)
        for batch_first in (True, False)
    },
    "without biases": {"bias": False},
    "bool mask and causal": {"mask": "bool", "causal": 1, "padding": "bool"},
    "float masks": {"mask": "float", "padding": "float", "shared": 2},
    "layer dropout": {"dropout_p": 0.3, "shared": 1},
    "layer in bfloat16": {"dtype": torch.bfloat16, "shared": 2, "mask": "bool"},
    "layer in float16": {"dtype": torch.float16, "batch_first": False},
    "layer in double": {"dtype": torch.float64, "scale": 0.3},
    "layer without samples": {"batch": 0},
    "layer without queries": {"queries": 0},
    "layer without keys": {"keys": 0, "shared": 1},
}


def layer_tensors(dtype: torch.dtype = torch.float32, bias: bool = True) -> list[Tensor | None]:
    """Parameters of 4 heads on 2 key heads of 3 numbers, width 12."""
    shapes = [(24, 12), (24,), (12, 12), (12,)]
    return [torch.randn(s).to(dtype).requires_grad_() if bias or len(s) > 1 else None for s in shapes]


def _layer(
    shared: int = 0,
    batch_first: bool = True,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    **rest: Any,
) -> Call:
    batch, queries = rest.pop("batch", 2), rest.pop("queries", 5)
    keys = queries if shared == 2 else rest.pop("keys", 7)
    order = (0, 1) if batch_first else (1, 0)

    def sequence(length: int) -> Tensor:
        sizes = (batch, length)
        return torch.randn(sizes[order[0]], sizes[order[1]], 12).to(dtype)

    inputs = [sequence(queries), sequence(keys), sequence(keys)][: 3 - shared]
    inputs += [inputs[-1]] * shared
    mask, padding = rest.pop("mask", None), rest.pop("padding", None)
    masks: list[Tensor | None] = [None, None]
    if mask:
        masks[0] = torch.randn(batch, 1, queries, keys) if mask == "float" else torch.rand(1, 4, queries, keys) < 0.7
    if padding:
        hidden = last_hidden(batch, keys)
        masks[1] = hidden if padding == "bool" else torch.zeros(batch, keys).masked_fill(hidden, -torch.inf)
    seed = torch.tensor([-77]) if "dropout_p" in rest else None
    options = {"num_heads": 4, "num_kv_heads": 2, "shared_inputs": shared, "batch_first": batch_first}
    options = {"dropout_p": 0.0, "causal": 0, "scale": None, **options, **rest}
    weights = [None if w is None else w.detach() for w in layer_tensors(dtype, bias)]
    return Call((*inputs, *weights, *masks, seed), options)


def _layer_forward(family: str) -> list[Call]:
    call = _layer(**LAYERS[family])
    half = call.args[0].dtype in (torch.bfloat16, torch.float16)
    return [call, *([Call(call.args, {**call.kwargs, "keep_rounding": True})] if half else [])]


def _layer_backward(family: str) -> list[Call]:
    call = _layer_forward(family)[-1]
    out, *saved = ops.multi_head_attention(*call.args, **call.kwargs)
    options = {n: x for n, x in call.kwargs.items() if n != "keep_rounding"}
    shared = options["shared_inputs"]
    wanted = [True, shared < 2, shared < 1, *[floating(x) for x in call.args[3:9]]]
    return [Call((torch.randn_like(out), *call.args, *saved), {**options, "output_mask": wanted})]


def _layer_subsets() -> list[Call]:
    first = _layer_backward("float masks")[0]
    return [Call(first.args, {**first.kwargs, "output_mask": m}) for m in _masks_to_ask(first.kwargs["output_mask"])]


# ---------------------------------------------------------------------------------------------------------------- pages
PAGES: dict[str, dict[str, Any]] = {
    "pages": {},
    "pages, three queries": {"queries": 3},
    "pages, sink and cap": {"sink": True, "softcap": 1.5},
    "pages, scale, shared range": {"scale": 0.3, "ranges": 1},
    "pages in bfloat16": {"dtype": torch.bfloat16},
    "pages in float16": {"dtype": torch.float16, "queries": 20},
    "pages in double": {"dtype": torch.float64, "queries": 2},
    "pages without samples": {"batch": 0},
}


def _paged(family: str) -> list[Call]:
    given = {"queries": 1, "batch": 3, "dtype": torch.float32, **PAGES[family]}
    batch, queries, dtype = given["batch"], given["queries"], given["dtype"]
    query = torch.randn(batch, 6, queries, 8).to(dtype)
    key, value = (torch.randn(9, 2, 16, width).to(dtype) for width in (8, 11))
    table = torch.randint(0, 9, (batch, 4), dtype=torch.int32)
    last = torch.randint(1, 65, (given.get("ranges", batch), 1), dtype=torch.int32).expand(-1, queries)
    sink = torch.randn(6) if "sink" in given else None
    options = {"scale": given.get("scale"), "softcap": given.get("softcap", 0.0)}
    return [Call((query, key, value, table, torch.stack((last * 0, last)), sink), options)]


# --------------------------------------------------------------------------------------------------------- all together
CALLS: dict[str, dict[str, Callable[[], list[Call]]]] = {
    **{name: {family: partial(attention_calls, name, family) for family in FAMILIES} for name in ATTENTION},
    "multi_head_attention": {family: partial(_layer_forward, family) for family in LAYERS},
    "multi_head_attention_backward": {family: partial(_layer_backward, family) for family in LAYERS},
    "paged_attention": {family: partial(_paged, family) for family in PAGES},
}
for _name in ("attention_backward", "attention_backward_jvp", "attention_weights_backward"):
    CALLS[_name]["each gradient alone"] = partial(attention_subsets, _name)
CALLS["multi_head_attention_backward"]["each gradient alone"] = _layer_subsets


def existing_operators() -> set[str]:
    """Every operator that is registered under our namespace."""
    names = (schema.name for schema in torch._C._jit_get_all_schemas())
    return {name.removeprefix("mha_ext::") for name in names if name.startswith("mha_ext::")}
