"""Every situation in which PyTorch's functions for attention raise an error: refused here too, by both their types."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from original_errors import A, B, E, H, R, S, Situation, T, assert_refused, outcome, x
from torch import Tensor
from torch.nn.attention.bias import causal_upper_left

from mha_ext import functional

BOOL, META = torch.bool, "meta"
INF, NAN = float("inf"), float("nan")


# ----------------------------------------------------------------------------------------- multi_head_attention_forward
def layer_call(function: Any, situation: Situation, need_weights: bool, training: bool) -> Any:
    good: dict[str, Any] = {
        "query": x(T, B, E), "key": x(S, B, E), "value": x(S, B, E), "embed_dim_to_check": E, "num_heads": H,
        "in_proj_weight": x(36, E), "in_proj_bias": x(36), "bias_k": None, "bias_v": None, "add_zero_attn": False,
        "dropout_p": 0.0, "out_proj_weight": x(E, E), "out_proj_bias": x(E),
    }  # fmt: skip
    return function(**{**good, "need_weights": need_weights, "training": training, **situation.changes})


SEPARATE = {
    "use_separate_proj_weight": True, "in_proj_weight": None,
    "q_proj_weight": x(E, E), "k_proj_weight": x(E, E), "v_proj_weight": x(E, E),
}  # fmt: skip
APPENDED = {"bias_k": x(1, 1, E), "bias_v": x(1, 1, E)}
UNBATCHED = {"query": x(T, E), "key": x(S, E), "value": x(S, E)}
NESTED = torch.nested.nested_tensor([x(5, E), x(3, E)])
JAGGED = torch.nested.nested_tensor([x(5, E), x(3, E)], layout=torch.jagged)
ALL = {"query": (T, B, E), "key": (S, B, E), "value": (S, B, E), "in_proj_weight": (36, E), "in_proj_bias": (36,),
       "out_proj_weight": (E, E), "out_proj_bias": (E,)}  # fmt: skip


def all_of(dtype: torch.dtype) -> dict[str, Any]:
    return {name: x(*shape).to(dtype) for name, shape in ALL.items()}


STATIC = r"have shape \(8, S, 3\)"
DENSE = "be a dense tensor .*"
MASK = r"have shape \(T, S\) = \(5, 7\), .*"
FLOATS = "be float64, float32, bfloat16 or float16"
LAYER = [
    # inputs
    Situation("query", r"be 2-D \(unbatched\) or 3-D \(batched\)", "1-D", (A,), {"query": x(E)}),
    Situation("query", r"be 2-D \(unbatched\) or 3-D \(batched\)", "4-D", (A,), {"query": x(1, T, B, E)}),
    Situation("key", "be 3-D like query", "2-D", (A,), {"key": x(S, E)}),
    Situation("value", "be 3-D like query", "4-D", (A,), {"value": x(1, S, B, E)}),
    Situation("key", "be 2-D like query", "3-D", (A,), {"query": x(T, E)}),
    Situation("query", r"have last size 12 \(embed_dim\)", r"shape \(5, 2, 11\)", (A,), {"query": x(T, B, 11)}),
    Situation("key", "have last size 12", r"shape \(7, 2, 11\)", (A,), {"key": x(S, B, 11)}),
    Situation("value", "have last size 12", r"shape \(7, 2, 11\)", (A,), {"value": x(S, B, 11)}),
    Situation("key", "have last size 12", r"shape \(7, 2, 8\)", (A,), {**SEPARATE, "key": x(S, B, 8)}),
    Situation("value", "have last size 12", r"shape \(7, 2, 8\)", (A,), {**SEPARATE, "value": x(S, B, 8)}),
    Situation("key", "have query's batch size 2", "3", (R,), {"key": x(S, 3, E), "value": x(S, 3, E)}),
    Situation("value", "have query's batch size 2", "3", (A,), {"value": x(S, 3, E)}),
    Situation("value", "have key's length 7", "6", (A,), {"value": x(6, B, E)}),
    Situation("value", "have key's length 7", "6", (A,), {**SEPARATE, "value": x(6, B, E)}),
    Situation("query", DENSE, "layout torch.sparse_coo", (R,), {"query": x(T, B, E).to_sparse()}, TypeError),
    Situation("key", DENSE, "a nested tensor", (R,), {"key": NESTED}, TypeError),
    Situation("query", DENSE, "a nested tensor", (R,), {"query": JAGGED}, TypeError),
    # numbers
    Situation("embed_dim_to_check", "be greater than 0", "0", (A,), {"embed_dim_to_check": 0}),
    Situation("embed_dim_to_check", "be an int", "NoneType", (A,), {"embed_dim_to_check": None}, TypeError),
    Situation("embed_dim_to_check", "be an int", "str", (A,), {"embed_dim_to_check": "12"}, TypeError),
    Situation("in_proj_weight", r"have shape \(24, 8\)", r"\(36, 12\)", (A,), {"embed_dim_to_check": 8}),
    Situation("q_proj_weight", r"have shape \(8, 8\)", r"\(12, 12\)", (A,), {**SEPARATE, "embed_dim_to_check": 8}),
    Situation("embed_dim_to_check", "be divisible by num_heads", ".* 12 and num_heads 5", (A,), {"num_heads": 5}),
    Situation("num_heads", "be greater than 0", "0", (ZeroDivisionError,), {"num_heads": 0}),
    Situation("num_heads", "be greater than 0", "-4", (R,), {"num_heads": -4}),
    Situation("num_heads", "be an int", "float", (TypeError,), {"num_heads": 4.0}, TypeError),
    Situation("num_heads", "be an int", "str", (TypeError,), {"num_heads": "4"}, TypeError),
    # weights
    Situation("in_proj_weight", "be a tensor", "None", (A,), {"in_proj_weight": None}),
    Situation("q_proj_weight", "be a tensor", "None", (A,), {**SEPARATE, "q_proj_weight": None}),
    Situation("k_proj_weight", "be a tensor", "None", (A,), {**SEPARATE, "k_proj_weight": None}),
    Situation("v_proj_weight", "be a tensor", "None", (A,), {**SEPARATE, "v_proj_weight": None}),
    Situation("out_proj_weight", "be a tensor", "NoneType", (TypeError,), {"out_proj_weight": None}, TypeError),
    Situation("q_proj_weight", r"have shape \(12, 12\)", r"\(12, 11\)", (A,), {**SEPARATE, "q_proj_weight": x(E, 11)}),
    Situation("k_proj_weight", r"have shape \(12, kdim\)", r"\(11, 12\)", (A,),
              {**SEPARATE, "k_proj_weight": x(11, E)}),
    Situation("v_proj_weight", r"have shape \(12, vdim\)", r"\(11, 12\)", (A,),
              {**SEPARATE, "v_proj_weight": x(11, E)}),
    Situation("in_proj_bias", r"have shape \(36,\)", r"\(33,\)", (A,), {**SEPARATE, "in_proj_bias": x(33)}),
    Situation("in_proj_weight", r"have shape \(36, 12\)", r"\(35, 12\)", (R,), {"in_proj_weight": x(35, E)}),
    Situation("in_proj_weight", r"have shape \(36, 12\)", r"\(36, 11\)", (R,), {"in_proj_weight": x(36, 11)}),
    Situation("in_proj_weight", r"have shape \(36, 12\)", r"\(36,\)", (R,), {"in_proj_weight": x(36)}),
    Situation("in_proj_bias", r"have shape \(36,\)", r"\(35,\)", (R,), {"in_proj_bias": x(35)}),
    Situation("out_proj_weight", r"have shape \(E_out, 12\)", r"\(12, 11\)", (R,), {"out_proj_weight": x(E, 11)}),
    Situation("out_proj_bias", r"have shape \(12,\)", r"\(11,\)", (R,), {"out_proj_bias": x(11)}),
    Situation("in_proj_weight", DENSE, "layout torch.sparse_coo", (NotImplementedError,),
              {"in_proj_weight": x(36, E).to_sparse()}, TypeError),
    Situation("in_proj_bias", "be on out_proj_weight's device cpu", META, (R,), {"in_proj_bias": x(36, device=META)}),
    Situation("out_proj_bias", "be on out_proj_weight's device cpu", META, (R,), {"out_proj_bias": x(E, device=META)}),
    Situation("in_proj_weight", "have out_proj_weight's dtype torch.float32", "torch.float64", (R,),
              {"in_proj_weight": x(36, E).double()}, TypeError),
    Situation("in_proj_weight", "have out_proj_weight's dtype torch.float64", "torch.float32", (R,),
              {"out_proj_weight": x(E, E).double()}, TypeError),
    Situation("query", "have the parameters' dtype torch.float32", "torch.float64", (R,),
              {"query": x(T, B, E).double()}, TypeError),
    Situation("query", FLOATS, "torch.int64", (R,), all_of(torch.int64), TypeError),
    Situation("query", FLOATS, "torch.complex64", (NotImplementedError,), all_of(torch.complex64), TypeError),
    # appended and static keys
    Situation("bias_v", "be a tensor because bias_k is given", "None", (A,), {"bias_k": x(1, 1, E)}),
    Situation("bias_k", "be a tensor because bias_v is given", "None", (A,), {"bias_v": x(1, 1, E)}),
    Situation("bias_k", r"have shape \(1, 1, 12\)", r"\(1, 1, 11\)", (R,), {**APPENDED, "bias_k": x(1, 1, 11)}),
    Situation("bias_v", r"have shape \(1, 1, 12\)", r"\(1, 1, 11\)", (R,), {**APPENDED, "bias_v": x(1, 1, 11)}),
    Situation("bias_k", "be on .* cpu", META, (R,), {**APPENDED, "bias_k": x(1, 1, E, device=META)}),
    Situation("bias_k and bias_v", "be None with static_k or static_v", "tensors", (A,),
              {**APPENDED, "static_k": x(8, S, 3)}),
    Situation("bias_k and bias_v", "be None with static_k or static_v", "tensors", (A,),
              {**APPENDED, "static_v": x(8, S, 3)}),
    Situation("static_k", STATIC, r"\(7, 7, 3\)", (A,), {"static_k": x(7, S, 3)}),
    Situation("static_k", STATIC, r"\(8, 7, 4\)", (A,), {"static_k": x(8, S, 4)}),
    Situation("static_k", STATIC, r"\(7, 3\)", (A,), {"static_k": x(S, 3)}),
    Situation("static_v", STATIC, r"\(7, 7, 3\)", (A,), {"static_v": x(7, S, 3)}),
    Situation("static_v", STATIC, r"\(8, 7, 4\)", (A,), {"static_v": x(8, S, 4)}),
    Situation("static_k", "have value's length 7", "9", (R,), {"static_k": x(8, 9, 3)}),
    Situation("static_v", "have key's length 7", "9", (R,), {"static_v": x(8, 9, 3)}),
    Situation("static_v", "have static_k's length 9", "8", (R,), {"static_k": x(8, 9, 3), "static_v": x(8, 8, 3)}),
    Situation("static_k", "have query's dtype torch.float32", "torch.float64", (R,),
              {"static_k": x(8, S, 3).double(), "static_v": x(8, S, 3).double()}, TypeError),
    Situation("static_v", "be on query's device cpu", META, (R,), {"static_v": x(8, S, 3, device=META)}),
    Situation("static_k", "be a tensor", "list", (AttributeError,), {"static_k": [1.0]}, TypeError),
    # masks
    Situation("attn_mask", MASK, r"\(4, 7\)", (R,), {"attn_mask": x(4, S)}),
    Situation("attn_mask", MASK, r"\(3, 5, 7\)", (R,), {"attn_mask": x(3, T, S)}),
    Situation("attn_mask", MASK, r"\(3, 5, 7\)", (A,), {**UNBATCHED, "attn_mask": x(3, T, S)}),
    Situation("attn_mask", MASK, r"\(3, 4, 5, 7\)", (A,), {"attn_mask": x(3, H, T, S)}),
    Situation("attn_mask", "be bool or floating point", r".*torch.int64", (A,),
              {"attn_mask": x(T, S).long()}, TypeError),
    Situation("attn_mask", "be bool or floating point", r".*complex64", (A,),
              {"attn_mask": x(T, S).to(torch.complex64)}, TypeError),
    Situation("key_padding_mask", "have shape .*= .2, 7. .*", r"\(2, 6\)", (A,), {"key_padding_mask": x(B, 6)}),
    Situation("key_padding_mask", "have shape .*= .2, 7. .*", r"\(3, 7\)", (A,), {"key_padding_mask": x(3, S).bool()}),
    Situation("key_padding_mask", "have shape .*= .2, 7. .*", r"\(1, 2, 7\)", (A,), {"key_padding_mask": x(1, B, S)}),
    Situation("key_padding_mask", "have shape .*= .1, 7. .*", r"\(2, 7\)", (A,),
              {**UNBATCHED, "key_padding_mask": x(2, S)}),
    Situation("key_padding_mask", "be bool or floating point", "torch.uint8", (A,),
              {"key_padding_mask": x(B, S).byte()}, TypeError),
]  # fmt: skip


@pytest.mark.parametrize("situation", LAYER, ids=str)
def test_layer(situation: Situation) -> None:
    seen = set()
    for need_weights, training in itertools.product((True, False), repeat=2):
        road = (situation, need_weights, training)
        theirs = outcome(lambda road=road: layer_call(F.multi_head_attention_forward, *road))
        seen.add(type(theirs))
        assert_refused(
            lambda road=road: layer_call(functional.multi_head_attention_forward, *road),
            situation, "multi_head_attention_forward", theirs,
        )  # fmt: skip
    assert seen == set(situation.theirs)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("probability", "kind"), [(1.5, ValueError), (-0.1, ValueError), (NAN, ValueError), ("0.1", TypeError)]
)
def test_dropout_of_the_layer(need_weights: bool, probability: Any, kind: type[Exception]) -> None:
    """The original refuses it in training alone, and a negative one or NaN only without weights."""
    situation = Situation("dropout_p", ".*", ".*", (), {"dropout_p": probability}, kind)
    for training in (True, False):
        theirs = outcome(lambda t=training: layer_call(F.multi_head_attention_forward, situation, need_weights, t))
        assert_refused(
            lambda t=training: layer_call(functional.multi_head_attention_forward, situation, need_weights, t),
            situation, "multi_head_attention_forward", theirs,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------- scaled_dot_product_attention
Q, K, V = x(2, 4, 5, 8), x(2, 4, 7, 8), x(2, 4, 7, 8)
NESTED_HEADS = torch.nested.nested_tensor([x(4, 5, 8), x(4, 3, 8)])
JAGGED_HEADS = torch.nested.nested_tensor([x(5, 4, 8), x(3, 4, 8)], layout=torch.jagged).transpose(1, 2)


def three(dtype: torch.dtype) -> dict[str, Any]:
    return {"query": Q.to(dtype), "key": K.to(dtype), "value": V.to(dtype)}


def grouped(key_heads: int, value_heads: int, **options: Any) -> dict[str, Any]:
    return {"key": x(2, key_heads, 7, 8), "value": x(2, value_heads, 7, 8), **options}


HEADS = [
    Situation("query", "have at least 2 axes", r"shape \(8,\)", (R,), {"query": x(8)}),
    Situation("key", "have at least 2 axes", r"shape \(8,\)", (R,), {"key": x(8)}),
    Situation("value", "have at least 2 axes", r"shape \(\)", (R,), {"value": x()}),
    Situation("key", "have query's dtype Float", "Double", (R,), {"key": K.double()}, TypeError),
    Situation("value", "have query's dtype Float", "BFloat16", (R,), {"value": V.bfloat16()}, TypeError),
    Situation("key", "have query's dtype Double", "Float", (R,), {"query": Q.double()}, TypeError),
    Situation("key", "be on query's device cpu", META, (R,), {"key": K.to(META)}),
    Situation("value", "be on query's device cpu", META, (R,), {"value": V.to(META)}),
    Situation("key", "be on query's device meta", "cpu", (R,), {"query": Q.to(META)}),
    Situation("query", FLOATS, "Long", (R,), three(torch.int64), TypeError),
    Situation("query", FLOATS, "Bool", (R,), three(BOOL), TypeError),
    Situation("query", FLOATS, "ComplexFloat", (NotImplementedError,), three(torch.complex64), TypeError),
    Situation("query", FLOATS, "Float8", (NotImplementedError,), three(torch.float8_e4m3fn), TypeError),
    Situation("key", "have query's dtype Float", "QInt8", (R,),
              {"key": torch.quantize_per_tensor(K, 0.1, 0, torch.qint8)}, TypeError),
    Situation("query", DENSE, "layout torch.sparse_coo", (R,), {"query": Q.to_sparse()}, TypeError),
    Situation("value", DENSE, "layout torch.sparse_coo", (R,), {"value": V.to_sparse()}, TypeError),
    Situation("query", DENSE, "a nested tensor", (R,), {"query": NESTED_HEADS}, TypeError),
    Situation("key", "be a jagged nested tensor", "a dense tensor", (ValueError,), {"query": JAGGED_HEADS}, TypeError),
    Situation("attn_mask", "not be set with nested tensors", "Tensor", (ValueError,),
              {"query": JAGGED_HEADS, "key": JAGGED_HEADS, "value": JAGGED_HEADS, "attn_mask": x(5, 5)}, TypeError),
    Situation("query", "be a tensor", "list", (TypeError,), {"query": [1.0]}, TypeError),
    Situation("key", "be a tensor", "NoneType", (TypeError,), {"key": None}, TypeError),
    Situation("value", "be a tensor", "str", (TypeError,), {"value": "v"}, TypeError),
    # sizes
    Situation("key", "have query's head_dim 8", "9", (R,), {"key": x(2, 4, 7, 9)}),
    Situation("key and value", "have query's batch sizes", r".*\(3, 4, 7, 8\)", (R,), {"key": x(3, 4, 7, 8)}),
    Situation("key and value", "have query's batch sizes", r".*\(3, 4, 7, 8\)", (R,), {"value": x(3, 4, 7, 8)}),
    Situation("key and value", "have query's 4 heads", r"\(2, 2\); enable_gqa", (R,), grouped(2, 2)),
    Situation("key and value", "have query's 4 heads", r"\(4, 2\)", (R,), grouped(4, 2)),
    Situation("key", "have a number of heads that divides query's 4", "3", (R,), grouped(3, 3, enable_gqa=True)),
    Situation("key", "have a number of heads that divides query's 4", "8", (R,), grouped(8, 8, enable_gqa=True)),
    # masks
    Situation("attn_mask", r"be broadcastable to \(2, 4, 5, 7\)", r"\(5, 6\)", (R,), {"attn_mask": x(5, 6)}),
    Situation("attn_mask", r"be broadcastable to \(2, 4, 5, 7\)", r"\(4, 7\)", (R,),
              {"attn_mask": x(4, 7, dtype=BOOL)}),
    Situation("attn_mask", r"be broadcastable to \(2, 4, 5, 7\)", r"\(3, 4, 5, 7\)", (R,),
              {"attn_mask": x(3, 4, 5, 7)}),
    Situation("attn_mask", r"be broadcastable to \(2, 4, 5, 7\)", r"\(1, 2, 4, 5, 7\)", (R,),
              {"attn_mask": x(1, 2, 4, 5, 7)}),
    Situation("attn_mask", "be bool or floating point", "torch.int32", (R,), {"attn_mask": x(5, 7).int()}, TypeError),
    Situation("attn_mask", "be bool or floating point", "torch.uint8", (R,), {"attn_mask": x(5, 7).byte()}, TypeError),
    Situation("attn_mask", "be bool or floating point", "torch.complex64", (R,),
              {"attn_mask": x(5, 7).to(torch.complex64)}, TypeError),
    Situation("attn_mask", DENSE, "layout torch.sparse_coo", (NotImplementedError,),
              {"attn_mask": x(5, 7).to_sparse()}, TypeError),
    Situation("attn_mask", DENSE, "a nested tensor", (R,),
              {"attn_mask": torch.nested.nested_tensor([x(5, 7), x(3, 7)])}, TypeError),
    Situation("attn_mask", "be a tensor", "list", (TypeError,), {"attn_mask": [1.0]}, TypeError),
    # options
    Situation("dropout_p", r"be in \[0, 1\)", "1.5", (R,), {"dropout_p": 1.5}),
    Situation("dropout_p", r"be in \[0, 1\)", "-0.1", (R,), {"dropout_p": -0.1}),
    Situation("dropout_p", r"be in \[0, 1\)", "nan", (R,), {"dropout_p": NAN}),
    Situation("dropout_p", "be a number", "str", (TypeError,), {"dropout_p": "0.1"}, TypeError),
    Situation("scale", "be a number", "str", (TypeError,), {"scale": "1"}, TypeError),
    Situation("is_causal", "be a bool", "str", (TypeError,), {"is_causal": "False"}, TypeError),
    Situation("is_causal", "be a bool", "NoneType", (TypeError,), {"is_causal": None}, TypeError),
    Situation("enable_gqa", "be a bool", "int", (TypeError,), {"enable_gqa": 2}, TypeError),
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("situation", HEADS, ids=str)
def test_heads(situation: Situation, grad: bool) -> None:
    arguments = {"query": Q, "key": K, "value": V, **situation.changes}
    if grad:
        arguments = {n: leaf(a) if n in ("query", "key", "value") else a for n, a in arguments.items()}
    theirs = outcome(lambda: F.scaled_dot_product_attention(**arguments))
    assert isinstance(theirs, situation.theirs)
    call = lambda: functional.scaled_dot_product_attention(**arguments)  # noqa: E731
    assert_refused(call, situation, "scaled_dot_product_attention", theirs)


def leaf(given: Any) -> Any:
    """The argument, with a gradient where it can have one."""
    if not isinstance(given, Tensor) or given.is_nested or not (given.is_floating_point() or given.is_complex()):
        return given
    return given.detach().clone().requires_grad_()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_mask": x(5, 7, device=META)}, "attn_mask must be on query's device cpu, got meta"),
        ({"value": x(2, 4, 9, 8)}, r"value must have key's length 7 .*, got 9"),
        (grouped(2, 4, enable_gqa=True), "value must have key's 2 heads, got 4"),
        (grouped(0, 0, enable_gqa=True), "key must have a number of heads that divides query's 4 .*, got 0"),
        ({"query": x(2, 4, 5, 0), "key": x(2, 4, 7, 0)}, "query must have head_dim at least 1 .*, got 0"),
        ({"value": x(2, 4, 7, 0)}, "value must have head_dim at least 1 .*, got 0"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"scale": NAN}, "scale must be finite, got nan"),
        ({"scale": -INF}, "scale must be finite, got -inf"),
        ({"attn_mask": causal_upper_left(5, 6)}, r"attn_mask must be a CausalBias of size \(5, 7\), got \(5, 6\)"),
    ],
    ids=str,
)
def test_heads_that_the_original_takes(changes: dict[str, Any], message: str) -> None:
    """It answers with NaN, with numbers from nowhere, or with what nobody can have meant; here it is an error."""
    arguments = {"query": Q, "key": K, "value": V, **changes}
    F.scaled_dot_product_attention(**arguments)
    with pytest.raises(ValueError, match=f"^scaled_dot_product_attention: {message}"):
        functional.scaled_dot_product_attention(**arguments)
