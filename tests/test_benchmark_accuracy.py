"""The benchmark's table of errors: exact results, what is counted, and what passes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("rich")

import mha_ext
from benchmarks import accuracy, problems
from benchmarks.accuracy import Cell, cell_from_json
from benchmarks.goals import evaluate
from benchmarks.report import Run, closing_tables
from benchmarks.roofs import Roofs
from mha_ext import reference

MACHINE = {"cpu_capability": "avx512", "threads": 2}
SHAPE = (1, 3, 33, 8)
CELL = Cell("1,1,1,1", "full", "fp32", "output", (2.0, 1.0), (2.0, 1.0))


def written_out(problem: problems.Problem) -> list[torch.Tensor]:
    """Output and gradients in float64 by autograd, dropout and masks put in by hand."""
    leaves = [tensor.double().requires_grad_() for tensor in problem.arguments]
    length = problem.arguments[0].shape[-2]
    allowed = torch.ones(length, length, dtype=torch.bool)
    allowed = allowed.tril() if problem.causal else allowed
    scores = leaves[0] @ leaves[1].mT / math.sqrt(leaves[0].shape[-1])
    if problem.mask is not None and problem.mask.dtype == torch.bool:
        allowed = allowed & problem.mask
    elif problem.mask is not None:
        scores = scores + problem.mask.double()
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    if problem.kept is not None:
        weights = weights * problem.kept / (1 - problem.dropout)
    output = weights @ leaves[2]
    return [output.detach(), *torch.autograd.grad(output, leaves, problem.grad_output.double())]


@pytest.mark.parametrize("option", problems.OPTIONS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_exact_results_are_those_of_the_equations(option: str, dtype: str) -> None:
    problem = problems.make_problem(SHAPE, dtype, option)
    assert problem.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    found = problems.equations(problem, np.float64)
    tensors = (*problem.arguments[2:], *problem.arguments[1::-1], problem.grad_output)
    for got, want, terms in zip(found, written_out(problem), tensors, strict=True):
        atol = 1e-13 * float(terms.abs().max())  # what cancels in the gradients of one-hot rows
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-11, atol=atol)


def test_exact_results_are_those_of_the_reference_and_wider_ones_stay_wide() -> None:
    problem = problems.make_problem(SHAPE, "fp64", "causal")
    leaves = [tensor.clone().requires_grad_() for tensor in problem.arguments]
    output, _, _ = reference.attention(*leaves, torch.ones(33, 33, dtype=torch.bool).tril())
    gradients = torch.autograd.grad(output, leaves, problem.grad_output)
    for got, want in zip(problems.equations(problem, np.float64), (output, *gradients), strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-12, atol=1e-14)
    if accuracy.wider("fp64") is not None:
        assert all(result.dtype == np.longdouble for result in problems.equations(problem, np.longdouble))


def test_options_are_what_they_say() -> None:
    peaked, large = (problems.make_problem((1, 2, 64, 32), "fp16", option) for option in ("peaked", "large"))
    query, key, _ = (tensor.double() for tensor in peaked.arguments)
    weights = (query @ key.mT / math.sqrt(32)).softmax(-1)
    assert float(weights.amax(-1).mean()) > 0.8
    query, key, _ = (tensor.double() for tensor in large.arguments)
    scores = query @ key.mT / math.sqrt(32)
    assert float(scores.amax(-1).min()) > 65504 and all(tensor.isfinite().all() for tensor in large.arguments)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("length", [33, 300])
def test_kept_pairs_are_those_of_our_call(dtype: str, length: int) -> None:
    """Exact results with these pairs are what our dropout computes, which other pairs would be far from."""
    problem = problems.make_problem((1, 2, length, 8), dtype, "dropout")
    share = float(problem.kept.double().mean())
    assert abs(share - 0.75) < 6 * math.sqrt(0.75 * 0.25 / problem.kept.numel())
    wanted = problems.equations(problem, np.float64)
    for way in (problems.ours, problems.composed):
        for got, want in zip(problems.computed(way, problem), wanted, strict=True):
            error = np.abs(problems.numbers(got, np.float64) - want).max() / np.abs(want).max()
            assert error < 8 * torch.finfo(problem.dtype).eps


def test_problems_draw_nothing_from_the_random_numbers_of_others() -> None:
    before = torch.get_rng_state()
    problem = problems.make_problem((1, 2, 17, 8), "bf16", "dropout")
    problems.computed(problems.ours, problem)
    assert torch.equal(torch.get_rng_state(), before)


def test_half_types_are_beside_both_ways_and_dropout_beside_the_one_that_takes_it() -> None:
    assert accuracy.torch_ways(problems.make_problem(SHAPE, "fp32", "full")) == (problems.default_way,)
    assert accuracy.torch_ways(problems.make_problem(SHAPE, "bf16", "bool")) == (problems.flash, problems.composed)
    assert accuracy.torch_ways(problems.make_problem(SHAPE, "fp16", "dropout")) == (problems.composed,)


def test_the_grid_holds_every_option_and_width_in_both_half_types() -> None:
    for dtype in ("bf16", "fp16"):
        mine = [(shape, option) for shape, kind, option in accuracy.grid() if kind == dtype]
        assert {option for _, option in mine} == set(problems.OPTIONS)
        assert {shape[2] for shape, _ in mine} >= {64, 197, 512, 2048} and {s[3] for s, _ in mine} == {32, 64, 128}
        assert {option for _, kind, option in accuracy.grid(quick=True) if kind == dtype} == set(problems.OPTIONS)


def test_errors_are_counted_in_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that is off by a known amount shows it, next to one that is as good as can be."""
    torch_attention = torch.nn.functional.scaled_dot_product_attention

    def rounded(query, key, value, mask=None, dropout_p=0.0, is_causal=False):  # type: ignore[no-untyped-def]
        leaves = (leaf.double() for leaf in (query, key, value))
        return torch_attention(*leaves, mask, dropout_p, is_causal).to(query.dtype)

    def coarse(*arguments, **options):  # type: ignore[no-untyped-def]
        return rounded(*arguments, **options) * (1 + 2**-14)

    monkeypatch.setattr(problems.F, "scaled_dot_product_attention", coarse)
    monkeypatch.setattr(mha_ext.functional, "scaled_dot_product_attention", rounded)
    grid = [(shape, dtype, option) for shape, dtype, option in accuracy.grid(quick=True) if dtype == "fp32"]
    monkeypatch.setattr(accuracy, "grid", lambda quick: grid)
    cells = accuracy.measure(quick=True)
    assert {cell.result for cell in cells} == set(accuracy.RESULTS)
    for cell in cells:
        assert max(cell.ours) <= 1.0 and cell.passes and cell.open == (0.0, 0.0)
        assert cell.torch[0] == pytest.approx(2**-14 / 2**-24, rel=0.01)


def test_each_number_is_beside_the_better_way() -> None:
    """(head, way, largest and mean square): one way has the lower largest error, the other the lower square."""
    errors = np.array([[[2.0, 4.0], [3.0, 9.0], [5.0, 1.0]], [[4.0, 4.0], [5.0, 9.0], [7.0, 1.0]]])
    cell = Cell("", "", "bf16", "", **accuracy._cell(errors, np.array([[0.5, 0.04], [1.5, 0.04]])))
    assert (cell.ours, cell.torch) == ((3.0, 2.0), (4.0, 1.0))
    assert cell.chance == 0.0 and cell.open == (1.0, pytest.approx(0.2))
    assert cell.allowed == (5.0, pytest.approx(1.2)) and cell.share == pytest.approx(2 / 1.2)


def test_what_is_not_a_number_never_helps_us() -> None:
    good, bad = [1.0, 1.0], [math.nan, math.nan]
    nothing = np.zeros((2, 2))
    theirs = Cell("", "", "fp16", "", **accuracy._cell(np.array([[good, bad, good]] * 2), nothing))
    assert theirs.torch == (1.0, 1.0) and theirs.passes
    assert Cell("", "", "fp16", "", **accuracy._cell(np.array([[good, bad, bad]] * 2), nothing)).passes
    assert not Cell("", "", "fp16", "", **accuracy._cell(np.array([[bad, good, good]] * 2), nothing)).passes
    assert not Cell("", "", "fp16", "", **accuracy._cell(np.array([[bad, bad, bad]] * 2), nothing)).passes


def test_a_cell_passes_when_neither_error_is_larger() -> None:
    assert CELL.passes
    assert not replace(CELL, ours=(2.1, 0.5)).passes and not replace(CELL, ours=(1.0, 1.1)).passes
    assert replace(CELL, ours=(2.1, 0.5), chance=0.2).passes and not replace(CELL, ours=(2.1, 1.1), chance=0.2).passes
    assert not replace(CELL, ours=(math.nan, 0.5)).passes
    row = evaluate([], MACHINE, [CELL, replace(CELL, ours=(3.0, 1.0))])[-1]
    assert (row.figure, row.needed, row.verdict) == (1.0, 2.0, "short")


def test_exact_results_on_both_sides_pass_and_float32s_own_errors_are_open() -> None:
    exact = replace(CELL, ours=(0.0, 0.0), torch=(0.0, 0.0))
    assert exact.passes and exact.share == 0.0
    assert not replace(exact, ours=(1e-9, 0.0)).passes and replace(exact, ours=(1e-9, 0.0)).share == math.inf
    left = replace(exact, open=(0.5, 0.25))  # theirs cancels exactly: it counts as right to float32
    assert replace(left, ours=(1.0, 0.5)).passes
    assert not replace(left, ours=(1.01, 0.5)).passes and not replace(left, ours=(1.0, 0.51)).passes


def test_verdicts_are_counted_by_dtype_and_cells_survive_their_file() -> None:
    half = replace(CELL, dtype="bf16", open=(0.1, 0.1))
    rows = evaluate([], MACHINE, [CELL, half, replace(half, ours=(9.0, 9.0))])
    found = [(row.where, row.figure, row.needed, row.verdict) for row in rows]
    assert found == [("accuracy fp32", 1.0, 1.0, "pass"), ("accuracy bf16", 1.0, 2.0, "short")]
    assert cell_from_json({**half.__dict__, "ours": [2.0, 1.0], "torch": [2.0, 1.0], "open": [0.1, 0.1]}) == half


def test_rows_of_half_types_that_pass_stand_together_and_short_ones_alone() -> None:
    cells = [replace(CELL, dtype="bf16", shape=f"1,1,{n},8", ours=(n / 100, 0.5)) for n in (64, 197, 96)]
    run = Run({**MACHINE, "threads": 2}, "the command", Roofs(1e9), accuracy=[*cells, CELL])
    (table, _) = closing_tables(run)
    assert [row[0] for row in table.rows] == ["all 3; worst: 1,1,197,8", "1,1,1,1"]
    run.accuracy[0] = replace(cells[0], ours=(3.0, 0.5))
    assert [row[-1] for row in closing_tables(run)[0].rows] == ["short", "pass", "pass", "pass"]


def test_errors_of_results_that_cancel_are_counted_against_what_they_are_a_sum_of() -> None:
    problem = problems.make_problem((1, 1, 8, 8), "bf16", "large")
    unit = torch.finfo(torch.bfloat16).eps / 2
    wanted = problems.equations(problem, np.float64)
    sizes = accuracy._sizes(problem, wanted, unit)
    query, key, _ = (float(tensor.abs().max()) for tensor in problem.arguments)
    assert sizes[1:3] == [unit * key, unit * query]
    assert sizes[0] == np.abs(wanted[0]).max() and sizes[3] == np.abs(wanted[3]).max()
