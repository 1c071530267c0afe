"""Few queries against many keys: the kernels whose lanes run along the head, and the keys cut into ranges of 512."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import DTYPES, LAYOUTS, Case, Problem, build, check, ops, run
from switches import cpu_capability, threads
from tolerances import assert_within, roundoff
from torch import Tensor

import mha_ext

CAPABILITIES = mha_ext.available_cpu_capabilities()

# Every option, alone and beside others; one range and several, tiles with a rest; rows that fill no vector, some and
# one with a rest; groups of heads, also more of them than run together.
GRID = [
    Case(1, 2, 2, 1, 1, 1, 1),
    Case(2, 4, 4, 1, 600, 64, 64),
    Case(1, 4, 2, 3, 130, 40, 24, mask="bool:B1TS", causal=2),
    Case(2, 4, 1, 2, 33, 17, 72, padding="bool", dropout_p=0.3),
    Case(1, 2, 1, 7, 1100, 8, 5, mask="float32:1HTS", padding="float32", causal=2, appended=2),
    Case(2, 2, 2, 8, 520, 24, 40, mask="bool:BH1S", layout="bthd"),
    Case(2, 6, 2, 4, 7, 5, 3, mask="float32:11TS", causal=1, layout="packed"),
    Case(1, 3, 1, 5, 140, 33, 80, mask="bool:1HTS", padding="bool", dropout_p=0.1, layout="columns"),
    Case(1, 80, 1, 1, 20, 16, 16, mask="bool:1H1S", dropout_p=0.5),
    Case(1, 24, 2, 6, 150, 9, 20, mask="float32:BHTS", causal=2, layout="tbhd"),
    Case(1, 2, 2, 3, 1, 16, 128, appended=1, scale=-1.5, layout="stepped"),
]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def everything(problem: Problem) -> list[Tensor]:
    out, lse, grads = run(problem)
    return [out, lse, *grads.values()]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(capability: str, dtype: torch.dtype, case: Case) -> None:
    with cpu_capability(capability):
        check(build(replace(case, dtype=dtype)))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_sides_of_where_queries_are_few(capability: str, dtype: torch.dtype) -> None:
    with cpu_capability(capability):
        for queries in range(1, 19):
            check(build(Case(1, 2, 1, queries, 70, 40, 24, dtype, "bool:11TS", causal=2, dropout_p=0.2)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("queries", [1, 3])
def test_layouts(layout: str, queries: int) -> None:
    for dim, dim_v in ((40, 16), (7, 65)):
        check(build(Case(2, 4, 2, queries, 137, dim, dim_v, torch.float32, causal=2, layout=layout)))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("options", [{}, {"mask": "float32:11TS", "causal": 2, "dropout_p": 0.2}], ids=str)
def test_thread_count_changes_no_bit(capability: str, options: dict[str, object]) -> None:
    results = []
    with cpu_capability(capability):
        for count in (1, 2, 3):
            with threads(count):
                results.append([x for t in (1, 3) for x in everything(build(Case(1, 2, 1, t, 1700, 24, **options)))])
    assert equal(results[0], results[1]) and equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_head_alone_gives_the_same_as_among_others(dtype: torch.dtype, queries: int) -> None:
    """Heads that run together, and the batch beside them, change no bit, forward or backward."""
    problem = build(Case(2, 6, 2, queries, 1100, 24, 40, dtype, "bool:B1TS", causal=2))
    shared = everything(problem)
    key, value = (x.repeat_interleave(3, 1) for x in (problem.key, problem.value))
    for b in range(2):
        for h in range(6):
            tensors = [x[b : b + 1, h : h + 1] for x in (problem.query, key, value, problem.grad_out, problem.grad_lse)]
            case = replace(problem.case, B=1, H=1, H_kv=1)
            out, lse, grads = run(Problem(case, *tensors, problem.attn_mask[b : b + 1]))
            alone = [out, lse, grads["query"]]
            assert equal(alone, [x[b : b + 1, h : h + 1] for x in shared[:3]])


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranges_of_which_nothing_is_seen(capability: str, dtype: torch.dtype) -> None:
    """Ranges are 512 keys or a little less: the first, one in the middle, the last hidden, for one query or all."""
    with cpu_capability(capability):
        for first, last in ((0, 600), (500, 1250), (1000, 1700), (0, 1700)):
            for queries in (slice(1, 2), slice(None)):
                problem = build(Case(1, 2, 2, 3, 1700, 16, dtype=dtype, mask="bool:1HTS"))
                problem.attn_mask[:, :, queries, first:last] = False
                check(problem)
                problem.attn_mask = torch.where(problem.attn_mask, 0.5, -math.inf).to(dtype)
                check(problem)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 3])
def test_what_lies_behind_masks_reaches_nothing(capability: str, dtype: torch.dtype, queries: int) -> None:
    """NaN and infinity at hidden keys change no bit of anything, in tiles that are hidden in part and as a whole."""
    problem = build(Case(2, 4, 2, queries, 700, 24, 40, dtype, "bool:B1TS", causal=2, dropout_p=0.2))
    hidden = torch.arange(700) % 11 == 0
    hidden[200:420] = True
    problem.attn_mask[..., hidden] = False
    with cpu_capability(capability):
        clean = everything(problem)
        problem.key[:, :, hidden], problem.value[:, :, hidden] = math.nan, math.inf
        assert equal(clean, everything(problem))


def test_a_query_that_sees_nothing_brings_its_nan_to_no_key() -> None:
    """dK and dV of keys take nothing from a query that does not see them, whatever it and its gradient hold."""
    problem = build(Case(1, 2, 1, 3, 150, 24, 40, mask="bool:11TS"))
    problem.attn_mask[:, :, 1, 20:] = False
    clean = run(problem)[2]
    problem.query[:, :, 1], problem.grad_out[:, :, 1] = math.nan, math.inf
    dirty = run(problem)[2]
    for name in ("key", "value"):
        assert torch.equal(clean[name][:, :, 20:], dirty[name][:, :, 20:])
    assert torch.equal(clean["query"][:, :, ::2], dirty["query"][:, :, ::2])


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_dropout_keeps_the_same_pairs(capability: str) -> None:
    """As many queries do, which run in another kernel: a pair is kept or not whatever runs beside it."""
    keys, seed = 600, torch.tensor([9])
    value = torch.eye(keys).expand(1, 2, keys, keys)
    with cpu_capability(capability):
        kept = [
            ops.attention(torch.zeros(1, 2, n, 4), torch.zeros(1, 2, keys, 4), value, dropout_seed=seed, dropout_p=0.4)
            for n in (3, 70)
        ]
    assert torch.equal(kept[0][0] != 0, kept[1][0][:, :, :3] != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("low", ["min", -1e30])
def test_rows_far_below_zero_attend_to_all_alike_also_backward(dtype: torch.dtype, low: str | float) -> None:
    """Beside a huge negative mask scores vanish: every weight is 1/S and dV the mean of dO, whatever digits the
    log-sum-exp has lost."""
    problem = build(Case(1, 2, 2, 3, 700, 8, dtype=dtype))
    problem.grad_lse = torch.zeros_like(problem.grad_lse)
    problem.attn_mask = torch.full((1, 1, 3, 700), torch.finfo(dtype).min if low == "min" else low, dtype=dtype)
    out, lse, grads = run(problem)
    mean = problem.value.double().mean(2, keepdim=True).expand(1, 2, 3, 8)
    share = 200 * roundoff(torch.float64 if dtype == torch.float64 else torch.float32) + 8 * roundoff(dtype)
    assert_within(out, mean, share * float(problem.value.abs().max()), "out")
    want = (problem.grad_out.double() / 700).sum(2, keepdim=True).expand(1, 2, 700, 8)
    assert_within(grads["value"], want, share * float(want.abs().max()), "value")
    assert bool(lse.isfinite().all())
