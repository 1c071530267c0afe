"""What is measured: a case is one shape, one kind of work, one dtype and one set of options.

Levels: ``core`` is attention alone on (B, H, T, D); ``layer`` is self-attention of a whole layer on (B, T, E);
``variant`` is attention with something that PyTorch's function lacks, beside the ways in which users write it today;
``derivative`` is a derivative of attention beyond the first backward pass.
Tasks: ``forward`` (no gradients; evaluation mode for a layer), ``backward`` (the backward pass alone), ``training``
(forward and backward together), ``memory`` (the peak of forward and backward, in a process of its own).

Which cases a preset holds stands in ``benchmarks/presets.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

SUITES = ("core", "layer", "variant", "derivative", "memory")
VARIANTS = ("grouped", "decode", "window", "packed", "alibi", "softcap", "sink")
DERIVATIVES = ("jvp", "double backward", "per example")
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        mask: "none", "bool" (a random (T, S) mask), "window" (a bool mask of the keys near each query), "float" (one
            that is added), "bias" (one that is added and needs a gradient), "padding" (keys to ignore at the end of
            each example), "half padding" (the later half of the keys of every example), "bool+padding".
        need_weights: a layer also returns the attention weights.
        length: number of queries.
        key_length: number of keys; 0 for as many as queries.
        kv_heads: number of key/value heads; 0 for as many as query heads.
        value_dim: width of a value head; 0 for that of a query head.
        mask_shape: of "float" and "bias": "" for (T, S), "HTS", "B11S" or "11TS".
        average_weights: the weights are averaged over heads, else given per head.
        inference: the memory of a forward pass without gradients.
        beside: what else of our own is measured in the same rounds, a key of ``benchmarks.peers.own.COMPARISONS``.
        variant: one of ``VARIANTS`` at the level of that name. "packed": ``batch`` sequences of ``packed_lengths``;
            "decode": grouped heads with few queries. At the level of derivatives one of ``DERIVATIVES``.
        window: the keys that a query of the variant "window" sees, its own the last of them.
    """

    level: str
    task: str
    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str = "fp32"
    causal: bool = False
    mask: str = "none"
    dropout: float = 0.0
    need_weights: bool = False
    key_length: int = 0
    kv_heads: int = 0
    value_dim: int = 0
    mask_shape: str = ""
    average_weights: bool = True
    inference: bool = False
    beside: str = ""
    variant: str = ""
    window: int = 0

    @property
    def suite(self) -> str:
        """The group that ``--suite`` selects by."""
        return "memory" if self.task == "memory" else self.level

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.key_length or self.length

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.value_dim or self.head_dim

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward pass belongs to the work."""
        return self.task != "forward" and not self.inference

    @property
    def embed_dim(self) -> int:
        """Width of the layer."""
        return self.heads * self.head_dim

    @property
    def shape_name(self) -> str:
        """The sizes in a word: B,H,T,D for the core and B,T,E,H for a layer."""
        if self.level == "layer":
            return f"{self.batch},{self.length},{self.embed_dim},{self.heads}"
        length = f"{self.length}" if self.keys == self.length else f"{self.length}:{self.keys}"
        heads = f"{self.heads}" if not self.kv_heads else f"{self.heads}:{self.kv_heads}"
        width = f"{self.head_dim}" if not self.value_dim else f"{self.head_dim}:{self.value_dim}"
        return f"{self.batch},{heads},{length},{width}"

    @property
    def options_name(self) -> str:
        """The options in some words; "full" when there are none."""
        options = [self.variant] if self.variant else []
        options += [str(self.window)] if self.window else []
        options += ["causal"] if self.causal else []
        options += [self.mask] if self.mask != "none" else []
        options += [f"({','.join(self.mask_shape)})"] if self.mask_shape else []
        options += ["dropout"] if self.dropout else []
        options += ["weights" if self.average_weights else "weights per head"] if self.need_weights else []
        options += ["inference"] if self.inference else []
        return " ".join(options) or "full"

    @property
    def name(self) -> str:
        """The name that ``-k`` matches."""
        return f"{self.level} {self.task} {self.shape_name} {self.dtype} {self.options_name}"

    def without_dropout(self) -> Case:
        """The same case with results that do not depend on chance."""
        return replace(self, dropout=0.0)

    def as_json(self) -> dict[str, object]:
        """The case as plain values, from which ``Case(**values)`` makes it again."""
        return asdict(self)


def packed_lengths(case: Case) -> list[int]:
    """Lengths of the sequences of the variant "packed", from an eighth of the longest on in even steps."""
    shortest, steps = max(1, case.length // 8), max(1, case.batch - 1)
    return [case.length - (case.length - shortest) * step // steps for step in reversed(range(case.batch))]


def visible_pairs(case: Case) -> int:
    """Pairs of query and key that a causal order or a window leaves (all without one); other masks are not counted."""
    if case.window:
        return sum(min(row + 1, case.window, case.keys) for row in range(case.length))
    if not case.causal:
        return case.length * case.keys
    return sum(min(row + 1, case.keys) for row in range(case.length))


def _pairs_of_all_examples(case: Case) -> int:
    if case.variant != "packed":
        return case.batch * visible_pairs(case)
    return sum(visible_pairs(replace(case, length=length, key_length=0)) for length in packed_lengths(case))


def floating_point_operations(case: Case) -> int:
    """Operations of the matrix products that the case asks for, two to a multiply-add.

    Attention: two products forward; five backward, the recomputed scores among them; five along tangents, and eleven
    more for the tangents of the gradients. Projections: one product forward and two backward for each of the four.
    """
    pairs = 2 * case.heads * _pairs_of_all_examples(case)
    scores, values = pairs * case.head_dim, pairs * case.value_width
    projections = 2 * 4 * case.batch * case.length * case.embed_dim**2 if case.level == "layer" else 0
    forward = scores + values + projections
    backward = 3 * scores + 2 * values + 2 * projections
    if case.level == "derivative":
        along = 3 * scores + 2 * values
        second = forward + backward + along + 7 * scores + 4 * values
        return {"jvp": forward + along, "double backward": second}.get(case.variant, forward + backward)
    return {"forward": forward, "backward": backward}.get(case.task, forward + backward)


def least_bytes(case: Case) -> int:
    """Bytes that must be read and written at least once by the core's forward: query, key, value and output."""
    kv_heads = case.kv_heads or case.heads
    numbers = case.batch * (case.head_dim + case.value_width) * (case.heads * case.length + kv_heads * case.keys)
    return numbers * DTYPES[case.dtype].itemsize


def select(
    cases: Iterable[Case], *, words: Sequence[str] = (), dtypes: Sequence[str] = (), suites: Sequence[str] = ()
) -> list[Case]:
    """Returns the cases whose name contains every word and whose dtype and suite are among those given, if any."""
    return [
        case
        for case in cases
        if all(word.lower() in case.name.lower() for word in words)
        and (not dtypes or case.dtype in dtypes)
        and (not suites or case.suite in suites)
    ]
