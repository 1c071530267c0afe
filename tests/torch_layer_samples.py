"""PyTorch's samples of whole layers: their exact answers, limits, and PyTorch's own ways to compute them.

The comparison is that of ``torch_samples.py``. A layer is a function with the arguments of
``F.multi_head_attention_forward``; ``as_function`` makes one of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from cases import NONE, UPPER_LEFT, Case, Problem, exact, kept
from tolerances import assert_within, attention_limits, bias_limit, roundoff
from torch import Tensor, nn
from torch_samples import (
    ATTENTION,
    Answers,
    Call,
    Limits,
    calls,
    change,
    compare,
    composition,
    dropout_seed,
    evaluate,
    grad_out,
    in_dtype,
    leaves,
    peer_limits,
    tame,
)

from mha_ext import reference

LAYER = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias"),
)
OPTIONS = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")


def layer_calls() -> list[Call]:
    """The many samples that are not meant for gradients, and the one that is; ours takes gradients of all."""
    return [c for grad in (False, True) for c in calls("multi_head_attention_forward", LAYER, grad)]


def as_function(module: nn.MultiheadAttention) -> Callable[..., Any]:
    """The module as a function of its parameters too; inputs and output (T, B, E) whatever its layout."""

    def function(**call: Any) -> Any:
        given = {n: call[n.replace("out_proj.", "out_proj_")] for n, _ in module.named_parameters()}
        swap = module.batch_first and call["query"].dim() == 3
        inputs = tuple(call[n].transpose(0, 1) if swap else call[n] for n in ATTENTION)
        out, weights = torch.func.functional_call(module, given, inputs, {n: call[n] for n in OPTIONS if n in call})
        return (out.transpose(0, 1) if swap else out), weights

    return function


def project(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value heads of a layer, (B, H, T, D), appended keys included."""
    heads, width, heads_of = call["num_heads"], call["embed_dim_to_check"], []
    packed, bias = call.get("in_proj_weight"), call["in_proj_bias"]
    weights = [call[f"{x}_proj_weight"] for x in "qkv"] if packed is None else packed.chunk(3)
    biases = [0.0] * 3 if bias is None else bias.chunk(3)
    rows = (None, call.get("bias_k"), call.get("bias_v"))
    for name, weight, shift, row in zip(ATTENTION, weights, biases, rows, strict=True):
        x = call[name] if call[name].dim() == 3 else call[name][:, None]
        x = x @ weight.mT + shift
        if row is not None:
            x = torch.cat([x, row.reshape(1, 1, width).expand(1, x.shape[1], width)])
        if call["add_zero_attn"] and name != "query":
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        heads_of.append(x.unflatten(2, (heads, width // heads)).permute(1, 2, 0, 3))
    query, key, value = heads_of
    return query, key, value


def layer_problem(call: Call, dtype: torch.dtype) -> Problem:
    """The attention inside a layer; masks in the operators' convention, the incoming gradient still empty."""
    query, key, value = project(call)
    batch, heads, queries, dim = query.shape
    keys = call["key"].shape[0]
    case = Case(
        batch, heads, None, queries, key.shape[2], dim, dtype=dtype, appended=key.shape[2] - keys,
        causal=UPPER_LEFT if call.get("is_causal") else NONE,
        dropout_p=call["dropout_p"] if call.get("training", True) else 0.0,
    )  # fmt: skip
    mask, padding = call.get("attn_mask"), call.get("key_padding_mask")
    if mask is not None:
        mask = ~mask if mask.dtype == torch.bool else mask
        mask = mask.unflatten(0, (batch, heads)) if mask.dim() == 3 else mask[None, None]
    if padding is not None and padding.dim() == 1:
        padding = padding[None]
    seed = dropout_seed(case.dropout_p)
    return Problem(case, query, key, value, torch.empty(0), torch.zeros(batch, heads, queries), mask, padding, seed)


def layer_truth(call: Call, dtype: torch.dtype) -> tuple[Answers, Limits]:
    """The exact answers for a call whose numbers are rounded to ``dtype``, and how far the attention inside may move
    them by the error analysis (the products around it are not counted)."""
    call = change(in_dtype(call, dtype), lambda x: x.double().requires_grad_())
    problem = layer_problem(call, dtype)
    case, weight, bias = problem.case, call["out_proj_weight"], call["out_proj_bias"]
    context, _, weights = reference.attention(
        problem.query, problem.key, problem.value, problem.attn_mask, key_padding_mask=problem.key_padding_mask,
        is_causal=case.causal != NONE, keep=kept(case, problem.dropout_seed), dropout_p=case.dropout_p,
        num_appended_keys=case.appended,
    )  # fmt: skip
    out = context.permute(2, 0, 1, 3).flatten(2) @ weight.mT + (0.0 if bias is None else bias)
    shape = call["query"].shape
    out = out.reshape(*shape[:-1], out.shape[-1])
    grad = grad_out(out, call)
    wanted = {n: x for n, x in call.items() if isinstance(x, Tensor) and x.requires_grad}
    *grads, grad_context = torch.autograd.grad(out, [*wanted.values(), context], grad)
    weights = weights if len(shape) == 3 else weights[0]
    answers = {"out": out.detach(), "result 1": weights.detach(), **dict(zip(wanted, grads, strict=True))}
    problem.grad_out = grad_context
    return answers, layer_limits(call, problem, grad)


def layer_limits(call: Call, problem: Problem, grad: Tensor) -> Limits:
    """The limits of the attention inside a layer, carried through the projections with every number positive."""
    case = problem.case
    truth = exact(problem)
    inner = attention_limits(truth, case.dtype, case.H)
    positive = change(call, lambda x: x.abs().requires_grad_())
    wanted = leaves(positive)
    carried = torch.autograd.grad(
        project(positive), list(wanted.values()), [inner[n] for n in ATTENTION], allow_unused=True
    )
    limits: Limits = {
        n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(wanted.items(), carried, strict=True)
    }
    weight, context = positive["out_proj_weight"].detach(), inner["out"].permute(2, 0, 1, 3).flatten(2)
    limits["out"] = (context @ weight.mT).reshape(*call["query"].shape[:-1], weight.shape[0])
    limits["out_proj_weight"] = grad.abs().flatten(0, -2).mT @ context.flatten(0, 1)
    if "attn_mask" in limits:
        limits["attn_mask"] = bias_limit(
            truth, inner["scores"], truth.grads["attn_mask"], case.keys - case.appended, case.dtype
        ).reshape(call["attn_mask"].shape)
    # with the unit matrix as values, the output is the weights
    unit = torch.eye(case.keys, dtype=torch.float64).expand(*truth.key.shape[:2], -1, -1)
    limits["result 1"] = attention_limits(
        replace(truth, value=unit, out=truth.weights * truth.drop), case.dtype, case.H, False
    )["out"]
    if call["query"].dim() == 2:
        limits["result 1"] = limits["result 1"][0]
    return limits


@contextmanager
def dropping(keep: Tensor | None) -> Iterator[None]:
    """PyTorch's layer drops these pairs instead of drawing its own."""
    if keep is None:
        yield
        return
    saved = F.dropout, F.scaled_dot_product_attention

    def dropout(weights: Tensor, p: float) -> Tensor:
        return weights * keep.view_as(weights) / (1 - p)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool) -> Tensor:
        return composition(q, k, v, mask, p, causal, keep)[0]

    F.dropout, F.scaled_dot_product_attention = dropout, attention
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = saved


def _masked(call: Call) -> Call:
    """A causal flag as a mask, without which PyTorch refuses it, or drops the appended keys."""
    if not call.get("is_causal"):
        return call
    hidden = torch.ones(call["query"].shape[0], call["key"].shape[0], dtype=torch.bool).triu(1)
    return call | {"attn_mask": hidden, "is_causal": False}


def pytorch_layer(**call: Any) -> tuple[Tensor, Tensor]:
    """PyTorch's function with weights per head, which is its composition."""
    problem = layer_problem(call, call["query"].dtype)
    with dropping(kept(problem.case, problem.dropout_seed)):
        return F.multi_head_attention_forward(**_masked(call), average_attn_weights=False)


def pytorch_fused_layer(**call: Any) -> tuple[Tensor, None]:
    """PyTorch's function without weights, which is its fused kernel, where that takes the call."""
    problem, mask = layer_problem(call, call["query"].dtype), call.get("attn_mask")
    with dropping(kept(problem.case, problem.dropout_seed)):
        return F.multi_head_attention_forward(
            **_masked(call | {"attn_mask": None if mask is None else mask.detach(), "need_weights": False})
        )


def check_layer(function: Callable[..., Any], call: Call, dtype: torch.dtype) -> None:
    """Results and gradients of one call, with weights per head, their mean and none, as the sample is and tame.

    As they are, the samples have scores of thousands, which half types know to some units only: no digit of the softmax
    is determined, and there is nothing to compare. What is certain there is that the weights are a mean.
    """
    if dtype in (torch.float64, torch.float32):
        _check_layer(function, call, dtype)
    else:
        _, weights = function(**in_dtype(call, dtype), average_attn_weights=False)
        if not call["dropout_p"]:
            total = weights.double().sum(-1)
            assert_within(total, torch.ones_like(total), weights.shape[-1] * roundoff(dtype), "sum of the weights")
    _check_layer(function, tame(call), dtype)


def _check_layer(function: Callable[..., Any], call: Call, dtype: torch.dtype) -> None:
    """The limit is PyTorch's error, which has the products around the attention, and the error analysis of what is
    inside: where the exact gradient is a difference that cancels, PyTorch's composition is exact by chance."""
    want, inner = layer_truth(call, dtype)
    peers = peer_limits(call, dtype, layer_truth, [pytorch_layer, pytorch_fused_layer])
    limits = {n: peers[n] + inner[n] if n in inner else peers[n] for n in peers}
    given = in_dtype(call, dtype)
    compare(evaluate(function, given | {"average_attn_weights": False}, dtype), want, limits, dtype)
    weights = want.pop("result 1")
    compare(evaluate(function, given | {"need_weights": False}, dtype), want, limits, dtype)
    limits["result 1"] = limits["result 1"].mean(-3)
    compare(evaluate(function, given, dtype), want | {"result 1": weights.mean(-3)}, limits, dtype)
