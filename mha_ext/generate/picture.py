"""The picture: characters a second and bytes of the caches, against the length of the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mha_ext.generate.memory import STORAGES, Held
from mha_ext.generate.speed import AGAIN, CACHE, TORCH, WAYS, Speeds

_COLOURS = {CACHE: "#2f855a", AGAIN: "#2b6cb0", TORCH: "#d1602b"}
_HEAD_COLOURS = ("#6b46c1", "#2b6cb0", "#2f855a")
_KIB = 1 << 10


def _draw_speeds(axes: Any, speeds: Sequence[Speeds]) -> None:
    lengths = [entry.length for entry in speeds]
    for way in WAYS:
        lows, medians, highs = zip(*(entry.rate(way) for entry in speeds), strict=True)
        below = [median - low for median, low in zip(medians, lows, strict=True)]
        above = [high - median for median, high in zip(medians, highs, strict=True)]
        axes.errorbar(lengths, medians, yerr=(below, above), color=_COLOURS[way], marker="o", capsize=3, label=way)
    axes.set(title="Characters a second: median, quartiles", xlabel="characters before", xscale="log", yscale="log")


def _draw_bytes(axes: Any, held: Sequence[Held], lengths: Sequence[int]) -> None:
    for entry, colour in zip(held, _HEAD_COLOURS, strict=True):
        label = f"{entry.kv_heads} key/value head{'s' if entry.kv_heads > 1 else ''}"
        axes.plot(lengths, [size / _KIB for size in entry.whole], color=colour, marker="o", label=label)
        axes.axhline(entry.rolling / _KIB, color=colour, linestyle="--", linewidth=1)
    title = f"Caches, {held[0].storage}, KiB (dashed: rolling)"
    axes.set(title=title, xlabel="characters", xscale="log", yscale="log")


def save_picture(path: Path, speeds: Sequence[Speeds], held: Sequence[Held]) -> None:
    """Draws both into a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, panels = pyplot.subplots(1, 1 + len(STORAGES), figsize=(16, 4), layout="constrained")
    for axes in panels[2:]:
        axes.sharey(panels[1])
    lengths = [entry.length for entry in speeds]
    _draw_speeds(panels[0], speeds)
    for axes, storage in zip(panels[1:], STORAGES, strict=True):
        _draw_bytes(axes, [entry for entry in held if entry.storage == storage], lengths)
    for axes in panels:
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
