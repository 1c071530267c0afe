"""That the comparisons on PyTorch's samples can fail: each refuses each deliberate fault, wherever the fault acts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import faults
import pytest
import torch
from cases import DTYPES
from faults import Fault
from test_torch_samples import ATTENTION_CALLS, FEW_LAYER_CALLS, LAYER_CALLS, extended
from test_torch_samples_module import FEW, SAMPLES, build, call_of
from torch_layer_samples import as_function, check_layer
from torch_samples import Call, check_attention, check_derivatives, mild

from mha_ext import functional

GROUPS = [extended(c)["groups"] for c in ATTENTION_CALLS if c["query"].dim() == 4]  # the generator has none
QUICK = [torch.float32, torch.bfloat16]


def showing(table: dict[str, Fault], dtypes: list[torch.dtype]) -> list[Any]:
    """Names and dtypes; a change of 1 % is lost among the roundings of half types, and not asked for there."""
    return [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name, fault in table.items()
        for dtype in dtypes
        if fault.shows_in(dtype)
    ]


def refuses(check: Callable[..., None], right: Callable[..., Any], wrong: Callable[..., Any], *rest: Any) -> None:
    """The comparison takes what is right and refuses what is not."""
    check(right, *rest)
    with pytest.raises(AssertionError):
        check(wrong, *rest)


def attention_refuses(name: str, dtype: torch.dtype, most: int) -> None:
    fault, right = faults.ATTENTION[name], functional.scaled_dot_product_attention
    acting = [c for c in ATTENTION_CALLS + GROUPS if fault.acts_on(faults.attention_has(c))]
    for call in acting[:: max(1, len(acting) // most)]:
        refuses(check_attention, right, fault.attention(right), call, dtype)
    assert acting


def layer_refuses(name: str, dtype: torch.dtype, calls: list[Call], most: int) -> int:
    fault, right = faults.LAYER[name], functional.multi_head_attention_forward
    acting = [c for c in calls if fault.acts_on(faults.layer_has(c))]
    for call in acting[:: max(1, len(acting) // most)]:
        refuses(check_layer, right, fault.function(right), call, dtype)
    return len(acting)


def module_refuses(name: str, dtype: torch.dtype, samples: list[Any], most: int) -> int:
    """Samples with dropout and, where there is no mask, the causal flag: together every fault acts on some."""
    fault, acting = faults.LAYER[name], []
    for sample in samples:
        module = build(sample, dropout=0.4)
        for batched in (False, True):
            call = call_of(module, sample, batched, is_causal=sample.forward_input.kwargs["attn_mask"] is None)
            if fault.acts_on(faults.layer_has(call)):
                acting.append((module, call))
    for module, call in acting[:: max(1, len(acting) // most)]:
        refuses(check_layer, as_function(module), as_function(fault.module(module)), call, dtype)
    return len(acting)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The samples are too small to share."""
    torch.set_num_threads(1)


@pytest.mark.parametrize(("name", "dtype"), showing(faults.ATTENTION, QUICK))
def test_attention_samples_refuse(name: str, dtype: torch.dtype) -> None:
    attention_refuses(name, dtype, most=1)


@pytest.mark.parametrize(("name", "dtype"), showing(faults.LAYER, QUICK))
def test_layer_samples_refuse(name: str, dtype: torch.dtype) -> None:
    assert layer_refuses(name, dtype, FEW_LAYER_CALLS, most=1) + module_refuses(name, dtype, FEW, most=1)


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), showing(faults.ATTENTION, list(DTYPES)))
def test_many_attention_samples_refuse(name: str, dtype: torch.dtype) -> None:
    attention_refuses(name, dtype, most=12)


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), showing(faults.LAYER, list(DTYPES)))
def test_many_layer_samples_refuse(name: str, dtype: torch.dtype) -> None:
    assert layer_refuses(name, dtype, LAYER_CALLS, most=8) + module_refuses(name, dtype, SAMPLES, most=8)


@pytest.mark.parametrize("name", [n for n, fault in faults.ATTENTION.items() if fault.of_gradients])
def test_derivatives_refuse_wrong_gradients(name: str) -> None:
    """Differences know nothing of an exact answer, so only a gradient that does not fit its function shows."""
    right = functional.scaled_dot_product_attention
    fault, call = faults.ATTENTION[name], mild(ATTENTION_CALLS[-1])
    call |= {n: call[n][:1, :1] for n in ("query", "key", "value")}
    check_derivatives(right, call, True)
    with pytest.raises(RuntimeError, match="Jacobian"):
        check_derivatives(fault.attention(right), call, True)
