"""Command line: ``python -m mha_ext.generate [--quick]``."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

try:
    import rich  # noqa: F401  (only to say plainly what is missing, before anything else imports it)
except ImportError:
    raise SystemExit(
        'mha_ext.generate prints with rich: install it with pip install "mha_ext[demo]" or pip install rich'
    ) from None

import torch

import mha_ext
from mha_ext.demo import command
from mha_ext.demo.model import ModelConfig
from mha_ext.demo.report import verdict
from mha_ext.demo.text import Corpus, load_text
from mha_ext.demo.training import Learner, held_out_loss, train
from mha_ext.generate import report
from mha_ext.generate.agreement import compare
from mha_ext.generate.memory import cache_bytes
from mha_ext.generate.model import WindowedModel, build_windowed_model
from mha_ext.generate.picture import save_picture
from mha_ext.generate.sampling import Drawn, greedy, write
from mha_ext.generate.speed import Measured, measure

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}
_HELD_OUT_BATCHES = 8
_HEADS = 8  # divisible by 4: caches of H, H / 4 and 1 heads are compared


@dataclass(frozen=True)
class Plan:
    """How large a run is."""

    config: ModelConfig
    window: int
    steps: int
    compared: int  # characters of the greedy text
    measured: Measured


def _plan(quick: bool, alphabet_size: int) -> Plan:
    if quick:
        config = ModelConfig(alphabet_size, batch=8, context=64, width=64, heads=_HEADS, layers=2)
        return Plan(config, window=32, steps=200, compared=100, measured=Measured((128, 256, 512), rounds=5, count=16))
    config = ModelConfig(alphabet_size, batch=8, context=256, width=128, heads=_HEADS, layers=3)
    measured = Measured((128, 256, 512, 1024), rounds=15, count=16)
    return Plan(config, window=64, steps=340, compared=400, measured=measured)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mha_ext.generate",
        description="Train a small language model with grouped queries, rotary positions and a sliding window, "
        "let it write with a key/value cache, and measure what the cache gains in time and takes in memory.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a small model and few lengths: half a minute, not some minutes")
    add("--output", type=Path, default=Path("generate_output"), metavar="DIR", help="where report and picture go")
    add("--dtype", choices=_DTYPES, default="fp32", help="of the model that writes, and of the products in training")
    add("--steps", type=int, help="training steps (default: 340, or 200 with --quick)")
    add("--kv-heads", type=int, default=2, metavar="G", help=f"key and value heads, a divisor of {_HEADS} (default: 2)")
    add("--window", type=int, metavar="W", help="characters that a layer sees (default: 64, or 32 with --quick)")
    add("--prompt", default="The ", help='what the sample begins with (default: "The ")')
    add("--length", type=int, default=400, help="characters of the sample (default: 400)")
    add("--temperature", type=float, default=0.6, help="of the sample; 0: always the likeliest (default: 0.6)")
    add("--top-k", type=int, metavar="K", help="draw the sample's characters from the K likeliest (default: all)")
    add("--seed", type=int, default=0, help="seed of initial values, batches and sample (default: 0)")
    add("--threads", type=int, help="threads that torch may use (default: torch's own choice)")
    return parser


def _arguments(arguments: Sequence[str] | None, corpus: Corpus) -> argparse.Namespace:
    parser = _parser()
    parsed = parser.parse_args(arguments)
    command.check_numbers(parser, parsed, ("steps", "kv_heads", "window", "length", "top_k", "threads"))
    if _HEADS % parsed.kv_heads:
        parser.error(f"--kv-heads must divide the model's {_HEADS} heads, got {parsed.kv_heads}")
    if not 0 <= parsed.temperature < float("inf"):
        parser.error(f"--temperature must be 0 or more and finite, got {parsed.temperature}")
    unknown = sorted(set(parsed.prompt) - set(corpus.alphabet))
    if unknown or not parsed.prompt:
        got = f"{parsed.prompt!r}, of which the text lacks {''.join(unknown)!r}" if unknown else "nothing"
        parser.error(f"--prompt must be characters of the training text, got {got}")
    return parsed


def _head(plan: Plan, corpus: Corpus, options: argparse.Namespace) -> list[str]:
    config = plan.config
    characters = len(corpus.training) + len(corpus.held_out)
    return [
        f"Text: pydoc_data.topics, {characters:,} characters, {config.alphabet_size} different ones",
        f"Model: {config.layers} layers, width {config.width}, {config.heads} heads, {options.kv_heads} key/value "
        f"heads, rotary positions, window {plan.window}, {options.dtype}",
        f"Training: context {config.context}, batch {config.batch}, {plan.steps} steps",
        f"Python {platform.python_version()}, torch {torch.__version__}, threads: {torch.get_num_threads()}, "
        f"mha_ext {mha_ext.__version__} ({mha_ext.cpu_capability()} kernels)",
    ]


def _trained(output: report.Report, plan: Plan, corpus: Corpus, options: argparse.Namespace) -> WindowedModel:
    """Trains the model and hands it back in the dtype in which it is to write."""
    dtype = _DTYPES[options.dtype]
    model = build_windowed_model(plan.config, options.kv_heads, plan.window, options.seed)
    learner = Learner("mha_ext", model, plan.steps, dtype)
    with command.progress(output.console, "training", "step", plan.steps) as show:
        train([learner], corpus.training, options.seed, lambda step: show(step, f"loss: {learner.losses[-1]:.3f}"))
    model.eval()
    loss = held_out_loss(learner, corpus.held_out, _HELD_OUT_BATCHES, options.seed)
    output.lines(
        [f"Loss on held-out text: {loss:.3f} nats per character; a step took {learner.step_seconds * 1e3:.0f} ms"]
    )
    return model if dtype is None else model.to(dtype)


def _sample(model: WindowedModel, corpus: Corpus, options: argparse.Namespace) -> str:
    generator = torch.Generator().manual_seed(options.seed)
    choose = Drawn(options.temperature, options.top_k, generator) if options.temperature else greedy
    written = write(model, corpus.encode(options.prompt), options.length, choose, model.make_caches(None))
    return corpus.decode(written.codes)


def _save(output: report.Report, directory: Path, draw: Callable[[Path], None]) -> None:
    """Writes picture and report into the output folder, and says where."""
    console, picture = output.console, (directory / "generation.png").resolve()
    drawn = True
    try:
        draw(picture)
        console.print(f"picture: {picture}", markup=False, soft_wrap=True)
    except ImportError:
        advice = 'pip install "mha_ext[demo]" or pip install matplotlib'
        console.print(f"no picture: matplotlib is missing ({advice})", markup=False)
        drawn = False
    path = (directory / "report.md").resolve()
    output.save(path, picture if drawn else None)
    console.print(f"report: {path}", markup=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, writes and measures; returns 0 when every check passed."""
    started = time.perf_counter()
    corpus = Corpus.from_text(load_text())
    options = _arguments(arguments, corpus)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    plan = _plan(options.quick, len(corpus.alphabet))
    plan = replace(plan, steps=options.steps or plan.steps, window=options.window or plan.window)
    output = report.Report(command.make_console())

    output.lines(_head(plan, corpus, options))
    model = _trained(output, plan, corpus, options)
    prompt = corpus.held_out[: plan.config.context]
    agree = report.report_agreement(output, compare(model, prompt, plan.compared), len(prompt))

    measured = plan.measured
    with command.progress(output.console, "measuring", "turn", measured.rounds * len(measured.lengths)) as show:
        speeds = measure(model, corpus.held_out, measured, show)
    report.report_speeds(output, speeds, plan.config.layers * (plan.window - 1) + 1)
    held = cache_bytes(plan.config, plan.window, measured.lengths)
    right = report.report_bytes(output, held, measured.lengths, plan.window)

    output.text("A text that the model wrote", _sample(model, corpus, options))
    _save(output, options.output, lambda path: save_picture(path, speeds, held))
    passed = agree and right
    output.console.print(f"all checks: {verdict(passed)}   ({time.perf_counter() - started:.0f} s)")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
