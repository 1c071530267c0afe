"""What attention among documents that follow each other must give: that of each document alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha_ext import reference


def each_alone(heads: Tensor, lengths: list[int], **options: Any) -> Tensor:
    """Causal self-attention inside each document of heads ``(H, total length, D)``."""
    parts = [part.unsqueeze(0) for part in heads.split(lengths, 1)]
    return torch.cat([reference.attention(x, x, x, is_causal=True, **options)[0].squeeze(0) for x in parts], 1)
