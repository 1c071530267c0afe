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

from benchmarks.cases import Case
from benchmarks.measure import Entry, Result, result_from_json
from benchmarks.roofs import Roofs

_FORMAT = 1  # of the JSON file
_MIB = 1 << 20
_SHAPES = {"core": "B,H,T,D", "layer": "B,T,E,H"}


@dataclass
class Run:
    """Everything that one call of the benchmark found out."""

    machine: dict[str, Any]
    command: str
    roofs: Roofs
    results: list[Result] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the run as JSON."""
        values = {
            "format": _FORMAT,
            "machine": self.machine,
            "command": self.command,
            "roofs": asdict(self.roofs),
            "results": [result.as_json() for result in self.results],
            "failures": self.failures,
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
        return cls(values["machine"], values["command"], Roofs(**values["roofs"]), results, values["failures"])


def milliseconds(seconds: float) -> str:
    """Returns a time with three significant digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.1 else f"{value:.3f}"


def _share(value: float | None, roof: float | None) -> str:
    return f"{100 * value / roof:.0f} %" if value and roof else "-"


def head_lines(run: Run) -> list[str]:
    """Returns what a reader must know before any number: machine, software, roofs."""
    machine, roofs = run.machine, run.roofs
    products = ", ".join(f"{name} {flops / 1e9:.0f} GF/s" for name, flops in roofs.product_flops.items())
    lines = [
        f"{machine['processor']}, processors: {machine['processors_available']}, threads: {machine['threads']}, "
        f"load before the run {machine['load_before']:.1f}",
        f"mha_ext {machine['mha_ext']} ({machine['cpu_capability']} kernels), torch {machine['torch']} "
        f"({machine['torch_cpu_capability']}), Python {machine['python']}, {machine['date']}",
        f"roofs: matrix product {products or 'not measured'}; reads {roofs.read_bytes / 1e9:.1f} GB/s",
    ]
    if machine["load_before"] > 0.5:
        lines.append("the machine was not idle: trust ratios, whose two sides were measured in turn, more than times")
    return lines


_SPEED_COLUMNS = ("options", "dtype", "task", "ours, ms", "GF/s", "of roof", "of products")
_MEMORY_COLUMNS = ("options", "dtype", "ours, MiB")
_TEXT_COLUMNS = {*_SHAPES.values(), "options", "dtype", "task"}
_NOTHING = "-"
_LEGEND = (
    "ours: median, and half the interquartile range as a share of it. vs a peer: its time over ours, median of the "
    "rounds and quartiles; above 1, ours is faster. of roof: of a large matrix product in this dtype. of products: of "
    "the library's own matrix products at these shapes."
)
_MEMORY_LEGEND = (
    "Growth of the largest resident set in forward and backward, output and gradients included, in a process of its "
    "own. vs a peer: its bytes over ours."
)


@dataclass(frozen=True)
class ReportTable:
    """One table of a run, independent of how it is written."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    legend: str


def _speed_cells(result: Result, roofs: Roofs) -> list[str]:
    seconds, flops = result.ours.seconds, result.flops
    assert seconds is not None and flops is not None
    return [
        result.case.task,
        f"{milliseconds(seconds.median)} ±{50 * seconds.spread:.0f} %",
        f"{flops / 1e9:.3g}",
        _share(flops, roofs.product_flops.get(result.case.dtype)),
        _share(flops, result.library_flops),
    ]


def _memory_cells(result: Result, _: Roofs) -> list[str]:
    return [f"{(result.ours.peak_bytes or 0) / _MIB:.0f}"]


def ratio_cell(entry: Entry | None) -> str:
    """Returns a peer's ratio with its quartiles, or its ratio and its bytes."""
    if entry is None or entry.ratio is None:
        return _NOTHING
    if entry.peak_bytes is not None:
        return f"{entry.ratio.median:.2f} ({entry.peak_bytes / _MIB:.0f} MiB)"
    return f"{entry.ratio.median:.2f} ({entry.ratio.lower:.2f}-{entry.ratio.upper:.2f})"


def tables(run: Run) -> list[ReportTable]:
    """Returns the tables that a run can fill: time and memory, of the core and of the layer; a row is a case."""
    found = []
    for memory in (False, True):
        own_columns, own_cells = (_MEMORY_COLUMNS, _memory_cells) if memory else (_SPEED_COLUMNS, _speed_cells)
        for level, sizes in _SHAPES.items():
            results = [r for r in run.results if r.case.level == level and (r.case.task == "memory") == memory]
            if not results:
                continue
            peers = list(dict.fromkeys(entry.peer for result in results for entry in result.peers))
            rows = []
            for result in results:
                entries = {entry.peer: entry for entry in result.peers}
                names = [result.case.shape_name, result.case.options_name, result.case.dtype]
                rows.append(names + own_cells(result, run.roofs) + [ratio_cell(entries.get(peer)) for peer in peers])
            title = f"{level}: peak extra memory" if memory else f"{level}: time"
            columns = [sizes, *own_columns, *(f"vs {peer}" for peer in peers)]
            found.append(ReportTable(title, columns, rows, _MEMORY_LEGEND if memory else _LEGEND))
    return found


def _styled(column: str, cell: str) -> Text:
    if column.startswith("vs ") and cell != _NOTHING:
        return Text(cell, style="green" if float(cell.split()[0]) >= 1.0 else "red")
    return Text(cell)


def summary_rows(results: Sequence[Result]) -> list[list[str]]:
    """Returns, for each peer and task, the number of cases, the geometric mean of the ratios, and the lowest ratio."""
    found: dict[tuple[str, str, str], list[tuple[float, Case]]] = defaultdict(list)
    for result in results:
        for entry in result.peers:
            if entry.ratio and entry.ratio.median > 0:
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
    """Prints the tables of a run, its summary, and what was left out or failed."""
    for table in tables(run):
        grid = Table(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
        for column in table.columns:
            grid.add_column(column, justify="left" if column in _TEXT_COLUMNS else "right", no_wrap=True)
        for row in table.rows:
            grid.add_row(*(_styled(column, cell) for column, cell in zip(table.columns, row, strict=True)))
        console.print(grid)
        console.print(table.legend, style="dim")
        console.print()

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
    for table in tables(run):
        lines += [f"**{table.title}**", "", *_markdown_table(table.columns, table.rows), "", table.legend, ""]
    return "\n".join(lines)
