"""Tables of the demonstration."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import mha_ext
from mha_ext.demo.checks import Difference, counted_parameters
from mha_ext.demo.model import ModelConfig
from mha_ext.demo.training import Learner, median_ratio

_INTERVALS = 8
_MIB = 1 << 20


def new_table(title: str, *columns: str) -> Table:
    """Returns a table whose first column is text and whose other columns are numbers."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def verdict(passed: bool) -> str:
    """Returns a coloured word for the outcome of a check."""
    return "[green]ok[/]" if passed else "[bold red]FAILED[/]"


def print_losses(console: Console, learners: Sequence[Learner], held_out: Mapping[str, float]) -> None:
    """Prints the mean loss of every interval of training, for both models, and how far they are apart."""
    theirs, ours = learners
    table = new_table("Mean loss in nats per character", "steps", "torch", "mha_ext", "difference")
    steps = len(ours.losses)
    edges = [round(steps * number / _INTERVALS) for number in range(_INTERVALS + 1)]
    for start, end in itertools.pairwise(edges):
        if start < end:
            means = [statistics.fmean(learner.losses[start:end]) for learner in (theirs, ours)]
            table.add_row(f"{start + 1}-{end}", f"{means[0]:.4f}", f"{means[1]:.4f}", f"{means[1] - means[0]:+.1e}")
    table.add_section()
    last = [held_out[learner.name] for learner in (theirs, ours)]
    table.add_row("held-out text", f"{last[0]:.4f}", f"{last[1]:.4f}", f"{last[1] - last[0]:+.1e}")
    console.print(table)
    apart = max(abs(mine - other) for mine, other in zip(ours.losses, theirs.losses, strict=True))
    console.print(
        f"Largest difference in one step: {apart:.1e}. It begins as rounding; training amplifies it with time.",
        style="dim",
    )
    console.print()


def print_costs(console: Console, learners: Sequence[Learner], peaks: Mapping[str, int]) -> None:
    """Prints time and memory of a training step for both models, and their ratio."""
    theirs, ours = learners
    table = new_table("One training step", "", "torch", "mha_ext", "step by step")
    times = [f"{learner.step_seconds * 1e3:.1f} ms" for learner in learners]
    table.add_row("time (median)", *times, f"{median_ratio(theirs, ours):.2f}")
    memory = [f"{peaks[learner.name] / _MIB:.1f} MiB" for learner in learners]
    table.add_row("peak extra memory", *memory, f"{peaks[theirs.name] / max(1, peaks[ours.name]):.2f}")
    console.print(table)
    console.print(
        "Whole step: embedding, attention, perceptron, loss, backward, optimizer. Last column: torch's over mha_ext's; "
        "for time the median over pairs of steps taken in turn, which a busy machine moves least. Memory: growth of "
        "the largest resident set during a step, each in its own process.",
        style="dim",
    )
    console.print()


def print_half(console: Console, learners: Sequence[Learner], held_out: Mapping[str, float], bound: float) -> bool:
    """Prints where training ends in float32 and under autocast to bfloat16; returns whether the losses are the same."""
    whole, rounded = learners
    table = new_table("mha_ext's layer, bfloat16 autocast", "", "float32", "bfloat16", "difference", "at most")
    apart = held_out[rounded.name] - held_out[whole.name]
    losses = [f"{held_out[learner.name]:.4f}" for learner in learners]
    table.add_row("held-out text, nats per character", *losses, f"{apart:+.1e}", f"{bound:.1e}")
    times = [f"{learner.step_seconds * 1e3:.1f} ms" for learner in learners]
    table.add_row("step (median)", *times, f"{median_ratio(whole, rounded):.2f}x", "")
    console.print(table)
    console.print(
        "The bound: bfloat16 rounds a logit z by up to |z|/256, and the loss of a character moves by at most twice the "
        "largest of its logits' roundings; the mean of that over held-out text.",
        style="dim",
    )
    agree = abs(apart) <= bound
    console.print(f"trained in bfloat16 to the same loss: {verdict(agree)}")
    console.print()
    return agree


def print_converted(console: Console, losses: Mapping[str, Sequence[float]], agree: bool) -> None:
    """Prints the losses of a transformer of PyTorch's and of the same one converted."""
    table = new_table("nn.Transformer learns to copy, float64: loss in nats", "step", *losses, "difference")
    theirs, ours = losses.values()
    for step in sorted({0, len(theirs) // 2, len(theirs) - 1}):
        table.add_row(str(step + 1), f"{theirs[step]:.9f}", f"{ours[step]:.9f}", f"{ours[step] - theirs[step]:+.1e}")
    console.print(table)
    console.print(f"mha_ext.convert(model) trains to the same loss: {verdict(agree)}")
    console.print()


def print_gradcheck(console: Console, passed: bool) -> None:
    """Prints whether the layer's gradients agree with finite differences."""
    console.print("[bold]Gradients of the layer against central finite differences, float64[/]")
    console.print(f"input and all parameters, causal: {verdict(passed)}")
    console.print()


def print_parity(console: Console, differences: Sequence[Difference]) -> None:
    """Prints how far our layer and PyTorch's are apart."""
    table = new_table(
        "Parity of the layer, float32, causal", "", "apart", "our error", "torch's error", "agree to rounding"
    )
    for difference in differences:
        numbers = [f"{value:.1e}" for value in (difference.apart, difference.ours, difference.theirs)]
        table.add_row(difference.name, *numbers, verdict(difference.passed))
    console.print(table)
    console.print("Relative to the largest magnitude; errors are against PyTorch's layer in float64.", style="dim")
    console.print()


def print_counts(console: Console, learner: Learner) -> bool:
    """Prints parameters and multiply-adds of the model's attention; returns whether the layer holds what it should."""
    config = learner.model.config
    counted = counted_parameters(learner.model.attention_layers()[0])
    expected = mha_ext.parameter_count(config.width)
    expected_biases = mha_ext.parameter_count(config.width, bias=True) - expected
    products = mha_ext.self_attention_flops(config.batch, config.context, config.width)
    agree = counted["weights"] == expected and counted["biases"] == expected_biases
    whole = sum(parameter.numel() for parameter in learner.model.parameters())
    layers = config.layers

    table = new_table("Counts (whatever the number of heads)", "", "a layer", f"{layers} layers")
    table.add_row("projection weights, 4 d^2 (eq. 20.4)", f"{expected:,}", f"{layers * expected:,}")
    table.add_row("  held by the module", f"{counted['weights']:,}", f"{layers * counted['weights']:,}")
    table.add_row("biases held by the module", f"{counted['biases']:,}", f"{layers * counted['biases']:,}")
    table.add_row("parameters of the whole model", "", f"{whole:,}")
    table.add_row("multiply-adds, 4 B T d^2 + 2 B T^2 d (eq. 20.5)", f"{products:,}", f"{layers * products:,}")
    console.print(table)
    console.print(f"count of the module and of the equation: {verdict(agree)}")
    console.print()
    return agree


def print_shapes(console: Console, config: ModelConfig) -> None:
    """Prints the shape of every step of one attention layer of the model."""
    trace = mha_ext.shape_trace(config.batch, config.context, config.width, config.heads, bias=True)
    title = f"Shapes: B={config.batch}, T={config.context}, d={config.width}, H={config.heads}"
    table = new_table(title, "step", "how", "shape", "numbers", "held")
    table.columns[1].justify = "left"
    for step in trace.steps:
        shape = "(" + ", ".join(map(str, step.shape)) + ")"
        table.add_row(step.name, escape(step.formula), shape, f"{step.numel:,}", "yes" if step.stored else "by tile")
    console.print(table)
    console.print(
        f"Stored, the attention weights would take {trace.attention_weights:,} numbers a layer; they live by the tile.",
        style="dim",
    )
    console.print()
