"""What the figures of a run have to reach, and whether they do.

A goal reads one figure from the result of every case that it holds for. Most compare with a peer: its time over ours,
at least so much. The others compare us with ourselves (``benchmarks/peers/own.py``): ours over that, at most so much.
The figures against peers are for AVX-512; with fewer lanes on our side they are 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy import Cell
from benchmarks.cases import HALF, Case
from benchmarks.figures import (
    Read,
    against,
    against_others,
    against_strongest,
    cost_of_visible,
    extra_over_mask,
    extra_over_results,
    own_cost,
    own_gain,
    peak_mib,
)
from benchmarks.measure import Result
from benchmarks.presets import CORE_SHAPES, ODD_LENGTHS, ODD_WIDTHS

Choice = Callable[[Case], bool]

_CORE_SLACK, _LAYER_SLACK = 0.90, 0.95
_TRIANGLE = ("full", "causal")

# Ratios to F.scaled_dot_product_attention that a prototype reached: (full, causal), forward and backward.
_CORE_RATIOS = {
    "1,8,128,64": {"forward": (1.8, 2.2), "backward": (2.2, 2.8)},
    "32,8,64,32": {"forward": (1.7, 2.1), "backward": (1.7, 1.8)},
    "8,8,512,64": {"forward": (1.25, 2.1), "backward": (1.4, 2.4)},
    "4,12,197,64": {"forward": (1.5, None), "backward": (1.5, None)},
    "1,8,2048,64": {"forward": (1.2, 1.45), "backward": (1.3, 1.6)},
    "2,16,1024,128": {"forward": (1.03, 1.4), "backward": (1.16, 1.6)},
}
# The same of bfloat16, with AMX.
_AMX_RATIOS = {
    "1,8,128,64": {"forward": (1.6, None), "backward": (13.0, None)},
    "32,8,64,32": {"forward": (2.4, None), "backward": (21.0, None)},
    "8,8,512,64": {"forward": (1.4, 2.3), "backward": (4.1, 6.0)},
    "1,8,2048,64": {"forward": (1.4, 1.8), "backward": (2.8, 3.4)},
    "2,16,1024,128": {"forward": (1.2, 1.6), "backward": (2.1, 3.4)},
}
# Ratios to nn.MultiheadAttention(need_weights=False), and of training to its default call.
_LAYER_RATIOS = {
    "1,128,512,8": {"forward": 1.0, "training": 1.2, "default": 1.3},
    "8,512,512,8": {"forward": 1.35, "training": 1.2, "default": 1.65},
    "32,64,256,8": {"forward": 1.15, "training": 1.4, "default": 1.3},
    "1,2048,512,8": {"forward": 2.1, "training": 1.2, "default": 2.0},
    "2,1024,1024,16": {"forward": 1.5, "training": 1.2},
    "16,192,768,12": {"forward": 1.15, "training": 1.3},
}
# The same of bfloat16: the lowest that a prototype reached in these shapes.
_HALF_LAYER_RATIOS = {"training": 2.0, "forward": 1.2}
# Of bfloat16 to who else computes a layer: a prototype's lead over the layer written by hand. OpenVINO only infers.
_HALF_LAYER_OTHERS = {"training": 1.6, "forward": 1.0}
_WIDE = ("avx512", "amx")  # how the names of instruction sets begin whose float32 kernels have AVX-512's lanes
_OWN_SLACK = 1.05  # of our time over our own otherwise: the medians of two equal calls in turn differ by so much


@dataclass(frozen=True)
class Goal:
    """What the figures of some cases have to reach.

    Attributes:
        text: what is compared with what, and in which unit.
        holds_for: whether the goal is about a case.
        figure: the number, from a case's result; None when what it is compared with was not measured.
        needed: what the number must reach at least.
        at_most: the number must not exceed ``needed`` instead.
        peer: the number is a ratio to a peer, and ``needed`` is 1 at most where we do not run on AVX-512.
        together: where all cases pass, one row stands for them: that of the worst.
        threads: how many the goal supposes.
        capability: how the name of the instruction set begins that the goal is for.
    """

    text: str
    holds_for: Choice
    figure: Read
    needed: float
    at_most: bool = False
    peer: bool = False
    together: bool = False
    threads: int = 1
    capability: str = ""


@dataclass(frozen=True)
class Row:
    """One goal's verdict on one case, or on several at once."""

    goal: str
    where: str
    figure: float | None
    needed: float
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """``pass``, ``short`` or ``not measured``."""
        if self.figure is None:
            return "not measured"
        reached = self.figure <= self.needed if self.at_most else self.figure >= self.needed
        return "pass" if reached else "short"

    @property
    def severity(self) -> float:
        """Grows with the distance from the goal; an unmeasured figure is the furthest."""
        if self.figure is None:
            return float("inf")
        return self.figure if self.at_most else -self.figure

    def as_json(self) -> dict[str, Any]:
        """The row as plain values, its verdict included."""
        values = {"goal": self.goal, "where": self.where, "figure": self.figure, "needed": self.needed}
        return {**values, "at_most": self.at_most, "verdict": self.verdict}


def _timed_core(case: Case) -> bool:
    return case.level == "core" and case.task in ("forward", "backward")


def _plain(case: Case) -> bool:
    return not (case.mask != "none" or case.dropout or case.need_weights or case.kv_heads or case.value_dim)


def _is(shape: str, task: str, options: str, level: str, dtype: str = "fp32") -> Choice:
    names = (level, task, shape, options, dtype)
    return lambda case: (case.level, case.task, case.shape_name, case.options_name, case.dtype) == names


def _against_sdpa(text: str, ratios: dict[str, Any], dtype: str, capability: str = "") -> Iterator[Goal]:
    for shape, tasks in ratios.items():
        for task, pair in tasks.items():
            for options, ratio in zip(_TRIANGLE, pair, strict=True):
                if ratio is not None:
                    yield Goal(
                        text, _is(shape, task, options, "core", dtype), against("F.sdpa"), ratio * _CORE_SLACK,
                        peer=True, capability=capability,
                    )  # fmt: skip


def _core_goals() -> Iterator[Goal]:
    yield from _against_sdpa("core vs F.sdpa", _CORE_RATIOS, "fp32")

    def short(case: Case) -> bool:
        return _timed_core(case) and _plain(case) and case.dtype == "fp32" and case.shape_name in _CORE_RATIOS

    yield Goal(
        "core, T up to 128, vs the strongest peer", lambda case: short(case) and case.length <= 128,
        against_strongest, 1.0, peer=True,
    )  # fmt: skip
    shapes = [",".join(map(str, shape)) for shape in CORE_SHAPES]

    def double(case: Case) -> bool:
        return _timed_core(case) and _plain(case) and case.dtype == "fp64" and case.shape_name in shapes

    yield Goal("core, float64, vs F.sdpa", double, against("F.sdpa"), 1.2, peer=True, together=True)

    def odd(case: Case) -> bool:
        return (
            _timed_core(case)
            and _plain(case)
            and case.dtype == "fp32"
            and (case.head_dim in ODD_WIDTHS or case.length in ODD_LENGTHS)
        )

    yield Goal("core, odd sizes, vs F.sdpa", odd, against("F.sdpa"), 1.0, peer=True, together=True)
    yield Goal("one head, 1 thread over all threads", lambda case: case.beside == "1 thread", own_gain, 1.6, threads=2)


def _mask_goals() -> Iterator[Goal]:
    def masked(case: Case) -> bool:
        return _timed_core(case) and case.beside == "unmasked"

    yield Goal("masks vs F.sdpa with the same", masked, against("F.sdpa"), 1.2, peer=True)
    yield Goal("masks, for each pair in a visible block, over unmasked", masked, cost_of_visible, 1.15, at_most=True)

    def trained(case: Case) -> bool:
        return case.task == "memory" and case.beside == "mask not trained"

    yield Goal("mask's gradient, extra bytes over the mask's", trained, extra_over_mask, 2.0, at_most=True)


def _dropout_goals() -> Iterator[Goal]:
    def training(case: Case) -> bool:
        return case.task == "training" and case.beside == "no dropout"

    def memory(case: Case) -> bool:
        return case.task == "memory" and case.beside == "no dropout"

    yield Goal("dropout, training step over that without", training, own_cost, 1.3, at_most=True)
    yield Goal("dropout, bytes over those without", memory, own_cost, 1.1, at_most=True)


def _weights_goals() -> Iterator[Goal]:
    def wanted(case: Case) -> bool:
        return case.level == "layer" and case.need_weights and case.dtype == "fp32" and case.mask == "none"

    def memory(case: Case) -> bool:
        return wanted(case) and case.task == "memory"

    def timed(case: Case) -> bool:
        return wanted(case) and case.task != "memory"

    yield Goal("weights, extra bytes over output and weights", memory, extra_over_results, 1.2, at_most=True)
    yield Goal(
        "weights, over the call without", lambda case: timed(case) and case.length == 1024, own_cost, 1.5, at_most=True
    )
    yield Goal(
        "weights vs nn.MHA with weights", lambda case: timed(case) and case.average_weights and case.length >= 512,
        against("nn.MHA"), 1.6, peer=True,
    )  # fmt: skip


def _layer_goals() -> Iterator[Goal]:
    for shape, ratios in _LAYER_RATIOS.items():
        for column, ratio in ratios.items():
            task, peer = ("training", "nn.MHA (default call)") if column == "default" else (column, "nn.MHA")
            yield Goal(
                f"layer vs {peer}", _is(shape, task, "full", "layer"), against(peer), ratio * _LAYER_SLACK, peer=True
            )

    def timed(case: Case) -> bool:
        return case.level == "layer" and case.task != "memory" and case.dtype in ("fp32", "fp64")

    yield Goal(
        "layer vs the strongest peer", lambda case: timed(case) and _plain(case), against_strongest, 1.0,
        peer=True, together=True,
    )  # fmt: skip
    yield Goal(
        "layer with options vs the strongest peer", lambda case: timed(case) and not _plain(case), against_strongest,
        1.0, peer=True, together=True,
    )  # fmt: skip
    yield Goal("one token over its two linears", lambda case: case.beside == "two linears", own_cost, 1.5, at_most=True)


def _half_core_goals() -> Iterator[Goal]:
    shapes = [",".join(map(str, shape)) for shape in CORE_SHAPES]

    def timed(case: Case) -> bool:
        return _timed_core(case) and _plain(case) and case.dtype in HALF and case.shape_name in shapes

    yield from _against_sdpa("core, bf16 with AMX, vs F.sdpa", _AMX_RATIOS, "bf16", "amx")
    for dtype in HALF:
        yield Goal(
            f"core, {dtype}, vs F.sdpa", lambda case, dtype=dtype: timed(case) and case.dtype == dtype,
            against("F.sdpa"), 1.0, peer=True, together=True,
        )  # fmt: skip

    def beside(case: Case) -> bool:
        return case.beside == "float32"

    yield Goal(
        "bf16, fp16, time over ours in float32", lambda case: beside(case) and case.task != "memory", own_cost,
        _OWN_SLACK, at_most=True, together=True,
    )  # fmt: skip
    yield Goal(
        "bf16, fp16, bytes over ours in float32", lambda case: beside(case) and case.task == "memory", own_cost,
        1.0, at_most=True,
    )  # fmt: skip


def _half_layer_goals() -> Iterator[Goal]:
    for task, ratio in _HALF_LAYER_RATIOS.items():

        def timed(case: Case, task: str = task) -> bool:
            return (case.level, case.task, case.dtype) == ("layer", task, "bf16")

        def plain(case: Case, timed: Choice = timed) -> bool:
            return timed(case) and _plain(case)

        def weights(case: Case, timed: Choice = timed) -> bool:
            return timed(case) and case.need_weights

        needed = ratio * _LAYER_SLACK
        yield Goal("layer, bf16, vs nn.MHA", plain, against("nn.MHA"), needed, peer=True)
        yield Goal("layer, bf16, vs nn.MHA (default call)", plain, against("nn.MHA (default call)"), needed, peer=True)
        yield Goal("layer, bf16, with weights vs nn.MHA with weights", weights, against("nn.MHA"), needed, peer=True)
        yield Goal("layer, bf16, vs the strongest other", plain, against_others, _HALF_LAYER_OTHERS[task], peer=True)


def _memory_goals() -> Iterator[Goal]:
    def memory(case: Case, length: int) -> bool:
        sizes = (case.level, case.task, case.heads, case.length, case.head_dim)
        return sizes == ("core", "memory", 8, length, 64)

    text = "peak of forward and backward, MiB"
    yield Goal(text, lambda case: memory(case, 4096), peak_mib, 48, at_most=True)
    yield Goal(text, lambda case: memory(case, 16384), peak_mib, 4 * 48, at_most=True)


def _variant_goals() -> Iterator[Goal]:
    def variant(case: Case) -> bool:
        return case.level == "variant"

    def timed(case: Case) -> bool:
        return variant(case) and case.task != "memory" and case.variant != "decode"

    def one_query(case: Case, group: bool, half: bool, many: bool = False) -> bool:
        sizes = (case.kv_heads != case.heads, case.dtype in HALF, group and not half and case.batch >= 4)
        return case.variant == "decode" and sizes == (group, half, many)

    def every_head(half: bool) -> Choice:
        return lambda case: one_query(case, group=False, half=half)

    yield Goal("decoding, fp32, vs F.sdpa", every_head(False), against("F.sdpa"), 1.2, peer=True)
    yield Goal("decoding, bf16 and fp16, vs F.sdpa", every_head(True), against("F.sdpa"), 1.5, peer=True)
    for half, many, needed in ((False, False, 1.0), (False, True, 1.2), (True, False, 1.5)):

        def grouped(case: Case, half: bool = half, many: bool = many) -> bool:
            return one_query(case, group=True, half=half, many=many)

        text = "bf16 and fp16" if half else "fp32, 4 and more examples" if many else "fp32, one example"
        yield Goal(f"decoding grouped heads, {text}, vs the best way", grouped, against_strongest, needed, peer=True)
    yield Goal("variants vs the best other way", timed, against_strongest, 1.0, peer=True, together=True)
    yield Goal(
        "variants, bytes of the best other way over ours", lambda case: variant(case) and case.task == "memory",
        against_strongest, 1.0,
    )  # fmt: skip
    for beside in ("repeated keys", "a mask"):

        def own(case: Case, beside: str = beside) -> bool:
            return variant(case) and case.beside == beside

        yield Goal(f"variants, time and bytes over ours with {beside}", own, own_cost, _OWN_SLACK, at_most=True)


def _derivative_goals() -> Iterator[Goal]:
    def derivative(case: Case) -> bool:
        return case.level == "derivative"

    yield Goal(
        "derivatives vs PyTorch's math path", lambda case: derivative(case) and case.task != "memory",
        against_strongest, 1.0, peer=True,
    )  # fmt: skip
    yield Goal(
        "derivatives, bytes of PyTorch's math path over ours", lambda case: derivative(case) and case.task == "memory",
        against_strongest, 1.0,
    )  # fmt: skip


def all_goals() -> list[Goal]:
    """Returns every goal."""
    groups = (
        *(_core_goals, _mask_goals, _dropout_goals, _weights_goals, _layer_goals, _memory_goals),
        *(_half_core_goals, _half_layer_goals, _variant_goals, _derivative_goals),
    )
    return [goal for group in groups for goal in group()]


def _rows(goal: Goal, results: Sequence[Result], machine: dict[str, Any]) -> list[Row]:
    if not machine["cpu_capability"].startswith(goal.capability):
        return []
    needed = min(goal.needed, 1.0) if goal.peer and not machine["cpu_capability"].startswith(_WIDE) else goal.needed
    rows = []
    for result in results:
        if goal.holds_for(result.case):
            figure = goal.figure(result) if machine["threads"] >= goal.threads else None
            rows.append(Row(goal.text, result.case.name, figure, needed, goal.at_most))
    if goal.together and len(rows) > 1 and all(row.verdict == "pass" for row in rows):
        worst = max(rows, key=lambda row: row.severity)
        return [Row(goal.text, f"all {len(rows)}; worst: {worst.where}", worst.figure, needed, goal.at_most)]
    return rows


def evaluate(results: Sequence[Result], machine: dict[str, Any], accuracy: Sequence[Cell] = ()) -> list[Row]:
    """Returns the verdicts of all goals on the cases that were measured."""
    rows = [row for goal in all_goals() for row in _rows(goal, results, machine)]
    for dtype in dict.fromkeys(cell.dtype for cell in accuracy):
        passing = [cell.passes for cell in accuracy if cell.dtype == dtype]
        rows.append(
            Row("errors at most PyTorch's, cells", f"accuracy {dtype}", float(sum(passing)), float(len(passing)))
        )
    return rows
