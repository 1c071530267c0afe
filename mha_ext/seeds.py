"""Seeds of dropout."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw_seed"]

_LEAST, _END = -(1 << 63), (1 << 63) - 1


def draw_seed(device: torch.device) -> Tensor:
    """A dropout seed from torch's generator: int64, one element; the same numbers in programs and compiled ones."""
    if torch.compiler.is_compiling():
        # The overload that inductor calls: those without a generator it replaces by random numbers of its own.
        draw = torch.ops.aten.randint.low_generator
        seed: Tensor = draw(_LEAST, _END, (1,), generator=None, dtype=torch.int64, device=device)
        return seed
    return torch.randint(_LEAST, _END, (1,), dtype=torch.int64, device=device)
