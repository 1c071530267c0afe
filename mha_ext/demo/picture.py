"""The picture of the demonstration: loss curves, how far they are apart, and the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mha_ext.demo.training import Learner

COLOURS = {"torch": "#d1602b", "mha_ext": "#2b6cb0"}
_FLOAT32_LOSS_STEP = 1e-7  # about the distance of neighbouring losses: below it the axis is linear, so that it shows 0
_TIME_AXIS = 2.5  # height of the axis in medians: single disturbed steps may fall outside


def save_picture(path: Path, learners: Sequence[Learner]) -> None:
    """Draws the recorded training into a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, (losses, differences, times) = pyplot.subplots(
        1, 3, figsize=(13, 4), layout="constrained", width_ratios=(3, 2, 3)
    )
    theirs, ours = learners
    steps = range(1, len(ours.losses) + 1)
    for learner, width in ((theirs, 3.5), (ours, 1.2)):
        colour = COLOURS[learner.name]
        losses.plot(steps, learner.losses, color=colour, linewidth=width, label=learner.name)
        milliseconds = [seconds * 1e3 for seconds in learner.seconds]
        times.plot(steps, milliseconds, ".", color=colour, markersize=3, alpha=0.4)
        median = learner.step_seconds * 1e3
        times.axhline(median, color=colour, linewidth=1.5, label=f"{learner.name}: median {median:.1f} ms")
    apart = [abs(mine - other) for mine, other in zip(ours.losses, theirs.losses, strict=True)]
    differences.plot(steps, apart, ".", color="#555555", markersize=3)
    differences.set_yscale("symlog", linthresh=_FLOAT32_LOSS_STEP)

    losses.set(title="Training loss", xlabel="step", ylabel="nats per character")
    differences.set(title="Difference of the losses", xlabel="step", ylabel="absolute")
    median = max(learner.step_seconds for learner in learners)
    times.set(
        title="Time of a training step (outliers cut off)",
        xlabel="step",
        ylabel="ms",
        ylim=(0, _TIME_AXIS * median * 1e3),
    )
    losses.legend(frameon=False)
    times.legend(frameon=False)
    for axes in (losses, differences, times):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
