"""Export to operator set 23 and later: an attention of ours is one standard Attention node wherever that can say it,
and gives in ONNX Runtime what the exact answer is, rows without keys and NaN in the padding included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import LOWER_RIGHT, UPPER_LEFT
from document_truth import each_alone
from layer_cases import EMBED, HEADS, exact_layer, make, sequence
from module_variant_cases import KEYWORDS, exact_variant, variant
from onnx_programs import (
    MASK_SIZES,
    SIZES,
    B,
    Layer,
    T,
    bool_mask,
    export,
    float_mask,
    inputs_of,
    no_masks,
    operators,
    padding,
    run,
)
from other_libraries import ORT, need, three_way
from tolerances import assert_within, double_limit
from torch import Tensor, _decomp, nn
from variant_cases import Variant, exact
from variant_cases import make as make_call

import mha_ext
from mha_ext import functional, reference

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter's own code
OPSET = 23


def attention_nodes(program: Any) -> list[Any]:
    return [node for node in program.model.graph if node.op_type == "Attention"]


def attribute(node: Any, name: str) -> Any:
    return node.attributes[name].value if name in node.attributes else None


def near(name: str, ours: Tensor, got: Tensor, want: Tensor, also: float = 0.0) -> None:
    limit = torch.full_like(want, double_limit(want.nan_to_num(neginf=0.0), EMBED) + also)
    three_way(name, ORT, (ours, got, want), (limit, limit))


# ----------------------------------------------------------------------------------------------------------- the layer
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "causal and padding": ({}, {"is_causal": True}, padding),
    "per head": ({"num_kv_heads": 2}, {"average_attn_weights": False}, float_mask),
}
MORE_LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "plain": ({}, {"need_weights": False}, no_masks),
    "causal": ({}, {"is_causal": True, "need_weights": False}, no_masks),
    "padding": ({}, {"need_weights": False}, padding),
    "separate": ({"kdim": 8, "vdim": 6}, {}, no_masks),
    "grouped": ({"num_kv_heads": 1}, {"is_causal": True}, no_masks),
    "bool mask": ({"bias": False}, {"is_causal": True}, bool_mask),
    "appended": ({"add_bias_kv": True, "add_zero_attn": True}, {"is_causal": True}, padding),
}


def check_layer(name: str, opset: int) -> None:
    """Exported with one set of sizes and run with another, against ours and the exact answer."""
    options, call, masks = {**LAYERS, **MORE_LAYERS}[name]
    module = make(**options)
    widths = {n: x for n, x in options.items() if n in ("kdim", "vdim")}
    example, other = ({**inputs_of(*sizes, **widths), **masks(*sizes)} for sizes in ((2, 5, 6), (3, 7, 4)))
    model = Layer(module, **call)
    sizes = {**SIZES, "attn_mask": MASK_SIZES.get(masks)}
    program = export(model, example, {n: sizes[n] for n in example}, opset)
    assert len(attention_nodes(program)) == 1 and "Softmax" not in operators(program)
    assert program.model.opset_imports == {"": opset}
    got, ours = run(program, other), [x.detach() for x in model(**other) if x is not None]
    qkv = (other["query"], other["key"], other["value"])
    answer = exact_layer(module, qkv, **masks(3, 7, 4), is_causal=call.get("is_causal", False))
    weights = answer.weights.mean(1) if call.get("average_attn_weights", True) else answer.weights
    assert len(got) == len(ours) == (2 if call.get("need_weights", True) else 1)
    for what, x, y, want in zip(("out", "weights"), ours, got, (answer.out, weights), strict=False):
        near(what, x, y, want)


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    check_layer(name, OPSET)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE_LAYERS)
def test_more_layers(name: str) -> None:
    check_layer(name, OPSET)


@pytest.mark.long
def test_operator_set_24() -> None:
    check_layer("causal and padding", 24)


@pytest.mark.long
def test_causal_self_attention_is_the_node_and_two_products() -> None:
    """No mask, nothing of softmax: the causal order is the node's own. Below operator set 23 there is no such node, and
    PyTorch's default lies there."""
    model = Layer(make(), is_causal=True, need_weights=False)

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x, x)[0]

    programs = {opset: export(Alone(), {"x": sequence(2, 5)}, {"x": {0: B, 1: T}}, opset) for opset in (OPSET, None)}
    (node,) = attention_nodes(programs[OPSET])
    assert attribute(node, "is_causal") == 1 and len([x for x in node.inputs if x is not None]) == 3
    assert operators(programs[OPSET]).count("MatMul") == 2
    assert not {"Where", "Exp", "Softmax"} & set(operators(programs[OPSET]))
    assert not attention_nodes(programs[None])
    x = sequence(3, 7)
    want = exact_layer(model.module, (x, x, x), is_causal=True).out
    for program in programs.values():
        near("out", Alone()(x).detach(), run(program, {"x": x})[0], want)


VARIANTS = ("all",)


def rounding_of_norms(module: mha_ext.MultiheadAttention, value: Tensor) -> dict[str, float]:
    """What float32 in the norms of query and key does to the output and the weights.

    PyTorch's exporter asks for RMSNormalization in float32 whatever the inputs are. With u = 2^-24 a norm of D numbers
    and what it is multiplied with are off by (D / 2 + 4) u of themselves, a score, which is at most sqrt(D), by twice
    that, a weight by twice as much again; a sum of values and the output projection take that as it comes.
    """
    width = module.head_dim
    weights = 4 * (width / 2 + 4) * width**0.5 * 2.0**-24
    rows = module.in_proj_weight[-module.num_kv_heads * width :].detach()
    values = (value @ rows.T).abs().max() + (0.0 if module.in_proj_bias is None else module.in_proj_bias.abs().max())
    out = weights * values * module.out_proj.weight.detach().abs().sum(1).max()
    return {"out": float(out), "weights": weights}


def check_variant(name: str) -> None:
    """Windows, caps, sinks, norms and rotations of the layer, causal and padded."""
    keywords = {**KEYWORDS[name], **({"softcap": 0.75} if "softcap" in KEYWORDS[name] else {})}  # float32 holds it
    module = variant(keywords)
    model = Layer(module, is_causal=True)
    example, other = ({**inputs_of(b, t, t), **padding(b, t, t)} for b, t in ((2, 5), (3, 7)))
    sizes = {n: {0: B, 1: T} for n in example}
    program = export(model, example, sizes, OPSET)
    (node,) = attention_nodes(program)
    cap = keywords.get("softcap")
    assert attribute(node, "softcap") == cap and (cap is None or "Tanh" not in operators(program))
    qkv = (other["query"], other["key"], other["value"])
    masks = {"key_padding_mask": other["key_padding_mask"], "is_causal": True}
    answer, ours = exact_variant(module, keywords, qkv, **masks), model(**other)
    also = rounding_of_norms(module, other["value"]) if keywords.get("qk_norm") else {}
    for what, x, y, want in zip(
        ("out", "weights"), ours, run(program, other), (answer.out, answer.weights.mean(1)), strict=True
    ):
        near(what, x.detach(), y, want, also.get(what, 0.0))


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    check_variant(name)


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in KEYWORDS if n not in VARIANTS])
def test_more_variants(name: str) -> None:
    check_variant(name)


# -------------------------------------------------------------------------------------------------------- the function
class Function(nn.Module):
    """The function with fixed options; tensors by name."""

    def __init__(self, rest: dict[str, Any]) -> None:
        super().__init__()
        self.rest = rest

    def forward(self, **tensors: Tensor) -> Any:
        return functional.scaled_dot_product_attention(**tensors, **self.rest, return_lse=True)


# The scale is one that float32 holds: the exporter rounds every Python number to that, also beside float64.
PLAIN = Variant(B=2, H=4, H_kv=2, T=5, S=7, D=8, D_v=6, dtype=torch.float64, scale=0.375)
CALLS: dict[str, dict[str, Any]] = {
    "all": {
        "mask": "float64:1HTS", "padding": "bool", "causal": LOWER_RIGHT, "window": (3, 1), "softcap": 0.75,
        "sink": "float64", "relative": "float64:1H", "key_range": "BT", "layout": "bthd",
    },
}  # fmt: skip
MORE_CALLS: dict[str, dict[str, Any]] = {
    "more queries than keys": {"T": 7, "S": 4, "causal": LOWER_RIGHT},
    "causal, more queries": {"T": 7, "S": 4, "causal": UPPER_LEFT, "layout": "tbhd"},
    "float padding": {"padding": "float64", "H_kv": None},
    "narrower bias": {"relative": "float32:11", "mask": "bool:B1TS"},
    "distance": {"alibi": "float64:H", "causal": UPPER_LEFT},
    "prefix": {"prefix": 2, "causal": UPPER_LEFT},
    "sink alone": {"sink": "float64"},
    "window from the end": {"window": (1, None), "ends": True, "mask": "bool:BHTS"},
}


def check_call(options: dict[str, Any]) -> None:
    call = make_call(Variant(**{**PLAIN.__dict__, **options}))
    _, answer = exact(call)
    model = Function(call.rest)
    tensors = {n: x.detach() for n, x in call.tensors.items()}
    program = export(model, tensors, None, OPSET)
    assert len(attention_nodes(program)) == 1
    for what, x, y, want in zip(("out", "lse"), model(**tensors), run(program, tensors), answer[:2], strict=True):
        near(what, x.detach(), y, want.detach())


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_the_function(name: str) -> None:
    """The log-sum-exp, which the operator does not give, is composed beside it."""
    check_call(CALLS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", MORE_CALLS)
def test_more_calls_of_the_function(name: str) -> None:
    check_call(MORE_CALLS[name])


class Documents(nn.Module):
    """Whose documents are inputs: as a number for each position, or as the places where they begin in one sequence."""

    def forward(self, query: Tensor, ids: Tensor, packed: Tensor, starts: Tensor) -> Any:
        own = functional.scaled_dot_product_attention(query, query, query, segment_ids=ids, is_causal=True, scale=0.375)
        longest = packed.shape[0]
        return own, functional.varlen_attention(
            packed, packed, packed, starts, starts, longest, longest, is_causal=True, scale=0.375
        )


@pytest.mark.long
def test_documents_of_any_number_and_length() -> None:
    def tensors(length: int, ids: list[list[int]], starts: list[int]) -> dict[str, Tensor]:
        query = sequence(len(ids), 2 * length, 8).view(len(ids), 2, length, 8)
        packed = sequence(1, starts[-1] * 2, 8, seed=2).view(-1, 2, 8)
        numbers = torch.tensor(starts, dtype=torch.int32)
        return {"query": query, "ids": torch.tensor(ids), "packed": packed, "starts": numbers}

    packed, documents = torch.export.Dim("packed"), torch.export.Dim("documents", min=3)
    sizes = {"query": {0: B, 2: T}, "ids": {0: B, 1: T}, "packed": {0: packed}, "starts": {0: documents}}
    program = export(Documents(), tensors(5, [[0, 0, 1, 1, 1], [2, 2, 2, 2, 4]], [0, 3, 9]), sizes, OPSET)
    other = tensors(6, [[0, 0, 1, 1, 1, 5], [7, 7, 7, 7, 7, 7], [1, 2, 3, 3, 4, 4]], [0, 2, 2, 7, 11])
    assert len(attention_nodes(program)) == 2
    (own, together), got = Documents()(**other), run(program, other)
    lengths = [ids.unique_consecutive(return_counts=True)[1].tolist() for ids in other["ids"]]
    rows = [each_alone(x, row, scale=0.375) for x, row in zip(other["query"], lengths, strict=True)]
    near("ids", own, got[0], torch.stack(rows))
    want = each_alone(other["packed"].transpose(0, 1), other["starts"].diff().tolist(), scale=0.375)
    near("starts", together, got[1], want.transpose(0, 1))


class Step(nn.Module):
    """Decoding: keys and values that are there, those of the new tokens, and all of them for the next step."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor) -> Any:
        keys, values = torch.cat((past_key, key), 2), torch.cat((past_value, value), 2)
        out = functional.scaled_dot_product_attention(
            query, keys, values, is_causal=True, causal_alignment="lower_right", enable_gqa=True, scale=0.375
        )
        return out, keys, values


@pytest.mark.long
def test_cache_as_inputs_and_outputs() -> None:
    """The causal order counts from the end of all keys, for any number of past and of new ones."""

    def tensors(past: int, new: int) -> dict[str, Tensor]:
        shapes = {"query": (4, new), "key": (2, new), "value": (2, new), "past_key": (2, past), "past_value": (2, past)}
        return {n: sequence(2, h * t, 8, seed=i).view(2, h, t, 8) for i, (n, (h, t)) in enumerate(shapes.items())}

    past = torch.export.Dim("past")
    sizes = {n: {2: past if "past" in n else T} for n in tensors(1, 1)}
    program, other = export(Step(), tensors(6, 3), sizes, OPSET), tensors(9, 2)
    assert len(attention_nodes(program)) == 1
    out, keys, values = run(program, other)
    all_keys = torch.cat((other["past_key"], other["key"]), 2)
    want = reference.attention(
        other["query"], all_keys, torch.cat((other["past_value"], other["value"]), 2),
        is_causal=True, causal_alignment="lower_right", scale=0.375,
    )[0]  # fmt: skip
    near("out", Step()(**other)[0], out, want)
    assert torch.equal(keys, all_keys) and values.shape == keys.shape


# ------------------------------------------------------------------------------------------------- what stays as it is
def test_nan_in_the_padding_stays_there() -> None:
    """And a sample that is all padding gives 0 before the output projection; through a program exported before."""
    model = Layer(make(), need_weights=False).eval()
    example, other = ({**inputs_of(*s), **padding(*s)} for s in ((2, 5, 6), (3, 7, 4)))
    need("onnxscript")
    before = torch.export.export(model, (), example, dynamic_shapes={n: SIZES[n] for n in example})
    program = torch.onnx.export(before, dynamo=True, verbose=False, opset_version=OPSET)
    assert len(attention_nodes(program)) == 1
    want = exact_layer(
        model.module, (other["query"], other["key"], other["value"]), key_padding_mask=other["key_padding_mask"]
    ).out
    hidden = other["key_padding_mask"].unsqueeze(-1)
    other |= {"key": other["key"].masked_fill(hidden, math.nan), "value": other["value"].masked_fill(hidden, math.inf)}
    near("out", model(**other)[0].detach(), run(program, other)[0], want)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dropout", "wider mask"])
def test_what_the_operator_cannot_say_is_composed(kind: str) -> None:
    """Dropout, and a mask whose numbers the dtype of the scores does not hold."""
    query = sequence(2, 4 * 5, 8).view(2, 4, 5, 8).to(torch.float64 if kind == "dropout" else torch.float16)
    seed = torch.tensor([3]) if kind == "dropout" else None
    mask = torch.full((1, 1, 5, 5), -1e9, dtype=torch.float32).triu(1) if kind != "dropout" else None
    ours = torch.ops.mha_ext.attention

    class Composed(nn.Module):
        def forward(self, query: Tensor) -> Tensor:
            return ours(query, query, query, mask, None, seed, dropout_p=0.5 if seed is not None else 0.0)[0]

    if kind == "dropout":
        program = torch.export.export(Composed(), (query,))
        found = _decomp.decomposition_table[ours.default](query, query, query, None, None, seed, dropout_p=0.5)[0]
        assert program is not None
        assert_within(found, Composed()(query), double_limit(found, 8))
        return
    program = export(Composed(), {"query": query}, None, OPSET)
    assert not attention_nodes(program)
    got, want = run(program, {"query": query})[0], Composed()(query.double())
    assert_within(got, want, 2e-3)


def test_outside_an_export_to_onnx_the_operators_are_composed() -> None:
    """PyTorch's whole table, given to a program's own run_decompositions, has no ONNX operators in it."""
    model = Layer(mha_ext.MultiheadAttention(EMBED, HEADS, batch_first=True).double(), need_weights=False).eval()
    inputs = inputs_of(2, 5, 6)
    program = torch.export.export(model, (), inputs).run_decompositions(dict(_decomp.decomposition_table))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [n for n in names if "onnx" in n or "mha_ext" in n]
    want = exact_layer(model.module, tuple(inputs.values())).out
    assert_within(program.module()(**inputs)[0].detach(), want, double_limit(want, EMBED))


@pytest.mark.long
def test_float32() -> None:
    """The dtype that models are exported in, at a size with several vectors."""
    x = torch.randn(2, 33, 48, generator=torch.Generator().manual_seed(1))
    module = mha_ext.MultiheadAttention(48, 3, batch_first=True).eval()
    model = Layer(module, need_weights=False, is_causal=True)
    feeds = {"query": x, "key": x + 1, "value": x - 1}
    (got,) = run(export(model, feeds, None, OPSET), feeds)
    want = exact_layer(module.double(), tuple(t.double() for t in feeds.values()), is_causal=True).out
    assert_within(got, want, 3e-6 * want.abs().max().item())
