"""Second derivatives and forward-mode derivatives in closed form, each with how far a computed one may lie from it.

The formulas run once, in float64, over numbers that carry a bound on their error to first order, as the bounds of
``tolerances.py`` do, whose notation this keeps: an operation adds the roundoff ``a`` of the type sums run in, a sum or
product of n terms ``growth(n)``, and errors of operands are carried through by the product rule. With p = exp(s - lse),
dP = drop (dO . v), delta = sum p dP - dlse, dS = p (dP - delta), and a dot for the derivative along directions:

* s.  = slope scale (q. k + q k.) + bias.      lse. = sum p s. + z sink.        p. = p (s. - lse.)
* o.  = (drop p.) v + (drop p) v.
* dP. = drop (dO. v + dO v.)                   delta. = sum (p. dP + p dP.) - dlse.
* dS. = p. (dP - delta) + p (dP. - delta.)     dX. = slope dS. + slope. dS, slope. = -2 t x. slope / cap
* dQ. = scale (dX. k + dX k.), likewise dK.    dV. = (drop p.)T dO + (drop p)T dO.
* dsink. = -sum (z. delta + z delta.), z = exp(sink - lse), z. = z (sink. - lse.)

``k`` of ``tolerances.py`` enters through delta, which kernels take from the output as it was kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from switches import threads
from tolerances import Exact, fold_heads, growth, roundoff, scores_of, smallest, sum_dtype
from torch import Tensor
from variant_cases import HEADS_AND_NUMBERS, TRAINED, Call
from variant_truth import biases


@dataclass
class Number:
    """Numbers and their errors, for sums over tensors of ``dtype``."""

    value: Tensor
    error: Tensor | float
    dtype: torch.dtype

    def _made(self, value: Tensor, error: Tensor | float, roundings: float = 1.0) -> Number:
        return Number(value, error + roundings * roundoff(sum_dtype(self.dtype)) * value.abs(), self.dtype)

    def __add__(self, other: Number) -> Number:
        return self._made(self.value + other.value, self.error + other.error)

    def __neg__(self) -> Number:
        return Number(-self.value, self.error, self.dtype)

    def __sub__(self, other: Number) -> Number:
        return self + -other

    def __mul__(self, other: Number) -> Number:
        error = self.value.abs() * other.error + other.value.abs() * self.error
        return self._made(self.value * other.value, error)

    def __rmul__(self, factor: float) -> Number:
        return self._made(factor * self.value, abs(factor) * self.error)

    def times(self, factor: Tensor) -> Number:
        """By numbers that are exact."""
        return self._made(factor * self.value, factor.abs() * self.error)

    def __matmul__(self, other: Number) -> Number:
        """A product of matrices, whose sums may run in any order."""
        size = self.value.abs() @ other.value.abs()
        error = self._full() @ other.value.abs() + self.value.abs() @ other._full()
        return Number(self.value @ other.value, error + growth(self.value.shape[-1], self.dtype) * size, self.dtype)

    def _full(self) -> Tensor:
        return self.error.expand_as(self.value) if isinstance(self.error, Tensor) else self.error + 0 * self.value

    def summed(self, axis: int = -1) -> Number:
        size = growth(self.value.shape[axis], self.dtype) * self.value.abs().sum(axis, keepdim=True)
        return Number(self.value.sum(axis, keepdim=True), self._full().sum(axis, keepdim=True) + size, self.dtype)

    @property
    def mT(self) -> Number:
        return Number(self.value.mT, self._full().mT, self.dtype)


@dataclass
class Problem:
    """What a call computes before any derivative."""

    truth: Exact
    dtype: torch.dtype
    weights: Number
    slope: Number
    turned: Number
    share: Number | None

    def exact(self, value: Tensor) -> Number:
        return Number(value, 0.0, self.dtype)


def _problem(truth: Exact, dtype: torch.dtype) -> Problem:
    a, scores = roundoff(sum_dtype(dtype)), scores_of(truth, dtype)
    lse = truth.lse.nan_to_num(neginf=0.0)[..., None]
    e_s = torch.where(truth.weights > 0, scores.error, 0.0)
    e_l = (truth.weights * e_s).sum(-1, keepdim=True) + growth(truth.key.shape[-2], dtype) + 4 * a + 3 * a * lse.abs()
    sink = None if truth.sink is None else truth.sink[:, None, None]
    if sink is not None:
        e_l = e_l + 4 * a * sink.abs()
    e_p = e_s + e_l + 2 * a * (scores.size + lse.abs()) + 4 * a
    weights = Number(truth.weights, truth.weights * e_p + smallest(dtype), dtype)
    share = None
    if sink is not None:
        part = torch.exp(sink - truth.lse[..., None])
        share = Number(part, part * (e_l + 2 * a * (sink.abs() + lse.abs()) + 4 * a), dtype)
    cap = truth.softcap or 1.0
    turned = torch.tanh(truth.scale * (truth.query @ truth.key.mT) / cap) if truth.softcap else 0 * truth.weights
    e_t = scores.slope_error if isinstance(scores.slope_error, Tensor) else 0.0
    slope = 1 - turned.square()
    turned_error = (
        slope
        * (growth(truth.query.shape[-1], dtype) + 4 * a)
        * (abs(truth.scale) * (truth.query.abs() @ truth.key.abs().mT) / cap)
        + 8 * a * turned.abs()
    )
    return Problem(truth, dtype, weights, Number(slope, e_t, dtype), Number(turned, turned_error, dtype), share)


@dataclass
class Motion:
    """Derivatives along directions of products (before the cap), log-sum-exp and weights."""

    products: Number
    lse: Number
    weights: Number


def _moved(p: Problem, along: Mapping[str, Tensor]) -> Motion:
    t = p.truth
    query, key = p.exact(t.query), p.exact(t.key)
    products = t.scale * ((p.exact(along["query"]) @ key.mT) + (query @ p.exact(along["key"]).mT))
    seen = (t.bias != -torch.inf).double()
    scores = ((products * p.slope if t.softcap else products) + p.exact(along["bias"])).times(seen)
    lse = (p.weights * scores).summed()
    if p.share is not None:
        lse = lse + p.share.times(along["sink"][:, None, None])
    return Motion(products, lse, p.weights * (scores - lse))


def _results(p: Problem, m: Motion, along: Mapping[str, Tensor]) -> dict[str, Number]:
    dropped, moved = p.weights.times(p.truth.drop), m.weights.times(p.truth.drop)
    out = moved @ p.exact(p.truth.value) + dropped @ p.exact(along["value"])
    return {"out": out, "lse": m.lse}


def _gradients(p: Problem, m: Motion, along: Mapping[str, Tensor]) -> tuple[dict[str, Number], Number]:
    """By name, key and value still with the heads of the query; and the scores' own, of which biases have sums."""
    t = p.truth
    value, grad_out, moved_out = p.exact(t.value), p.exact(t.grad_out), p.exact(along["grad_out"])
    kept = roundoff(p.dtype) * (roundoff(torch.bfloat16) if p.dtype in (torch.bfloat16, torch.float16) else 1.0)
    pairs = (grad_out @ value.mT).times(t.drop)
    moved_pairs = (moved_out @ value.mT + grad_out @ p.exact(along["value"]).mT).times(t.drop)
    delta = (p.weights * pairs).summed() - p.exact(t.grad_lse[..., None])
    delta.error = delta.error + kept * (t.grad_out.abs() * t.out.abs()).sum(-1, keepdim=True)
    moved_delta = (m.weights * pairs + p.weights * moved_pairs).summed() - p.exact(along["grad_lse"][..., None])
    moved_delta.error = moved_delta.error + kept * (along["grad_out"].abs() * t.out.abs()).sum(-1, keepdim=True)
    away = pairs - delta
    scores, moved = p.weights * away, m.weights * away + p.weights * (moved_pairs - moved_delta)
    products, moved_products = scores, moved
    if t.softcap:
        bend = (-2 / t.softcap) * (p.turned * m.products * p.slope)
        products, moved_products = scores * p.slope, moved * p.slope + scores * bend
    query, key = p.exact(t.query), p.exact(t.key)
    found = {
        "query": t.scale * (moved_products @ key + products @ p.exact(along["key"])),
        "key": t.scale * (moved_products.mT @ query + products.mT @ p.exact(along["query"])),
        "value": m.weights.times(t.drop).mT @ grad_out + p.weights.times(t.drop).mT @ moved_out,
    }
    if p.share is not None:
        moved_share = p.share * (p.exact(along["sink"][:, None, None]) - m.lse)
        found["sink"] = -(moved_share * delta + p.share * moved_delta)
    return found, moved


def _directions(call: Call, truth: Exact, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name, in float64, keys and values for each head of the query, and all that is added as one bias."""
    case, named = call.variant, {n: x.double() for n, x in named.items()}
    repeats = case.H // case.heads_kv
    sizes = (case.B, case.H, case.T, case.keys)
    learned = {n: x for n, x in named.items() if n in TRAINED and n != "sink"}
    parts = biases(sizes, {"causal_alignment": call.rest["causal_alignment"], **learned})
    bias = sum(parts, torch.zeros(sizes, dtype=torch.float64))
    made = {**named, "bias": bias, "query": named["query"]}
    for name in ("key", "value"):
        made[name] = named[name].repeat_interleave(repeats, 1)
    rows = truth.grad_out
    return {"grad_out": torch.zeros_like(rows), "grad_lse": torch.zeros_like(rows[..., 0]), **made}


@threads(1)
def forward_answers(call: Call, truth: Exact, named: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Derivative and limit of out and lse along ``named`` directions of the call's tensors."""
    p = _problem(truth, call.variant.dtype)
    along = _directions(call, truth, named)
    found = _results(p, _moved(p, along), along)
    found["lse"] = Number(found["lse"].value[..., 0], found["lse"]._full()[..., 0], p.dtype)
    return {n: _stored(x, call.variant.dtype if n == "out" else sum_dtype(p.dtype)) for n, x in found.items()}


def _stored(number: Number, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return number.value, number.error + roundoff(dtype) * number.value.abs() + smallest(dtype)


@threads(1)
def second_answers(call: Call, truth: Exact, named: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The derivative of every gradient along ``named`` directions (of the tensors, ``grad_out`` and ``grad_lse``), and
    its limit. It is also what double backward gives for gradients that are sent those directions."""
    case = call.variant
    p, along = _problem(truth, case.dtype), _directions(call, truth, named)
    found, scores = _gradients(p, _moved(p, along), along)
    answers = {"query": _stored(found["query"], case.dtype)}
    for name in ("key", "value"):
        x, heads = found[name], case.heads_kv
        size = growth(case.H // heads, case.dtype) * fold_heads(x.value.abs(), heads)
        folded = Number(fold_heads(x.value, heads), fold_heads(x._full(), heads) + size, case.dtype)
        answers[name] = _stored(folded, case.dtype)
    for name, x in call.tensors.items():
        if name == "sink":
            rows = found[name]
            size = growth(rows.value.numel(), case.dtype) * rows.value.abs()
            total = Number(rows.value.sum((0, 2, 3)), (rows._full() + size).sum((0, 2, 3)), case.dtype)
            answers[name] = _stored(total, x.dtype)
        elif name not in HEADS_AND_NUMBERS:
            answers[name] = _stored(_of_a_bias(call, name, scores), x.dtype)
    return answers


def _of_a_bias(call: Call, name: str, scores: Number) -> Number:
    """The gradient of what scores take linearly, with coefficients of one sign: errors add up as it does."""
    case, x = call.variant, call.tensors[name]
    leaf = x.detach().double().requires_grad_()
    sizes = (case.B, case.H, case.T, case.keys)
    (part,) = biases(sizes, {"causal_alignment": call.rest["causal_alignment"], name: leaf})
    error = scores._full() + growth(case.B * case.H * case.T * case.keys, case.dtype) * scores.value.abs()
    sums = [
        torch.autograd.grad(part.expand(sizes), leaf, pairs, retain_graph=True)[0] for pairs in (scores.value, error)
    ]
    return Number(sums[0], sums[1].abs(), case.dtype)
