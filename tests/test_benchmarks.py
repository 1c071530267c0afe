"""The benchmark's own arithmetic: statistics, counts, selection, agreement of the peers, and its reports."""

import json
import math
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("rich")

from benchmarks import cases as case_list
from benchmarks import run as command
from benchmarks.cases import Case, floating_point_operations, least_bytes, visible_pairs
from benchmarks.inputs import make_inputs
from benchmarks.measure import Entry, Result
from benchmarks.peers import OURS, PEERS, peers_for
from benchmarks.report import Run, markdown, milliseconds, summary_rows, tables
from benchmarks.roofs import Roofs, library_products
from benchmarks.timing import Budget, Summary, interleave, ratios, summarise
from benchmarks.work import TOLERANCES, largest_difference, results

CORE = Case("core", "forward", batch=2, heads=4, length=9, head_dim=8)
LAYER = Case("layer", "training", batch=2, heads=2, length=9, head_dim=8)


def test_summary_is_the_median_and_the_quartiles():
    assert summarise([5.0, 1.0, 3.0, 2.0, 4.0]) == Summary(3.0, 2.0, 4.0)
    assert summarise([7.0]) == Summary(7.0, 7.0, 7.0)
    assert summarise([1.0, 2.0]) == Summary(1.5, 1.25, 1.75)
    assert summarise([2.0, 4.0, 6.0, 8.0]).spread == pytest.approx(3.0 / 5.0)


def test_ratios_pair_the_rounds():
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


@pytest.mark.parametrize(("seconds_per_round", "rounds"), [(0.5, 4), (100.0, 3), (1e-6, 10)])
def test_rounds_follow_from_the_budget(seconds_per_round, rounds):
    assert Budget(seconds=2.0, least_rounds=3, most_rounds=10).rounds(seconds_per_round) == rounds


def test_participants_take_turns():
    calls = []
    slow_enough = 3e-3  # one call fills a sample

    def participant(name):
        def work():
            calls.append(name)
            end = time.perf_counter() + slow_enough
            while time.perf_counter() < end:
                pass

        return work

    samples = interleave({"a": participant("a"), "b": participant("b")}, Budget(seconds=1e-9, least_rounds=3))
    assert calls == ["a", "a", "b", "b", "a", "b", "b", "a", "a", "b"]
    assert all(len(times) == 3 and min(times) >= slow_enough for times in samples.values())


def test_visible_pairs_of_a_causal_case():
    assert visible_pairs(replace(CORE, length=4, causal=True)) == 10
    assert visible_pairs(replace(CORE, length=4, key_length=2, causal=True)) == 1 + 2 + 2 + 2
    assert visible_pairs(replace(CORE, length=4, key_length=6)) == 24


def test_operations_of_core_and_layer():
    pairs = 9 * 9
    product = 2 * 2 * 4 * pairs * 8
    assert floating_point_operations(CORE) == 2 * product
    assert floating_point_operations(replace(CORE, task="backward")) == 5 * product
    projections = 2 * 4 * 2 * 9 * 16**2
    assert floating_point_operations(LAYER) == 7 * (2 * 2 * 2 * pairs * 8) + 3 * projections
    assert least_bytes(CORE) == 4 * (4 * 2 * 4 * 9 * 8)
    assert least_bytes(replace(CORE, kv_heads=1, dtype="bf16")) == 2 * (2 * 2 * 8 * 9 * (4 + 1))


@pytest.mark.parametrize("case", [CORE, replace(CORE, task="backward"), LAYER, replace(LAYER, task="forward")])
def test_library_products_do_the_operations_of_the_case(case):
    products = library_products(case)
    products.run()
    assert products.operations == floating_point_operations(case)


def test_every_preset_has_unique_names_and_known_words():
    for name in case_list.PRESETS:
        cases = case_list.preset(name)
        assert len({case.name for case in cases}) == len(cases)
        assert all(case.dtype in case_list.DTYPES and case.suite in case_list.SUITES for case in cases)
        assert all(Case(**json.loads(json.dumps(case.as_json()))) == case for case in cases)


def test_the_default_preset_holds_the_shapes_of_the_goals():
    names = {case.name for case in case_list.preset("default")}
    for shape in ("8,8,512,64", "1,8,2048,64", "32,8,64,32"):
        for task in ("forward", "backward"):
            assert {f"core {task} {shape} fp32 full", f"core {task} {shape} fp32 causal"} <= names


def test_selection_needs_every_word():
    cases = case_list.preset("default")
    chosen = case_list.select(cases, words=["8,8,512,64", "CAUSAL"], dtypes=["fp32"], suites=["core"])
    assert {case.name for case in chosen} == {
        "core forward 8,8,512,64 fp32 causal",
        "core backward 8,8,512,64 fp32 causal",
    }


@pytest.mark.parametrize("mask", ["none", "bool", "float", "bias", "padding", "bool+padding"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", [replace(CORE, task="backward"), replace(CORE, kv_heads=2), LAYER])
def test_all_peers_compute_what_we_compute(case, mask, causal):
    case = replace(case, mask=mask, causal=causal, dropout=0.1)
    peers, reasons = peers_for(case, lambda peer: True)
    assert peers or reasons
    if peers:
        ours = results(case, OURS[case.level])
    for peer in peers:
        name, difference = largest_difference(ours, results(case, peer))
        assert difference <= TOLERANCES[case.dtype], (peer.name, name)


def test_layers_agree_on_the_weights_and_who_has_none_says_so():
    case = replace(LAYER, need_weights=True)
    peers, reasons = peers_for(case, lambda peer: peer.by_default)
    assert reasons == {"linear+sdpa+linear": "F.scaled_dot_product_attention returns no weights"}
    ours = results(case, OURS["layer"])
    assert ours["weights"].shape == (2, 9, 9)
    assert largest_difference(ours, results(case, peers[0]))[1] <= TOLERANCES["fp32"]


def test_a_difference_and_a_missing_result_are_seen():
    left = {"output": torch.tensor([1.0, 2.0])}
    assert largest_difference(left, {"output": torch.tensor([1.0, 4.0])}) == ("output", 0.5)
    assert largest_difference(left, {"output": torch.tensor([1.0, 2.0]), "weights": left["output"]})[0] == "weights"
    assert math.isnan(largest_difference({"output": torch.tensor([math.nan])}, {"output": torch.tensor([1.0])})[1])


def test_inputs_are_the_same_every_time():
    case = replace(CORE, mask="bool+padding")
    first, second = make_inputs(case), make_inputs(case)
    assert all(torch.equal(*pair) for pair in zip(first.arguments, second.arguments, strict=True))
    assert torch.equal(first.mask, second.mask) and torch.equal(first.padding, second.padding)
    assert not first.padding[:, 0].any() and first.padding.any()


def make_run() -> Run:
    machine = {
        "processor": "Abacus", "processors_available": 2, "threads": 2, "load_before": 0.0, "date": "today",
        "cpu_capability": "avx2", "torch_cpu_capability": "AVX2", "mha_ext": "0", "torch": "2", "python": "3",
    }  # fmt: skip
    seconds = Summary(2e-3, 1.9e-3, 2.1e-3)
    timed = Result(
        CORE,
        Entry("mha_ext", seconds=seconds),
        [Entry("F.sdpa", seconds=Summary(4e-3, 4e-3, 4e-3), ratio=Summary(2.0, 1.9, 2.1), difference=1e-7)],
        rounds=7,
        library_flops=1e9,
    )
    memory = Result(
        replace(LAYER, task="memory"),
        Entry("mha_ext", peak_bytes=1 << 20),
        [Entry("nn.MHA", peak_bytes=3 << 20, ratio=Summary(3.0, 3.0, 3.0))],
        left_out={"linear+sdpa+linear": "reason"},
    )
    return Run(machine, "the command", Roofs(1e9, {"fp32": 1e9}), [timed, memory])


def test_a_run_survives_its_file(tmp_path):
    run = make_run()
    run.save(tmp_path / "results.json")
    assert Run.load(tmp_path / "results.json") == run


def test_an_unknown_file_format_is_refused(tmp_path):
    path = tmp_path / "results.json"
    path.write_text('{"format": 0}')
    with pytest.raises(ValueError, match="format must be 1, got 0"):
        Run.load(path)


def test_markdown_has_a_row_for_every_case():
    text = markdown(make_run())
    assert "`the command`" in text and "Abacus" in text
    assert "| B,H,T,D | options | dtype | task | ours, ms | GF/s | of roof | of products | vs F.sdpa |" in text
    assert "| 2,4,9,8 | full | fp32 | forward | 2 ±5 % |" in text and "| 2.00 (1.90-2.10) |" in text
    assert "| 2,9,16,2 | full | fp32 | 1 | 3.00 (3 MiB) |" in text
    assert all(len(row) == len(table.columns) for table in tables(make_run()) for row in table.rows)


def test_summary_names_the_lowest_ratio():
    rows = summary_rows(make_run().results)
    assert rows[0] == ["core forward", "F.sdpa", "1", "2.00", "2.00", "2,4,9,8 fp32 full"]


@pytest.mark.parametrize(("seconds", "text"), [(0.25, "250"), (0.0123456, "12.3"), (5e-6, "0.005")])
def test_times_have_three_digits(seconds, text):
    assert milliseconds(seconds) == text


def test_command_line_measures_checks_and_writes(tmp_path, capsys):
    arguments = ["--quick", "--suite", "core", "-k", "causal", "--seconds", "0.001", "--markdown"]
    threads = torch.get_num_threads()
    try:
        assert command.main([*arguments, "--output", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    values = json.loads((tmp_path / "results.json").read_text())
    assert [result["name"] for result in values["results"]] == [
        "core forward 2,4,128,64 fp32 causal",
        "core backward 2,4,128,64 fp32 causal",
    ]
    assert values["machine"]["threads"] == threads
    assert values["machine"]["processor"] and values["machine"]["cpu_capability"]
    assert (tmp_path / "results.md").exists()
    assert "F.sdpa" in capsys.readouterr().out
    assert command.main(["--load", str(tmp_path / "results.json")]) == 0


def test_command_line_says_when_nothing_is_selected(capsys):
    assert command.main(["-k", "no such case"]) == 2
    assert "no case is selected" in capsys.readouterr().out


def test_peers_have_names_of_their_own():
    for level in OURS:
        names = [peer.name for peer in (OURS[level], *PEERS) if peer.level == level]
        assert len(set(names)) == len(names)
