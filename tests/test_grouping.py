"""Grouped-query layers made from trained ones: what is pooled, what is copied, what is left alone."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from layer_cases import EMBED, HEADS, inputs_for, make, same_states
from tolerances import assert_within, double_limit, roundoff
from torch import Tensor, nn

import mha_ext
from mha_ext import to_grouped_query

KINDS: list[dict[str, Any]] = [
    {},
    {"bias": False, "batch_first": False},
    {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.25},
    {"kdim": 8, "vdim": 6, "add_bias_kv": True},
    {"kdim": 8, "bias": False},
]
POOLED = ("k_proj_weight", "v_proj_weight", "bias_k", "bias_v")


def by_head(x: Tensor, heads: int) -> list[Tensor]:
    """The rows of each head of a weight or bias, or the numbers of an appended key."""
    return list(x.flatten().chunk(heads)) if x.dim() == 3 else list(x.chunk(heads))


def means_by_hand(rows: list[Tensor], count: int) -> Tensor:
    size = len(rows) // count
    return torch.cat([sum(rows[i * size : (i + 1) * size]) / size for i in range(count)])


def pooled_by_hand(module: nn.MultiheadAttention, count: int, kv_heads: int = HEADS) -> dict[str, Tensor]:
    """Every parameter of the grouped layer, head for head, in float64."""
    wanted = {}
    for name, x in module.double().state_dict().items():
        if name.startswith("in_proj"):
            heads = by_head(x, HEADS + 2 * kv_heads)
            parts = [torch.cat(heads[:HEADS])]
            parts += [means_by_hand(heads[HEADS + i * kv_heads :][:kv_heads], count) for i in range(2)]
            wanted[name] = torch.cat(parts)
        elif name in POOLED:
            rows = means_by_hand(by_head(x, kv_heads), count)
            wanted[name] = rows.view(1, 1, -1) if x.dim() == 3 else rows
        else:
            wanted[name] = x
    return wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("kind", [nn.MultiheadAttention, mha_ext.MultiheadAttention])
def test_means_by_hand(kind: type[Any], options: dict[str, Any], count: int, dtype: torch.dtype) -> None:
    """Each parameter, PyTorch's layer and ours; the mean of up to 4 in float64, then one rounding."""
    module = make(kind, **options, dtype=dtype)
    before = copy.deepcopy(module)
    state = torch.get_rng_state()
    grouped = to_grouped_query(module, count)
    assert torch.equal(state, torch.get_rng_state()) and same_states(module, before)
    got, want = grouped.state_dict(), pooled_by_hand(before, count)
    assert list(got) == list(want)
    for name, x in want.items():
        limit = 4 * roundoff(torch.float64) * float(x.abs().max()) + roundoff(dtype) * x.abs()
        assert got[name].dtype == dtype
        assert_within(got[name], x, limit, name)
    assert type(grouped) is mha_ext.MultiheadAttention and grouped.num_kv_heads == count
    for name in ("embed_dim", "num_heads", "head_dim", "kdim", "vdim", "dropout", "batch_first", "add_zero_attn"):
        assert getattr(grouped, name) == getattr(module, name)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_equal_heads_stay_what_they_are(dtype: torch.dtype, size: int) -> None:
    """To the bit, in groups of 3 and 7 as well, whose sums round; and the layer is the same function."""
    shared = make(num_heads=2 * size, head_dim=5, num_kv_heads=2, add_bias_kv=True, dtype=dtype)
    module = make(num_heads=2 * size, head_dim=5, add_bias_kv=True, dtype=dtype)
    with torch.no_grad():
        for name in ("in_proj_weight", "in_proj_bias"):
            x = getattr(shared, name)
            query, rest = x[: 10 * size], x[10 * size :].unflatten(0, (4, 5))
            getattr(module, name).copy_(torch.cat((query, rest.repeat_interleave(size, 0).flatten(0, 1))))
        for name in ("bias_k", "bias_v"):
            x = getattr(shared, name).view(2, 5).repeat_interleave(size, 0)
            getattr(module, name).copy_(x.view(1, 1, -1))
    module.out_proj.load_state_dict(shared.out_proj.state_dict())
    grouped = to_grouped_query(module, 2)
    assert same_states(grouped, shared)
    inputs = tuple(x.to(dtype) for x in inputs_for(module))
    out, want = grouped(*inputs)[0], module(*inputs)[0]
    if dtype == torch.float64:
        assert_within(out, want, double_limit(want, EMBED))


def test_in_two_steps_as_in_one() -> None:
    module = make()
    twice = to_grouped_query(to_grouped_query(module, 2), 1)
    assert twice.num_kv_heads == 1
    for name, x in pooled_by_hand(module, 1).items():
        assert_within(twice.state_dict()[name], x, 1e-15, name)
    for name, x in pooled_by_hand(make(num_kv_heads=2), 1, 2).items():
        assert_within(to_grouped_query(make(num_kv_heads=2), 1).state_dict()[name], x, 1e-15, name)


def test_mode_gradients_and_storage() -> None:
    """The mode, whether a parameter is trained, and nothing shared: training one leaves the other alone."""
    module = make(nn.MultiheadAttention, add_bias_kv=True, dropout=0.5).eval()
    module.in_proj_weight.requires_grad_(False)
    module.out_proj.weight.requires_grad_(False)
    grouped = to_grouped_query(module, 2)
    assert not grouped.training and not grouped.out_proj.training
    trained = {name: p.requires_grad for name, p in grouped.named_parameters()}
    assert trained == {name: p.requires_grad for name, p in module.named_parameters()}
    with torch.no_grad():
        before = copy.deepcopy(module)
        for parameter in grouped.parameters():
            parameter.fill_(7.0)
    assert same_states(module, before)
    assert to_grouped_query(make(dropout=0.5), 2).training


def test_gradients_flow() -> None:
    grouped = to_grouped_query(make(nn.MultiheadAttention, add_bias_kv=True), 2)
    grouped(*inputs_for(grouped))[0].square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().max() > 0) for p in grouped.parameters())


def test_an_adapter_on_the_output_projection_is_kept() -> None:
    module = make(nn.MultiheadAttention)
    module.out_proj = nn.Sequential(nn.Linear(EMBED, 3), nn.Linear(3, EMBED)).double()
    grouped = to_grouped_query(module, 2)
    assert isinstance(grouped.out_proj, nn.Sequential) and grouped.out_proj is not module.out_proj
    assert grouped(*inputs_for(grouped))[0].shape == (2, 5, EMBED)


@pytest.mark.parametrize(
    ("module", "count", "kind", "message"),
    [
        (nn.Linear(4, 4), 2, TypeError, "module must be an nn.MultiheadAttention, got Linear"),
        (make(), 3, ValueError, "num_kv_heads must divide 4 (key and value heads), got 3"),
        (make(num_kv_heads=2), 4, ValueError, "num_kv_heads must divide 2 (key and value heads), got 4"),
        (make(), 0, ValueError, "num_kv_heads must be greater than 0, got 0"),
        (make(), 2.0, TypeError, "num_kv_heads must be an int, got float"),
    ],
    ids=str,
)
def test_refused(module: Any, count: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(f"to_grouped_query: {message}")):
        to_grouped_query(module, count)
