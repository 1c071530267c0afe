"""Attention that returns its weights: out and lse are those of attention, weights are right, and so are gradients that
come through all three at once."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from cases import DTYPES, Case, Problem, build, exact, kept, merged_bias, ops
from switches import cpu_capability, threads
from tolerances import Exact, assert_within, attention_limits, double_limit
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap
from tracing import Operators

import mha_ext
from mha_ext import reference

CAPABILITIES = mha_ext.available_cpu_capabilities()
# One block or several, of few queries or of many; tiles that the causal order or padding skips; rows that see nothing.
GRID = [
    Case(1, 1, 1, 1, 1, 4),
    Case(1, 3, 3, 128, 70, 8, causal=1),
    Case(2, 4, 2, 17, 33, 8, 5, mask="bool:B1TS", padding="bool"),
    Case(9, 2, 1, 70, 130, 24, causal=2, mask="float32:1HTS"),
    Case(1, 4, 1, 200, 257, 16, dropout_p=0.3, causal=1, layout="packed"),
    Case(2, 2, 2, 65, 66, 16, mask="bool:BHTS", padding="float32", appended=2),
    Case(1, 2, 2, 130, 40, 8, causal=2),
    Case(1, 2, 2, 600, 64, 8, scale=-1.5),
]


def with_identity(problem: Problem) -> Exact:
    """The exact answer for values that are the identity: its output is the weights after dropout, each with a limit."""
    case = problem.case
    twin = Problem(**{**problem.__dict__})
    twin.value = torch.eye(case.keys, dtype=case.dtype).expand(case.B, case.heads_kv, -1, -1)
    twin.grad_out = torch.zeros(case.B, case.H, case.T, case.keys, dtype=case.dtype)
    return exact(twin)


def check_weights(problem: Problem) -> None:
    out = ops.attention(*problem.tensors, **problem.options)[0]
    real = exact(problem)
    limits = attention_limits(real, problem.case.dtype, problem.case.heads_kv, grads=False)
    truth = with_identity(problem)
    limit = attention_limits(truth, problem.case.dtype, problem.case.heads_kv, grads=False)["out"]
    for average in (True, False):
        got = ops.attention_with_weights(*problem.tensors, **problem.options, average=average)
        assert_within(got[0], real.out, limits["out"])
        assert_within(got[1], real.lse, limits["lse"])
        assert got[0].stride() == out.stride()
        assert got[2].dtype == out.dtype and got[2].is_contiguous()
        assert_within(got[2], truth.out.mean(1) if average else truth.out, limit.amax(1) if average else limit)
        visible = (truth.weights > 0).any(1) if average else truth.weights > 0
        assert not got[2][~visible].any()


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(capability: str, dtype: torch.dtype, case: Case) -> None:
    with cpu_capability(capability):
        check_weights(build(Case(**{**case.__dict__, "dtype": dtype})))


def test_heads_that_skip_different_tiles() -> None:
    """A tile enters the mean with the first head that sees it; one that none sees is zero."""
    problem = build(Case(1, 4, 4, 40, 256, 8, mask="bool:BHTS"))
    problem.attn_mask.fill_(True)
    for head, tiles in enumerate([(0, 2), (0, 1), (0,), (0, 1, 2, 3)]):
        for tile in tiles:
            problem.attn_mask[:, head, :, 64 * tile : 64 * tile + 64] = False
    check_weights(problem)
    assert not ops.attention_with_weights(*problem.tensors)[2][..., :64].any()


@pytest.mark.parametrize("step", [20.0, -20.0, 3e4, -3e38])
def test_maxima_that_move_from_tile_to_tile(step: float) -> None:
    """What a tile was measured against is made up for, however far the row's maximum went since."""
    problem = build(Case(1, 2, 2, 30, 260, 8, mask="float32:1HTS"))
    ramp = torch.arange(260) // 64 * step
    problem.attn_mask += ramp.clamp(torch.finfo(torch.float32).min / 2, None)
    check_weights(problem)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("causal", [0, 1, 2])
def test_a_nan_shows_in_every_visible_pair_of_the_rows_that_see_it_and_nowhere_else(average: bool, causal: int) -> None:
    problem = build(Case(2, 3, 3, 100, 200, 8, mask="bool:BHTS", causal=causal, dropout_p=0.3))
    problem.key[:, 1, 130] = math.nan
    problem.query[0, 2, 17] = math.inf
    truth_bias = merged_bias(problem.case, problem.attn_mask, None)
    visible = truth_bias > -math.inf
    row = torch.zeros(2, 3, 100, dtype=torch.bool)
    row[:, 1] = visible[:, 1, :, 130]
    row[0, 2, 17] = True
    out, lse, weights = ops.attention_with_weights(*problem.tensors, **problem.options, average=average)
    want = row[..., None] & visible
    assert torch.equal(weights.isnan(), want.any(1) if average else want)
    assert not weights[~visible.any(1) if average else ~visible].any()
    plain = ops.attention(*problem.tensors, **problem.options)
    assert torch.equal(out.isnan(), plain[0].isnan()) and torch.equal(lse.isnan(), plain[1].isnan())


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("average", [True, False])
def test_thread_count_changes_no_bit(capability: str, average: bool) -> None:
    results = []
    for sizes in ((1, 2, 1, 200, 170), (3, 2, 2, 70, 64)):
        problem = build(Case(*sizes, 24, mask="float32:11TS", causal=1, dropout_p=0.2))
        with cpu_capability(capability):
            for count in (1, 2, 3):
                with threads(count):
                    results.append(ops.attention_with_weights(*problem.tensors, **problem.options, average=average))
        assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(results[0], r, strict=True))
        results = []


@pytest.mark.parametrize("sizes", [(1, 2, 2, 0, 5), (1, 2, 2, 5, 0), (0, 2, 1, 5, 5)], ids=str)
def test_nothing_to_attend(sizes: tuple[int, ...]) -> None:
    batch, heads, _, queries, keys = sizes
    problem = build(Case(*sizes, 4))
    for average, shape in ((True, (batch, queries, keys)), (False, (batch, heads, queries, keys))):
        out, lse, weights = ops.attention_with_weights(*problem.tensors, average=average)
        assert weights.shape == shape and not out.any() and bool((lse == -math.inf).all())


# ------------------------------------------------------------------------------------------------------------ gradients
def oracle(problem: Problem, average: bool) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Leaves, and out, lse and weights computed from them by the reference."""
    case = problem.case
    names = ("query", "key", "value", "attn_mask", "key_padding_mask")
    leaves = {
        n: x.detach().double().requires_grad_()
        for n in names
        if (x := getattr(problem, n)) is not None and x.is_floating_point()
    }
    query, key, value, mask, padding = (leaves.get(n, getattr(problem, n)) for n in names)
    key, value = (x.repeat_interleave(case.H // case.heads_kv, 1) for x in (key, value))
    keep = kept(case, problem.dropout_seed)
    bias = merged_bias(case, mask, padding)
    out, lse, weights = reference.attention(query, key, value, bias, keep=keep, dropout_p=case.dropout_p)
    return list(leaves.values()), (out, lse, weights.mean(1) if average else weights)


@pytest.mark.parametrize("sent", [(0, 1, 2), (0, 2), (1, 2), (2,), (0,)], ids=str)
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"dropout_p": 0.3}, {"mask": "float64:1HTS", "padding": "float64", "causal": 2, "appended": 1}, {"H_kv": 1}],
    ids=str,
)
def test_gradients_come_through_all_results(sent: tuple[int, ...], average: bool, options: dict[str, Any]) -> None:
    problem = build(Case(**{**Case(2, 4, None, 33, 70, 8, dtype=torch.float64).__dict__, **options}))
    wanted, want = oracle(problem, average)
    leaves = [x.detach().requires_grad_() if x is not None and x.is_floating_point() else x for x in problem.tensors]
    got = ops.attention_with_weights(*leaves, **problem.options, average=average)
    sent_gradients = [torch.randn_like(x) for x in want]
    results = []
    for inputs, outputs in (([x for x in leaves if x is not None and x.requires_grad], got), (wanted, want)):
        sent_outputs = [outputs[i] for i in sent]
        grads = torch.autograd.grad(sent_outputs, inputs, [sent_gradients[i] for i in sent], allow_unused=True)
        results.append([torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)])
    for a, b in zip(*results, strict=True):
        assert_within(a, b, double_limit(b, 1000))


def test_a_loss_that_ignores_the_weights_does_not_pay_for_their_gradient() -> None:
    module = mha_ext.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)
    forward, output, weights = ("mha_ext::attention_" + n for n in ("with_weights", "backward", "weights_backward"))
    for loss, want in (
        (lambda o, w: o.sum(), {forward, output}),
        (lambda o, w: w[..., 0].sum(), {forward, weights}),
        (lambda o, w: o.sum() + w[..., 0].sum(), {forward, output, weights}),
    ):
        with Operators() as operators:
            loss(*module(x, x, x)).backward()
        assert {name for name in operators.counts if name.startswith("mha_ext::")} == want


def doubles(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": 2, "num_appended_keys": 1}, {"dropout_p": 0.4}], ids=str)
def test_gradcheck_and_gradgradcheck(average: bool, options: dict[str, Any]) -> None:
    """Reverse and forward mode, batched gradients and second derivatives of out, lse and weights together."""
    columns = 5 - int(options.get("num_appended_keys", 0))
    inputs = (doubles(1, 2, 3, 4), doubles(1, 1, 5, 4, seed=1), doubles(1, 1, 5, 2, seed=2))
    inputs += (doubles(1, 2, 3, columns, seed=4), doubles(1, columns, seed=5))
    seed = torch.tensor([5]) if "dropout_p" in options else None

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = ops.attention_with_weights(*tensors, seed, **options, average=average)
        return results

    assert gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, inputs)


@pytest.mark.parametrize("average", [True, False])
def test_vmap_and_the_composition_of_other_devices_and_autocast(average: bool) -> None:
    problem = build(Case(2, 4, 2, 9, 14, 8, dtype=torch.float64, mask="float64:11TS", causal=1, dropout_p=0.3))
    options = {**problem.options, "average": average}
    want = ops.attention_with_weights(*problem.tensors, **options)
    other = ops.attention_with_weights.default.redispatch(
        torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *problem.tensors, **options
    )
    query, *rest = problem.tensors
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped = vmap(lambda q: ops.attention_with_weights(q, *rest, **options))(torch.stack([query, -query]))
    minus = ops.attention_with_weights(-query, *rest, **options)
    for i in range(3):
        assert other[i].stride() == want[i].stride()
        assert_within(other[i], want[i], double_limit(want[i], 100))
        assert_within(mapped[i], torch.stack([want[i], minus[i]]), double_limit(want[i], 100))
    lowered = [x.bfloat16() for x in problem.tensors[:3]]
    low = ops.attention_with_weights(*lowered, *problem.tensors[3:], **options)
    with torch.autocast("cpu", torch.bfloat16):
        cast = ops.attention_with_weights(*[x.float() for x in problem.tensors[:3]], *problem.tensors[3:], **options)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(cast, low, strict=True))
        many = vmap(lambda q: ops.attention_with_weights(q, *[x.float() for x in rest[:2]], *rest[2:], **options))(
            query.float()[None]
        )
    assert many[0].dtype == many[2].dtype == torch.bfloat16
