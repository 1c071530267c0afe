"""Command line of the demonstration: ``python -m mha_ext.demo [--quick]``."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

try:
    import rich  # noqa: F401  (only to say plainly what is missing, before anything else imports it)
except ImportError:
    raise SystemExit(
        'the demo prints with rich: install it with pip install "mha_ext[demo]" or pip install rich'
    ) from None

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin stall each other on a busy machine

import torch
from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

import mha_ext
from mha_ext.demo import checks, command, converted, half, report
from mha_ext.demo.model import ModelConfig
from mha_ext.demo.picture import save_picture
from mha_ext.demo.step_memory import step_peak_bytes
from mha_ext.demo.text import Corpus, load_text
from mha_ext.demo.training import ATTENTION_CLASSES, Learner, held_out_loss, make_learner, same_start, train

_PROMPT = "The "


@dataclass(frozen=True)
class Plan:
    """How large a run is."""

    steps: int
    held_out_batches: int
    sample_length: int
    config: ModelConfig


def _plan(quick: bool, alphabet_size: int) -> Plan:
    if quick:
        config = ModelConfig(alphabet_size, batch=8, context=64, width=64, heads=4, layers=2)
        return Plan(steps=60, held_out_batches=4, sample_length=120, config=config)
    return Plan(steps=340, held_out_batches=16, sample_length=400, config=ModelConfig(alphabet_size))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mha_ext.demo",
        description="Train one small language model with PyTorch's attention layer and with ours, and compare.",
    )
    parser.add_argument("--quick", action="store_true", help="a small model and few steps: some seconds, not minutes")
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), metavar="DIR", help="where the picture goes"
    )
    parser.add_argument("--steps", type=int, help="training steps (default: 340, or 60 with --quick)")
    parser.add_argument("--seed", type=int, default=0, help="seed of initial values and batches (default: 0)")
    parser.add_argument("--threads", type=int, help="threads that torch may use (default: torch's own choice)")
    parsed = parser.parse_args(arguments)
    command.check_numbers(parser, parsed, ("steps", "threads"))
    return parsed


def _train(console: Console, learners: Sequence[Learner], codes: torch.Tensor, seed: int) -> None:
    """Trains, showing the losses."""
    steps = learners[0].steps
    with command.progress(console, "training", "step", steps) as show:

        def report_losses(step: int) -> None:
            show(step, "loss: " + "  ".join(f"{learner.name} {learner.losses[-1]:.3f}" for learner in learners))

        train(learners, codes, seed, report_losses)


def _print_head(console: Console, plan: Plan, corpus: Corpus) -> None:
    config = plan.config
    characters = len(corpus.training) + len(corpus.held_out)
    lines = [
        "One language model, trained with torch.nn.MultiheadAttention, with mha_ext's, and with mha_ext's in bfloat16.",
        f"Text: pydoc_data.topics, {characters:,} characters, {config.alphabet_size} different ones",
        f"Model: {config.layers} layers, width {config.width}, {config.heads} heads, context {config.context}, "
        f"batch {config.batch}, {plan.steps} steps",
        f"Python {platform.python_version()}, torch {torch.__version__}, threads: {torch.get_num_threads()}, "
        f"mha_ext {mha_ext.__version__} ({mha_ext.cpu_capability()} kernels)",
    ]
    console.print(Panel(Text("\n".join(lines)), title="mha_ext demo", title_align="left", expand=False))


def _print_sample(console: Console, learner: Learner, corpus: Corpus, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    learner.model.eval()
    codes = learner.model.sample(corpus.encode(_PROMPT), length, generator)
    text = Text(corpus.decode(codes))
    console.print(Panel(text, title=f"written by the {learner.name} model", title_align="left", expand=False))


def _save_picture(console: Console, directory: Path, learners: Sequence[Learner]) -> None:
    path = (directory / "training.png").resolve()
    try:
        save_picture(path, learners)
    except ImportError:
        advice = 'pip install "mha_ext[demo]" or pip install matplotlib'
        console.print(f"no picture: matplotlib is missing ({advice})", markup=False)
        return
    console.print(f"picture: {path}", soft_wrap=True)


def _check_layer(console: Console, plan: Plan, ours: Learner, seed: int) -> bool:
    """Prints the checks of the layer by itself; returns whether all of them passed."""
    console.print(Rule("the layer by itself", align="left"))
    gradients_right = checks.gradients_match_finite_differences(seed)
    report.print_gradcheck(console, gradients_right)
    differences = checks.parity(plan.config, seed)
    report.print_parity(console, differences)
    counts_right = report.print_counts(console, ours)
    report.print_shapes(console, plan.config)
    return gradients_right and counts_right and all(difference.passed for difference in differences)


def _check_converted(console: Console, seed: int) -> bool:
    """Prints how a whole transformer of PyTorch's learns once it is converted; returns whether it learns the same."""
    console.print(Rule("a finished model, converted", align="left"))
    losses = converted.converted_losses(seed)
    agree = converted.agree(losses)
    report.print_converted(console, losses, agree)
    return agree


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demonstration; returns 0 when every check passed."""
    started = time.perf_counter()
    options = _arguments(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = command.make_console()
    corpus = Corpus.from_text(load_text())
    plan = _plan(options.quick, len(corpus.alphabet))
    if options.steps is not None:
        plan = Plan(options.steps, plan.held_out_batches, plan.sample_length, plan.config)

    _print_head(console, plan, corpus)
    learners = [make_learner(name, plan.config, plan.steps, options.seed) for name in ATTENTION_CLASSES]
    rounded = half.make_half_learner(plan.config, plan.steps, options.seed)
    started_equal = same_start([*learners, rounded])
    console.print(f"initial values of all models, bit for bit: {report.verdict(started_equal)}")
    _train(console, [*learners, rounded], corpus.training, options.seed)

    held_out = {
        learner.name: held_out_loss(learner, corpus.held_out, plan.held_out_batches, options.seed)
        for learner in (*learners, rounded)
    }
    report.print_losses(console, learners, held_out)
    peaks = {name: step_peak_bytes(name, plan.config, options.seed) for name in ATTENTION_CLASSES}
    report.print_costs(console, learners, peaks)
    bound = half.loss_bound(learners[-1], corpus.held_out, options.seed)
    half_right = report.print_half(console, (learners[-1], rounded), held_out, bound)
    layer_right = _check_layer(console, plan, learners[-1], options.seed)
    converted_right = _check_converted(console, options.seed)
    _print_sample(console, learners[-1], corpus, plan.sample_length, options.seed)
    _save_picture(console, options.output, learners)

    passed = started_equal and half_right and layer_right and converted_right
    console.print(f"all checks: {report.verdict(passed)}   ({time.perf_counter() - started:.0f} s)")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
