"""The operators with windows, ranges, biases, sinks and caps: as PyTorch sees them, with appended keys, in memory."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, Case, build, exact, ops, run
from operator_cases import KINDS, needing_gradients, problem_of
from tolerances import assert_within, attention_limits, double_limit, roundoff, sum_dtype
from torch import Tensor
from torch.autograd import gradcheck


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_composition_for_other_devices_gives_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    """The kernel that other devices use, run here on CPU tensors, forward and backward."""
    problem, options = problem_of(name, dtype, T=33, S=66)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    out, lse = ops.attention(*problem.tensors, **options)
    other = ops.attention.default.redispatch(keys, *problem.tensors, **options)
    limits = attention_limits(exact(problem), dtype, 2)  # of the plain call: scores are of the same size
    for a, b, limit in zip(other, (out, lse), (limits["out"].max(), limits["lse"].max()), strict=True):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        assert_within(a, b, 10 * float(limit))
    wanted = [True, True, True, False, False, "relative_bias" in options, "sink" in options]
    arguments = (problem.grad_out, problem.grad_lse, *problem.tensors, out, lse)
    backward = {
        **options,
        "output_mask": wanted,
        "rounding": ops.attention_for_backward(*problem.tensors, **options)[3],
    }
    ours = ops.attention_backward(*arguments, **backward)
    theirs = ops.attention_backward.default.redispatch(keys, *arguments, **backward)
    for a, b in zip(theirs, ours, strict=True):
        if b is not None and b.numel():
            kept = roundoff(dtype) * (
                roundoff(torch.bfloat16) if b.dtype != dtype else 1.0
            )  # what rounding left of out
            assert_within(a, b, 64 * max(kept, roundoff(sum_dtype(dtype))) * float(b.abs().max()))


@pytest.mark.parametrize("appended", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_appended_keys_are_seen_by_every_query(name: str, appended: int) -> None:
    """No window, range, order or bias reaches them: the same call with a float mask that says so."""
    problem, options = problem_of(name, torch.float64, T=20, S=70, appended=appended)
    queries, keys = 20, 70 - appended
    out, lse = ops.attention(*problem.tensors, **options)
    place = torch.arange(queries)[:, None] + (keys - queries if options["causal"] in (2, 3) else 0)
    key = torch.arange(keys)
    hidden = torch.zeros(2, 1, queries, keys, dtype=torch.bool)
    hidden |= (key > place) & (options["causal"] in (1, 2))
    hidden |= (key < place - options.get("window_left", 1000)) | (key > place + options.get("window_right", 1000))
    if "key_range" in options:
        first, end = options["key_range"][..., None].unbind(0)
        hidden |= ((key < first) | (key >= end))[:, None]
    mask = torch.zeros(2, 4, queries, keys, dtype=torch.float64)
    if "relative_bias" in options:
        mask = mask + options["relative_bias"].double()[:, :, key - torch.arange(queries)[:, None] + queries - 1]
    mask = torch.nn.functional.pad(mask.masked_fill(hidden, -torch.inf), (0, appended))
    rest = {n: options[n] for n in ("sink", "softcap") if n in options}
    want = ops.attention(problem.query, problem.key, problem.value, mask, **rest)
    for a, b in zip((out, lse), want, strict=True):
        assert_within(a, b, double_limit(b, 70))


def test_gradcheck_with_appended_keys() -> None:
    problem, options = problem_of("all", torch.float64, T=3, S=5, D=3, D_v=2, H=2, H_kv=1, appended=1)
    options["relative_bias"], options["sink"] = torch.randn(1, 2, 6).double(), torch.randn(2).double()
    inputs = [problem.query, problem.key, problem.value, options.pop("relative_bias"), options.pop("sink")]

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        return tuple(ops.attention(q, k, v, relative_bias=bias, sink=sink, **options))

    assert gradcheck(function, [x.requires_grad_() for x in inputs], check_forward_ad=True)


def test_inputs_are_never_written() -> None:
    problem, options = problem_of("all", T=33, S=70)
    before = {n: x.clone() for n, x in {**problem.__dict__, **options}.items() if isinstance(x, Tensor)}
    leaves = needing_gradients(options)
    out, lse = ops.attention(*needing_gradients(problem.tensors), **leaves)
    torch.autograd.backward((out, lse), (problem.grad_out, problem.grad_lse))
    after = {**problem.__dict__, **options}
    assert all(torch.equal(after[n], x) for n, x in before.items()) and len(before) > 6


def test_options_that_say_nothing_change_no_bit() -> None:
    """A range of all keys, a bias of zeros, a sink of minus infinity and sides beyond every key."""
    problem = build(Case(2, 4, 2, 33, 70, 16, causal=1))
    want = run(problem)
    nothing = {"window_left": 1000, "window_right": 1000}
    nothing["key_range"] = torch.tensor([0, 70])[:, None, None].expand(2, 1, 33).int().contiguous()
    nothing["relative_bias"], nothing["sink"] = torch.zeros(1, 1, 102), torch.full((4,), -torch.inf)
    for name, value in nothing.items():
        out, lse = ops.attention(*problem.tensors, **problem.options, **{name: value})
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1]), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sink_for_each_sample(dtype: torch.dtype) -> None:
    """(B, H) sinks give what each sample gives by itself with its own, to the bit, and so do their gradients."""
    problem, options = problem_of("bias", dtype, T=33, S=70)
    sink = torch.randn(2, 4)

    def run_on(samples: slice, sink: Tensor) -> tuple[Tensor, ...]:
        tensors = [None if x is None else x[samples].detach().requires_grad_() for x in problem.tensors]
        sink = sink.requires_grad_()
        rest = {n: x[samples] if isinstance(x, Tensor) and x.shape[0] == 2 else x for n, x in options.items()}
        out, lse = ops.attention(*tensors, sink=sink, **rest)
        sent = (problem.grad_out[samples], problem.grad_lse[samples])
        return out, lse, *torch.autograd.grad((out, lse), (*tensors[:3], sink), sent)

    together = run_on(slice(0, 2), sink.clone())
    for b in range(2):
        alone = run_on(slice(b, b + 1), sink[b].clone())
        for x, y in zip(together[:-1], alone[:-1], strict=True):
            assert torch.equal(x[b : b + 1], y)
        assert_within(together[-1][b], alone[-1], double_limit(alone[-1], 33) if dtype == torch.float64 else 1e-3)
