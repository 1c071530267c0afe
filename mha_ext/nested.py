"""Nested tensors in and out of the layer: padded and masked on the way in, given back with their lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

__all__ = ["pad", "unpad"]


def pad(nested: Any) -> tuple[Tensor, Tensor]:
    """A nested tensor of ``(length, E)`` parts as ``(B, longest, E)``, and ``(B, longest)`` bool, True = real."""
    parts = nested.unbind()
    lengths = [part.shape[0] for part in parts]
    dense = nested.lengths() is None if nested.layout == torch.jagged else nested.is_contiguous()
    if dense and any(lengths):
        padded = torch.nested.to_padded_tensor(nested, 0.0)
    else:  # PyTorch refuses to pad parts with holes between them, and no row at all
        padded = pad_sequence(list(parts), batch_first=True)
    positions = torch.arange(padded.shape[1], device=padded.device)
    return padded, positions < torch.tensor(lengths, device=padded.device).unsqueeze(1)


def unpad(padded: Tensor, real: Tensor, like: Any) -> Tensor:
    """``(B, longest, E)`` as a nested tensor with the layout and the lengths of ``like``."""
    if like.layout == torch.jagged and like.lengths() is None:
        # The same offsets object, so that the result adds to `like`.
        return torch.nested.nested_tensor_from_jagged(padded[real], offsets=like.offsets())
    lengths = real.sum(1).tolist()
    parts = [part[:length] for part, length in zip(padded.unbind(), lengths, strict=True)]
    return torch.nested.as_nested_tensor(parts, layout=like.layout)
