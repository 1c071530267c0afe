"""The processes that compute, as the main process sees them: started when first needed, asked one at a time.

Every library is in a process of its own, because thread pools of several libraries in one process disturb each other.
PyTorch's own ways and ours share one, with one pool of threads; ``--apart`` gives each of them its own as well. On one
thread of an EPYC of the Zen 4 generation both gave the same processor times to 3 %, for the core at 1,8,128,64 forward
and 1,8,512,64 backward and for the layer at 1,128,512,8 forward. Training that layer differed by up to 10 %, by the
page faults that the C library's allocator causes or not, depending on what the process did before.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.peers import Peer
from benchmarks.processors import Allotment, environment
from benchmarks.timing import Sample

_ROOT = Path(__file__).resolve().parent.parent
_LONGEST = 300.0  # seconds that an answer may take; compilation included
_TAIL = 5  # lines of standard error that an error shows
_WITH_OPENMP = ("torch", "torch.compile")
_VARIABLES = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "JAX_PLATFORMS": "cpu"}


class WorkerError(RuntimeError):
    """A worker could not do what it was asked for; it is still there."""


class WorkerDiedError(WorkerError):
    """A worker ended, or gave no answer and was ended."""


class Worker:
    """One process that computes.

    Args:
        name: what errors call it.
        command: how it is started.
        variables: what its environment has besides ours.
        longest: seconds that an answer may take.
    """

    def __init__(
        self, name: str, command: Sequence[str], variables: dict[str, str] | None = None, longest: float = _LONGEST
    ) -> None:
        self.name = name
        self._longest = longest
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **(variables or {})},
            cwd=_ROOT,
        )

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def ask(self, operation: str, **values: Any) -> dict[str, Any]:
        """Returns the answer to one request.

        Raises:
            WorkerError: it answered that it could not.
            WorkerDiedError: it gave no answer.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"operation": operation, **values}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died(operation) from None
        line = self._line(operation)
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            self.close()
            raise WorkerDiedError(f"{self.name}: {operation} must be answered in JSON, got {line[:80]!r}") from None
        if "error" in found:
            raise WorkerError(f"{self.name}: {operation} failed: {found['error']}")
        return found

    def _line(self, operation: str) -> bytes:
        output = self._process.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            if not selector.select(self._longest):
                self.close()
                raise WorkerDiedError(f"{self.name}: {operation} gave no answer within {self._longest:g} s")
        line = output.readline()
        if not line:
            raise self._died(operation)
        return line

    def _died(self, operation: str) -> WorkerDiedError:
        code = self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self._errors.seek(0)
        tail = self._errors.read().decode(errors="replace").strip().splitlines()[-_TAIL:]
        self.close()
        return WorkerDiedError(
            f"{self.name}: process {how} during {operation}: {' | '.join(tail) or 'it said nothing'}"
        )

    def close(self) -> None:
        """Ends the process."""
        if self.alive:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # what was still to be written has no reader
                continue


class Workers:
    """All processes of a run. A context: they end with it.

    Args:
        allotment: what each may use.
        apart: every peer, not just every library, has a process of its own.
    """

    def __init__(self, allotment: Allotment, apart: bool = False) -> None:
        self.allotment, self._apart = allotment, apart
        self._workers: dict[str, Worker] = {}
        self._last: Worker | None = None
        self._directory = tempfile.TemporaryDirectory()
        self.restless: set[str] = set()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()
        self._directory.cleanup()

    def start(self, name: str, with_openmp: bool) -> Worker:
        """Starts a process."""
        settings = {"threads": self.allotment.threads, "processors": self.allotment.processors}
        command = [sys.executable, "-m", "benchmarks.worker", json.dumps(settings)]
        return Worker(name, command, environment(self.allotment, with_openmp) | _VARIABLES)

    def of(self, peer: Peer) -> Worker:
        """Returns the process of a peer, started anew if there is none or it has died."""
        name = f"{peer.worker}, {peer.name}" if self._apart else peer.worker
        worker = self._workers.get(name)
        if worker is None or not worker.alive:
            worker = self._workers[name] = self.start(name, peer.worker in _WITH_OPENMP)
        return worker

    def results(self, case: Case, peer: Peer) -> dict[str, Tensor]:
        """Returns everything that a peer computes for a case."""
        path = Path(self._directory.name) / "results.pt"
        self._ask(self.of(peer), "check", case=case.as_json(), peer=peer.name, path=str(path))
        try:
            found: dict[str, Tensor] = torch.load(path)
        finally:
            path.unlink()
        return found

    def prepare(self, case: Case, peer: Peer, name: str) -> dict[str, Any]:
        """Makes a participant ready: the peer itself, or another one of its process by name."""
        return self._ask(self.of(peer), "prepare", case=case.as_json(), peer=name)

    def time(self, peer: Peer, name: str, repeats: int) -> Sample:
        """Times a participant that was prepared in a peer's process, while all others rest."""
        return Sample(**self._ask(self.of(peer), "time", peer=name, repeats=repeats))

    def roofs(self, peer: Peer, dtypes: Sequence[str]) -> dict[str, Any]:
        """Measures the machine in a peer's process."""
        return self._ask(self.of(peer), "roofs", dtypes=list(dtypes))

    def release(self) -> None:
        """Lets every process forget what it has prepared."""
        for worker in self._workers.values():
            if worker.alive:
                self._ask(worker, "release")

    def _ask(self, worker: Worker, operation: str, **values: Any) -> dict[str, Any]:
        """Asks one process, after the one before has come to rest."""
        last, self._last = self._last, worker
        if last is not None and last is not worker and last.alive and not last.ask("rest")["resting"]:
            self.restless.add(last.name)
        return worker.ask(operation, **values)
