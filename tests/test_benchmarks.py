"""The benchmark's own arithmetic: statistics, counts, selection, agreement of the peers, and its reports."""

import ctypes
import hashlib
import json
import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import mha_ext

pytest.importorskip("rich")

from benchmarks import cases as case_list
from benchmarks import fma_peak, presets
from benchmarks import run as command
from benchmarks.cases import Case, floating_point_operations, least_bytes, visible_pairs
from benchmarks.fma_peak import fma_flops
from benchmarks.inputs import make_inputs
from benchmarks.measure import Entry, Result
from benchmarks.processes import WorkerDiedError, Workers
from benchmarks.report import Run, markdown, milliseconds, summary_rows, tables
from benchmarks.roofs import Roofs, library_products
from benchmarks.timing import Budget, Sample, Summary, cores, interleave, ratios, run_timed, summarise
from benchmarks.work import largest_difference

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
    walls = {"a": 5e-4, "b": 1.0}  # of a call; a is repeated until a sample is long enough

    def turn(name, repeats):
        calls.append((name, repeats))
        return Sample(walls[name], 2 * walls[name])

    samples = interleave(["a", "b"], turn, Budget(seconds=1e-9, least_rounds=3))
    warm = [("a", 1), ("a", 1), ("b", 1), ("b", 1)]
    assert calls == [*warm, ("a", 4), ("b", 1), ("b", 1), ("a", 4), ("a", 4), ("b", 1)]
    assert samples == {name: [Sample(wall, 2 * wall)] * 3 for name, wall in walls.items()}


def test_a_sample_counts_the_time_of_all_threads():
    def work():
        time.sleep(0.01)

    waited = run_timed(work, 2)
    assert waited.wall >= 0.01 and waited.processor < waited.wall

    def two_threads():  # hashing lets go of the interpreter
        list(pool.map(lambda _: hashlib.sha256(data).digest(), range(2)))

    data = bytes(1 << 24)
    with ThreadPoolExecutor(2) as pool:
        before = time.thread_time()
        shared = run_timed(two_threads, 1)
        assert shared.processor > 2 * (time.thread_time() - before)  # this thread did nothing but wait


def test_cores_are_processor_time_over_time():
    assert cores([Sample(1.0, 2.0), Sample(3.0, 3.0)]) == 1.25


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
    for name in presets.PRESETS:
        cases = presets.preset(name)
        assert len({case.name for case in cases}) == len(cases)
        assert all(case.dtype in case_list.DTYPES and case.suite in case_list.SUITES for case in cases)
        assert all(Case(**json.loads(json.dumps(case.as_json()))) == case for case in cases)


def test_the_default_preset_holds_the_shapes_of_the_goals():
    names = {case.name for case in presets.preset("default")}
    for shape in ("8,8,512,64", "1,8,2048,64", "32,8,64,32"):
        for task in ("forward", "backward"):
            assert {f"core {task} {shape} fp32 full", f"core {task} {shape} fp32 causal"} <= names


def test_selection_needs_every_word():
    cases = presets.preset("default")
    chosen = case_list.select(cases, words=["8,8,512,64", "CAUSAL"], dtypes=["fp32"], suites=["core"])
    assert {case.name for case in chosen} == {
        "core forward 8,8,512,64 fp32 causal",
        "core backward 8,8,512,64 fp32 causal",
    }


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
        Entry("mha_ext", seconds=seconds, cores=2.0),
        [
            Entry(
                "F.sdpa", seconds=Summary(4e-3, 4e-3, 4e-3), ratio=Summary(2.0, 1.9, 2.1), difference=1e-7, cores=1.04
            ),
            Entry("other", seconds=Summary(3e-3, 3e-3, 3e-3), ratio=Summary(1.5, 1.4, 1.6), difference=0.0, cores=1.96),
        ],
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


def test_markdown_has_a_row_for_every_case_with_its_strongest_peer():
    text = markdown(make_run())
    assert "`the command`" in text and "Abacus" in text
    assert (
        "| B,H,T,D | options | dtype | task | ours, ms | GF/s | of roof | of products | strongest peer | ratio |"
        in text
    )
    assert "| 2,4,9,8 | full | fp32 | forward | 2 ±5 % |" in text
    assert "| other | 1.50 (1.40-1.60) | 2.0 / 2.0 |" in text
    assert "| 2,4,9,8 | full | fp32 | forward | 2.00 (1.0) | 1.50 (2.0) |" in text
    assert "| 2,9,16,2 | full | fp32 | 1 | nn.MHA | 3.00 (3 MiB) | 3.00 (3 MiB) |" in text
    assert all(len(row) == len(table.columns) for table in tables(make_run()) for row in table.rows)


def test_the_strongest_peer_is_the_fastest_of_those_that_were_right():
    timed, memory = make_run().results
    assert timed.strongest.peer == "other" and memory.strongest.peer == "nn.MHA"
    assert replace(timed, peers=[]).strongest is None
    alone = replace(make_run(), results=[replace(timed, peers=[])])
    assert "| - | - | 2.0 / - |" in markdown(alone)


def test_the_roof_is_the_most_that_was_seen():
    run = make_run()
    roofs = Roofs(1e9, {"fp32": 1e9, "bf16": 3e9}, {"fp32": 2e9})
    assert [roofs.most_flops(name) for name in ("fp32", "bf16", "fp64")] == [2e9, 3e9, None]
    flops = floating_point_operations(CORE) / 2e-3
    assert f"| {100 * flops / 2e9:.0f} % |" in markdown(replace(run, roofs=roofs))


def test_the_head_names_libraries_processors_and_threads_that_kept_spinning():
    run = make_run()
    assert "bound to" not in markdown(run) and "come to rest" not in markdown(run)
    run.machine |= {"bound_to": [0, 3], "libraries": {"onnxruntime": "9.8"}, "restless": ["JAX"]}
    text = markdown(run)
    assert "threads: 2 bound to 0, 3" in text and "onnxruntime 9.8" in text
    assert "threads did not come to rest while others were measured: JAX" in text


def test_summary_names_the_lowest_ratio():
    rows = summary_rows(make_run().results)
    assert rows[0] == ["core forward", "F.sdpa", "1", "2.00", "2.00", "2,4,9,8 fp32 full"]


def test_the_loop_of_multiply_adds_does_what_is_counted(tmp_path):
    if not fma_flops(["fp32"]):
        pytest.skip("needs a C++ compiler and a processor with AVX2")
    library = fma_peak.build(tmp_path)
    library.fma_fp64.argtypes, library.fma_fp64.restype = [ctypes.c_long], ctypes.c_double
    operations = library.fma_step_operations(8)
    # Every lane of every sum goes to 2, where half of it and 1 are itself: the total counts the lanes.
    assert library.fma_fp64(200) == operations == library.fma_step_operations(4) // 2
    assert fma_flops(["fp64", "bf16"]).keys() == {"fp64"}
    # The compiler has left no product out: it computes those beforehand whose start it knows.
    fma_peak.compile_loop(tmp_path / "loop.s", "-S")
    sums = operations // 2 // (8 if mha_ext.cpu_capability().startswith(("avx512", "amx")) else 4)
    assert (tmp_path / "loop.s").read_text().count("vfmadd") == 2 * sums


def test_without_a_compiler_there_is_no_roof_of_multiply_adds(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert fma_flops(["fp32"]) == {}


@pytest.mark.parametrize(("seconds", "text"), [(0.25, "250"), (0.0123456, "12.3"), (5e-6, "0.005")])
def test_times_have_three_digits(seconds, text):
    assert milliseconds(seconds) == text


def test_command_line_measures_checks_and_writes(tmp_path, capsys):
    arguments = ["--quick", "--suite", "core", "-k", "causal", "--seconds", "0.001", "--markdown", "--peer", "F.sdpa"]
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
    assert all(result["ours"]["cores"] > 0 and result["peers"][0]["cores"] > 0 for result in values["results"])
    assert (tmp_path / "results.md").exists()
    assert "F.sdpa" in capsys.readouterr().out
    assert command.main(["--load", str(tmp_path / "results.json")]) == 0


def test_command_line_says_when_no_process_can_compute(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.processes.sys.executable", shutil.which("false"))
    assert command.main(["--quick", "--suite", "core"]) == 2
    said = "nothing could be measured: torch: process ended with status 1 during roofs: it said nothing"
    assert said in capsys.readouterr().out


def test_a_case_that_breaks_is_named_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)  # or the line that is looked for is folded
    first, *_ = cases = case_list.select(presets.preset("quick"), suites=["core"])

    def measure(case, chosen, budget, workers):
        if case == first:
            raise WorkerDiedError("torch: process killed by SIGKILL during time: it said nothing")
        return Result(case, Entry("mha_ext", seconds=Summary(1.0, 1.0, 1.0)), [])

    monkeypatch.setattr(command, "measure_case", measure)
    monkeypatch.setattr(Workers, "roofs", lambda self, peer, dtypes: {"read_bytes": 1e9})
    assert command.main(["--quick", "--suite", "core", "--output", str(tmp_path)]) == 1
    assert f"FAILED: {first.name}: torch: process killed by SIGKILL during time" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "results.json").read_text())["results"]) == len(cases) - 1


def test_command_line_says_when_nothing_is_selected(capsys):
    assert command.main(["-k", "no such case"]) == 2
    assert "no case is selected" in capsys.readouterr().out
