"""The limits bite: every deliberate fault, small as it may be, lies outside them; and so does the noise they allow
for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import DTYPES, Case, Problem, build, exact, kept
from tolerances import Exact, assert_within, attention_limits, growth, roundoff, sum_dtype
from torch import Tensor

from mha_ext import reference


def naive(problem: Problem, truth: Exact, **faults: Any) -> dict[str, Tensor]:
    """Attention written out in the problem's sum dtype, with faults put in on request; out, lse and gradients."""
    case = problem.case
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    leaves = [x.detach().to(dtype).requires_grad_() for x in (problem.query, problem.key, problem.value)]
    query, key, value = leaves
    heads = torch.arange(case.H) // (case.H // case.heads_kv)
    heads = faults.get("heads", lambda h: h)(heads)
    scores = query @ key[:, heads].mT * (truth.scale * faults.get("scale", 1.0))
    scores = scores + faults.get("bias", lambda b: b)(truth.bias).to(dtype)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None])
    keep = kept(case, problem.dropout_seed)
    if keep is not None:
        keep = faults.get("keep", lambda k: k)(keep)
        weights = weights * keep / (1 - case.dropout_p) * faults.get("rescale", 1.0)
    out = weights @ value[:, heads] * faults.get("out", 1.0)
    sent = (out.to(case.dtype), lse + faults.get("lse", 0.0))
    grads = torch.autograd.grad(sent, leaves, (problem.grad_out, problem.grad_lse.to(dtype)))
    return {"out": sent[0], "lse": sent[1], **dict(zip(("query", "key", "value"), grads, strict=True))}


def problem_for(dtype: torch.dtype, **options: Any) -> tuple[Problem, Exact, dict[str, Tensor]]:
    problem = build(Case(**{**Case(2, 4, 2, 40, 70, 32, dtype=dtype).__dict__, **options}))
    if problem.attn_mask is not None and problem.attn_mask.dtype == torch.bool:
        problem.attn_mask[..., 0] = True
    truth = exact(problem)
    return problem, truth, attention_limits(truth, dtype, problem.case.heads_kv)


def outside(problem: Problem, truth: Exact, limits: dict[str, Tensor], **faults: Any) -> set[str]:
    """Which results leave their limits."""
    results = naive(problem, truth, **faults)
    wanted = {"out": truth.out, "lse": truth.lse, **truth.grads}
    bad = set()
    for name, result in results.items():
        try:
            assert_within(result, wanted[name], limits[name], name)
        except AssertionError:
            bad.add(name)
    return bad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": 1}, {"dropout_p": 0.3}, {"mask": "bool:B1TS"}], ids=str)
def test_a_right_computation_in_the_same_dtype_is_inside(dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert not outside(*problem_for(dtype, **options))


def moved(bias: Tensor) -> Tensor:
    """The mask, one key late."""
    return torch.nn.functional.pad(bias, (1, -1))


def one_pair_seen(bias: Tensor) -> Tensor:
    """A single hidden pair shown, in the last row that hides one."""
    bias = bias.clone()
    hidden = (bias == -torch.inf).nonzero()
    bias[tuple(hidden[-1])] = 0.0
    return bias


FAULTS: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("scale by D instead of its root", {}, {"scale": 32**-0.5}, {"out", "lse", "query", "key", "value"}),
    ("scale a hundredth off", {}, {"scale": 1.01}, {"out", "lse", "value"}),
    ("key heads swapped", {}, {"heads": lambda h: 1 - h}, {"out", "lse", "query", "key", "value"}),
    ("key heads tiled, not repeated", {}, {"heads": lambda h: torch.arange(4) % 2}, {"out", "lse", "query", "key"}),
    ("causal off by one", {"causal": 1}, {"bias": moved}, {"out", "lse", "query", "key", "value"}),
    ("one forbidden pair seen", {"causal": 1}, {"bias": one_pair_seen}, {"out", "lse", "value"}),
    ("mask off by one", {"mask": "bool:B1TS"}, {"bias": moved}, {"out", "lse", "query", "key", "value"}),
    ("bias dropped", {"mask": "float32:1111"}, {"bias": torch.zeros_like}, {"lse"}),
    ("bias per key dropped", {"mask": "float32:111S"}, {"bias": lambda b: b.clamp(-1e300, 0)}, {"out", "lse", "query"}),
    ("padding ignored", {"padding": "bool"}, {"bias": torch.zeros_like}, {"out", "lse", "query", "key", "value"}),
    ("dropout mask shifted", {"dropout_p": 0.3}, {"keep": lambda k: k.roll(1, -1)}, {"out", "query", "key", "value"}),
    ("dropout mask of another head", {"dropout_p": 0.3}, {"keep": lambda k: k.flip(1)}, {"out", "query", "key"}),
    ("dropout not rescaled", {"dropout_p": 0.3}, {"rescale": 0.7}, {"out", "query", "key", "value"}),
    ("log-sum-exp in base two", {}, {"lse": 0.05}, {"lse"}),
    ("output a fiftieth off", {}, {"out": 1.02}, {"out", "value"}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options", "faults", "wanted"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_fault_is_noticed(
    name: str, options: dict[str, Any], faults: dict[str, Any], wanted: set[str], dtype: torch.dtype
) -> None:
    assert wanted <= outside(*problem_for(dtype, **options), **faults), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_are_small_beside_the_results(dtype: torch.dtype) -> None:
    """Half of the limits lie below 10,000 u of the sums and 32 u of the storage, beside a typical result."""
    _, truth, limits = problem_for(dtype)
    share = 10_000 * roundoff(sum_dtype(dtype)) + (32 * roundoff(dtype) if dtype.itemsize == 2 else 0.0)
    for name, want in {"out": truth.out, **truth.grads}.items():
        assert float(limits[name].median()) < share * float(want.square().mean().sqrt()), name


def test_growth_is_linear_for_few_terms_and_a_root_for_many() -> None:
    unit = roundoff(torch.float32)
    assert growth(1, torch.float32) == unit and growth(16, torch.bfloat16) == 16 * unit
    assert growth(10_000, torch.float16) == 600 * unit


def test_assert_within_sees_shapes_nan_and_infinities() -> None:
    one = torch.ones(2, 3)
    assert_within(one, one, 0.0)
    bad: list[tuple[Tensor, Tensor, Callable[[], float] | float]] = [
        (one, torch.ones(3, 2), 1.0),
        (one.clone().fill_(torch.nan), one, 1.0),
        (one, one.clone().fill_(torch.nan), 1.0),
        (one.clone().fill_(torch.inf), one, 1.0),
        (one.clone().fill_(torch.inf), one.clone().fill_(-torch.inf), 1.0),
        (one + 0.2, one, 0.1),
    ]
    for got, want, limit in bad:
        with pytest.raises(AssertionError):
            assert_within(got, want, limit)


def test_reference_is_inside_its_own_limits_in_float32() -> None:
    problem, truth, limits = problem_for(torch.float32)
    out, lse, _ = reference.attention(problem.query, problem.key, problem.value)
    assert_within(out, truth.out, limits["out"])
    assert_within(lse, truth.lse, limits["lse"])
