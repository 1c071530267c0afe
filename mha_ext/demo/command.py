"""What the package's commands share: the terminal, a progress bar, checks of options."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_PLAIN_WIDTH = 100  # of lines in a pipe or a file
_PLAIN_REPORTS = 10  # lines of progress where there is no terminal


def make_console() -> Console:
    """Returns a console on standard output that no terminal or pipe makes fail."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without mathematical signs shows "?" instead of failing
    is_terminal = sys.stdout.isatty()
    return Console(width=None if is_terminal or "COLUMNS" in os.environ else _PLAIN_WIDTH, highlight=False)


def check_numbers(parser: argparse.ArgumentParser, parsed: argparse.Namespace, positive: Sequence[str]) -> None:
    """Ends the program with a message if a named option was given and is below 1, or if the seed is none of torch's."""
    for name in positive:
        value = getattr(parsed, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not -(2**63) <= parsed.seed < 2**64:  # what torch.manual_seed takes
        parser.error(f"--seed must be from -2**63 to 2**64 - 1, got {parsed.seed}")


@contextmanager
def progress(console: Console, title: str, unit: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Gives a function of how many are done and a text: a progress bar on a terminal, some plain lines elsewhere."""
    every = max(1, total // _PLAIN_REPORTS)

    def print_line(done: int, text: str) -> None:
        if done % every == 0 or done == total:
            console.print(f"{unit} {done:>{len(str(total))}}/{total}  {text}")

    if console.is_terminal:
        columns = (
            TextColumn(title),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("[dim]left[/]"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=total)
            yield lambda done, text: bar.update(task, completed=done, description=text)
    else:
        yield print_line
    console.print()
