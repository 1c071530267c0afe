"""Attention problems with windows, caps, sinks, biases and boundaries: how they are made, drawn and checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from cases import DTYPES, LAYOUTS, LOWER_RIGHT, NONE, UPPER_LEFT, Case, build, generator
from hypothesis import strategies as st
from switches import threads
from tolerances import Exact, assert_within, attention_limits, bias_limit, growth, roundoff, smallest
from torch import Tensor
from variant_truth import Answer, biases, by_name, dense

from mha_ext.functional import scaled_dot_product_attention

HEADS_AND_NUMBERS = ("query", "key", "value")
TRAINED = ("attn_mask", "key_padding_mask", "alibi_slopes", "relative_bias", "sink")


@dataclass(frozen=True)
class Variant(Case):
    """A case of ``cases.py`` with more options. ``causal`` says how positions are aligned, ``ends`` that they are
    aligned to the last key although there is no causal order. ``alibi`` and ``relative`` are "<dtype>:<letters>", the
    letters B, H and 1 their axes before the last; ``segments`` is "one" (a tensor for both), "pair" or "batch";
    ``prefix`` a number or "batch"; ``key_range`` "T" or "BT"."""

    ends: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sink: str = "none"
    alibi: str = "none"
    relative: str = "none"
    segments: str = "none"
    prefix: int | str | None = None
    key_range: str = "none"

    @property
    def alignment(self) -> str:
        return "lower_right" if self.causal == LOWER_RIGHT or (self.causal == NONE and self.ends) else "upper_left"

    def __str__(self) -> str:
        mine = fields(self)[len(fields(Case)) :]
        extras = [f"{f.name}={getattr(self, f.name)}" for f in mine if getattr(self, f.name) != f.default]
        return "-".join([super().__str__(), *extras])


@dataclass
class Call:
    """One call of the function: its floating tensors and the others by name, the options, and what is sent back."""

    variant: Variant
    tensors: dict[str, Tensor]
    rest: dict[str, Any]
    grad_out: Tensor
    grad_lse: Tensor
    seed: int = 0
    _keep: list[Tensor] = field(default_factory=list)

    @property
    def options(self) -> dict[str, Any]:
        """Everything but query, key and value."""
        return {**{n: x for n, x in self.tensors.items() if n not in HEADS_AND_NUMBERS}, **self.rest}

    def keep(self) -> Tensor | None:
        """Which pairs dropout keeps: what a call with equal scores and an identity for values gives, not more."""
        case = self.variant
        if not case.dropout_p:
            return None
        if not self._keep:
            zeros = torch.zeros(case.B, case.H, 1, 1)
            query, key = zeros.expand(-1, -1, case.T, 1), zeros.expand(-1, -1, case.keys, 1)
            value = torch.eye(case.keys).expand(case.B, case.H, -1, -1)
            torch.manual_seed(self.seed)
            self._keep.append(scaled_dot_product_attention(query, key, value, dropout_p=case.dropout_p) != 0)
        return self._keep[0]

    def ours(self, **more: Any) -> tuple[Tensor, ...]:
        """Results of the call with ``return_lse``, and what ``more`` asks for."""
        torch.manual_seed(self.seed)
        tensors = {n: x.detach() for n, x in self.tensors.items()}
        return scaled_dot_product_attention(**tensors, **self.rest, return_lse=True, **more)

    def gradients(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Out, lse and the gradient of every floating tensor."""

        def call(**arguments: Any) -> tuple[Tensor, ...]:
            torch.manual_seed(self.seed)
            return scaled_dot_product_attention(**arguments, return_lse=True)

        return by_name(call, self.tensors, self.rest, {"out": self.grad_out, "lse": self.grad_lse})


# ------------------------------------------------------------------------------------------------------------ building
def _numbers(what: str, last: tuple[int, ...], case: Variant, g: torch.Generator) -> Tensor:
    """Normal numbers of "<dtype>:<letters>", their axes before ``last`` as the letters say."""
    dtype, letters = what.split(":")
    sizes = {"B": case.B, "H": case.H, "1": 1}
    shape = (*(sizes[letter] for letter in letters), *last)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(getattr(torch, dtype))


def _segments(case: Variant, g: torch.Generator) -> Any:
    """Non-decreasing numbers with gaps; the queries' and the keys' differ unless one tensor serves both."""

    def ids(length: int, batch: tuple[int, ...]) -> Tensor:
        steps = torch.rand(*batch, length, generator=g) < min(0.5, 4 / max(length, 1))
        return 2 * steps.long().cumsum(-1) + (torch.rand(*batch, 1, generator=g) < 0.3)

    if case.segments == "one":
        return ids(case.T, (case.B,))
    batch = (case.B,) if case.segments == "batch" else ()
    queries, keys = ids(case.T, batch), ids(case.keys, batch)
    return queries, (keys.int() if case.segments == "batch" else keys)


def _ranges(case: Variant, g: torch.Generator) -> Tensor:
    """Any two ends a query, in order or not, beyond the last key or not."""
    shape = (2, case.B, case.T) if case.key_range == "BT" else (2, case.T)
    first, end = torch.randint(-2, case.keys + 3, shape, generator=g)
    return torch.stack([first // 2, end])


def make(case: Variant, seed: int = 0) -> Call:
    """The tensors of a variant; the same variant and seed always give the same ones."""
    problem, g = (
        build(replace(case, layout="plain" if case.layout == "expanded" else case.layout), seed),
        generator(seed),
    )
    tensors = {"query": problem.query, "key": problem.key, "value": problem.value}
    if case.layout == "expanded":
        tensors |= {n: tensors[n][:1].expand(case.B, -1, -1, -1) for n in ("key", "value")}
    rest: dict[str, Any] = {"dropout_p": case.dropout_p, "is_causal": case.causal != NONE, "scale": case.scale}
    rest |= {"enable_gqa": case.heads_kv != case.H, "causal_alignment": case.alignment}
    for name in ("attn_mask", "key_padding_mask"):
        mask = getattr(problem, name)
        if mask is not None:
            (tensors if mask.is_floating_point() else rest)[name] = mask
    if case.alibi != "none":
        tensors["alibi_slopes"] = _numbers(case.alibi, (), case, g) / 8
    if case.relative != "none":
        tensors["relative_bias"] = _numbers(case.relative, (case.T + case.keys - 1,), case, g)
    if case.sink != "none":
        tensors["sink"] = _numbers(f"{case.sink}:H", (), case, g)
    rest |= {n: x for n in ("window", "softcap") if (x := getattr(case, n)) is not None}
    if case.segments != "none":
        rest["segment_ids"] = _segments(case, g)
    if case.prefix is not None:
        per_batch = torch.randint(0, case.keys + 2, (case.B,), generator=g)
        rest["prefix_length"] = per_batch if case.prefix == "batch" else case.prefix
    if case.key_range != "none":
        rest["key_range"] = _ranges(case, g)
    return Call(case, tensors, rest, problem.grad_out, problem.grad_lse, seed)


# ------------------------------------------------------------------------------------------------------------ the truth
@threads(1)
def exact(call: Call) -> tuple[Exact, Answer]:
    """The answer and every gradient in float64, and the answer with what it is made of."""
    case, keep, found = call.variant, call.keep(), []
    tensors = {n: x.double() for n, x in call.tensors.items()}

    def function(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        answer = dense(query, key, value, options, keep)
        found.append(answer)
        return answer.out, answer.lse.nan_to_num(neginf=0.0)

    with torch.no_grad():
        lse = dense(*(tensors[n] for n in HEADS_AND_NUMBERS), call.options, keep).lse
    grad_out, grad_lse = call.grad_out.double(), torch.where(lse.isfinite(), call.grad_lse.double(), 0.0)
    _, grads = by_name(function, tensors, call.rest, {"out": grad_out, "lse": grad_lse})
    answer = Answer(*(x.detach() for x in found[-1]))
    repeats = case.H // case.heads_kv
    query, key, value = (tensors[n] for n in HEADS_AND_NUMBERS)
    heads = (query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
    drop = torch.ones_like(answer.weights) if keep is None else keep.double() / (1 - case.dropout_p)
    scale = case.D**-0.5 if case.scale is None else case.scale
    sizes = (case.B, case.H, case.T, case.keys)
    parts = max(1, len(biases(sizes, call.options)))
    sink = tensors.get("sink")
    more = {"softcap": case.softcap or 0.0, "sink": sink, "added": answer.added, "parts": parts}
    made = (answer.bias, answer.probabilities, drop, answer.out, answer.lse, scale, grad_out, grad_lse, grads)
    return Exact(*heads, *made, **more), answer


@threads(1)
def limits_of(call: Call, truth: Exact, grads: bool = True, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The limit of every result, by name; of what a party computes in ``dtype``, by default the call's."""
    case = call.variant
    dtype = case.dtype if dtype is None else dtype
    limits = attention_limits(truth, dtype, case.heads_kv, grads)
    if not grads:
        return limits
    e_ds = limits.pop("scores")
    for name, x in call.tensors.items():
        if name in ("attn_mask", "key_padding_mask"):
            four = (
                truth.grads[name].to(x.dtype) if name == "attn_mask" else truth.grads[name].to(x.dtype)[:, None, None]
            )
            limits[name] = bias_limit(truth, e_ds, four, case.keys, dtype).reshape(x.shape)
        elif name in ("alibi_slopes", "relative_bias"):
            limits[name] = _summed(call, truth, name, e_ds, dtype)
        elif name == "sink":
            limits[name] = limits[name] + roundoff(x.dtype) * truth.grads[name].abs() + smallest(x.dtype)
    return limits


def _summed(call: Call, truth: Exact, name: str, e_ds: Tensor, dtype: torch.dtype) -> Tensor:
    """Limit for the gradient of what scores take linearly, with coefficients of one sign: errors add up as it does."""
    case, x = call.variant, call.tensors[name]
    d_scores = truth.grad_scores().abs()
    terms = case.B * case.H * (case.T * case.keys if name == "alibi_slopes" else min(case.T, case.keys))
    alone = {n: o for n, o in call.rest.items() if n == "causal_alignment"}
    leaf = x.detach().double().requires_grad_()
    (part,) = biases((case.B, case.H, case.T, case.keys), {**alone, name: leaf})
    (total,) = torch.autograd.grad(part.expand_as(e_ds), leaf, e_ds + growth(terms, dtype) * d_scores)
    return total.abs() + roundoff(x.dtype) * truth.grads[name].abs() + smallest(x.dtype)


# ----------------------------------------------------------------------------------------------------------- the checks
def check(call: Call, grads: bool = True) -> None:
    """Output, log-sum-exp and all gradients of a call against the exact answer, within the derived limits."""
    case, (truth, answer) = call.variant, exact(call)
    limits = limits_of(call, truth, grads)
    (out, lse), got = call.gradients() if grads else (call.ours(), {})
    assert_within(out, truth.out, limits["out"], "out")
    assert_within(lse, truth.lse, limits["lse"], "lse")
    assert out.dtype == case.dtype and lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    blind = (answer.bias == -math.inf).all(-1)
    assert not out[blind].any(), "a query without keys must give 0"
    for name, grad in got.items():
        x = call.tensors[name]
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype), name
        assert_within(grad, truth.grads[name], limits[name], f"grad of {name}")
    if "query" in got:
        assert not got["query"][blind].any(), "a query without keys must pass no gradient"


def check_weights(call: Call) -> None:
    """Weights per head, their mean and their sum over queries: what an identity for values gives, each with a limit."""
    case = call.variant
    value = torch.eye(case.keys, dtype=case.dtype).expand(case.B, case.heads_kv, -1, -1)
    grad_out = torch.zeros(case.B, case.H, case.T, case.keys, dtype=case.dtype)
    twin = replace(call, tensors={**call.tensors, "value": value}, grad_out=grad_out)
    truth, answer = exact(twin)
    limit, u = limits_of(twin, truth, grads=False)["out"], roundoff(case.dtype)
    out, lse = call.ours()
    for kind, want, allowed in (
        ("per_head", truth.out, limit),
        ("mean", truth.out.mean(1), limit.mean(1) + 4 * u * truth.out.mean(1)),
        ("column_sum", truth.out.sum(2), limit.sum(2) + (growth(case.T, case.dtype) + u) * truth.out.sum(2)),
    ):
        again, lse_again, weights = call.ours(return_weights=kind)
        assert weights.dtype == case.dtype
        assert_within(weights, want, allowed, kind)
        assert not weights[want == 0].any() or kind == "column_sum", f"{kind}: a hidden pair must have no weight"
        limits = limits_of(call, exact(call)[0], grads=False)
        assert_within(again, out, 2 * limits["out"], "out with weights")
        assert_within(lse_again, lse, 2 * limits["lse"], "lse with weights")
    assert not (answer.weights[answer.bias == -math.inf]).any()


def plain_variants(cases: Sequence[Variant], dtypes: Sequence[torch.dtype] = DTYPES) -> list[Variant]:
    """Every case in every dtype."""
    return [replace(case, dtype=dtype) for case in cases for dtype in dtypes]


# --------------------------------------------------------------------------------------------------------- the strategy
_LENGTHS = st.sampled_from([1, 3, 15, 16, 17, 31, 33, 63, 64, 65, 66])
_LONG_LENGTHS = st.sampled_from([1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 66, 127, 128, 129, 130, 257])
_SIDES = st.sampled_from([0, 1, 5, 64, 1000, None, -1])
_FLOATS = ("float64", "float32", "bfloat16", "float16")


def _of(*letters: str) -> st.SearchStrategy[str]:
    """Mostly nothing, else any floating dtype with any of the axes."""
    some = st.tuples(st.sampled_from(_FLOATS), st.sampled_from(letters)).map(":".join)
    return st.one_of(st.just("none"), some)


@st.composite
def variants(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES, long: bool = False) -> Variant:
    """Any combination that the function takes; shrinks to a plain call on one pair."""
    lengths = _LONG_LENGTHS if long else _LENGTHS
    kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3]))
    queries = draw(lengths)
    keys = queries if draw(st.booleans()) else draw(lengths)
    causal = draw(st.sampled_from([NONE, UPPER_LEFT, LOWER_RIGHT]))
    window = draw(st.one_of(st.none(), st.tuples(_SIDES, _SIDES)))
    prefix = None
    if causal and window is None:
        prefix = draw(st.one_of(st.none(), st.just("batch"), st.integers(0, keys + 3)))
    letters = st.sampled_from(["11TS", "1HTS", "B11S", "BHTS", "11T1"])
    mask = st.one_of(st.just("none"), letters.map("bool:{}".format), letters.map("float32:{}".format))
    return Variant(
        B=draw(st.integers(1, 2)),
        H=kv_heads * group,
        H_kv=kv_heads,
        T=queries,
        S=keys,
        D=draw(st.sampled_from([1, 4, 8, 16, 17, 33, 64])),
        D_v=draw(st.sampled_from([None, 1, 8, 24])),
        dtype=draw(st.sampled_from(list(dtypes))),
        mask=draw(mask),
        padding=draw(st.sampled_from(["none", "none", "bool", "float32"])),
        causal=causal,
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3])),
        scale=draw(st.sampled_from([None, None, 0.3, -1.5])),
        layout=draw(st.sampled_from([*LAYOUTS, "expanded"])),
        ends=draw(st.booleans()),
        window=window,
        softcap=draw(st.sampled_from([None, None, 50.0, 2.0, 0.5])),
        sink=draw(st.sampled_from(["none", *_FLOATS])),
        alibi=draw(_of("H", "BH")),
        relative=draw(_of("1", "H", "BH", "B1")),
        segments=draw(st.sampled_from(["none", "pair", "batch", *(["one"] if queries == keys else [])])),
        prefix=prefix,
        key_range=draw(st.sampled_from(["none", "none", "T", "BT"])),
    )
