"""Which part of the square of queries and keys a masked case leaves, counted in the blocks that a kernel can skip."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import make_inputs

EDGE = 64  # queries and keys of a block


def visible(case: Case) -> Tensor:
    """Returns the pairs that causal mask, bool mask and padding leave, (B or 1, T, S) bool; a float mask leaves all."""
    inputs = make_inputs(case)
    pairs = torch.ones(1, case.length, case.keys, dtype=torch.bool)
    if case.causal:
        pairs = pairs.tril()
    if inputs.mask is not None and inputs.mask.dtype == torch.bool:
        pairs = pairs & inputs.mask
    if inputs.padding is not None:
        pairs = pairs & ~inputs.padding[:, None, :]
    return pairs


def visible_share(case: Case) -> float:
    """Returns the share of the blocks, weighted with their pairs, in which at least one pair is visible."""
    pairs = visible(case)
    rows, keys = pairs.shape[-2:]
    padded = F.pad(pairs, (0, -keys % EDGE, 0, -rows % EDGE))
    blocks = padded.unflatten(-1, (-1, EDGE)).unflatten(-3, (-1, EDGE)).any(-1).any(-2)
    inside = blocks.repeat_interleave(EDGE, -1).repeat_interleave(EDGE, -2)[..., :rows, :keys]
    return float(inside.double().mean())
