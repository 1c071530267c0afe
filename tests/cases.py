"""The one grid: what an attention problem is, how its tensors are made, and its exact answer in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from switches import threads
from tolerances import Exact, assert_within, attention_limits, bias_limit
from torch import Tensor

from mha_ext import reference

ops = torch.ops.mha_ext

SIZES = (1, 3, 15, 16, 17, 31, 33, 48, 63, 64, 65, 127, 257)
HEAD_DIMS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 33, 40, 63, 64, 65, 80, 96, 128, 129, 160, 256)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NONE, UPPER_LEFT, LOWER_RIGHT = 0, 1, 2


@dataclass(frozen=True)
class Case:
    """Sizes and options; ``mask`` is "none" or "<dtype>:<letters>", four of B, H, T, S and 1; ``padding`` is a
    dtype."""

    B: int = 2
    H: int = 2
    H_kv: int | None = None
    T: int = 17
    S: int | None = None
    D: int = 16
    D_v: int | None = None
    dtype: torch.dtype = torch.float32
    mask: str = "none"
    padding: str = "none"
    causal: int = NONE
    appended: int = 0
    dropout_p: float = 0.0
    scale: float | None = None
    layout: str = "plain"

    @property
    def heads_kv(self) -> int:
        return self.H if self.H_kv is None else self.H_kv

    @property
    def keys(self) -> int:
        return self.T if self.S is None else self.S

    @property
    def dim_v(self) -> int:
        return self.D if self.D_v is None else self.D_v

    def __str__(self) -> str:
        plain = Case()
        names = ("mask", "padding", "causal", "appended", "dropout_p", "scale", "layout")
        extras = [f"{n}={getattr(self, n)}" for n in names if getattr(self, n) != getattr(plain, n)]
        sizes = f"{self.B}x{self.H}/{self.heads_kv}x{self.T}x{self.keys}x{self.D}/{self.dim_v}"
        return "-".join([sizes, str(self.dtype).removeprefix("torch."), *extras])


@dataclass
class Problem:
    """A case with its tensors, ready for the operator."""

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    attn_mask: Tensor | None = None
    key_padding_mask: Tensor | None = None
    dropout_seed: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.query, self.key, self.value, self.attn_mask, self.key_padding_mask, self.dropout_seed)

    @property
    def options(self) -> dict[str, Any]:
        c = self.case
        return {"dropout_p": c.dropout_p, "causal": c.causal, "scale": c.scale, "num_appended_keys": c.appended}


# ------------------------------------------------------------------------------------------------------------- layouts
def _in_order(*order: int) -> Callable[[Tensor], Tensor]:
    def lay(x: Tensor) -> Tensor:
        back = [order.index(i) for i in range(x.dim())]
        return x.permute(order).contiguous().permute(back)

    return lay


def _packed(x: Tensor) -> Tensor:
    """A slice of a (B, T, 3, H, D) buffer, as a packed projection leaves it."""
    buffer = torch.full((x.shape[0], x.shape[2], 3, x.shape[1], x.shape[3]), math.nan, dtype=x.dtype)
    view = buffer[:, :, 1].transpose(1, 2)
    return view.copy_(x)


def _offset(x: Tensor) -> Tensor:
    """Inside a larger buffer full of NaN, rows and columns off any alignment."""
    buffer = torch.full([n + 3 for n in x.shape], math.nan, dtype=x.dtype)
    return buffer[tuple(slice(1, 1 + n) for n in x.shape)].copy_(x)


def _stepped(x: Tensor) -> Tensor:
    """Every second number of the last axis, NaN between."""
    buffer = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)
    return buffer[..., ::2].copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "bthd": _in_order(0, 2, 1, 3),
    "tbhd": _in_order(2, 0, 1, 3),
    "packed": _packed,
    "offset": _offset,
    "stepped": _stepped,
    "columns": _in_order(0, 1, 3, 2),
    "batch_last": _in_order(1, 2, 3, 0),
}


# ------------------------------------------------------------------------------------------------------------ building
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_mask(case: Case, g: torch.Generator) -> Tensor | None:
    if case.mask == "none":
        return None
    dtype_name, letters = case.mask.split(":")
    full = {"B": case.B, "H": case.H, "T": case.T, "S": case.keys - case.appended, "1": 1}
    shape = [full[letter] for letter in letters]
    visible = torch.rand(shape, generator=g) > 0.3
    if letters[2] == "T" and case.T > 2:
        visible[..., 1, :] = False
    if dtype_name == "bool":
        return visible
    bias = torch.randn(shape, generator=g, dtype=torch.float64)
    return bias.masked_fill(~visible, -math.inf).to(getattr(torch, dtype_name))


def make_padding(case: Case, g: torch.Generator) -> Tensor | None:
    if case.padding == "none":
        return None
    columns = case.keys - case.appended
    lengths = torch.randint(0, columns + 1, (case.B, 1), generator=g)
    lengths[:1] = columns
    ignored = torch.arange(columns) >= lengths
    if case.padding == "bool":
        return ignored
    bias = torch.randn(case.B, columns, generator=g, dtype=torch.float64)
    return bias.masked_fill(ignored, -math.inf).to(getattr(torch, case.padding))


def build(case: Case, seed: int = 0) -> Problem:
    """Normal inputs in the case's dtype and layout, masks with empty rows where their shape allows it."""
    g = generator(seed)
    lay = LAYOUTS[case.layout]

    def normal(*shape: int) -> Tensor:
        return lay(torch.randn(shape, generator=g, dtype=torch.float64).to(case.dtype))

    query = normal(case.B, case.H, case.T, case.D)
    key = normal(case.B, case.heads_kv, case.keys, case.D)
    value = normal(case.B, case.heads_kv, case.keys, case.dim_v)
    grad_out = normal(case.B, case.H, case.T, case.dim_v)
    grad_lse = torch.randn(case.B, case.H, case.T, generator=g, dtype=torch.float64)
    grad_lse = grad_lse.to(torch.float64 if case.dtype == torch.float64 else torch.float32)
    problem = Problem(case, query, key, value, grad_out, grad_lse, make_mask(case, g), make_padding(case, g))
    if case.dropout_p > 0:
        problem.dropout_seed = torch.tensor([-(2**40) - 12345 * seed - 77])
    return problem


# ----------------------------------------------------------------------------------------------------------- the answer
def splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def dropout_hash(seed: int, batch: int, heads: int, queries: int, keys: int) -> np.ndarray:
    """The documented counter-based generator, (B, H, T, S) uint32, written from its specification."""
    u32, u64 = np.uint32, np.uint64
    with np.errstate(over="ignore"):
        head = splitmix64(splitmix64(np.array([seed % 2**64], dtype=u64)) ^ np.arange(batch * heads, dtype=u64))
        row = splitmix64(head.reshape(batch, heads, 1, 1) + np.arange(keys, dtype=u64))
        low, high = (row & u64(0xFFFFFFFF)).astype(u32), (row >> u64(32)).astype(u32)
        x = np.arange(queries, dtype=u32)[:, None] ^ low
        x = (x ^ (x >> u32(16))) * u32(0x7FEB352D)
        x = ((x ^ (x >> u32(15))) + high) * u32(0x846CA68B)
        x = (x ^ (x >> u32(16))) * u32(0x9E3779B1)
        return x ^ (x >> u32(15))


def kept(case: Case, seed: Tensor | None) -> Tensor | None:
    if seed is None:
        return None
    bits = dropout_hash(int(seed), case.B, case.H, case.T, case.keys).astype(np.float64)
    return torch.from_numpy(bits >= case.dropout_p * 2.0**32)


def merged_bias(case: Case, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor:
    """Everything that decides who sees whom, as one differentiable float64 (B, H, T, S) bias, -inf for a hidden
    pair."""
    columns = case.keys - case.appended
    bias = torch.zeros(case.B, case.H, case.T, columns, dtype=torch.float64)
    if attn_mask is not None:
        bias = bias.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else bias + attn_mask.double()
    if padding is not None:
        row = padding[:, None, None, :]
        bias = bias.masked_fill(row, -math.inf) if row.dtype == torch.bool else bias + row.double()
    if case.causal != NONE:
        last = torch.arange(case.T) + (columns - case.T if case.causal == LOWER_RIGHT else 0)
        bias = bias.masked_fill(torch.arange(columns) > last[:, None], -math.inf)
    return torch.nn.functional.pad(bias, (0, case.appended))


def _leaf(x: Tensor | None) -> Tensor | None:
    if x is None or not x.is_floating_point():
        return x
    return x.detach().double().contiguous().requires_grad_()


@threads(1)
def exact(problem: Problem) -> Exact:
    """The answer and all gradients in float64 by the reference, which shares no code with the kernels."""
    case, repeats = problem.case, problem.case.H // problem.case.heads_kv
    leaves = {n: _leaf(getattr(problem, n)) for n in ("query", "key", "value", "attn_mask", "key_padding_mask")}
    query, key, value = leaves["query"], leaves["key"], leaves["value"]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    bias = merged_bias(case, leaves["attn_mask"], leaves["key_padding_mask"])
    keep = kept(case, problem.dropout_seed)
    scale = case.D**-0.5 if case.scale is None else case.scale
    out, lse, weights = reference.attention(query, key, value, bias, scale=scale, keep=keep, dropout_p=case.dropout_p)
    with torch.no_grad():
        plain = reference.attention(query, key, value, bias, scale=scale)[2]
    drop = torch.ones_like(weights) if keep is None else keep.double() / (1 - case.dropout_p)
    grad_out = problem.grad_out.double()
    grad_lse = torch.where(lse.isfinite(), problem.grad_lse.double(), 0.0)
    wanted = {n: x for n, x in leaves.items() if x is not None and x.requires_grad}
    loss = (out * grad_out).sum() + (torch.where(lse.isfinite(), lse, 0.0) * grad_lse).sum()
    got = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    grads = {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(wanted.items(), got, strict=True)}
    parts = [x.detach() for x in (query, key, value, bias, plain, drop, out, lse)]
    return Exact(*parts, scale, grad_out, grad_lse, grads)


# ---------------------------------------------------------------------------------------------------------- the checks
def attention_weights(query: Tensor, key: Tensor, *rest: Tensor | None, average: bool, **options: Any) -> Tensor:
    """The weights alone, from (query, key, attn_mask, key_padding_mask, dropout_seed) and options."""
    return ops.attention_with_weights(query, key, key.detach(), *rest, **options, average=average)[2]


def run(problem: Problem, with_lse_grad: bool = True) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The operator's out, lse and gradients of every float input."""
    names = ("query", "key", "value", "attn_mask", "key_padding_mask", "dropout_seed")
    tensors = dict(zip(names, problem.tensors, strict=True))
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items() if x is not None and x.is_floating_point()}
    out, lse = ops.attention(*[leaves.get(n, x) for n, x in tensors.items()], **problem.options)
    sent = (out, lse) if with_lse_grad else (out,)
    got = torch.autograd.grad(sent, list(leaves.values()), (problem.grad_out, problem.grad_lse)[: len(sent)])
    return out.detach(), lse.detach(), dict(zip(leaves, got, strict=True))


def lies_like(out: torch.Tensor, query: torch.Tensor) -> bool:
    """Whether an output is dense and has its axes in the order of query's (B, H, T, D)."""
    _, heads, length, _ = query.stride()
    if heads > length:
        return out.is_contiguous()
    first_is_length = length > query.stride(0) > 0
    return out.permute(2, 0, 1, 3).is_contiguous() if first_is_length else out.transpose(1, 2).is_contiguous()


def check(problem: Problem, truth: Exact | None = None, grads: bool = True) -> None:
    """Forward, log-sum-exp and all gradients of one problem against the exact answer, within the derived limits."""
    case = problem.case
    truth = exact(problem) if truth is None else truth
    limits = attention_limits(truth, case.dtype, case.heads_kv, grads)
    if grads:
        out, lse, got = run(problem)
    else:
        out, lse = ops.attention(*problem.tensors, **problem.options)
        got = {}
    assert_within(out, truth.out, limits["out"], "out")
    assert_within(lse, truth.lse, limits["lse"], "lse")
    assert out.dtype == case.dtype and lies_like(out, problem.tensors[0])
    assert lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32) and lse.is_contiguous()
    for name, grad in got.items():
        want = truth.grads[name]
        if name in ("query", "key", "value"):
            limit = limits[name]
        else:
            mask = getattr(problem, name)
            assert (grad.shape, grad.dtype) == (mask.shape, mask.dtype)
            four = grad if name == "attn_mask" else grad[:, None, None]
            limit = bias_limit(truth, limits["scores"], four, case.keys - case.appended, case.dtype).reshape(mask.shape)
        assert_within(grad, want, limit, f"grad of {name}")
