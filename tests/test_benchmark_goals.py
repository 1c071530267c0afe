"""The benchmark's goals, the cases that they need, what is measured beside them, and its table of errors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("rich")

from benchmarks import goals, presets
from benchmarks.accuracy import Cell
from benchmarks.cases import Case
from benchmarks.goals import Goal, Row, evaluate
from benchmarks.inputs import make_inputs
from benchmarks.measure import Entry, Result, measure_case
from benchmarks.peers import own
from benchmarks.processes import Workers
from benchmarks.processors import allot
from benchmarks.report import Run, closing_tables, markdown, tables
from benchmarks.roofs import Roofs
from benchmarks.tiles import visible, visible_share
from benchmarks.timing import Budget, Summary
from benchmarks.work import timed_work

MACHINE = {
    "processor": "Abacus", "processors_available": 2, "threads": 2, "load_before": 0.0, "date": "today",
    "cpu_capability": "avx512", "torch_cpu_capability": "AVX512", "mha_ext": "0", "torch": "2", "python": "3",
}  # fmt: skip
MIB = 1 << 20
CORE = Case("core", "forward", batch=8, heads=8, length=512, head_dim=64)


def constant(value: float) -> Summary:
    return Summary(value, value, value)


def timed(case: Case, **ratios: float) -> Result:
    names = {"sdpa": "F.sdpa", "mha": "nn.MHA", "default": "nn.MHA (default call)", "hand": "linear+sdpa+linear"}
    entries = [
        Entry(names.get(name) or own.comparisons(case)[0].name, seconds=constant(ratio), ratio=constant(ratio))
        for name, ratio in ratios.items()
    ]
    return Result(case, Entry("mha_ext", seconds=constant(1.0)), entries)


def weighed(case: Case, ours: int, other: int | None = None) -> Result:
    entries = []
    if other is not None:
        entries.append(Entry(own.comparisons(case)[0].name, peak_bytes=other, ratio=constant(other / ours)))
    return Result(case, Entry("mha_ext", peak_bytes=ours), entries)


def verdicts(result: Result, **machine: object) -> dict[str, tuple[float | None, float, str]]:
    rows = evaluate([result], {**MACHINE, **machine})
    return {row.goal: (row.figure, row.needed, row.verdict) for row in rows}


def test_a_goal_is_reached_at_its_figure_and_not_before():
    assert Row("", "", 1.5, 1.5).verdict == Row("", "", 1.5, 1.5, at_most=True).verdict == "pass"
    assert Row("", "", 1.49, 1.5).verdict == Row("", "", 1.51, 1.5, at_most=True).verdict == "short"
    assert Row("", "", None, 1.5).verdict == "not measured"


def test_core_cells_are_those_of_the_prototype_less_a_tenth():
    assert verdicts(timed(CORE, sdpa=1.13)) == {"core vs F.sdpa": (1.13, pytest.approx(1.25 * 0.9), "pass")}
    assert verdicts(timed(replace(CORE, causal=True), sdpa=1.8))["core vs F.sdpa"][1:] == (
        pytest.approx(2.1 * 0.9),
        "short",
    )
    backward = timed(replace(CORE, task="backward", causal=True), sdpa=2.2)
    assert verdicts(backward)["core vs F.sdpa"][1:] == (pytest.approx(2.4 * 0.9), "pass")


def test_fewer_lanes_need_only_be_as_fast_as_the_peer():
    result = timed(replace(CORE, causal=True), sdpa=1.05)
    assert verdicts(result, cpu_capability="avx2")["core vs F.sdpa"] == (1.05, 1.0, "pass")
    assert verdicts(result)["core vs F.sdpa"][2] == "short"
    assert verdicts(result, cpu_capability="avx512_bf16")["core vs F.sdpa"][2] == "short"
    alone = timed(replace(CORE, batch=1, heads=1, length=4096, beside="1 thread"), own=1.5)
    assert verdicts(alone, cpu_capability="avx2")["one head, 1 thread over all threads"] == (1.5, 1.6, "short")


def test_bfloat16_has_goals_of_its_own_with_amx():
    goal, result = "core, bf16 with AMX, vs F.sdpa", timed(replace(CORE, task="backward", dtype="bf16"), sdpa=3.0)
    assert verdicts(result, cpu_capability="amx")[goal] == (pytest.approx(3.0), pytest.approx(4.1 * 0.9), "short")
    assert goal not in verdicts(result, cpu_capability="avx512_bf16")


def test_the_strongest_peer_is_the_one_that_is_nearest_and_never_ourselves():
    short = replace(CORE, batch=1, length=128)
    result = timed(short, sdpa=1.8, hand=0.9)
    assert verdicts(result)["core, T up to 128, vs the strongest peer"] == (0.9, 1.0, "short")
    assert "core, T up to 128, vs the strongest peer" not in verdicts(timed(CORE, sdpa=2.0))
    token = Case("layer", "forward", batch=1, heads=8, length=1, head_dim=16, beside="two linears")
    assert verdicts(timed(token, mha=1.4, own=0.7)) == {
        "layer vs the strongest peer": (1.4, 1.0, "pass"),
        "one token over its two linears": (pytest.approx(1 / 0.7), 1.5, "pass"),
    }


def test_threads_are_not_judged_on_one():
    alone = timed(replace(CORE, batch=1, heads=1, length=4096, beside="1 thread"), own=1.0)
    goal = "one head, 1 thread over all threads"
    assert verdicts(alone, threads=1)[goal] == (None, 1.6, "not measured")
    assert verdicts(alone)[goal] == (1.0, 1.6, "short")


def test_a_missing_peer_is_not_measured():
    assert verdicts(timed(CORE))["core vs F.sdpa"][2] == "not measured"


def test_masked_time_is_charged_to_visible_blocks():
    case = replace(CORE, mask="half padding", beside="unmasked")
    found = verdicts(timed(case, sdpa=3.0, own=1.8))
    assert found["masks vs F.sdpa with the same"] == (3.0, 1.2, "pass")
    figure, needed, verdict = found["masks, for each pair in a visible block, over unmasked"]
    assert figure == pytest.approx(1 / 1.8 / 0.5) and (needed, verdict) == (1.15, "pass")
    assert verdicts(timed(case, own=1.7))["masks, for each pair in a visible block, over unmasked"][2] == "short"


def test_memory_goals_count_in_mebibytes_masks_and_results():
    long = Case("core", "memory", batch=1, heads=8, length=4096, head_dim=64)
    assert verdicts(weighed(long, 48 * MIB)) == {"peak of forward and backward, MiB": (48.0, 48.0, "pass")}
    assert verdicts(weighed(replace(long, length=16384), 193 * MIB))["peak of forward and backward, MiB"][2] == "short"

    mask = replace(long, batch=2, length=512, mask="bias", mask_shape="HTS", beside="mask not trained")
    assert verdicts(weighed(mask, (10 + 4 + 16) * MIB, 10 * MIB)) == {
        "mask's gradient, extra bytes over the mask's": (2.0, 2.0, "pass")
    }
    assert verdicts(weighed(replace(mask, mask_shape="B11S"), 15 * MIB, 10 * MIB))[
        "mask's gradient, extra bytes over the mask's"
    ] == (pytest.approx(MIB / (2 * 512 * 4)), 2.0, "short")

    layer = Case("layer", "memory", 2, 4, 256, 16, need_weights=True, average_weights=False, beside="no weights")
    results = 4 * (2 * 256 * 64 + 2 * 4 * 256 * 256)
    goal = "weights, extra bytes over output and weights"
    assert verdicts(weighed(layer, MIB + results, MIB))[goal] == (1.0, 1.2, "pass")
    averaged = weighed(replace(layer, average_weights=True), MIB + results, MIB)
    assert verdicts(averaged)[goal] == (pytest.approx(results / (4 * (2 * 256 * 64 + 2 * 256 * 256))), 1.2, "short")

    dropout = replace(long, dropout=0.1, beside="no dropout")
    assert verdicts(weighed(dropout, 45 * MIB, 40 * MIB))["dropout, bytes over those without"][2] == "short"


def test_many_cells_of_one_goal_are_one_row_until_one_is_short():
    cases = [replace(CORE, head_dim=width) for width in (40, 72, 80)]
    text = "core, odd sizes, vs F.sdpa"
    good = [timed(case, sdpa=ratio) for case, ratio in zip(cases, (1.5, 1.1, 1.2), strict=True)]
    (row,) = evaluate(good, MACHINE)
    assert (row.goal, row.where, row.figure) == (text, f"all 3; worst: {cases[1].name}", 1.1)
    rows = evaluate([*good, timed(replace(CORE, head_dim=96), sdpa=0.9)], MACHINE)
    assert [row.verdict for row in rows] == ["pass", "pass", "pass", "short"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_types_are_judged_against_the_peer_and_against_ours_in_float32(dtype):
    case = replace(CORE, dtype=dtype, beside="float32")
    over, core = "bf16, fp16, time over ours in float32", f"core, {dtype}, vs F.sdpa"
    assert verdicts(timed(case, sdpa=1.0, own=1.0)) == {
        core: (1.0, 1.0, "pass"),
        over: (1.0, 1.05, "pass"),
    }
    worse = verdicts(timed(replace(case, task="backward", causal=True), sdpa=0.99, own=0.9))
    assert worse[core][2] == worse[over][2] == "short"
    memory = replace(case, task="memory", length=4096)
    goal = "bf16, fp16, bytes over ours in float32"
    assert verdicts(weighed(memory, 10 * MIB, 10 * MIB))[goal] == (1.0, 1.0, "pass")
    assert verdicts(weighed(memory, 11 * MIB, 10 * MIB))[goal][2] == "short"


def test_a_layer_in_bfloat16_has_goals_for_training_and_inference():
    case = Case("layer", "training", 1, 8, 128, 64, dtype="bf16")
    assert verdicts(timed(case, mha=1.9, default=1.89, hand=1.6)) == {
        "layer, bf16, vs nn.MHA": (1.9, pytest.approx(1.9), "pass"),
        "layer, bf16, vs nn.MHA (default call)": (1.89, pytest.approx(1.9), "short"),
        "layer, bf16, vs the strongest other": (1.6, 1.6, "pass"),
    }
    assert verdicts(timed(replace(case, task="forward"), mha=1.15, default=1.13, hand=0.99)) == {
        "layer, bf16, vs nn.MHA": (1.15, pytest.approx(1.14), "pass"),
        "layer, bf16, vs nn.MHA (default call)": (1.13, pytest.approx(1.14), "short"),
        "layer, bf16, vs the strongest other": (0.99, 1.0, "short"),
    }
    assert verdicts(timed(case, mha=1.5, default=1.4, hand=1.7))["layer, bf16, vs the strongest other"][0] == 1.7
    weights = verdicts(timed(replace(case, need_weights=True), mha=1.9))
    assert weights == {"layer, bf16, with weights vs nn.MHA with weights": (1.9, pytest.approx(1.9), "pass")}


def test_a_variant_is_judged_beside_other_ways_and_our_own_without_it():
    case = Case("variant", "backward", 1, 8, 2048, 64, variant="window", window=256, beside="a mask")
    assert verdicts(timed(case, sdpa=0.9, own=1.1)) == {
        "variants vs the best other way": (0.9, 1.0, "short"),
        "variants, time and bytes over ours with a mask": (pytest.approx(1 / 1.1), 1.05, "pass"),
    }
    result = weighed(replace(case, task="memory"), 10 * MIB, 9 * MIB)
    result.peers.append(Entry("F.sdpa", peak_bytes=20 * MIB, ratio=constant(2.0)))
    assert verdicts(result) == {
        "variants, bytes of the best other way over ours": (2.0, 1.0, "pass"),
        "variants, time and bytes over ours with a mask": (pytest.approx(10 / 9), 1.05, "short"),
    }


def test_every_core_and_layer_shape_is_measured_in_half_types():
    timed = [case for case in presets.preset("goals") if case.task != "memory" and case.level != "variant"]
    cases = [case for case in timed if case.dtype in ("bf16", "fp16")]
    core = {(c.batch, c.heads, c.length, c.head_dim, c.task, c.causal, c.dtype) for c in cases if c.level == "core"}
    tasks = [(t, causal, d) for t in ("forward", "backward") for causal in (False, True) for d in ("bf16", "fp16")]
    assert core == {(*shape, *task) for shape in presets.CORE_SHAPES for task in tasks}
    layer = {(c.batch, c.length, c.embed_dim, c.heads, c.task) for c in cases if c.level == "layer"}
    assert layer == {(*shape, task) for shape in presets.LAYER_SHAPES for task in ("forward", "training")}
    assert all(case.beside == "float32" for case in cases)


def test_every_goal_has_a_case_and_every_case_a_goal():
    cases = presets.preset("goals")
    for goal in goals.all_goals():
        assert any(goal.holds_for(case) for case in cases), goal.text
    for case in cases:
        assert any(goal.holds_for(case) for goal in goals.all_goals()), case.name


def test_every_comparison_with_ourselves_is_read_by_a_goal():
    """A goal's figure exists where the case, all peers and what stands beside it were measured."""
    for case in presets.preset("goals"):
        if case.task == "memory":
            result = weighed(case, 2 * MIB, MIB if case.beside else None)
            result.peers.append(Entry("F.sdpa", peak_bytes=MIB, ratio=constant(0.5)))
        else:
            result = timed(case, sdpa=1.0, mha=1.0, default=1.0, **({"own": 1.0} if case.beside else {}))
        figures = [goal.figure(result) for goal in goals.all_goals() if goal.holds_for(case)]
        assert figures and None not in figures, case.name


def test_odd_sizes_cover_every_length_and_width_both_ways():
    cases = [case for case in presets.preset("goals") if case.head_dim in presets.ODD_WIDTHS and case.level == "core"]
    for task in ("forward", "backward"):
        for causal in (False, True):
            chosen = [case for case in cases if (case.task, case.causal, case.mask) == (task, causal, "none")]
            assert {case.head_dim for case in chosen} == set(presets.ODD_WIDTHS)
            assert {case.length for case in chosen} >= set(presets.ODD_LENGTHS)
            assert any(case.length < case.keys for case in chosen)


def test_full_holds_every_case_of_the_goals_with_what_is_beside_it():
    assert set(presets.preset("goals")) <= set(presets.preset("full"))


def test_default_measures_some_of_every_kind_of_goal():
    default = presets.preset("default")
    met = {goal.text for goal in goals.all_goals() if any(goal.holds_for(case) for case in default)}
    assert met == {goal.text for goal in goals.all_goals()}


@pytest.mark.parametrize("mask", ["bool", "window", "padding", "half padding", "bool+padding"])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_share_counts_blocks(mask, causal):
    case = Case("core", "forward", 2, 1, 130, 8, mask=mask, causal=causal, key_length=100)
    pairs = visible(case)
    inputs = make_inputs(case)
    total = 0
    for sample in range(2):
        for row in range(0, 130, 64):
            for column in range(0, 100, 64):
                block = [(i, j) for i in range(row, min(row + 64, 130)) for j in range(column, min(column + 64, 100))]
                seen = [
                    (not causal or j <= i)
                    and (inputs.mask is None or bool(inputs.mask[i, j]))
                    and (inputs.padding is None or not bool(inputs.padding[sample, j]))
                    for i, j in block
                ]
                assert seen == [bool(pairs.expand(2, -1, -1)[sample, i, j]) for i, j in block]
                total += len(block) if any(seen) else 0
    assert visible_share(case) == pytest.approx(total / (2 * 130 * 100))


def test_masks_have_the_shapes_and_patterns_that_they_name():
    case = Case("core", "forward", 2, 4, 300, 8, key_length=260, value_dim=24)
    shapes = {"": (300, 260), "HTS": (4, 300, 260), "B11S": (2, 1, 1, 260), "11TS": (1, 1, 300, 260)}
    for name, shape in shapes.items():
        assert make_inputs(replace(case, mask="bias", mask_shape=name)).mask.shape == shape
    window = make_inputs(replace(case, mask="window")).mask
    assert window[200].nonzero().flatten().tolist() == list(range(72, 260)) and window.dtype == torch.bool
    assert make_inputs(replace(case, mask="half padding")).padding.sum(1).tolist() == [130, 130]
    assert make_inputs(case).arguments[2].shape == (2, 4, 260, 24)
    assert make_inputs(case).grad_output.shape == (2, 4, 300, 24)


SMALL = Case("core", "training", batch=1, heads=2, length=16, head_dim=8)
SMALL_LAYER = Case("layer", "training", batch=1, heads=2, length=16, head_dim=8)
BESIDE = [
    (replace(SMALL, beside="1 thread"), SMALL),
    (replace(SMALL, beside="unmasked", mask="bool+padding", causal=True), SMALL),
    (replace(SMALL, beside="no dropout", dropout=0.5), SMALL),
    (replace(SMALL_LAYER, beside="no dropout", dropout=0.5), SMALL_LAYER),
    (replace(SMALL_LAYER, beside="no weights", need_weights=True), SMALL_LAYER),
]


@pytest.mark.parametrize("case", [SMALL, SMALL_LAYER], ids=["core", "layer"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_ours_in_float32_beside_a_half_type_computes_in_float32(case, dtype):
    half = replace(case, dtype=dtype, beside="float32")
    (peer,) = own.comparisons(half)
    runner = peer.build(half, make_inputs(half))
    wanted, _ = own.OURS[case.level].build(case, make_inputs(case)).forward()
    assert wanted.dtype == torch.float32 and torch.equal(runner.forward()[0], wanted)
    assert all(leaf.dtype == torch.float32 for leaf in runner.leaves.values())
    gradients = timed_work(half, runner, make_inputs(half))()
    assert all(grad.dtype == torch.float32 for grad in gradients)


@pytest.mark.parametrize(("case", "same_as"), BESIDE, ids=lambda case: f"{case.level} {case.beside}")
def test_what_is_beside_a_case_is_the_case_without_its_option(case, same_as):
    (peer,) = own.comparisons(case)
    runner = peer.build(case, make_inputs(case))
    output, weights = runner.forward()
    wanted, _ = own.OURS[case.level].build(same_as, make_inputs(same_as)).forward()
    assert weights is None and torch.equal(output, wanted)


def test_a_mask_that_is_not_trained_has_no_gradient():
    case = replace(SMALL, beside="mask not trained", mask="bias", task="memory")
    (peer,) = own.comparisons(case)
    assert list(peer.build(case, make_inputs(case)).leaves) == ["query", "key", "value"]
    assert list(own.OURS["core"].build(case, make_inputs(case)).leaves) == ["query", "key", "value", "mask"]


def test_one_thread_is_set_for_the_call_alone(set_threads):
    set_threads(2)
    case = replace(SMALL, beside="1 thread", task="forward")
    (peer,) = own.comparisons(case)
    runner = peer.build(case, make_inputs(case))
    seen = []
    watched = replace(runner, forward=lambda: seen.append(torch.get_num_threads()))
    timed_work(case, watched, make_inputs(case))()
    assert seen == [1] and torch.get_num_threads() == 2


def test_inference_memory_has_no_gradients():
    case = replace(SMALL, task="memory", inference=True)
    runner = own.OURS["core"].build(case, make_inputs(case))
    output, _ = timed_work(case, runner, make_inputs(case))()
    assert output.shape == (1, 2, 16, 8) and not output.requires_grad


def test_measuring_puts_our_own_comparison_among_the_peers_and_does_not_compare_its_result():
    case = replace(SMALL, beside="unmasked", mask="window", length=300, task="forward")
    with Workers(allot(1)) as workers:
        result = measure_case(case, lambda peer: peer.name == "F.sdpa", Budget(1e-3, least_rounds=1), workers)
    assert [entry.peer for entry in result.peers] == ["F.sdpa", "mha_ext, unmasked"]
    assert result.peers[1].difference is None and not result.wrong


@pytest.mark.parametrize(("dtype", "has_products"), [("bf16", True), ("fp16", False)])
def test_half_types_are_timed_beside_ours_in_float32_and_float16_without_the_librarys_products(dtype, has_products):
    case = replace(SMALL, dtype=dtype, beside="float32", task="backward")
    with Workers(allot(1)) as workers:
        result = measure_case(case, lambda peer: peer.name == "F.sdpa", Budget(1e-3, least_rounds=1), workers)
    assert [entry.peer for entry in result.peers] == ["F.sdpa", "mha_ext, float32"] and not result.wrong
    assert (result.library_flops is not None) is has_products


def make_run() -> Run:
    case = replace(CORE, mask="half padding", beside="unmasked")
    result = replace(timed(case, sdpa=3.0, own=1.8), rounds=3, library_flops=1e9)
    cell = Cell("1,1,1,1", "full", "fp32", "output", (2.0, 1.0), (2.5, 1.0))
    return Run(MACHINE, "the command", Roofs(1e9, {"fp32": 1e9}), [result], {}, [cell])


def test_verdicts_are_printed_saved_and_loaded(tmp_path):
    run = make_run()
    text = markdown(run)
    assert (
        "| masks vs F.sdpa with the same | core forward 8,8,512,64 fp32 half padding | 3 | at least 1.2 | pass |"
        in text
    )
    assert "| 1,1,1,1 | full | fp32 | output | 2 | 1 | 2.5 | 1 | 1.000 | pass |" in text
    assert all(len(row) == len(table.columns) for table in closing_tables(run) for row in table.rows)
    assert "vs mha_ext" not in " ".join(column for table in tables(run) for column in table.columns)
    run.save(tmp_path / "results.json")
    assert Run.load(tmp_path / "results.json") == run
    saved = json.loads((tmp_path / "results.json").read_text())["goals"]
    assert [row["verdict"] for row in saved] == ["pass", "pass", "pass"]


def test_a_goal_states_its_case_once():
    texts = [(row.goal, row.where) for row in make_run().goals()]
    assert len(set(texts)) == len(texts)
    assert all(isinstance(goal, Goal) for goal in goals.all_goals())
