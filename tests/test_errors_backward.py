"""What the backward operators are given besides the forward's arguments is checked as strictly: kernels read it raw."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from cases import ops
from torch import Tensor

OFF: dict[str, Any] = {"dropout_p": 0.0, "causal": 0, "scale": None, "num_appended_keys": 0}


def attention_state() -> dict[str, Tensor]:
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)
    out, lse = ops.attention(query, key, value)
    return {"query": query, "key": key, "value": value, "out": out, "lse": lse, "grad_out": torch.ones_like(out)}


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("out", lambda t: t.double(), TypeError, "attention_backward: out must have query's dtype Float, got Double"),
        ("out", lambda t: t.bfloat16(), TypeError, "attention_backward: out must have query's dtype Float"),
        ("out", lambda t: t.to("meta"), ValueError, "attention_backward: out must be on query's device cpu, got meta"),
        ("out", lambda t: t[:, :1], ValueError, "attention_backward: out must have shape"),
        ("lse", lambda t: t.double(), TypeError, "attention_backward: lse must be Float, got Double"),
        ("lse", lambda t: t.to("meta"), ValueError, "attention_backward: lse must be on query's device cpu, got meta"),
        ("grad_out", lambda t: t.half(), TypeError, "attention_backward: grad_out must have query's dtype Float"),
    ],
)
def test_attention_backward(name: str, change: Any, error: type[Exception], message: str) -> None:
    s = attention_state()
    s[name] = change(s[name])
    inputs = (s["query"], s["key"], s["value"], None, None, None)
    with pytest.raises(error, match=message):
        ops.attention_backward(
            s["grad_out"], None, *inputs, s["out"], s["lse"], **OFF, output_mask=[True] * 3 + [False] * 4
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounding_took_is_bfloat16_of_the_output_s_shape_or_empty(dtype: torch.dtype) -> None:
    x = torch.randn(2, 2, 4, 3).to(dtype)
    out, lse, _, rounding = ops.attention_for_backward(x, x, x)
    good = [rounding, torch.zeros(0, dtype=torch.bfloat16), None]
    bad = [torch.ones(7, dtype=torch.bfloat16), torch.zeros(0), torch.ones(2, 2, 4, 4, dtype=torch.bfloat16)]
    for given in good + bad:
        call = partial(ops.attention_backward, out, None, x, x, x, None, None, None, out, lse, **OFF)
        with (
            nullcontext() if given is None or any(given is x for x in good) else pytest.raises((ValueError, TypeError))
        ):
            call(output_mask=[True] * 3 + [False] * 4, rounding=given)


@pytest.mark.parametrize("weights", [-1, 3])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_that_do_not_exist(device: str, weights: int) -> None:
    x = torch.zeros(1, 1, 2, 2, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"attention_for_backward: weights must be 0 \(none\), .*, got {weights}"):
        ops.attention_for_backward(x, x, x, weights=weights)


def test_weights_need_an_lse_that_can_be_read() -> None:
    s = attention_state()
    inputs = (torch.zeros(2, 5, 5), s["query"], s["key"], None, None, None, s["lse"].to("meta"))
    with pytest.raises(ValueError, match="attention_weights_backward: lse must be on query's device cpu, got meta"):
        ops.attention_weights_backward(*inputs, **OFF, average=True, output_mask=[True] * 2 + [False] * 4)


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("q", lambda t: t[:, :1], ValueError, r"q must have shape \[2, 5, 16\], got \[2, 1, 16\]"),
        ("q", lambda t: t.double(), TypeError, "q must have query's dtype Float, got Double"),
        ("q", lambda t: t.to("meta"), ValueError, "q must be on query's device cpu, got meta"),
        ("k", lambda t: t.new_zeros(0), ValueError, r"k must have shape \[2, 5, 32\], got \[0\]"),
        ("v", lambda t: t.new_zeros(2, 5, 16), ValueError, r"v must have shape \[0\], got \[2, 5, 16\]"),
        ("context", lambda t: t.bfloat16(), TypeError, "context must have query's dtype Float"),
        ("lse", lambda t: t.half(), TypeError, "lse must be Float, got Half"),
        ("rounding", lambda t: t.new_zeros(2, 5, 16), ValueError, r"rounding must have shape \[0\], got \[2, 5, 16\]"),
        ("rounding", lambda t: torch.zeros(0), TypeError, "rounding must be bfloat16, got Float"),
    ],
)
def test_layer_backward(name: str, change: Any, error: type[Exception], message: str) -> None:
    x, y, in_weight, out_weight = torch.randn(2, 5, 16), torch.randn(2, 5, 16), torch.randn(48, 16), torch.randn(16, 16)
    options: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 4, "shared_inputs": 1, "batch_first": True}
    inputs = (x, y, y, in_weight, None, out_weight, None)
    out, *saved = ops.multi_head_attention(*inputs, **options)
    state = dict(zip(("q", "k", "v", "context", "lse", "rounding"), saved, strict=True))
    state[name] = change(state[name])
    off = {key: value for key, value in OFF.items() if key != "num_appended_keys"}
    wanted = [True, True, False, True, False, True, False, False, False]
    with pytest.raises(error, match="multi_head_attention_backward: " + message):
        ops.multi_head_attention_backward(
            torch.ones_like(out), *inputs, None, None, None, *state.values(), **options, **off, output_mask=wanted
        )


def test_more_heads_than_the_weight_has_rows() -> None:
    x, weight = torch.randn(2, 5, 16), torch.randn(48, 16)
    message = "in_proj_weight must have at least num_heads = 4611686018427387904 rows"
    with pytest.raises(ValueError, match=message):
        ops.multi_head_attention(x, x, x, weight, None, weight[:16], None, num_heads=2**62, num_kv_heads=2**62)


def test_two_finite_masks_hide_nothing_together() -> None:
    """Each is float32's smallest number; their sum would be minus infinity."""
    q = torch.ones(1, 1, 3, 4)
    low = torch.finfo(torch.float32).min
    out, lse = ops.attention(q, q, q, torch.full((1, 1, 3, 3), low), torch.full((1, 3), low))
    assert torch.equal(out, torch.ones_like(out)) and bool(lse.isfinite().all())
