"""What a run found, as tables and sentences: printed, and kept for a report in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from mha_ext.demo.report import new_table, verdict
from mha_ext.generate.agreement import Comparison
from mha_ext.generate.memory import Held
from mha_ext.generate.speed import AGAIN, CACHE, TORCH, WAYS, Speeds

_KIB = 1 << 10


@dataclass
class Report:
    """Prints on a console and remembers the same as Markdown."""

    console: Console
    parts: list[str] = field(default_factory=list)

    def lines(self, lines: Sequence[str]) -> None:
        """A paragraph, one sentence or figure a line."""
        self.console.print("\n".join(lines), markup=False, style="dim", soft_wrap=True)
        self.console.print()
        self.parts.append("\n".join(f"- {line}" for line in lines))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; the first column is text."""
        table = new_table(title, *columns)
        for row in rows:
            table.add_row(*map(escape, row))
        self.console.print(table)
        rule = ["---", *["---:"] * (len(columns) - 1)]
        body = "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows))
        self.parts.append(f"## {title}\n\n{body}")

    def check(self, name: str, passed: bool) -> bool:
        """A verdict."""
        self.console.print(f"{escape(name)}: {verdict(passed)}")
        self.parts.append(f"{name}: {'ok' if passed else '**FAILED**'}")
        return passed

    def text(self, title: str, text: str) -> None:
        """A text as it is."""
        self.console.print(f"[bold]{escape(title)}[/]")
        self.console.print(text, markup=False)
        self.console.print()
        self.parts.append(f"## {title}\n\n" + "\n".join(f"    {line}" for line in text.splitlines()))

    def save(self, path: Path, picture: Path | None) -> None:
        """Writes what was remembered, with the picture if there is one."""
        parts = ["# Text generation with a key/value cache", *self.parts]
        if picture is not None:
            parts.append(f"![characters a second and bytes of the caches]({picture.name})")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def report_agreement(report: Report, comparison: Comparison, prompt_length: int) -> bool:
    """Reports whether cached text and logits are those of re-running; returns whether they are."""
    rows = [["re-run, no cache", "", "", f"{comparison.rounding:.1e}"]]
    for found in (*comparison.exact, *comparison.rounded):
        rows.append([found.name, f"{found.same} of {found.total}", f"{found.apart:.1e}", f"{found.error:.1e}"])
    report.table(
        "Greedy text with a cache and without",
        ("", "same characters", "logits apart", "error of logits"),
        rows,
    )
    report.lines(
        [
            f"The text goes on from {prompt_length} characters; the same are those before the first that differs. "
            "Logits: largest difference. Errors are against the same model in float64, which reads the re-run text.",
            f"Bound of the error of re-running, and of how far a cache is apart from it: {comparison.bound:.1e}, some "
            "times what a change of every parameter in its last place does to the logits.",
            "int8 rounds keys and values on purpose: no bound is claimed, texts may part.",
        ]
    )
    for found in comparison.exact:
        if found.same < found.total:
            report.lines([f"{found.name}: the two likeliest characters were {found.gap:.1e} apart where texts part."])
    return report.check("cached logits are those of re-running, within the bound", comparison.passed)


def report_speeds(report: Report, speeds: Sequence[Speeds], receptive_field: int) -> None:
    """Reports characters a second at each length."""
    rows = []
    for entry in speeds:
        rates = [f"{middle:.0f} ({low:.0f}-{high:.0f})" for low, middle, high in map(entry.rate, WAYS)]
        gains = [f"{entry.gain(way):.1f}x" for way in (AGAIN, TORCH)]
        prefill = sorted(entry.prefill)[len(entry.prefill) // 2]
        rows.append([str(entry.length), *rates, *gains, f"{prefill * 1e3:.1f}"])
    columns = ("length", *WAYS, "x re-run", "x nn.MHA", "prefill, ms")
    report.table("Characters a second after a text of some length: median (quartiles)", columns, rows)
    report.lines(
        [
            f"{CACHE}: each character goes through the model alone; the text before it went in at once (prefill, not "
            f"in the rate). {AGAIN}: our model without a cache, the whole text goes through it for every character.",
            f"{TORCH}: likewise, a model of the same sizes, untrained, with torch.nn.MultiheadAttention and a causal "
            "mask, without rotary positions, shared heads and window. Its fused inference path, slower here, is off.",
            "x re-run, x nn.MHA: how many times as fast the cache is, the median of the rounds' ratios.",
            f"With a window, only the last {receptive_field} characters matter to the next one: a program may re-run "
            "these alone, at any length.",
        ]
    )


def report_bytes(report: Report, held: Sequence[Held], lengths: Sequence[int], window: int) -> bool:
    """Reports what caches take; returns whether it is what their sizes say."""
    rows = []
    for entry in held:
        sizes = [f"{size / _KIB:.1f}" for size in (*entry.whole, entry.rolling)]
        rows.append([f"{entry.storage}, H_kv = {entry.kv_heads}", *sizes])
    columns = ("KiB at length", *map(str, lengths), "rolling")
    report.table("Bytes of the caches of all layers, one text", columns, rows)
    report.lines(
        [
            "Keys and values: 2 · layers · B · H_kv · length · head_dim · bytes of a number; int8 has a float32 scale "
            "for each vector besides.",
            f"Rolling: room for two windows of {window} characters, whatever the length.",
        ]
    )
    return report.check("bytes are those of the formula", all(entry.whole == entry.expected for entry in held))
