"""Bad input: refused before any work, with the argument's name, what it must be, and what was given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ops
from torch import Tensor

import mha_ext
from mha_ext import functional


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def attention(**changes: Any) -> None:
    """A good call of the operator, B=2, H=4, H_kv=2, T=5, S=7, D=8, D_v=6, with some arguments replaced."""
    good: dict[str, Any] = {"query": x(2, 4, 5, 8), "key": x(2, 2, 7, 8), "value": x(2, 2, 7, 6)}
    ops.attention(**{**good, **changes})


def test_the_good_call_is_good() -> None:
    attention()
    attention(
        attn_mask=x(2, 4, 5, 7), key_padding_mask=x(2, 7), dropout_seed=torch.tensor([1]), dropout_p=0.5, causal=2
    )


# What is replaced, the error's type, the argument named first, and words that have to follow it in this order.
OPERATOR = [
    ({"query": x(4, 5, 8)}, ValueError, "query", ["4", "got"]),
    ({"key": x(2, 7, 8)}, ValueError, "key", ["4", "got"]),
    ({"value": x(2, 2, 7)}, ValueError, "value", ["4", "got"]),
    ({"key": x(3, 2, 7, 8)}, ValueError, "key", ["batch", "2", "got", "3"]),
    ({"value": x(3, 2, 7, 6)}, ValueError, "value", ["batch", "2", "got", "3"]),
    ({"key": x(2, 3, 7, 8), "value": x(2, 3, 7, 6)}, ValueError, "key", ["head", "4", "got", "3"]),
    ({"value": x(2, 4, 7, 6)}, ValueError, "value", ["head", "2", "got", "4"]),
    ({"value": x(2, 2, 9, 6)}, ValueError, "value", ["7", "got", "9"]),
    ({"key": x(2, 2, 7, 9)}, ValueError, "key", ["8", "got", "9"]),
    ({"query": x(2, 4, 5, 0), "key": x(2, 2, 7, 0)}, ValueError, "query", ["1", "got", "0"]),
    ({"key": x(2, 2, 7, 8, dtype=torch.float64)}, TypeError, "key", ["[fF]loat", "got", "[dD]ouble|float64"]),
    ({"value": x(2, 2, 7, 6, dtype=torch.bfloat16)}, TypeError, "value", ["[fF]loat", "got", "BFloat16|bfloat16"]),
    (
        {n: x(2, 2, 5, 8, dtype=torch.int64) for n in ("query", "key", "value")},
        TypeError,
        "query",
        ["float", "got", "[lL]ong|int64"],
    ),
    (
        {n: x(2, 2, 5, 8).to(torch.complex64) for n in ("query", "key", "value")},
        TypeError,
        "query",
        ["float", "got", "[cC]omplex"],
    ),
    ({"attn_mask": x(5, 7)}, ValueError, "attn_mask", ["4|2.*4.*5.*7", "got"]),
    ({"attn_mask": x(2, 4, 5, 6)}, ValueError, "attn_mask", ["2.*4.*5.*7", "got", "6"]),
    ({"attn_mask": x(2, 3, 5, 7)}, ValueError, "attn_mask", ["2.*4.*5.*7", "got", "3"]),
    ({"attn_mask": x(2, 4, 5, 7), "num_appended_keys": 1}, ValueError, "attn_mask", ["2.*4.*5.*6", "got", "7"]),
    ({"attn_mask": x(2, 4, 5, 7, dtype=torch.int32)}, TypeError, "attn_mask", ["bool", "got", "[iI]nt"]),
    ({"key_padding_mask": x(7)}, ValueError, "key_padding_mask", ["2", "got", "1"]),
    ({"key_padding_mask": x(2, 6)}, ValueError, "key_padding_mask", ["7", "got", "6"]),
    ({"key_padding_mask": x(3, 7)}, ValueError, "key_padding_mask", ["2", "got", "3"]),
    (
        {"key_padding_mask": x(2, 7, dtype=torch.uint8)},
        TypeError,
        "key_padding_mask",
        ["bool", "got", "Byte|uint8|unsigned"],
    ),
    ({"dropout_p": -0.1}, ValueError, "dropout_p", ["0", "1", "got", "-0.1"]),
    ({"dropout_p": 1.0, "dropout_seed": torch.tensor([1])}, ValueError, "dropout_p", ["0", "1", "got", "1"]),
    ({"dropout_p": float("nan")}, ValueError, "dropout_p", ["got", "nan"]),
    ({"dropout_p": 0.5}, ValueError, "dropout_seed", ["dropout_p", "got", "0.5"]),
    ({"dropout_seed": torch.tensor([1])}, ValueError, "dropout_seed", ["dropout_p", "got", "0"]),
    ({"dropout_p": 0.5, "dropout_seed": torch.tensor([1, 2, 3])}, ValueError, "dropout_seed", ["1|one", "got", "3"]),
    (
        {"dropout_p": 0.5, "dropout_seed": torch.tensor([1.0])},
        TypeError,
        "dropout_seed",
        ["int64|[lL]ong", "got", "[fF]loat"],
    ),
    ({"causal": 4}, ValueError, "causal", ["0", "got", "4"]),
    ({"causal": -1}, ValueError, "causal", ["0", "got", "-1"]),
    ({"scale": float("inf")}, ValueError, "scale", ["finite", "got", "inf"]),
    ({"scale": float("nan")}, ValueError, "scale", ["finite", "got", "nan"]),
    ({"num_appended_keys": 8}, ValueError, "num_appended_keys", ["7", "got", "8"]),
    ({"num_appended_keys": -1}, ValueError, "num_appended_keys", ["0", "got", "-1"]),
]


def says(function: str, argument: str, words: list[str]) -> str:
    return rf"{function}: {argument}\b.*" + ".*".join(f"(?:{word})" for word in words)


@pytest.mark.parametrize(
    ("changes", "kind", "argument", "words"), OPERATOR, ids=lambda v: v if isinstance(v, str) else None
)
def test_operator(changes: dict[str, Any], kind: type[Exception], argument: str, words: list[str]) -> None:
    with pytest.raises(kind, match=says("attention", argument, words)):
        attention(**changes)


@pytest.mark.parametrize(
    ("changes", "kind", "argument", "words"), OPERATOR, ids=lambda v: v if isinstance(v, str) else None
)
def test_operator_on_meta_tensors_says_the_same(
    changes: dict[str, Any], kind: type[Exception], argument: str, words: list[str]
) -> None:
    """Shapes and dtypes are refused alike where nothing is computed."""
    moved = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in changes.items()}
    good = {"query": x(2, 4, 5, 8), "key": x(2, 2, 7, 8), "value": x(2, 2, 7, 6)}
    with pytest.raises(kind, match=says("attention", argument, words)):
        attention(**{**{n: v.to("meta") for n, v in good.items()}, **moved})


def test_tensors_of_different_devices_are_refused() -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"key.*cpu.*meta|device"):
        attention(key=x(2, 2, 7, 8).to("meta"))


def test_nothing_is_computed_before_the_check() -> None:
    """A wrong mask at the end of the argument list is noticed although the work itself would take minutes."""
    long = x(1, 1, 1, 8).expand(64, 64, 2**17, 8)
    with pytest.raises(ValueError, match="key_padding_mask"):
        attention(query=long, key=long, value=long, key_padding_mask=x(2, 7))


# ------------------------------------------------------------------------------------------------------------ the layer
def layer(**changes: Any) -> None:
    """A good call of the layer's operator: E=12, H=4, H_kv=2, D=3."""
    good: dict[str, Any] = {
        "query": x(2, 5, 12), "key": x(2, 7, 12), "value": x(2, 7, 12),
        "in_proj_weight": x(24, 12), "in_proj_bias": x(24), "out_proj_weight": x(12, 12), "out_proj_bias": x(12),
        "num_heads": 4, "num_kv_heads": 2,
    }  # fmt: skip
    ops.multi_head_attention(**{**good, **changes})


LAYER = [
    ({"query": x(5, 12)}, ValueError, "query", ["3", "got"]),
    ({"key": x(3, 7, 12)}, ValueError, "key", ["2", "got", "3"]),
    ({"value": x(2, 6, 12)}, ValueError, "value", ["7", "got", "6"]),
    ({"key": x(2, 7, 11)}, ValueError, "key", ["12", "got", "11"]),
    ({"in_proj_weight": x(23, 12)}, ValueError, "in_proj_weight", ["got", "23"]),
    ({"in_proj_weight": x(24, 11)}, ValueError, "in_proj_weight|query", ["got"]),
    ({"in_proj_bias": x(23)}, ValueError, "in_proj_bias", ["24", "got", "23"]),
    ({"out_proj_weight": x(12, 11)}, ValueError, "out_proj_weight", ["12", "got", "11"]),
    ({"out_proj_bias": x(11)}, ValueError, "out_proj_bias", ["12", "got", "11"]),
    ({"num_heads": 3}, ValueError, "num_heads|num_kv_heads", ["got"]),
    ({"num_heads": 0}, ValueError, "num_heads|num_kv_heads", ["got"]),
    ({"num_kv_heads": 0}, ValueError, "num_kv_heads", ["got", "0"]),
    ({"shared_inputs": 3}, ValueError, "shared_inputs", ["got", "3"]),
    ({"in_proj_weight": x(24, 12, dtype=torch.float64)}, TypeError, "in_proj_weight", ["got", "[dD]ouble|float64"]),
    ({"attn_mask": x(2, 4, 5, 6)}, ValueError, "attn_mask", ["2.*4.*5.*7", "got", "6"]),
    ({"key_padding_mask": x(2, 6)}, ValueError, "key_padding_mask", ["7", "got", "6"]),
    ({"dropout_p": 1.5}, ValueError, "dropout_p", ["got", "1.5"]),
    ({"causal": 7}, ValueError, "causal", ["got", "7"]),
]


@pytest.mark.parametrize(
    ("changes", "kind", "argument", "words"), LAYER, ids=lambda v: v if isinstance(v, str) else None
)
def test_layer_operator(changes: dict[str, Any], kind: type[Exception], argument: str, words: list[str]) -> None:
    with pytest.raises(kind, match=says("multi_head_attention", f"(?:{argument})", words)):
        layer(**changes)


# -------------------------------------------------------------------------------------------------------- from Python
def module(*arguments: Any, **options: Any) -> mha_ext.MultiheadAttention:
    return mha_ext.MultiheadAttention(*arguments, batch_first=True, **options)


def forward(*inputs: Tensor, **options: Any) -> Callable[[], object]:
    return lambda: module(12, 4)(*inputs, **options)


def sdpa(*inputs: Tensor, **options: Any) -> Callable[[], object]:
    return lambda: functional.scaled_dot_product_attention(*inputs, **options)


GOOD = (x(2, 5, 12), x(2, 7, 12), x(2, 7, 12))
HEADS = (x(2, 4, 5, 8), x(2, 4, 7, 8), x(2, 4, 7, 8))
PYTHON = [
    (lambda: mha_ext.split_heads(x(2, 5, 10), 3), ValueError, "embed_dim 10 is not divisible by num_heads 3"),
    (lambda: module(10, 3), ValueError, "embed_dim.*10.*num_heads.*3"),
    (lambda: module(12, 0), ValueError, "num_heads.*0"),
    (lambda: module(0, 4), ValueError, "embed_dim.*0"),
    (lambda: module(12, 4, dropout=1.5), ValueError, "dropout.*1.5"),
    (lambda: module(12, 4, num_kv_heads=3), ValueError, "num_kv_heads.*3"),
    (forward(x(5), *GOOD[1:]), ValueError, "query.*got"),
    (forward(x(5, 12), *GOOD[1:]), ValueError, "(query|key).*got"),
    (forward(x(3, 5, 12), *GOOD[1:]), ValueError, "batch.*3|batch.*2"),
    (forward(x(2, 5, 11), *GOOD[1:]), ValueError, "query.*12.*got.*11"),
    (forward(GOOD[0], x(2, 7, 13), GOOD[2]), ValueError, "key.*12.*got.*13"),
    (forward(GOOD[0], GOOD[1], x(2, 6, 12)), ValueError, "value.*7.*got.*6"),
    (forward(GOOD[0], x(2, 7, 12, dtype=torch.float64), GOOD[2]), TypeError, "key.*got.*float64"),
    (forward(*GOOD, attn_mask=x(5, 6)), ValueError, "attn_mask.*5.*7.*got.*5.*6"),
    (forward(*GOOD, attn_mask=x(3, 5, 7)), ValueError, "attn_mask.*8.*5.*7.*got.*3.*5.*7"),
    (forward(*GOOD, attn_mask=x(5, 7, dtype=torch.int64)), TypeError, "attn_mask.*bool.*got.*int64"),
    (forward(*GOOD, key_padding_mask=x(2, 6)), ValueError, "key_padding_mask.*2.*7.*got.*2.*6"),
    (forward(*GOOD, key_padding_mask=x(3, 7)), ValueError, "key_padding_mask.*2.*7.*got.*3.*7"),
    (forward(*GOOD, key_padding_mask=x(2, 7, dtype=torch.uint8)), TypeError, "key_padding_mask.*bool.*got.*uint8"),
    (sdpa(x(8), *HEADS[1:]), ValueError, "query.*got"),
    (sdpa(HEADS[0], x(2, 3, 7, 8), x(2, 3, 7, 8)), ValueError, "key.*head.*got.*3"),
    (sdpa(HEADS[0], x(2, 2, 7, 8), x(2, 2, 7, 8)), ValueError, "enable_gqa"),
    (sdpa(HEADS[0], HEADS[1], x(2, 4, 9, 8)), ValueError, "value.*7.*got.*9"),
    (sdpa(HEADS[0], x(2, 4, 7, 9), HEADS[2]), ValueError, "key.*8.*got.*9"),
    (sdpa(*HEADS, x(5, 6)), ValueError, "attn_mask.*got"),
    (sdpa(*HEADS, x(5, 7, dtype=torch.int32)), TypeError, "attn_mask.*got.*int32"),
    (sdpa(*HEADS, dropout_p=1.0), ValueError, "dropout_p.*got.*1"),
    (sdpa(*HEADS, scale=float("nan")), ValueError, "scale.*finite.*got.*nan"),
    (sdpa(*HEADS, is_causal=True, causal_alignment="center"), ValueError, "causal_alignment.*upper_left.*got.*center"),
    (sdpa(*HEADS, return_weights="median"), ValueError, "return_weights.*got.*median"),
    (sdpa(*HEADS, key_padding_mask=x(3, 7)), ValueError, "key_padding_mask.*got"),
    (lambda: mha_ext.set_cpu_capability("sse9"), ValueError, "sse9"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "kind", "message"), PYTHON, ids=lambda v: re.sub(r"\W+", " ", v) if isinstance(v, str) else None
)
def test_python(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
