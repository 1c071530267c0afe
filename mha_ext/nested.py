"""Nested tensors in and out of the layer: padded and masked on the way in, given back with their lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mha_ext.errors import InvalidValueError
from mha_ext.layer import QKV, Options

__all__ = ["attend", "pad", "unpad"]

Results = tuple[Tensor, Tensor | None]


def attend(
    where: str, inputs: QKV, options: Options, batch_first: bool, compute: Callable[[QKV, Options], Results]
) -> Results:
    """A layer on nested inputs: padded, masked, and the output given back with query's lengths.

    Args:
        where: the function that is being called, for messages.
        inputs: query, key, value.
        options: of the call; masks must be None.
        batch_first: must be True.
        compute: the layer on dense inputs.

    Raises:
        ValueError: only some of the inputs are nested, lengths of key and value differ, or an option does not fit.
    """
    if not all(tensor.is_nested for tensor in inputs):
        kinds = ", ".join("nested" if tensor.is_nested else "dense" for tensor in inputs)
        raise InvalidValueError(f"{where}: query, key and value must all be nested or all be dense, got {kinds}")
    if not batch_first:
        raise InvalidValueError(f"{where}: batch_first must be True for nested inputs, got False")
    if options.attn_mask is not None or options.key_padding_mask is not None:
        raise InvalidValueError(f"{where}: attn_mask and key_padding_mask must be None for nested inputs, got a mask")
    query, key, value = inputs
    q, real_queries = pad(query)
    k, real_keys = (q, real_queries) if key is query else pad(key)
    v, real_values = (k, real_keys) if value is key else pad(value)
    if not torch.equal(real_keys, real_values):
        lengths, got = real_keys.sum(1).tolist(), real_values.sum(1).tolist()
        raise InvalidValueError(f"{where}: value must have key's lengths {lengths}, got {got}")
    out, weights = compute((q, k, v), options._replace(key_padding_mask=real_keys.logical_not()))
    if weights is not None:
        padding = real_queries.logical_not().unsqueeze(-1)
        weights = weights.masked_fill(padding if options.average_weights else padding.unsqueeze(1), 0.0)
    return unpad(out, real_queries, query), weights


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
