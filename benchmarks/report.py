"""A run as tables on a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.accuracy import Cell, cell_from_json
from benchmarks.cases import HALF, Case
from benchmarks.goals import Row, evaluate
from benchmarks.measure import Entry, Result, result_from_json
from benchmarks.peers.own import NAMES
from benchmarks.roofs import Roofs

_FORMAT = 1  # of the JSON file
_MIB = 1 << 20
_SHAPES = {"core": "B,H,T,D", "layer": "B,T,E,H", "variant": "B,H,T,D", "derivative": "B,H,T,D"}


@dataclass
class Run:
    """Everything that one call of the benchmark found out."""

    machine: dict[str, Any]
    command: str
    roofs: Roofs
    results: list[Result] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    accuracy: list[Cell] = field(default_factory=list)

    def goals(self) -> list[Row]:
        """Returns the verdicts of the goals on what was measured."""
        return evaluate(self.results, self.machine, self.accuracy)

    def save(self, path: Path) -> None:
        """Writes the run as JSON."""
        values = {
            "format": _FORMAT,
            "machine": self.machine,
            "command": self.command,
            "roofs": asdict(self.roofs),
            "results": [result.as_json() for result in self.results],
            "failures": self.failures,
            "accuracy": [asdict(cell) for cell in self.accuracy],
            "goals": [row.as_json() for row in self.goals()],
        }
        path.write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Run:
        """Reads a run that `save` wrote."""
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError(f"{path}: must hold an object, got {type(values).__name__}")
        if values.get("format") != _FORMAT:
            raise ValueError(f"{path}: format must be {_FORMAT}, got {values.get('format')}")
        results = [result_from_json(result) for result in values["results"]]
        accuracy = [cell_from_json(cell) for cell in values.get("accuracy", [])]
        roofs = Roofs(**values["roofs"])
        return cls(values["machine"], values["command"], roofs, results, values["failures"], accuracy)


def milliseconds(seconds: float) -> str:
    """Returns a time with three significant digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.1 else f"{value:.3f}"


def _share(value: float | None, roof: float | None) -> str:
    return f"{100 * value / roof:.0f} %" if value and roof else "-"


def _places(machine: dict[str, Any]) -> str:
    bound = machine.get("bound_to")
    return f" bound to {', '.join(map(str, bound))}" if bound else ""


def head_lines(run: Run) -> list[str]:
    """Returns what a reader must know before any number: machine, software, roofs."""
    machine, roofs = run.machine, run.roofs
    products, peaks = (
        ", ".join(f"{name} {flops / 1e9:.0f} GF/s" for name, flops in found.items()) or "not measured"
        for found in (roofs.product_flops, roofs.fma_flops)
    )
    others = "".join(f", {name} {version}" for name, version in machine.get("libraries", {}).items())
    lines = [
        f"{machine['processor']}, processors: {machine['processors_available']}, "
        f"threads: {machine['threads']}{_places(machine)}, load before the run {machine['load_before']:.1f}",
        f"mha_ext {machine['mha_ext']} ({machine['cpu_capability']} kernels), torch {machine['torch']} "
        f"({machine['torch_cpu_capability']}){others}, Python {machine['python']}, {machine['date']}",
        f"roofs: multiply-adds {peaks}; matrix product {products}; reads {roofs.read_bytes / 1e9:.1f} GB/s",
    ]
    if machine["load_before"] > 0.5:
        lines.append("the machine was not idle: trust ratios, whose two sides were measured in turn, more than times")
    if machine.get("restless"):
        lines.append(f"threads did not come to rest while others were measured: {', '.join(machine['restless'])}")
    return lines


_SPEED_COLUMNS = ("options", "dtype", "task", "ours, ms", "GF/s", "of roof", "of products")
_MEMORY_COLUMNS = ("options", "dtype", "ours, MiB")
_VERDICT = "verdict"
_ACCURACY_COLUMNS = (
    *("B,H,T,D", "options", "dtype", "result"),
    *("ours, largest", "ours, rms", "F.sdpa, largest", "F.sdpa, rms", "of allowed"),
    _VERDICT,
)
_GOAL_COLUMNS = ("goal", "case", "figure", "needed", _VERDICT)
_TEXT_COLUMNS = {
    *(*_SHAPES.values(), "options", "dtype", "task", "strongest peer"),
    *("result", "goal", "case", _VERDICT),
}
_STRONGEST_COLUMNS = ("strongest peer", "ratio")
_CORES_COLUMN = "cores, ours / its"
_RATIO_COLUMNS = ("ratio", "vs ")  # what their titles start with
_NOTHING = "-"
_LEGEND = (
    "ours: median, and half the interquartile range as a share of it. ratio: time of the strongest peer over ours, "
    "median of the rounds and quartiles; above 1, ours is faster. cores: processor time over time. of roof: of the "
    "most multiply-adds seen in this dtype, in a loop of nothing else or in a large matrix product. of products: of "
    "the library's own matrix products at these shapes."
)
_PEERS_LEGEND = "vs a peer: its time over ours, median of the rounds; in brackets the processors that it kept busy."
_MEMORY_LEGEND = (
    "Growth of the largest resident set in forward and backward, output and gradients included, in a process of its "
    "own. ratio, vs a peer: its bytes over ours."
)


_ACCURACY_LEGEND = (
    "Errors against the next wider type, in units of the unit roundoff times the largest magnitude of the result: the "
    "mean of the heads' largest errors, and the root mean square. pass: our rms is at most PyTorch's, and so is our "
    "largest, within two standard errors of the heads' differences. bf16, fp16: beside the better of PyTorch's fused "
    "kernel and its composition, number by number, with float32's own errors added to what is allowed; rows that pass "
    "stand together."
)
_GOAL_LEGEND = (
    "vs a peer: its time over ours. over something: ours over that. Goals whose cases were not run are not listed "
    "(--goals runs all of them)."
)


@dataclass(frozen=True)
class ReportTable:
    """One table of a run, independent of how it is written."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    legend: str


def _case_cells(result: Result) -> list[str]:
    return [result.case.shape_name, result.case.options_name, result.case.dtype]


def _strongest_cells(result: Result) -> list[str]:
    strongest = result.strongest
    return [strongest.peer, ratio_cell(strongest)] if strongest else [_NOTHING, _NOTHING]


def _cores(entry: Entry | None) -> str:
    return _NOTHING if entry is None or entry.cores is None else f"{entry.cores:.1f}"


def _speed_row(result: Result, roofs: Roofs) -> list[str]:
    seconds, flops = result.ours.seconds, result.flops
    assert seconds is not None and flops is not None
    return [
        *_case_cells(result),
        result.case.task,
        f"{milliseconds(seconds.median)} ±{50 * seconds.spread:.0f} %",
        f"{flops / 1e9:.3g}",
        _share(flops, roofs.most_flops(result.case.dtype)),
        _share(flops, result.library_flops),
        *_strongest_cells(result),
        f"{_cores(result.ours)} / {_cores(result.strongest)}",
    ]


def ratio_cell(entry: Entry | None) -> str:
    """Returns a peer's ratio with its quartiles, or its ratio and its bytes."""
    if entry is None or entry.ratio is None:
        return _NOTHING
    if entry.peak_bytes is not None:
        return f"{entry.ratio.median:.2f} ({entry.peak_bytes / _MIB:.0f} MiB)"
    return f"{entry.ratio.median:.2f} ({entry.ratio.lower:.2f}-{entry.ratio.upper:.2f})"


def _peer_cell(entry: Entry | None) -> str:
    if entry is None or entry.ratio is None or entry.peak_bytes is not None:
        return ratio_cell(entry)
    return f"{entry.ratio.median:.2f} ({_cores(entry)})"


def _peer_cells(result: Result, peers: Sequence[str]) -> list[str]:
    entries = {entry.peer: entry for entry in result.peers}
    return [_peer_cell(entries.get(peer)) for peer in peers]


def _time_tables(level: str, results: Sequence[Result], peers: Sequence[str], roofs: Roofs) -> list[ReportTable]:
    sizes = _SHAPES[level]
    columns = [sizes, *_SPEED_COLUMNS, *_STRONGEST_COLUMNS, _CORES_COLUMN]
    found = [ReportTable(f"{level}: time", columns, [_speed_row(result, roofs) for result in results], _LEGEND)]
    if len(peers) > 1:
        columns = [sizes, "options", "dtype", "task", *(f"vs {peer}" for peer in peers)]
        rows = [[*_case_cells(r), r.case.task, *_peer_cells(r, peers)] for r in results if r.peers]
        found.append(ReportTable(f"{level}: every peer", columns, rows, _PEERS_LEGEND))
    return found


def _memory_table(level: str, results: Sequence[Result], peers: Sequence[str]) -> ReportTable:
    columns = [_SHAPES[level], *_MEMORY_COLUMNS, *_STRONGEST_COLUMNS, *(f"vs {peer}" for peer in peers)]
    rows = []
    for result in results:
        ours = f"{(result.ours.peak_bytes or 0) / _MIB:.0f}"
        rows.append([*_case_cells(result), ours, *_strongest_cells(result), *_peer_cells(result, peers)])
    return ReportTable(f"{level}: peak extra memory", columns, rows, _MEMORY_LEGEND)


def tables(run: Run) -> list[ReportTable]:
    """Returns the tables that a run can fill: time and memory, of the core and of the layer; a row is a case."""
    found = []
    for memory in (False, True):
        for level in _SHAPES:
            results = [r for r in run.results if r.case.level == level and (r.case.task == "memory") == memory]
            peers = list(dict.fromkeys(e.peer for result in results for e in result.peers if e.peer not in NAMES))
            if results and memory:
                found.append(_memory_table(level, results, peers))
            elif results:
                found += _time_tables(level, results, peers, run.roofs)
    return found


def _judged(cells: Sequence[Cell]) -> list[tuple[str, Cell]]:
    """What is shown of the errors; where all shapes of a half type pass with an option, only the nearest to it."""
    groups: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.dtype, cell.options, cell.result, "" if cell.dtype in HALF else cell.shape].append(cell)
    found = []
    for group in groups.values():
        if len(group) > 1 and all(cell.passes for cell in group):
            worst = max(group, key=lambda cell: cell.share)
            found.append((f"all {len(group)}; worst: {worst.shape}", worst))
        else:
            found += [(cell.shape, cell) for cell in group]
    return found


def closing_tables(run: Run) -> list[ReportTable]:
    """Returns what is judged: errors beside PyTorch's, and the goals; empty ones are left out."""
    cells = [
        [
            *(shape, cell.options, cell.dtype, cell.result),
            *(f"{number:.3g}" for pair in (cell.ours, cell.torch) for number in pair),
            *(f"{cell.share:.3f}", "pass" if cell.passes else "short"),
        ]
        for shape, cell in _judged(run.accuracy)
    ]
    rows = [
        [
            *(row.goal, row.where, _NOTHING if row.figure is None else f"{row.figure:.3g}"),
            f"{'at most' if row.at_most else 'at least'} {row.needed:.3g}",
            row.verdict,
        ]
        for row in run.goals()
    ]
    tables = (
        ReportTable("accuracy", list(_ACCURACY_COLUMNS), cells, _ACCURACY_LEGEND),
        ReportTable("goals", list(_GOAL_COLUMNS), rows, _GOAL_LEGEND),
    )
    return [table for table in tables if table.rows]


def _styled(column: str, cell: str) -> Text:
    if column == _VERDICT:
        return Text(cell, style={"pass": "green", "short": "red"}.get(cell, ""))
    if column.startswith(_RATIO_COLUMNS) and cell != _NOTHING:
        return Text(cell, style="green" if float(cell.split()[0]) >= 1.0 else "red")
    return Text(cell)


def summary_rows(results: Sequence[Result]) -> list[list[str]]:
    """Returns, for each peer and task, the number of cases, the geometric mean of the ratios, and the lowest ratio."""
    found: dict[tuple[str, str, str], list[tuple[float, Case]]] = defaultdict(list)
    for result in results:
        for entry in result.peers:
            if entry.ratio and entry.ratio.median > 0 and entry.peer not in NAMES:
                key = (result.case.level, result.case.task, entry.peer)
                found[key].append((entry.ratio.median, result.case))
    rows = []
    for (level, task, peer), pairs in found.items():
        lowest, case = min(pairs, key=lambda pair: pair[0])
        mean = statistics.geometric_mean(ratio for ratio, _ in pairs)
        where = f"{case.shape_name} {case.dtype} {case.options_name}"
        rows.append([f"{level} {task}", peer, str(len(pairs)), f"{mean:.2f}", f"{lowest:.2f}", where])
    return rows


def print_run(console: Console, run: Run) -> None:
    """Prints the tables of a run, its summary, what was left out or failed, and the verdicts."""
    for table in tables(run):
        _print_table(console, table)

    summary = Table("work", "peer", title="ratios, all in all", title_justify="left", title_style="bold")
    summary.box, summary.show_edge = box.SIMPLE_HEAD, False
    for column in ("cases", "geometric mean", "lowest"):
        summary.add_column(column, justify="right")
    summary.add_column("where")
    for row in summary_rows(run.results):
        summary.add_row(*row)
    console.print(summary)
    console.print()
    _print_exceptions(console, run)
    for table in closing_tables(run):
        _print_table(console, table)


def _print_table(console: Console, table: ReportTable) -> None:
    grid = Table(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    for column in table.columns:
        grid.add_column(column, justify="left" if column in _TEXT_COLUMNS else "right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(_styled(column, cell) for column, cell in zip(table.columns, row, strict=True)))
    console.print(grid)
    console.print(table.legend, style="dim")
    console.print()


def _print_exceptions(console: Console, run: Run) -> None:
    reasons = sorted({f"{peer}: {why}" for result in run.results for peer, why in result.left_out.items()})
    for reason in reasons:
        console.print(f"left out: {reason}", style="dim", markup=False)
    for result in run.results:
        for peer, problem in result.wrong.items():
            console.print(f"WRONG: {result.case.name}, {peer}: {problem}", style="red", markup=False)
    for name, problem in run.failures.items():
        console.print(f"FAILED: {name}: {problem}", style="red", markup=False)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def markdown(run: Run) -> str:
    """Returns the run as Markdown: the command, the machine, and the tables."""
    lines = [f"`{run.command}`", "", *(f"- {line}" for line in head_lines(run)), ""]
    for table in (*tables(run), *closing_tables(run)):
        lines += [f"**{table.title}**", "", *_markdown_table(table.columns, table.rows), "", table.legend, ""]
    return "\n".join(lines)
