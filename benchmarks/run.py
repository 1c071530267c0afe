"""Command line of the benchmark: ``python -m benchmarks.run`` (or ``make bench``)."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

try:
    import rich  # noqa: F401  (only to say plainly what is missing, before anything else imports it)
except ImportError:
    raise SystemExit('the benchmark prints with rich: pip install "mha_ext[bench]" or pip install rich') from None

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import accuracy, machine, presets
from benchmarks import cases as case_list
from benchmarks.cases import Case
from benchmarks.measure import Result, measure_case
from benchmarks.peers import OURS, PEERS, Peer
from benchmarks.plot import save_plot
from benchmarks.processes import WorkerError, Workers
from benchmarks.processors import allot
from benchmarks.report import Run, head_lines, markdown, print_run
from benchmarks.roofs import Roofs
from benchmarks.timing import Budget

BUDGETS = {
    "quick": Budget(seconds=0.2, least_rounds=3),
    "default": Budget(seconds=2.5, least_rounds=7),
    "full": Budget(seconds=6.0, least_rounds=11),
    "goals": Budget(seconds=2.5, least_rounds=7),
}
_PLAIN_WIDTH = 170  # of lines in a pipe or a file


def _earlier_run(path: str) -> Run:
    """The run that `--load` names; whatever is wrong with the file is an error of the command line."""
    try:
        return Run.load(Path(path))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} must be a readable file, got {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        message = f"{path} must be a run that an earlier benchmark wrote, got {type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(message) from None


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Measure mha_ext beside what a PyTorch user has today.",
        epilog="Another instruction set on both sides: ATEN_CPU_CAPABILITY=avx2 MHA_EXT_CPU_CAPABILITY=avx2 before the "
        "command; the goals against peers are 1.0 then.",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="preset", action="store_const", const="quick", help="few small cases, seconds")
    size.add_argument(
        "--goals", dest="preset", action="store_const", const="goals", help="all that the goals need, 25 minutes"
    )
    size.add_argument("--full", dest="preset", action="store_const", const="full", help="every case and peer, long")
    parser.set_defaults(preset="default")
    parser.add_argument(
        "-k", dest="words", action="append", default=[], metavar="WORD", help="cases named so (repeatable)"
    )
    parser.add_argument("--dtype", action="append", default=[], choices=list(case_list.DTYPES))
    parser.add_argument("--suite", action="append", default=[], choices=list(case_list.SUITES))
    parser.add_argument("--peer", action="append", default=[], choices=[peer.name for peer in PEERS], help="only these")
    parser.add_argument("--threads", type=int, help="threads of every library (default: torch's own choice)")
    parser.add_argument("--apart", action="store_true", help="each peer in a process of its own, PyTorch's ways too")
    parser.add_argument("--seconds", type=float, help="time for the rounds of each case, instead of the preset's")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    parser.add_argument("--markdown", action="store_true", help="also write the tables as Markdown, and print them")
    parser.add_argument("--load", type=_earlier_run, metavar="JSON", help="show an earlier run instead of measuring")
    parser.add_argument("--list", action="store_true", help="print the names of the selected cases and stop")
    parsed = parser.parse_args(arguments)
    if parsed.threads is not None and parsed.threads < 1:
        parser.error(f"--threads must be at least 1, got {parsed.threads}")
    if parsed.seconds is not None and not 0 < parsed.seconds < math.inf:
        parser.error(f"--seconds must be finite and positive, got {parsed.seconds}")
    return parsed


def _peer_filter(options: argparse.Namespace) -> Callable[[Peer], bool]:
    if options.peer:
        return lambda peer: peer.name in options.peer
    if options.preset == "goals":
        return lambda peer: peer.by_default or peer.level == "layer"
    return lambda peer: peer.by_default or options.preset == "full"


def _budget(options: argparse.Namespace) -> Budget:
    budget = BUDGETS[options.preset]
    return budget if options.seconds is None else Budget(options.seconds, budget.least_rounds)


def _result_line(result: Result) -> str:
    ratios = ", ".join(f"{entry.peer} {entry.ratio.median:.2f}" for entry in result.peers if entry.ratio)
    return f"{result.case.name}: {ratios or 'no peer'}"


def _measure(console: Console, run: Run, cases: Sequence[Case], measure: Callable[[Case], Result]) -> None:
    """Measures all cases into the run, with a progress bar on a terminal and a line for each case elsewhere."""

    def one(case: Case) -> None:
        try:
            run.results.append(measure(case))
        except (RuntimeError, ValueError, TypeError) as error:  # a long run survives a case that breaks, and says so
            run.failures[case.name] = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)

    if not console.is_terminal:
        for number, case in enumerate(cases, start=1):
            one(case)
            line = _result_line(run.results[-1]) if case.name not in run.failures else f"{case.name}: FAILED"
            console.print(f"[{number}/{len(cases)}] {line}", markup=False, soft_wrap=True)
        console.print()
        return

    columns = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]left[/]"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            one(case)
            progress.advance(task)


def _save(console: Console, run: Run, directory: Path, write_markdown: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    run.save(directory / "results.json")
    written = ["results.json"]
    if write_markdown:
        text = markdown(run)
        (directory / "results.md").write_text(text)
        written.append("results.md")
        console.print(text, markup=False, soft_wrap=True)
    try:
        save_plot(directory / "ratios.png", run)
        written.append("ratios.png")
    except ImportError:
        console.print(
            'no plot: matplotlib is missing (pip install "mha_ext[bench]" or pip install matplotlib)', markup=False
        )
    for name in written:
        console.print(f"written: {(directory / name).resolve()}", soft_wrap=True)


def _new_run(cases: Iterable[Case], command: str, machine_facts: dict[str, object], workers: Workers) -> Run:
    dtypes = sorted({case.dtype for case in cases if case.task != "memory"})
    return Run(machine_facts, command, Roofs(**workers.roofs(OURS["core"], dtypes)))


def _measure_all(console: Console, options: argparse.Namespace, cases: Sequence[Case], command: str) -> Run:
    """Measures the machine and then all cases, in processes that end with it."""
    allotment = allot(torch.get_num_threads())
    facts = machine.describe(allotment)
    chosen, budget = _peer_filter(options), _budget(options)
    console.print("measuring the machine's roofs")
    with Workers(allotment, options.apart) as workers:
        run = _new_run(cases, command, facts, workers)
        for line in head_lines(run):
            console.print(line, markup=False)
        console.print()
        _measure(console, run, cases, lambda case: measure_case(case, chosen, budget, workers))
        run.machine["restless"] = sorted(workers.restless)
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 when every peer that was measured computed what we compute."""
    started = time.perf_counter()
    options = _arguments(arguments)
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PLAIN_WIDTH, highlight=False)
    if options.load is not None:
        run: Run = options.load
        print_run(console, run)
        if options.markdown:
            console.print(markdown(run), markup=False, soft_wrap=True)
        return 0

    cases = case_list.select(
        presets.preset(options.preset), words=options.words, dtypes=options.dtype, suites=options.suite
    )
    if not cases:
        console.print("no case is selected: --list without filters prints them all")
        return 2
    if options.list:
        for case in cases:
            console.print(case.name, markup=False)
        return 0
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    given = sys.argv[1:] if arguments is None else arguments
    try:
        run = _measure_all(console, options, cases, shlex.join(["python", "-m", "benchmarks.run", *given]))
    except WorkerError as error:  # before the first case; later ones are among the run's failures
        console.print(f"nothing could be measured: {error}", markup=False, soft_wrap=True)
        return 2
    if not options.words and options.suite in ([], ["core"]):
        run.accuracy = accuracy.measure(quick=options.preset == "quick")
    print_run(console, run)
    _save(console, run, options.output, options.markdown)
    console.print(f"{len(cases)} cases in {time.perf_counter() - started:.0f} s")
    return 1 if run.failures or any(result.wrong for result in run.results) else 0


if __name__ == "__main__":
    sys.exit(main())
