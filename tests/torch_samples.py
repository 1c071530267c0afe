"""PyTorch's own samples of attention, which ship with it in ``torch.testing._internal``, and how ours is compared on
them.

A call is the dict of a function's arguments by name. Its exact answer is float64 by the equations in
``mha_ext.reference``; PyTorch's functions in float64 have to agree with that. ``make_tensor`` draws from [-9, 9]: after
a projection the scores are thousands, the softmax is 0 or 1 and the exact gradients of queries and keys are differences
that cancel. There the limits of the error analysis in ``tolerances.py`` hold. On the same samples made ``tame``, where
every number counts, the limit is PyTorch's own rounding error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from cases import NONE, UPPER_LEFT, Case, Problem, exact, generator, kept
from tolerances import assert_within, attention_limits, bias_limit, peer_limit, roundoff
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from mha_ext.seeds import draw_seed

Call = dict[str, Any]
Answers = dict[str, Tensor]
Limits = dict[str, Any]
Ways = list[Callable[..., Any]]
Truth = Callable[[Call, torch.dtype], tuple[Answers, Limits]]
ATTENTION = ("query", "key", "value")
TAME = 2.0**-4  # a power of two: exact in every dtype
SEED = 11


def operator_entry(name: str) -> OpInfo:
    """The one entry of PyTorch's operator database with this name."""
    (entry,) = [entry for entry in op_db if entry.name == f"nn.functional.{name}"]
    return entry


def calls(name: str, positional: tuple[str, ...], requires_grad: bool = False) -> list[Call]:
    """Every sample of an operator in float64."""
    samples = operator_entry(name).sample_inputs("cpu", torch.float64, requires_grad=requires_grad)
    return [dict(zip(positional, (s.input, *s.args), strict=True)) | s.kwargs for s in samples]


def attention_calls() -> list[Call]:
    return calls("scaled_dot_product_attention", ATTENTION)


def change(call: Call, function: Callable[[Tensor], Tensor]) -> Call:
    """The call with every floating tensor changed."""
    floats = {n: x for n, x in call.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return call | {n: function(x.detach()) for n, x in floats.items()}


def tame(call: Call) -> Call:
    return change(call, lambda x: x * TAME)


def mild(call: Call) -> Call:
    """Between the two: a softmax that is not yet 0 or 1, gradients well above what ``gradcheck`` takes for 0."""
    return change(call, lambda x: x / 4)


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    return change(call, lambda x: x.to(dtype))


def leaves(call: Call) -> Answers:
    return {n: x for n, x in call.items() if isinstance(x, Tensor) and x.requires_grad}


def evaluate(function: Callable[..., Any], call: Call, dtype: torch.dtype) -> Answers:
    """Results and gradients of a function on a call in ``dtype``; the incoming gradient is the same for every dtype."""
    call = change(call, lambda x: x.to(dtype).requires_grad_())
    torch.manual_seed(SEED)
    results = function(**call)
    out, *rest = (results,) if isinstance(results, Tensor) else results
    wanted = leaves(call)
    grads = torch.autograd.grad(out, list(wanted.values()), grad_out(out, call), allow_unused=True)
    answers = {"out": out.detach()} | {f"result {i}": x.detach() for i, x in enumerate(rest, 1) if x is not None}
    return answers | {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}


def grad_out(out: Tensor, call: Call) -> Tensor:
    """Small enough for float16, rounded so that bfloat16 holds it exactly."""
    grad = torch.randn(out.shape, generator=generator(out.numel()), dtype=torch.float64)
    return grad.bfloat16().to(call["query"].dtype)


def dropout_seed(dropout_p: float) -> Tensor | None:
    """What ours draws in ``evaluate``."""
    torch.manual_seed(SEED)
    return draw_seed(torch.device("cpu")) if dropout_p > 0 else None


def compare(got: Answers, want: Answers, limits: Limits, dtype: torch.dtype) -> None:
    """Everything wanted is there, in ``dtype``, and within its limit; what overflows ``dtype`` is infinite."""
    missing = [n for n, x in want.items() if n not in got and bool((x != 0).any())]
    assert not missing, f"no gradient of {missing}"
    for name, x in got.items():
        rounded = want[name].to(dtype).double()
        assert x.dtype == dtype, f"{name}: {x.dtype}"
        assert_within(x, torch.where(rounded.isinf(), rounded, want[name]), limits[name], name)


def peer_limits(call: Call, dtype: torch.dtype, truth: Truth, ways: Ways) -> Limits:
    """Twice PyTorch's largest error on this sample (three times for gradients), and some u of the result's scale.

    In float64 the exact answer is no more exact than its peers. There it is PyTorch's error in float32, made smaller as
    the roundoff is, and half as much again for the error of the exact answer.
    """
    tried = torch.float32 if dtype == torch.float64 else dtype
    call = in_dtype(call, tried)
    want, _ = truth(call, tried)
    peers = [evaluate(way, call, tried) for way in ways]
    limits: Limits = {}
    for name, x in want.items():
        found = [p[name] for p in peers if name in p] or [torch.zeros_like(x)]
        limits[name] = max(peer_limit(p, x, tried) for p in found) * (1.5 if name in call else 1.0)
        if tried != dtype:
            limits[name] *= 1.5 * roundoff(dtype) / roundoff(tried)
    return limits


def strided(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on views with a NaN beside every number; gradients flow through the copy."""

    def spread(x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return torch.stack([torch.full_like(x, torch.nan), x], -1)[..., 1] if floating else x

    return lambda **call: function(**{n: spread(x) for n, x in call.items()})


def check_derivatives(function: Callable[..., Any], call: Call, fast: bool) -> None:
    """First and second derivatives against differences, in backward and forward mode and under vmap."""
    call = change(call, lambda x: x.clone().requires_grad_())
    names = list(leaves(call))

    def outputs(*tensors: Tensor) -> Any:
        torch.manual_seed(SEED)
        return function(**(call | dict(zip(names, tensors, strict=True))))

    inputs = tuple(call[n] for n in names)
    assert gradcheck(outputs, inputs, fast_mode=fast, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(outputs, inputs, fast_mode=fast, check_fwd_over_rev=True)


# ---------------------------------------------------------------------------------------------------------- attention
def attention_problem(call: Call, dtype: torch.dtype) -> tuple[Problem, dict[str, tuple[int, ...]]]:
    """The call as a problem with four axes, and the shapes of query, key and value spread over batch and heads."""
    query, key, value = (call[n] for n in ATTENTION)
    heads = [(1, *x.shape)[-3] for x in (query, key, value)]
    heads = heads if call.get("enable_gqa") else [max(heads)] * 3
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    spread = {n: (*batch, h, *call[n].shape[-2:]) for n, h in zip(ATTENTION, heads, strict=True)}
    q, k, v = (call[n].detach().expand(s).reshape(prod(batch), *s[-3:]) for n, s in spread.items())
    case = Case(
        q.shape[0], heads[0], heads[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], dtype,
        causal=UPPER_LEFT if call.get("is_causal") else NONE, dropout_p=call.get("dropout_p", 0.0),
        scale=call.get("scale"),
    )  # fmt: skip
    grad = grad_out(torch.empty(*batch, heads[0], case.T, case.dim_v), call).reshape(
        prod(batch), heads[0], case.T, case.dim_v
    )
    problem = Problem(case, q, k, v, grad, torch.zeros(grad.shape[:3]), call.get("attn_mask"))
    problem.dropout_seed = dropout_seed(case.dropout_p)
    return problem, spread


def attention_truth(call: Call, dtype: torch.dtype) -> tuple[Answers, Limits]:
    """The exact answers for a call whose numbers are rounded to ``dtype``, and their limits by the error analysis."""
    call = in_dtype(call, dtype)
    problem, spread = attention_problem(call, dtype)
    truth = exact(problem)
    limits = attention_limits(truth, dtype, problem.case.heads_kv)
    shape = (*spread["query"][:-1], spread["value"][-1])
    answers, bounds = {"out": truth.out.reshape(shape)}, {"out": limits["out"].reshape(shape)}
    for name, full in spread.items():
        answers[name], bounds[name] = (
            x.reshape(full).sum_to_size(call[name].shape) for x in (truth.grads[name], limits[name])
        )
        # an input that was spread has been summed over its copies, in the dtype of the input
        bounds[name] = bounds[name] + 4 * roundoff(dtype) * truth.grads[name].abs().reshape(full).sum_to_size(
            call[name].shape
        )
    if "attn_mask" in truth.grads:
        answers["attn_mask"] = truth.grads["attn_mask"]
        bounds["attn_mask"] = bias_limit(
            truth, limits["scores"], answers["attn_mask"].to(dtype), problem.case.keys, dtype
        )
    return answers, bounds


def composition(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """PyTorch's attention in pieces. It warns that the pairs to keep are an argument for tests."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Dropout mask should only be used for testing purposes")
        return torch._scaled_dot_product_attention_math(*args, **options)


def pytorch_attention(**call: Any) -> Tensor:
    """PyTorch's function; with dropout its composition, on the pairs that ours keeps, which it takes as an argument."""
    if call.get("dropout_p", 0.0) == 0.0:
        return F.scaled_dot_product_attention(**call)
    problem, spread = attention_problem(call, torch.float64)
    keep = kept(problem.case, problem.dropout_seed).reshape(*spread["query"][:-1], problem.case.keys)
    query, key, value = (call[n].expand(s) for n, s in spread.items())
    options = {n: call[n] for n in ("scale", "enable_gqa") if n in call}
    return composition(query, key, value, call.get("attn_mask"), call["dropout_p"], call["is_causal"], keep, **options)[
        0
    ]


def pytorch_fused_attention(**call: Any) -> Tensor:
    """PyTorch's fused kernel, which needs four axes and no gradient of the mask."""
    _, spread = attention_problem(call, torch.float64)
    query, key, value = (call[n].expand(s).reshape(-1, *s[-3:]) for n, s in spread.items())
    mask = call.get("attn_mask")
    options = {n: call[n] for n in ("is_causal", "scale", "enable_gqa") if n in call}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(query, key, value, None if mask is None else mask.detach(), **options)
    return out.reshape(*spread["query"][:-1], out.shape[-1])


def check_attention(function: Callable[..., Any], call: Call, dtype: torch.dtype) -> None:
    """Results and gradients of one call as the sample is, by the error analysis; and tame, beside PyTorch's errors."""
    ways = [pytorch_attention] + [pytorch_fused_attention] * (call.get("dropout_p", 0.0) == 0.0)
    want, limits = attention_truth(call, dtype)
    compare(evaluate(function, in_dtype(call, dtype), dtype), want, limits, dtype)
    call = tame(call)
    want, limits = attention_truth(call, dtype)
    got = evaluate(function, in_dtype(call, dtype), dtype)
    compare(got, want, limits, dtype)
    compare(got, want, peer_limits(call, dtype, attention_truth, ways), dtype)
