"""torch.onnx.export of our module and function: standard operators only, right in ONNX Runtime for other sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import EMBED, HEADS, exact_layer, last_hidden, make, sequence
from onnx_programs import (
    MASK_SIZES,
    SIZES,
    B,
    Layer,
    S,
    T,
    bool_mask,
    export,
    float_mask,
    inputs_of,
    no_masks,
    padding,
    run,
)
from other_libraries import ORT, need, three_way
from tolerances import double_limit
from torch import Tensor, _decomp, nn

import mha_ext
from mha_ext import functional, reference

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter's own code
KERNELS = torch.ops.mha_ext
Masks = Callable[[int, int, int], dict[str, Tensor]]
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], Masks]] = {
    "causal and padding": ({}, {"is_causal": True}, padding),
}
MORE_LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], Masks]] = {
    "plain": ({}, {"need_weights": False}, no_masks),
    "causal": ({}, {"is_causal": True, "need_weights": False}, no_masks),
    "padding": ({}, {"need_weights": False}, padding),
    "separate": ({"kdim": 8, "vdim": 6}, {}, no_masks),
    "grouped": ({"num_kv_heads": 2}, {"is_causal": True}, no_masks),
    "no bias": ({"bias": False}, {"is_causal": True}, bool_mask),
    "appended": ({"add_bias_kv": True, "add_zero_attn": True}, {"is_causal": True}, padding),
    "per head": ({}, {"average_attn_weights": False}, float_mask),
}


def check_layer(options: dict[str, Any], call: dict[str, Any], masks: Masks) -> None:
    """Exported with one set of sizes and run with another, against ours and the exact answer."""
    module = make(**options)
    widths = {n: x for n, x in options.items() if n in ("kdim", "vdim")}
    example, other = ({**inputs_of(*sizes, **widths), **masks(*sizes)} for sizes in ((2, 5, 6), (3, 7, 4)))
    model = Layer(module, **call)
    sizes = {**SIZES, "attn_mask": MASK_SIZES.get(masks)}
    got = run(export(model, example, {name: sizes[name] for name in example}), other)
    ours = [x.detach() for x in model(**other) if x is not None]
    qkv = (other["query"], other["key"], other["value"])
    exact = exact_layer(module, qkv, **masks(3, 7, 4), is_causal=call.get("is_causal", False))
    weights = exact.weights.mean(1) if call.get("average_attn_weights", True) else exact.weights
    assert len(got) == len(ours) == (2 if call.get("need_weights", True) else 1)
    for name, x, y, want in zip(("out", "weights"), ours, got, (exact.out, weights), strict=False):
        limit = torch.full_like(want, double_limit(want, EMBED))
        three_way(name, ORT, (x, y, want), (limit, limit))


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    check_layer(*LAYERS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", MORE_LAYERS)
def test_more_layers(name: str) -> None:
    check_layer(*MORE_LAYERS[name])


@pytest.mark.long
def test_program_exported_before() -> None:
    """torch.export first, as a program of our operators, then ONNX; NaN behind the padding stays there."""
    model = Layer(make(), need_weights=False).eval()
    example = {**inputs_of(2, 5, 6), **padding(2, 5, 6)}
    program = torch.export.export(model, (), example, dynamic_shapes={name: SIZES[name] for name in example})
    assert any(node.target is KERNELS.multi_head_attention.default for node in program.graph.nodes)
    need("onnxscript")
    other = {**inputs_of(3, 7, 4), **padding(3, 7, 4)}
    want = model(**other)[0].detach()
    hidden = other["key_padding_mask"].unsqueeze(-1)
    other |= {"key": other["key"].masked_fill(hidden, math.nan), "value": other["value"].masked_fill(hidden, math.inf)}
    (got,) = run(torch.onnx.export(program, dynamo=True, verbose=False), other)
    limit = torch.full_like(want, double_limit(want, EMBED))
    three_way("out", ORT, (model(**other)[0].detach(), got, want), (limit, limit))


class Heads(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=0.375, enable_gqa=True, causal_alignment="lower_right",
            return_lse=True, return_weights="per_head",
        )  # fmt: skip


@pytest.mark.long
def test_attention_on_heads() -> None:
    """Grouped heads, aligned to the lower right with more queries than keys, log-sum-exp and weights. The scale is one
    that float32 holds exactly: PyTorch's exporter rounds every Python number to that, also beside float64."""

    def heads(batch: int, queries: int, keys: int) -> dict[str, Tensor]:
        shapes = {"query": (4, queries, 8), "key": (2, keys, 8), "value": (2, keys, 6)}
        return {n: sequence(batch, h * t, d).view(batch, h, t, d) for n, (h, t, d) in shapes.items()}

    sizes = {"query": {0: B, 2: T}, "key": {0: B, 2: S}, "value": {0: B, 2: S}}
    other = heads(3, 7, 4)
    got = run(export(Heads(), heads(2, 5, 6), sizes), other)
    exact = reference.attention(**other, is_causal=True, scale=0.375, causal_alignment="lower_right")
    assert len(got) == 3
    for name, x, y, want in zip(("out", "lse", "weights"), Heads()(**other), got, exact, strict=True):
        limit = torch.full_like(want, double_limit(want.nan_to_num(neginf=0.0), 8))
        three_way(name, ORT, (x, y, want), (limit, limit))


@pytest.mark.long
def test_encoder() -> None:
    """Ours in PyTorch's encoder, padded."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True, dtype=torch.float64)
            self.layer.self_attn = make()

        def forward(self, x: Tensor, key_padding_mask: Tensor) -> Tensor:
            return self.layer(x, src_key_padding_mask=key_padding_mask)

    example, other = (
        {"x": sequence(batch, length), "key_padding_mask": last_hidden(batch, length)}
        for batch, length in ((2, 6), (3, 4))
    )
    encoder = Encoder()
    (got,) = run(export(encoder, example, {"x": {0: B, 1: T}, "key_padding_mask": {0: B, 1: T}}), other)
    want = encoder(**other).detach()
    limit = torch.full_like(want, double_limit(want, EMBED))
    three_way("out", ORT, (want, got, want), (limit, limit))


def test_compilers_keep_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compositions are for ONNX: with symbolic sizes, too, shapes come from the operators' own Meta kernels, and
    PyTorch's default decompositions leave the operators alone."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a composition took the place of an operator")

    operators = [getattr(KERNELS, n).default for n in ("attention", "attention_with_weights", "multi_head_attention")]
    assert all(operator in _decomp.decomposition_table for operator in operators)
    assert not _decomp.get_decompositions(operators)  # which inductor asks
    refused = {**_decomp.decomposition_table, **dict.fromkeys(operators, refuse)}
    monkeypatch.setattr(_decomp, "decomposition_table", refused)
    sizes = {name: SIZES[name] for name in ("query", "key", "value")}
    found = set()
    for need_weights, add_zero_attn in ((True, False), (False, False), (False, True)):
        module = mha_ext.MultiheadAttention(EMBED, HEADS, add_zero_attn=add_zero_attn, batch_first=True).double()
        model = Layer(module, need_weights=need_weights)
        program = torch.export.export(model.eval(), (), inputs_of(2, 5, 6), dynamic_shapes=sizes)
        found |= {node.target for node in program.run_decompositions().graph.nodes}
    assert found >= set(operators)
