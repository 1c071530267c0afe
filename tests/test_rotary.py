"""Rotary positions against NumPy's complex numbers in float64: pairs, angles, layouts, derivatives, errors."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from cases import DTYPES, LAYOUTS, generator
from tolerances import assert_within, roundoff, sum_dtype
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import mha_ext
from mha_ext import functional
from mha_ext.functional import apply_rotary


def heads(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def by_complex_numbers(
    x: Tensor, positions: np.ndarray, base: float = 1e4, interleaved: bool = False, rotary_dim: int | None = None
) -> Tensor:
    """Each pair as one complex number times ``exp(i p base^(-2n/R))``; positions broadcast to (..., H, T)."""
    given = x.double().numpy().copy()
    dim = given.shape[-1] if rotary_dim is None else rotary_dim
    for n in range(dim // 2):
        i, j = (2 * n, 2 * n + 1) if interleaved else (n, n + dim // 2)
        turned = (given[..., i] + 1j * given[..., j]) * np.exp(1j * positions * base ** (-2.0 * n / dim))
        given[..., i], given[..., j] = turned.real, turned.imag
    return torch.from_numpy(given)


def limit(x: Tensor, want: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """Cosine, sine, two products and their sum: five roundings of at most the pair's numbers, whose largest is taken
    over the head; the angle's own error, four roundings of float64 (exponent, power, two products) in ours and in the
    oracle; and the result's rounding."""
    a, angle = roundoff(sum_dtype(dtype)), 8 * roundoff(torch.float64) * largest
    return 2 * x.double().abs().amax(-1, keepdim=True) * (5 * a + angle) + roundoff(dtype) * want.abs()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"interleaved": True},
    {"rotary_dim": 4},
    {"rotary_dim": 2, "interleaved": True},
    {"base": 500000.0},
    {"base": 0.5, "rotary_dim": 6},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_complex_numbers(options: dict[str, Any], dtype: torch.dtype) -> None:
    x = heads(2, 3, 9, 8, dtype=dtype)
    for offset in (0, 1000003):
        want = by_complex_numbers(x, np.arange(9.0) + offset, **options)
        got = apply_rotary(x, offset=offset, **options)
        fastest = max(1.0, options.get("base", 1.0) ** -1.0)  # of the pairs' speeds
        assert got.dtype == dtype
        assert_within(got, want, limit(x, want, (9 + offset) * fastest, dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64])
def test_positions(dtype: torch.dtype) -> None:
    """For all, by example, broadcast over examples; with an offset that their dtype could not hold."""
    x = heads(2, 3, 4, 5, 8)
    for shape in ((5,), (2, 3, 5), (1, 3, 5), (3, 5), (2, 1, 5)):
        positions = torch.randint(0, 250, shape, generator=generator(2)).to(dtype)
        full = np.broadcast_to(positions.double().numpy(), (2, 3, 5))[:, :, None]
        want = by_complex_numbers(x, full + 1000)
        assert_within(apply_rotary(x, positions, offset=1000), want, limit(x, want, 1250, x.dtype))
    half = torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5])
    want = by_complex_numbers(x, half.double().numpy())
    assert_within(apply_rotary(x, half), want, limit(x, want, 5, x.dtype))


def test_shapes_of_one_head_and_of_nothing() -> None:
    x = heads(5, 8)
    assert torch.equal(apply_rotary(x), apply_rotary(x[None, None])[0, 0])
    assert torch.equal(apply_rotary(x[None], torch.arange(5)), apply_rotary(x[None]))
    for shape in ((0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8)):
        assert apply_rotary(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("options", [{}, {"interleaved": True, "rotary_dim": 4}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, options: dict[str, Any]) -> None:
    """Same numbers; the output is dense and has its axes in the order of the input's."""
    x = heads(2, 3, 5, 8)
    laid = LAYOUTS[layout](x)
    got = apply_rotary(laid, **options)
    assert torch.equal(got, apply_rotary(x, **options))
    order = sorted(range(4), key=lambda axis: -laid.stride(axis))
    assert got.permute(order).is_contiguous()


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_the_distance_alone(interleaved: bool) -> None:
    """q_p . k_j is the same wherever the pair lies, and the length of a head is kept; shifts change angles of up to
    10^4 by float64's rounding, as in the limit above."""
    q, k = heads(7, 16).expand(3, 7, 16), heads(7, 16, seed=2).expand(3, 7, 16)
    q, k = q[:, None], k[:, None]
    shift = torch.tensor([[0], [5], [10000]]) + torch.arange(7)
    turned = [apply_rotary(x, shift, interleaved=interleaved) for x in (q, k)]
    scores = turned[0] @ turned[1].mT
    sizes = q.norm(dim=-1).amax() * k.norm(dim=-1).amax()
    for row in scores[1:]:
        assert_within(row, scores[0], float(sizes) * (8 * 10007 + 100) * roundoff(torch.float64))
    assert_within(turned[0].norm(dim=-1), q.norm(dim=-1), 1e-14)
    assert float((scores[0] - (q @ k.mT)[0]).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_at_a_time_gives_the_same_bits(dtype: torch.dtype) -> None:
    x = heads(2, 100, 3, 64, dtype=dtype).transpose(1, 2)
    for options in ({}, {"interleaved": True, "rotary_dim": 24}):
        parts = [apply_rotary(x[:, :, i : i + 1], offset=i, **options) for i in range(100)]
        assert torch.equal(torch.cat(parts, 2), apply_rotary(x, **options))


def test_half_types_are_rounded_once() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = heads(3, 50, 32, dtype=dtype)
        assert torch.equal(apply_rotary(x), apply_rotary(x.float()).to(dtype))
        x.requires_grad_()
        (grad,) = torch.autograd.grad(apply_rotary(x), x, x.detach())
        back = apply_rotary(x.detach().float(), -torch.arange(50))
        assert_within(grad, back, 1.1 * roundoff(dtype) * back.abs() + 5e-7)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_derivatives(options: dict[str, Any]) -> None:
    x = heads(2, 2, 3, 6).requires_grad_()
    positions = torch.tensor([[0.0, 2.5, 1.0], [4.0, -1.0, 0.3]], dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, positions: Tensor) -> Tensor:
        return apply_rotary(x, positions, **options)

    assert gradcheck(call, (x, positions)) and gradgradcheck(call, (x, positions))


def test_transforms() -> None:
    """vmap over heads and positions, forward derivatives, a compiled and an exported program of any length."""
    x, positions = heads(3, 2, 5, 8), torch.randint(0, 9, (3, 5), generator=generator(1))
    assert torch.equal(torch.func.vmap(apply_rotary)(x, positions), apply_rotary(x, positions))
    _, tangent = torch.func.jvp(apply_rotary, (x,), (x,))
    assert_within(tangent, apply_rotary(x), 4 * roundoff(x.dtype) * float(x.abs().max()))

    rotary = mha_ext.RotaryEmbedding(8, rotary_dim=6)
    compiled = torch.compile(rotary, fullgraph=True, dynamic=True, backend="aot_eager")
    for offset in (0, 3, 4):
        assert torch.equal(compiled(x, offset=offset), rotary(x, offset=offset))
    length = torch.export.Dim("length")
    program = torch.export.export(rotary, (x,), dynamic_shapes={"x": {2: length}})
    longer = heads(3, 2, 11, 8)
    assert torch.equal(program.module()(longer), rotary(longer))
    assert rotary(x.to("meta")).shape == x.shape


def test_module_holds_the_options() -> None:
    x, options = heads(2, 5, 8), {"base": 100.0, "interleaved": True, "rotary_dim": 4}
    rotary = mha_ext.RotaryEmbedding(8, **options)
    positions = torch.tensor([4, 1, 1, 0, 9])
    want = apply_rotary(x, positions, offset=2, **options)
    for again in (rotary, copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):
        assert torch.equal(again(x, positions, 2), want)
        assert not again.state_dict() and not list(again.parameters())
    assert repr(rotary) == "RotaryEmbedding(8, base=100.0, interleaved=True, rotary_dim=4)"
    assert repr(mha_ext.RotaryEmbedding(8)) == "RotaryEmbedding(8)"


X = torch.zeros(2, 3, 5, 8)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
    ({"x": X.long()}, TypeError, "x must be float64, float32, bfloat16 or float16, got torch.int64"),
    ({"x": X[0, 0, 0]}, ValueError, "x must have at least 2 axes (T, D), got shape (8,)"),
    ({"x": X.to_sparse()}, TypeError, "x must be a dense tensor"),
    ({"x": X[..., :7]}, ValueError, "rotary_dim must be given where head_dim is odd, got head_dim 7"),
    ({"rotary_dim": 3}, ValueError, "rotary_dim must be even and at most 8 (head_dim), got 3"),
    ({"rotary_dim": 10}, ValueError, "rotary_dim must be even and at most 8 (head_dim), got 10"),
    ({"rotary_dim": 0}, ValueError, "rotary_dim must be greater than 0, got 0"),
    ({"rotary_dim": 4.0}, TypeError, "rotary_dim must be an int, got float"),
    ({"base": 0}, ValueError, "base must be greater than 0 and finite, got 0"),
    ({"base": math.inf}, ValueError, "base must be greater than 0 and finite, got inf"),
    ({"base": math.nan}, ValueError, "base must be greater than 0 and finite, got nan"),
    ({"base": "ten"}, TypeError, "base must be a number, got str"),
    ({"interleaved": 1}, TypeError, "interleaved must be a bool, got int"),
    ({"offset": 1.5}, TypeError, "offset must be an int, got float"),
    ({"positions": [0, 1]}, TypeError, "positions must be a tensor, got list"),
    ({"positions": torch.zeros(5, dtype=torch.bool)}, TypeError, "positions must be integers or floating point"),
    ({"positions": torch.arange(4)}, ValueError, "positions must be broadcastable to (2, 5), got (4,)"),
    ({"positions": torch.zeros(3, 5)}, ValueError, "positions must be broadcastable to (2, 5), got (3, 5)"),
    ({"positions": torch.zeros(2, 1)}, ValueError, "positions must be broadcastable to (2, 5), got (2, 1)"),
    ({"positions": torch.zeros(1, 2, 5)}, ValueError, "positions must be broadcastable to (2, 5), got (1, 2, 5)"),
    ({"positions": torch.zeros(())}, ValueError, "positions must be broadcastable to (2, 5), got ()"),
    ({"positions": torch.zeros(5, device="meta")}, ValueError, "positions must be on x's device cpu, got meta"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG, ids=lambda v: v if isinstance(v, str) else None)
def test_refused(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(f"apply_rotary: {message}")):
        functional.apply_rotary(**{"x": X, **changes})


def test_refused_by_the_module() -> None:
    for arguments, kind, message in (
        ({"head_dim": 0}, ValueError, "head_dim must be greater than 0, got 0"),
        ({"head_dim": 7}, ValueError, "rotary_dim must be given where head_dim is odd, got head_dim 7"),
        ({"head_dim": 8, "base": -1.0}, ValueError, "base must be greater than 0 and finite, got -1.0"),
    ):
        with pytest.raises(kind, match=re.escape(f"RotaryEmbedding: {message}")):
            mha_ext.RotaryEmbedding(**arguments)
    with pytest.raises(
        ValueError, match=re.escape("RotaryEmbedding: x must have last size 6 (head_dim), got (2, 3, 5")
    ):
        mha_ext.RotaryEmbedding(6)(X)
