"""Attention and layers as pairs of functions of the same tensors, ours and dense float64 math, for derivatives of any
order: what reverse mode, forward mode and their compositions give of one is compared with what they give of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import LOWER_RIGHT, UPPER_LEFT, build, generator, kept, merged_bias, ops
from layer_cases import sequence
from module_variant_cases import dense_layer, variant
from tolerances import assert_within, double_limit
from torch import Tensor
from torch.func import functional_call, grad, jvp
from variant_cases import HEADS_AND_NUMBERS, Call, Variant, make
from variant_truth import dense

from mha_ext import reference, seeds
from mha_ext.functional import scaled_dot_product_attention

Function = Callable[..., tuple[Tensor, ...]]

SMALL = Variant(2, 4, 2, 5, 7, 4, 3, torch.float64)
# One option each and all that combine: names for the tests, and what to change in a case.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": UPPER_LEFT},
    "causal from the end": {"causal": LOWER_RIGHT, "T": 7, "S": 5},
    "bool mask": {"mask": "bool:B1TS"},
    "bool mask and padding": {"mask": "bool:11TS", "padding": "bool", "causal": LOWER_RIGHT},
    "learned mask": {"mask": "float64:1HTS"},
    "learned mask and padding": {"mask": "float64:1H1S", "padding": "float64"},
    "dropout": {"dropout_p": 0.3, "causal": UPPER_LEFT},
    "relative bias": {"relative": "float64:H"},
    "slopes": {"alibi": "float64:BH", "causal": LOWER_RIGHT},
    "sink": {"sink": "float64"},
    "sink and empty rows": {"sink": "float64", "mask": "bool:B1TS"},
    "softcap": {"softcap": 1.5},
    "softcap and mask": {"softcap": 1.5, "mask": "bool:1HTS", "causal": UPPER_LEFT},
    "window": {"window": (2, 1), "ends": True},
    "range": {"key_range": "BT"},
    "appended keys": {"appended": 2, "causal": UPPER_LEFT, "padding": "bool"},
    "appended keys and a learned mask": {"appended": 1, "mask": "float64:BHTS", "dropout_p": 0.2},
    "one key head": {"H_kv": 1, "scale": -0.7},
    "everything": {
        "mask": "float64:B1TS", "padding": "bool", "relative": "float64:H", "alibi": "float64:H", "sink": "float64",
        "softcap": 2.0, "window": (4, None), "causal": LOWER_RIGHT, "dropout_p": 0.2,
    },
}  # fmt: skip

# On longer sequences.
MORE = {"segments": {"segments": "pair"}, "prefix": {"causal": UPPER_LEFT, "prefix": 20}}


def in_dtype(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """With parameters of float32 where the call is not in float64."""
    if dtype == torch.float64:
        return options
    return {n: x.replace("float64", "float32") if isinstance(x, str) else x for n, x in options.items()}


@dataclass
class Twins:
    """The same function twice: ``ours`` and ``exact`` of ``inputs``, floating tensors with ``names``."""

    names: list[str]
    inputs: tuple[Tensor, ...]
    ours: Function
    exact: Function

    def doubled(self) -> tuple[Tensor, ...]:
        return tuple(x.double() for x in self.inputs)


def finite(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Without the log-sum-exp of rows that see nothing: nothing depends on it."""
    return tuple(torch.where(x == -torch.inf, 0.0, x) for x in results)


def drawn_keep(call: Call) -> Tensor | None:
    """Which pairs the call's dropout keeps, by the specification of its hash, for the seed that the call draws."""
    if not call.variant.dropout_p:
        return None
    torch.manual_seed(call.seed)
    return kept(call.variant, seeds.draw_seed(torch.device("cpu")))


def attention_twins(case: Variant, seed: int = 0) -> Twins:
    """Output and log-sum-exp of a case, as functions of every floating tensor."""
    if case.appended:
        return _operator_twins(case, seed)
    call = make(case, seed)
    keep, names = drawn_keep(call), list(call.tensors)

    def ours(*tensors: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(call.seed)
        return finite(
            scaled_dot_product_attention(**dict(zip(names, tensors, strict=True)), **call.rest, return_lse=True)
        )

    def exact(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, tensors, strict=True))
        heads = [given.pop(n) for n in HEADS_AND_NUMBERS]
        answer = dense(*heads, {**given, **call.rest}, keep)
        return finite((answer.out, answer.lse))

    return Twins(names, tuple(call.tensors.values()), ours, exact)


def _operator_twins(case: Variant, seed: int) -> Twins:
    """The operator itself, with keys behind the masks' columns."""
    problem = build(case, seed)
    names = ["query", "key", "value", "attn_mask", "key_padding_mask"]
    given = {n: getattr(problem, n) for n in names}
    learned = [n for n, x in given.items() if x is not None and x.is_floating_point()]
    keep, repeats = kept(case, problem.dropout_seed), case.H // case.heads_kv

    def ours(*tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = {**given, **dict(zip(learned, tensors, strict=True))}
        return finite(ops.attention(*arguments.values(), problem.dropout_seed, **problem.options))

    def exact(*tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *masks = {**given, **dict(zip(learned, tensors, strict=True))}.values()
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        more = {"scale": case.scale, "keep": keep, "dropout_p": case.dropout_p}
        return finite(reference.attention(query, key, value, merged_bias(case, *masks), **more)[:2])

    return Twins(learned, tuple(given[n] for n in learned), ours, exact)


def small_twins(name: str, **more: Any) -> Twins:
    return attention_twins(replace(SMALL, **{**OPTIONS[name], **more}))


# --------------------------------------------------------------------------------------------------------------- layers
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal and padding": {"padding": "bool", "is_causal": True},
    "mask": {"mask": "bool"},
    "learned mask": {"mask": "float", "padding": "float"},
    "weights": {"need_weights": True, "padding": "bool"},
    "weights of each head": {"need_weights": True, "average_attn_weights": False, "mask": "float"},
    "appended keys": {"add_bias_kv": True, "add_zero_attn": True, "padding": "bool"},
    "other widths": {"kdim": 4, "vdim": 6, "bias": False},
    "shared heads": {"num_kv_heads": 2, "head_dim": 3, "is_causal": True},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 0.7, "num_kv_heads": 1},
    "sink": {"sink": True, "mask": "bool"},
    "norm and rope": {"qk_norm": True, "rope": True, "num_kv_heads": 2},
    "everything": {
        "window": (3, 1), "softcap": 2.0, "sink": True, "qk_norm": True, "rope": True, "num_kv_heads": 2,
        "padding": "bool", "mask": "float", "is_causal": True,
    },
}  # fmt: skip
_OF_THE_CALL = ("mask", "padding", "is_causal", "need_weights", "average_attn_weights")
_VARIANTS = ("window", "softcap", "sink", "qk_norm", "rope")
BATCH, LENGTH = 2, 5


@dataclass
class Layer:
    """A module with the arguments of a call, and the same by dense math."""

    module: Any
    keywords: dict[str, Any]
    call: dict[str, Any]
    masks: dict[str, Tensor]

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self.module.named_parameters()}

    def widths(self) -> tuple[int, int, int]:
        return self.module.embed_dim, self.module.kdim, self.module.vdim

    def inputs(self) -> tuple[Tensor, ...]:
        """One tensor where one serves as query, key and value, else three."""
        widths = self.widths()
        if len(set(widths)) == 1:
            return (sequence(BATCH, LENGTH, widths[0]),)
        return tuple(sequence(BATCH, LENGTH, width, seed) for seed, width in enumerate(widths))

    def ours(self, inputs: Sequence[Tensor], parameters: dict[str, Tensor], masks: dict[str, Tensor]) -> Any:
        query, key, value = inputs if len(inputs) == 3 else 3 * tuple(inputs)
        results = functional_call(self.module, parameters, (query, key, value), {**self.call, **masks})
        return tuple(x for x in results if x is not None)

    def exact(self, inputs: Sequence[Tensor], parameters: dict[str, Tensor], masks: dict[str, Tensor]) -> Any:
        three = list(inputs) if len(inputs) == 3 else 3 * list(inputs)
        order = {"is_causal": self.call.get("is_causal", False)}
        out, weights = dense_layer(self.module, parameters, three, self.keywords, **masks, **order)
        if not self.call["need_weights"]:
            return (out,)
        return out, weights.mean(1) if self.call.get("average_attn_weights", True) else weights

    def twins(self) -> Twins:
        """Functions of the inputs, the float masks and the parameters."""
        inputs, parameters = self.inputs(), self.parameters
        floats = {n: x for n, x in self.masks.items() if x.is_floating_point()}
        names = [*("query", "key", "value")[: len(inputs)], *floats, *parameters]

        def function(of: Callable[..., Any]) -> Function:
            def call(*tensors: Tensor) -> tuple[Tensor, ...]:
                given = dict(zip(names, tensors, strict=True))
                masks = {**self.masks, **{n: given[n] for n in floats}}
                return of(tensors[: len(inputs)], {n: given[n] for n in parameters}, masks)

            return call

        return Twins(
            names, (*inputs, *floats.values(), *parameters.values()), function(self.ours), function(self.exact)
        )


def layer(name: str, batch: int = BATCH, **more: Any) -> Layer:
    """A float64 layer with the options of that name, and its masks, for ``batch`` examples."""
    options = {**LAYERS[name], **more}
    call = {n: options.pop(n) for n in _OF_THE_CALL if n in options}
    keywords = {n: x for n, x in options.items() if n in _VARIANTS}
    module = variant(keywords, embed_dim=8, num_heads=4, **{n: x for n, x in options.items() if n not in keywords})
    keywords["eps"] = torch.finfo(torch.float64).eps
    g, masks = generator(3), {}
    kind = call.pop("mask", None)
    if kind is not None:
        hidden = torch.rand(LENGTH, LENGTH, generator=g) < 0.3
        hidden[1] = True
        numbers = torch.randn(LENGTH, LENGTH, generator=g, dtype=torch.float64)
        masks["attn_mask"] = hidden if kind == "bool" else numbers
    kind = call.pop("padding", None)
    if kind is not None:
        ignored = torch.arange(LENGTH) >= LENGTH - torch.arange(batch)[:, None]
        numbers = torch.randn(batch, LENGTH, generator=g, dtype=torch.float64)
        masks["key_padding_mask"] = ignored if kind == "bool" else numbers
    return Layer(module, keywords, {"need_weights": False, **call}, masks)


# ---------------------------------------------------------------------------------------------------------- derivatives
def like(tensors: Sequence[Tensor], seed: int) -> tuple[Tensor, ...]:
    """Normal numbers in the tensors' shapes and dtypes: directions, and what is sent back."""
    g = generator(seed)
    return tuple(torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype) for x in tensors)


def zeros_for(found: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, tensors, strict=True))


def loss(function: Function, sent: Sequence[Tensor]) -> Callable[..., Tensor]:
    """The sum of the results times what is sent back to them."""

    def total(*inputs: Tensor) -> Tensor:
        return sum((x * g).sum() for x, g in zip(function(*inputs), sent, strict=True))  # type: ignore[return-value]

    return total


def gradient(function: Function, sent: Sequence[Tensor], count: int) -> Function:
    """Gradients of that sum, by ``torch.func.grad``, as a function of the inputs."""
    return grad(loss(function, sent), tuple(range(count)))


def along(function: Function, directions: Sequence[Tensor]) -> Function:
    """The derivative along directions, by ``torch.func.jvp``, as a function of the inputs."""

    def moved(*inputs: Tensor) -> tuple[Tensor, ...]:
        return jvp(function, inputs, tuple(directions))[1]

    return moved


def twice_back(
    function: Function, inputs: Sequence[Tensor], sent: Sequence[Tensor], directions: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Double backward: ``directions`` sent back through the gradients, to the inputs and to what was sent to them."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    cotangents = [x.detach().requires_grad_() for x in sent]
    results = function(*leaves)
    first = zeros_for(torch.autograd.grad(results, leaves, cotangents, create_graph=True, allow_unused=True), leaves)
    pairs = [(x, d) for x, d in zip(first, directions, strict=True) if x.requires_grad]
    second = torch.autograd.grad(
        [x for x, _ in pairs], [*leaves, *cotangents], [d for _, d in pairs], allow_unused=True
    )
    return zeros_for(second, [*leaves, *cotangents])


def same(got: Any, want: Any, terms: int = 1000) -> None:
    """Tensors, or nested tuples or dicts of them, equal to the rounding of float64."""
    if isinstance(want, Tensor):
        assert_within(got, want, double_limit(want, terms))
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        same(tuple(got.values()), tuple(want.values()), terms)
    else:
        for a, b in zip(got, want, strict=True):
            same(a, b, terms)
