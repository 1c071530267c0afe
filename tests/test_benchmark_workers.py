"""The benchmark's processes: what they answer, how they end, which processors they use, and who is timed when."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import processors
from benchmarks.cases import Case
from benchmarks.measure import measure_case
from benchmarks.peers import OURS, PEERS, Peer, find_peer
from benchmarks.peers.base import ForeignPeer
from benchmarks.processes import Worker, WorkerDiedError, WorkerError, Workers
from benchmarks.processors import Allotment, allot, environment, one_per_core_first, rest
from benchmarks.timing import Budget
from benchmarks.worker import PRODUCTS

ROOT = Path(__file__).resolve().parent.parent
CORE = Case("core", "forward", batch=1, heads=2, length=64, head_dim=16)
BUDGET = Budget(seconds=1e-9, least_rounds=2)


# ------------------------------------------------------------------------------------------------------------ a process
@pytest.fixture
def worker() -> Iterator[Worker]:
    command = [sys.executable, str(ROOT / "tests" / "bench_worker.py")]
    started = Worker("stand-in", command, {"PYTHONPATH": str(ROOT)})
    yield started
    started.close()


def test_a_worker_answers_and_survives_an_exception(worker: Worker) -> None:
    assert worker.ask("echo", value=[1, "two"]) == {"value": [1, "two"]}
    with pytest.raises(WorkerError, match=r"^stand-in: fail failed: ValueError: the first line$"):
        worker.ask("fail")
    assert worker.alive and worker.ask("echo", value=3) == {"value": 3}


def test_what_libraries_print_is_no_answer(worker: Worker) -> None:
    assert worker.ask("chatter") == {}
    assert worker.ask("echo", value=4) == {"value": 4}


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("crash", r"^stand-in: process killed by SIGSEGV during crash: the library's last words$"),
        ("leave", r"^stand-in: process ended with status 3 during leave: it said nothing$"),
    ],
)
def test_a_worker_that_dies_is_named_with_its_last_words(worker: Worker, operation: str, message: str) -> None:
    with pytest.raises(WorkerDiedError, match=message):
        worker.ask(operation)
    assert not worker.alive


def test_a_worker_that_hangs_is_ended() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    worker = Worker("sleeper", command, longest=0.2)
    with pytest.raises(WorkerDiedError, match=r"^sleeper: time gave no answer within 0\.2 s$"):
        worker.ask("time")
    assert not worker.alive


def test_an_answer_that_is_no_json_is_refused() -> None:
    worker = Worker("babbler", [sys.executable, "-c", "input(); print('hello')"])
    with pytest.raises(WorkerDiedError, match=r"^babbler: check must be answered in JSON, got b'hello"):
        worker.ask("check")
    assert not worker.alive


# ----------------------------------------------------------------------------------------------------- whose turn it is
class Recorder:
    """In place of a `Worker`: writes down what it is asked, and does it or not."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.alive, self._log = name, True, log
        self.failing: set[str] = set()
        self.offset = 0.0
        self.restless = False

    def ask(self, operation: str, **values: Any) -> dict[str, Any]:
        self._log.append(f"{self.name} {operation} {values.get('peer', '')}".strip())
        if operation in self.failing:
            raise WorkerError(f"{self.name}: {operation} failed: because")
        if operation == "check":
            torch.save({"output": torch.ones(2) + self.offset}, values["path"])
        answers = {
            "time": {"wall": 1.0 if values.get("peer") == "mha_ext" else 3.0, "processor": 1.5},
            "rest": {"resting": not self.restless},
            "prepare": {"operations": 6},
        }
        return answers.get(operation, {})

    def close(self) -> None:
        self.alive = False


class RecordedWorkers(Workers):
    def __init__(self, apart: bool = False) -> None:
        super().__init__(Allotment(2, (0, 1)), apart)
        self.log: list[str] = []
        self.recorders: dict[str, Recorder] = {}

    def start(self, name: str, with_openmp: bool) -> Recorder:
        self.log.append(f"start {name} {'with' if with_openmp else 'without'} OpenMP")
        self.recorders[name] = recorder = self.recorders.get(name) or Recorder(name, self.log)
        recorder.alive = True
        return recorder


class Stub(Peer):
    level = "core"

    def __init__(self, name: str, worker: str = "torch") -> None:
        self.name, self.worker = name, worker

    def build(self, case: Case, inputs: Any) -> Any:
        raise AssertionError("only a worker builds")


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> list[Stub]:
    found = [Stub("near"), Stub("far", "elsewhere")]
    monkeypatch.setattr("benchmarks.peers.PEERS", tuple(found))
    return found


def test_another_process_is_asked_only_when_the_last_one_rests(stubs: list[Stub]) -> None:
    near, far = stubs
    with RecordedWorkers() as workers:
        for peer in (near, near, far, near):
            workers.time(peer, peer.name, 1)
        assert not workers.restless
        workers.recorders["torch"].restless = True
        workers.time(far, "far", 1)
        assert workers.restless == {"torch"}
    assert workers.log == [
        "start torch with OpenMP", "torch time near", "torch time near",
        "start elsewhere without OpenMP", "torch rest", "elsewhere time far",
        "elsewhere rest", "torch time near", "torch rest", "elsewhere time far",
    ]  # fmt: skip


def test_a_dead_process_is_started_again_and_none_survives_the_run(stubs: list[Stub]) -> None:
    with RecordedWorkers() as workers:
        workers.time(stubs[0], "near", 1)
        workers.recorders["torch"].alive = False
        workers.time(stubs[0], "near", 1)
        assert workers.log.count("start torch with OpenMP") == 2
    assert not workers.recorders["torch"].alive


def test_apart_each_peer_has_a_process_of_its_own(stubs: list[Stub]) -> None:
    with RecordedWorkers(apart=True) as workers:
        for peer in (OURS["core"], stubs[0]):
            workers.time(peer, peer.name, 1)
    assert [line for line in workers.log if "start" in line] == [
        "start torch, mha_ext with OpenMP",
        "start torch, near with OpenMP",
    ]


def test_a_case_is_checked_prepared_and_timed_in_rounds(stubs: list[Stub]) -> None:
    with RecordedWorkers() as workers:
        result = measure_case(CORE, lambda peer: True, BUDGET, workers)
    timed = [line.split(" time ")[1] for line in workers.log if " time " in line]
    warm, rounds = timed[:8], timed[8:]
    assert warm == [name for name in ("mha_ext", "near", "far", PRODUCTS) for _ in range(2)]
    assert rounds == ["mha_ext", "near", "far", PRODUCTS, "near", "far", PRODUCTS, "mha_ext"]
    assert [(entry.peer, entry.ratio.median, entry.cores) for entry in result.peers if entry.ratio] == [
        ("near", 3.0, 0.5),
        ("far", 3.0, 0.5),
    ]
    assert (result.ours.cores, result.rounds, result.library_flops) == (1.5, 2, 2.0)
    assert workers.log[-3:] == ["torch release", "torch rest", "elsewhere release"]


def test_a_peer_that_fails_or_differs_is_not_timed(stubs: list[Stub]) -> None:
    with RecordedWorkers() as workers:
        workers.of(stubs[1])
        workers.recorders["elsewhere"].offset = 1e-3
        result = measure_case(CORE, lambda peer: True, BUDGET, workers)
        assert result.wrong == {"far": "output differs from ours by 1.0e-03, more than 2e-05"}
        for operation in ("check", "prepare"):
            workers.recorders["elsewhere"].offset = 0.0
            workers.recorders["elsewhere"].failing = {operation}
            result = measure_case(CORE, lambda peer: True, BUDGET, workers)
            assert result.wrong == {"far": f"elsewhere: {operation} failed: because"}
            assert [entry.peer for entry in result.peers] == ["near"]
    assert "elsewhere time far" not in workers.log


def test_our_own_failure_fails_the_case(stubs: list[Stub]) -> None:
    with RecordedWorkers() as workers:
        workers.of(OURS["core"])
        workers.recorders["torch"].failing = {"prepare"}
        with pytest.raises(WorkerError, match="torch: prepare failed"):
            measure_case(CORE, lambda peer: True, BUDGET, workers)
    assert "torch release" in workers.log


# ----------------------------------------------------------------------------------------------------------- processors
def test_processors_of_different_cores_come_first() -> None:
    assert one_per_core_first({0: "0,1", 1: "0,1", 2: "2,3", 3: "2,3"}) == [0, 2, 1, 3]
    assert one_per_core_first({4: "4,12", 12: "4,12", 5: "5,13"}) == [4, 5, 12]


def test_threads_beyond_the_processors_share_them() -> None:
    available = os.sched_getaffinity(0)
    found = allot(len(available) + 1)
    assert set(found.processors) == available and found.threads == len(available) + 1
    assert found.place(len(available)) == found.place(0)
    assert len(allot(1).processors) == 1


def test_openmp_is_bound_where_pytorch_computes_and_kept_away_elsewhere() -> None:
    assert environment(Allotment(2, (3, 5)), with_openmp=True) == {
        "OMP_NUM_THREADS": "2",
        "OMP_PROC_BIND": "true",
        "OMP_PLACES": "{3},{5}",
    }
    assert environment(Allotment(2, (3, 5)), with_openmp=False)["OMP_PROC_BIND"] == "false"
    assert environment(Allotment(2, ()), with_openmp=True) == {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(("busy_looks", "resting"), [(0, True), (3, True), (1000, False)])
def test_rest_ends_when_no_thread_computes(monkeypatch: pytest.MonkeyPatch, busy_looks: int, resting: bool) -> None:
    class Clock:
        now = spent = 0.0
        looks = 0

        def monotonic(self) -> float:
            return self.now

        def process_time(self) -> float:
            return self.spent

        def sleep(self, seconds: float) -> None:
            self.now += seconds
            self.looks += 1
            self.spent += seconds / 2 if self.looks <= busy_looks else 0.0

    clock = Clock()
    monkeypatch.setattr(processors, "time", clock)
    assert rest(longest=0.5) is resting
    assert clock.looks == (busy_looks + 1 if resting else 100)


# ------------------------------------------------------------------------------------------------------- real processes
def bound_processors(worker: Worker) -> set[int]:
    """Processors that some thread of a process is bound to, alone."""
    found = set()
    for path in Path(f"/proc/{worker.pid}/task").glob("*/status"):
        (allowed,) = (line.split()[1] for line in path.read_text().splitlines() if line.startswith("Cpus_allowed_list"))
        if allowed.isdigit():
            found.add(int(allowed))
    return found


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(allot(min(2, len(os.sched_getaffinity(0))))) as started:
        yield started


@pytest.mark.parametrize("name", ["mha_ext", "ORT Attention", "OpenVINO"])
def test_every_library_binds_its_threads(workers: Workers, name: str) -> None:
    peer = find_peer("core", name)
    if missing := peer.missing():
        pytest.skip(missing)
    workers.prepare(replace(CORE, length=512), peer, name)
    worker, found = workers.of(peer), set()
    with ThreadPoolExecutor(1) as pool:
        timed = pool.submit(workers.time, peer, name, 300)
        while not timed.done():  # OpenVINO binds its threads only while they compute
            found |= bound_processors(worker)
    assert found == set(workers.allotment.processors)
    assert timed.result().wall > 0 and timed.result().processor > 0


def test_a_case_that_a_library_cannot_do_says_why(workers: Workers) -> None:
    peer = OURS["core"]
    with pytest.raises(WorkerError, match=r"^torch: check failed: KeyError: 'no such dtype'$"):
        workers.results(replace(CORE, dtype="no such dtype"), peer)
    assert workers.of(peer).alive


def test_each_foreign_library_and_compiled_code_has_a_process_of_its_own() -> None:
    assert {peer.worker for peer in OURS.values()} == {"torch"}
    groups: dict[str, set[type[Peer]]] = {}
    for peer in PEERS:
        groups.setdefault(peer.worker, set()).add(ForeignPeer if isinstance(peer, ForeignPeer) else Peer)
    assert groups == {
        "torch": {Peer},
        "torch.compile": {Peer},
        "ONNX Runtime": {ForeignPeer},
        "OpenVINO": {ForeignPeer},
        "JAX": {ForeignPeer},
    }
