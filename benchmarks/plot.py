"""The ratios of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import SUITES
from benchmarks.measure import Result
from benchmarks.report import Run

_COLOURS = ("#2b6cb0", "#d1602b", "#3a8f5c", "#8a5fa8", "#b08a2b", "#5b6770", "#a83f55", "#3fa0a8", "#86a83f")
_ROW_HEIGHT = 0.2  # inches
_LABELS_WIDTH = 4.0
_MARGIN = 1.25


def _draw(axes, results: Sequence[Result], colours: dict[str, str]) -> None:
    position = 0.0
    ticks, labels = [], []
    for result in results:
        first = position
        for entry in result.peers:
            if entry.ratio is None:
                continue
            ratio = entry.ratio
            error = [[ratio.median - ratio.lower], [ratio.upper - ratio.median]]
            axes.barh(position, ratio.median, height=0.85, color=colours[entry.peer], label=entry.peer)
            axes.errorbar(ratio.median, position, xerr=error, color="#222222", linewidth=0.8, capsize=1.5)
            position += 1
        ticks.append((first + position - 1) / 2)
        labels.append(f"{result.case.task}  {result.case.shape_name}  {result.case.dtype}  {result.case.options_name}")
        position += 0.6
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.set_ylim(position, -1)
    largest = max(entry.ratio.median for result in results for entry in result.peers if entry.ratio)
    axes.set_xlim(0, _MARGIN * max(largest, 1.0))  # a disturbed round's long whisker must not squeeze the bars
    axes.axvline(1.0, color="#222222", linewidth=1)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    unique = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(unique.values(), unique.keys(), frameon=False, fontsize=8)


def save_plot(path: Path, run: Run) -> None:
    """Draws the ratio of every peer to ours, with its quartiles, one panel for each suite.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    suites = {suite: [r for r in run.results if r.case.suite == suite and r.peers] for suite in SUITES}
    suites = {suite: results for suite, results in suites.items() if results}
    if not suites:
        return
    names = list(dict.fromkeys(entry.peer for results in suites.values() for r in results for entry in r.peers))
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    rows = [sum(len(r.peers) + 0.6 for r in results) + 3 for results in suites.values()]
    figure, panels = pyplot.subplots(
        len(suites),
        1,
        figsize=(_LABELS_WIDTH + 6, _ROW_HEIGHT * sum(rows) + 1),
        height_ratios=rows,
        layout="constrained",
        squeeze=False,
    )
    for axes, (suite, results) in zip(panels[:, 0], suites.items(), strict=True):
        _draw(axes, results, colours)
        axes.set_title(
            f"{suite}: {'memory' if suite == 'memory' else 'time'} of the peer / ours", loc="left", fontsize=10
        )
    machine = run.machine
    figure.suptitle(
        f"{machine['processor']}, threads: {machine['threads']}, torch {machine['torch']}, {machine['date']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
