"""What a layer may have beyond PyTorch's: a window, a softcap, a sink, normed and rotated queries and keys.

A layer has the attributes ``window``, ``softcap``, ``sink``, ``q_norm``, ``k_norm`` and ``rope`` only if one of them
was asked for: otherwise it has the original's attributes and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mha_ext import checks, layer, unused_rows, variants
from mha_ext.errors import InvalidTypeError, InvalidValueError
from mha_ext.rotary import RotaryEmbedding

__all__ = ["Variants", "add", "checked", "norm_and_rotate", "options", "reset", "shown", "used"]


class Variants(NamedTuple):
    """The module's keywords, checked."""

    window: tuple[int, int] | None  # -1 for no limit
    softcap: float | None
    sink: bool
    qk_norm: bool
    rope: RotaryEmbedding | None


def checked(where: str, head_dim: int, **given: Any) -> Variants | None:
    """The keywords ``window``, ``softcap``, ``sink``, ``qk_norm`` and ``rope``, or None where none is set.

    Raises:
        TypeError: one is of the wrong type.
        ValueError: one is out of range, or ``rope`` is for heads of another width.
    """
    sink, qk_norm = given["sink"], given["qk_norm"]
    checks.flags(where, sink=sink, qk_norm=qk_norm)
    window = None if given["window"] is None else variants.limits(where, given["window"])
    softcap, rope = variants.softcap(where, given["softcap"]) or None, given["rope"]
    if not (rope is None or isinstance(rope, (bool, RotaryEmbedding))):
        kind = type(rope).__name__
        raise InvalidTypeError(f"{where}: rope must be None, a bool or a mha_ext.RotaryEmbedding, got {kind}")
    if isinstance(rope, bool):
        if rope and head_dim % 2:
            raise InvalidValueError(
                f"{where}: rope must be a RotaryEmbedding where head_dim {head_dim} is odd, got True"
            )
        rope = RotaryEmbedding(head_dim) if rope else None
    if rope is not None and rope.head_dim != head_dim:
        raise InvalidValueError(f"{where}: rope must be for head_dim {head_dim}, got {rope}")
    wanted = Variants(None if window == layer.NO_WINDOW else window, softcap, bool(sink), bool(qk_norm), rope)
    return None if wanted == (None, None, False, False, None) else wanted


def add(module: Any, wanted: Variants, factory: dict[str, Any]) -> None:
    """Give a layer the attributes, parameters and modules of its variants, without random numbers."""
    module._has_variants = True
    module.window, module.softcap = wanted.window, wanted.softcap
    sink = nn.Parameter(torch.zeros(module.num_heads, **factory)) if wanted.sink else None
    module.register_parameter("sink", sink)
    for name in ("q_norm", "k_norm"):
        setattr(module, name, nn.RMSNorm(module.head_dim, **factory) if wanted.qk_norm else None)
    module.rope = wanted.rope


def reset(module: Any) -> None:
    """Initialise the parameters of the variants again."""
    if module.sink is not None:
        nn.init.zeros_(module.sink)
    for norm in (module.q_norm, module.k_norm):
        if norm is not None:
            norm.reset_parameters()


def used(module: Any) -> dict[str, Any]:
    """The module's keywords that are set, as its constructor takes them."""
    if not module._has_variants:
        return {}
    keywords = {"window": module.window, "softcap": module.softcap, "rope": module.rope}
    keywords |= {"sink": module.sink is not None or None, "qk_norm": module.q_norm is not None or None}
    return {name: value for name, value in keywords.items() if value is not None}


def shown(module: Any) -> list[str]:
    """The same for the module's repr, which shows ``rope`` and the norms as the modules that they are."""
    return [f"{name}={value}" for name, value in used(module).items() if name != "rope"]


def options(module: Any, options: layer.Options) -> layer.Options:
    """A call's options with those of the layer's variants that attention itself computes."""
    window, softcap = module.window, module.softcap
    return options._replace(
        window=layer.NO_WINDOW if window is None else variants.limits("MultiheadAttention", window),
        softcap=variants.softcap("MultiheadAttention", softcap),
        sink=module.sink,
    )


def norm_and_rotate(
    module: Any, q: Tensor, k: Tensor, batch_first: bool, positions: Tensor | None = None, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Query and key heads ``(B, H, T, D)`` as attention takes them, stored in the layer's order of axes.

    ``positions`` ``(T,)`` or ``(B, T)`` plus ``offset`` are those of both; without them each counts from the offset.
    """
    if module.q_norm is not None:
        q = _normed(module.q_norm, q, batch_first)
    if module.k_norm is not None:
        k = _normed(module.k_norm, k, batch_first)
    rope = module.rope
    return (q, k) if rope is None else (rope(q, positions, offset), rope(k, positions, offset))


def _normed(norm: nn.Module, heads: Tensor, batch_first: bool) -> Tensor:
    """Heads through a norm, which stores them densely: on axes in the order in which the projection stored them.

    The gradient of a norm is NaN where squares overflow, even if none arrives, and would reach the projection's weight
    from behind a mask. There the result is NaN and has no gradient.
    """
    order, back = ((0, 2, 1, 3), (0, 2, 1, 3)) if batch_first else ((2, 0, 1, 3), (1, 2, 0, 3))
    rows = heads.permute(order)
    weight = getattr(norm, "weight", None)
    if weight is not None and weight.dtype != rows.dtype:  # autocast
        rows = rows.to(weight.dtype)
    exact = torch.promote_types(rows.dtype, torch.float32)
    size = torch.linalg.vector_norm(rows.detach(), dim=-1, keepdim=True, dtype=exact)
    if unused_rows.is_finite(size):
        normed: Tensor = norm(rows)
    else:
        broken = size.isfinite().logical_not()
        normed = norm(rows.masked_fill(broken, 0.0)).masked_fill(broken, float("nan"))
    return normed.to(heads.dtype).permute(back)
