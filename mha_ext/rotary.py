"""Rotary position embedding (Su et al. 2021, RoFormer): pairs of a head's numbers, turned by angles.

The angles grow with the position, and a query at p and a key at j meet in a product that depends on ``p - j`` alone.
Everything here is plain PyTorch, so that every transform and every order of derivative works.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mha_ext import checks
from mha_ext.errors import InvalidTypeError, InvalidValueError

__all__ = ["RotaryEmbedding", "apply_rotary"]

_BASE = 10000.0
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def apply_rotary(
    x: Tensor,
    positions: Tensor | None = None,
    *,
    base: float = _BASE,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    offset: int = 0,
) -> Tensor:
    """Turn pairs of numbers of each head: pair n of R / 2 at position p by the angle ``p · base^(-2n / R)``.

    Angles and their sines are computed in float64; bfloat16 and float16 are turned in float32 and rounded once.

    Args:
        x: ``(..., H, T, D)``, queries or keys, floating, any strides; ``(T, D)`` is one head.
        positions: ``(T,)``, or broadcastable to ``(..., T)`` (the axes of x before H); integers, or floating ones.
            ``0 ... T - 1`` by default.
        base: greater than 0; the larger, the slower the last pairs turn.
        interleaved: pairs are neighbours ``(x_2n, x_2n+1)``, as in RoFormer; by default they are ``(x_n, x_n+R/2)``, as
            in GPT-NeoX and Llama.
        rotary_dim: R, even: the first R of the D numbers are turned, the others kept; D by default.
        offset: added to the positions.

    Returns:
        The turned heads, of x's shape and dtype, their axes stored in the order of x's.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a shape does not fit, or ``base`` or ``rotary_dim`` is out of range.

    Example:
        >>> import torch
        >>> from mha_ext.functional import apply_rotary
        >>> x = torch.tensor([[1.0, 0.0]] * 3)
        >>> apply_rotary(x).acos()[:, 0]
        tensor([0., 1., 2.])
        >>> torch.equal(apply_rotary(x, offset=5), apply_rotary(x, torch.tensor([5, 6, 7])))
        True
    """
    where = "apply_rotary"
    _check_heads(where, x)
    base, rotary_dim = _check_pairs(where, x.shape[-1], base, interleaved, rotary_dim)
    cosines, sines = _cosines_and_sines(where, x, positions, (base, rotary_dim, offset))
    turned = x if x.dtype in (torch.float32, torch.float64) else x.float()
    half, rest = rotary_dim // 2, x.shape[-1] - rotary_dim
    used = turned.narrow(-1, 0, rotary_dim)
    if interleaved:
        first, second = used[..., 0::2], used[..., 1::2]
        partners = torch.stack((-second, first), -1).flatten(-2)
        cosines, sines = cosines.repeat_interleave(2, -1), sines.repeat_interleave(2, -1)
    else:
        partners = torch.cat((-used.narrow(-1, half, half), used.narrow(-1, 0, half)), -1)
        cosines, sines = torch.cat((cosines, cosines), -1), torch.cat((sines, sines), -1)
    if rest:
        partners = nn.functional.pad(partners, (0, rest))
        cosines, sines = nn.functional.pad(cosines, (0, rest), value=1.0), nn.functional.pad(sines, (0, rest))
    return torch.addcmul(turned * cosines, partners, sines).to(x.dtype)


def _check_heads(where: str, x: Any) -> None:
    checks.tensor(where, "x", x)
    checks.strided(where, "x", x)
    checks.float_dtype(where, "x", x.dtype)
    if x.dim() < 2:
        raise InvalidValueError(f"{where}: x must have at least 2 axes (T, D), got shape {tuple(x.shape)}")


def _check_pairs(where: str, head_dim: int, base: Any, interleaved: Any, rotary_dim: Any) -> tuple[float, int]:
    """The base and the number of turned numbers.

    Raises:
        TypeError: one is not a number, or ``interleaved`` not a bool.
        ValueError: one is out of range.
    """
    base = checks.real(where, "base", base)
    if not 0.0 < base < float("inf"):
        raise InvalidValueError(f"{where}: base must be greater than 0 and finite, got {base}")
    checks.flags(where, interleaved=interleaved)
    if rotary_dim is None:
        if head_dim % 2:
            raise InvalidValueError(f"{where}: rotary_dim must be given where head_dim is odd, got head_dim {head_dim}")
        return base, head_dim
    rotary_dim = checks.size(where, "rotary_dim", rotary_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise InvalidValueError(f"{where}: rotary_dim must be even and at most {head_dim} (head_dim), got {rotary_dim}")
    return base, rotary_dim


def _cosines_and_sines(where: str, x: Tensor, positions: Any, numbers: tuple[float, int, Any]) -> tuple[Tensor, Tensor]:
    """Of every pair's angle: ``(T, R / 2)``, or ``(..., 1, T, R / 2)`` where positions have axes of the batch."""
    base, rotary_dim, offset = numbers
    if not isinstance(offset, torch.SymInt):
        offset = checks.integer(where, "offset", offset)
    length = x.shape[-2]
    if positions is None:
        positions = torch.arange(length, device=x.device)
    else:
        _check_positions(where, x, positions)
    positions = positions.to(torch.float64) + offset  # first: a small integer type would overflow
    if positions.dim() > 1:
        positions = positions.unsqueeze(-2)  # the heads' axis
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=x.device) / -rotary_dim
    angles = positions.unsqueeze(-1) * torch.pow(base, exponents)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _check_positions(where: str, x: Tensor, positions: Any) -> None:
    """Positions are numbers, as many as x has, and where x is.

    Raises:
        TypeError: they are not.
        ValueError: the shape or the device does not fit.
    """
    checks.tensor(where, "positions", positions)
    checks.strided(where, "positions", positions)
    if positions.dtype not in _INTEGERS and positions.dtype not in checks.FLOATS:
        raise InvalidTypeError(f"{where}: positions must be integers or floating point, got {positions.dtype}")
    if positions.device != x.device:
        raise InvalidValueError(f"{where}: positions must be on x's device {x.device}, got {positions.device}")
    full = (*x.shape[:-3], x.shape[-2])
    shape = positions.shape
    leading = zip(reversed(shape[:-1]), reversed(full[:-1]), strict=False)
    misfit = any(given not in (1, size) for given, size in leading)
    if not 1 <= len(shape) <= len(full) or shape[-1] != full[-1] or misfit:
        raise InvalidValueError(f"{where}: positions must be broadcastable to {full}, got {tuple(shape)}")


class RotaryEmbedding(nn.Module):
    """:func:`mha_ext.functional.apply_rotary` with its options kept; it has no parameters and no buffers.

    Args:
        head_dim: D.
        base: as in ``apply_rotary``.
        interleaved: as in ``apply_rotary``.
        rotary_dim: as in ``apply_rotary``.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range.

    Example:
        >>> import torch
        >>> from mha_ext import RotaryEmbedding
        >>> rotary = RotaryEmbedding(8, rotary_dim=4)
        >>> rotary(torch.randn(2, 3, 5, 8), offset=7).shape
        torch.Size([2, 3, 5, 8])
        >>> rotary
        RotaryEmbedding(8, rotary_dim=4)
    """

    def __init__(
        self, head_dim: int, *, base: float = _BASE, interleaved: bool = False, rotary_dim: int | None = None
    ) -> None:
        super().__init__()
        where = "RotaryEmbedding"
        self.head_dim = checks.size(where, "head_dim", head_dim)
        self.base, self.rotary_dim = _check_pairs(where, self.head_dim, base, interleaved, rotary_dim)
        self.interleaved = interleaved

    def forward(self, x: Tensor, positions: Tensor | None = None, offset: int = 0) -> Tensor:
        """Turn heads ``(..., H, T, head_dim)`` by their positions.

        Args:
            x: as in ``apply_rotary``.
            positions: as in ``apply_rotary``.
            offset: as in ``apply_rotary``.

        Returns:
            The turned heads.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: a shape does not fit.
        """
        _check_heads("RotaryEmbedding", x)
        if x.shape[-1] != self.head_dim:
            shape = tuple(x.shape)
            raise InvalidValueError(f"RotaryEmbedding: x must have last size {self.head_dim} (head_dim), got {shape}")
        return apply_rotary(
            x, positions, base=self.base, interleaved=self.interleaved, rotary_dim=self.rotary_dim, offset=offset
        )

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, after ``head_dim``."""
        defaults = {"base": _BASE, "interleaved": False, "rotary_dim": self.head_dim}
        shown = [f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join([str(self.head_dim), *shown])
