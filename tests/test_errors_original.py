"""Every situation in which nn.MultiheadAttention raises an error: refused here too, or given its right answer.

Each test runs the original as well, on all of its roads, and holds what it raises there: code that catches that type
must catch ours.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from layer_cases import MODES, mode
from original_errors import A, B, E, H, R, S, Situation, T, assert_refused, outcome, x
from torch import Tensor, nn

import mha_ext

BOOL = torch.bool
ROADS = list(itertools.product(MODES, (True, False), (True, False)))


@functools.cache
def layer(kind: type[nn.MultiheadAttention], batch_first: bool, **options: Any) -> nn.MultiheadAttention:
    return kind(E, H, batch_first=batch_first, **options)


def call(kind: type[nn.MultiheadAttention], situation: Situation, road: tuple[str, bool, bool]) -> Any:
    """A call on (T, B, E) inputs, turned round for batch_first; what ``self`` names is query, key and value."""
    name, need_weights, batch_first = road
    module = layer(kind, batch_first, **situation.options)
    arguments = {"query": x(T, B, E), "key": x(S, B, E), "value": x(S, B, E), **situation.changes}
    for name_, given in arguments.items():
        if (
            batch_first
            and isinstance(given, Tensor)
            and not given.is_nested
            and given.dim() == 3
            and "mask" not in name_
        ):
            arguments[name_] = given.transpose(0, 1)
    if "self" in arguments:
        arguments["query"] = arguments["key"] = arguments["value"] = arguments.pop("self")
    elif arguments["key"] is situation.changes.get("value"):
        arguments["value"] = arguments["key"]
    with mode(module, name):
        return module(need_weights=need_weights, **arguments)


def on_every_road(situation: Situation) -> None:
    seen = set()
    for road in ROADS:
        theirs = outcome(lambda road=road: call(nn.MultiheadAttention, situation, road))
        seen.add(type(theirs))
        assert_refused(
            lambda road=road: call(mha_ext.MultiheadAttention, situation, road), situation, "MultiheadAttention", theirs
        )
    assert seen == set(situation.theirs)


# ----------------------------------------------------------------------------------------------------- ranks and shapes
KDIM = {"kdim": 8, "vdim": 6}
KV = {"key": x(S, B, 8), "value": x(S, B, 6)}
SHARED = x(S, B, 11)
SHAPES = [
    Situation("query", r"be 2-D \(unbatched\) or 3-D \(batched\)", "0-D", (A,), {"query": x()}),
    Situation("query", r"be 2-D \(unbatched\) or 3-D \(batched\)", "1-D", (A,), {"query": x(E)}),
    Situation("query", r"be 2-D \(unbatched\) or 3-D \(batched\)", "4-D", (A,), {"query": x(1, T, B, E)}),
    Situation("query", r"be 2-D \(unbatched\) or 3-D \(batched\)", "4-D", (A,), {"self": x(1, T, B, E)}),
    Situation("key", "be 3-D like query", "1-D", (A, IndexError), {"key": x(E)}),
    Situation("key", "be 3-D like query", "2-D", (A,), {"key": x(S, E)}),
    Situation("key", "be 3-D like query", "4-D", (A,), {"key": x(1, S, B, E)}),
    Situation("value", "be 3-D like query", "1-D", (A, IndexError), {"value": x(E)}),
    Situation("value", "be 3-D like query", "2-D", (A,), {"value": x(S, E)}),
    Situation("value", "be 3-D like query", "4-D", (A,), {"value": x(1, S, B, E)}),
    Situation("key", "be 2-D like query", "3-D", (A,), {"query": x(T, E)}),
    Situation("value", "be 2-D like query", "3-D", (A,), {"query": x(T, E), "key": x(S, E)}),
    Situation("query", r"have last size 12 \(embed_dim\)", r"shape \(\d, \d, 11\)", (A,), {"query": x(T, B, 11)}),
    Situation("query", r"have last size 12 \(embed_dim\)", r"shape \(\d, \d, 13\)", (A, R), {"self": x(T, B, 13)}),
    Situation("query", r"have last size 12 \(embed_dim\)", r"shape \(5, 11\)", (A,),
              {"query": x(T, 11), "key": x(S, E), "value": x(S, E)}),
    Situation("key", r"have last size 12 \(kdim\)", r"shape \(\d, \d, 11\)", (A,), {"key": x(S, B, 11)}),
    Situation("key", r"have last size 12 \(kdim\)", r"shape \(\d, \d, 11\)", (R,), {"key": SHARED, "value": SHARED}),
    Situation("value", r"have last size 12 \(vdim\)", r"shape \(\d, \d, 13\)", (A,), {"value": x(S, B, 13)}),
    Situation("key", r"have last size 8 \(kdim\)", r"shape \(\d, \d, 9\)", (A,), {**KV, "key": x(S, B, 9)},
              options=KDIM),
    Situation("value", r"have last size 6 \(vdim\)", r"shape \(\d, \d, 7\)", (A,), {**KV, "value": x(S, B, 7)},
              options=KDIM),
    Situation("query", r"have last size 12 \(embed_dim\)", r"shape \(\d, \d, 8\)", (A,), {**KV, "query": x(T, B, 8)},
              options=KDIM),
    Situation("key", "have query's batch size 3", r"2 \(axis", (R,), {"query": x(T, 3, E)}),
    Situation("key", "have query's batch size 2", r"3 \(axis", (A,), {"key": x(S, 3, E)}),
    Situation("key", "have query's batch size 2", r"1 \(axis", (R,), {"key": x(S, 1, E), "value": x(S, 1, E)}),
    Situation("value", "have query's batch size 2", r"3 \(axis", (A,), {"value": x(S, 3, E)}),
    Situation("value", "have query's batch size 2", r"3 \(axis", (A,), {**KV, "value": x(S, 3, 6)}, options=KDIM),
    Situation("key", "have query's batch size 2", r"3 \(axis", (R,), {"key": x(S, 3, 8), "value": x(S, 3, 6)},
              options=KDIM),
    Situation("value", "have key's length 7", "6", (A,), {"value": x(6, B, E)}),
    Situation("value", "have key's length 7", "6", (A,), {**KV, "value": x(6, B, 6)}, options=KDIM),
    Situation("value", "have key's length 7", "6", (A,), {"query": x(T, E), "key": x(S, E), "value": x(6, E)}),
]  # fmt: skip


@pytest.mark.parametrize("situation", SHAPES, ids=str)
def test_shapes(situation: Situation) -> None:
    on_every_road(situation)


# ---------------------------------------------------------------------------------------------------------------- masks
def mask_situations(same: bool) -> list[Situation]:
    """Masks that do not fit: of T=5 queries and S=7 keys, or (``same``) of 5 in self-attention, with its fast path."""
    keys = T if same else S
    fast = (A, R) if same else (A,)
    inputs = {"self": x(T, B, E)} if same else {}
    attn = rf"have shape \(T, S\) = \(5, {keys}\), .*= \(8, 5, {keys}\), .*= \(2, 4, 5, {keys}\)"
    padding = rf"have shape \(B, S\) = \(2, {keys}\) or \(S,\) = \({keys},\)"
    attn_shapes = [
        ((), fast), ((6,), fast), ((4, keys), (R,)), ((T, 6), (R,)), ((3, T, keys), (R,)), ((H, T, keys), (R,)),
        ((B * H, 4, keys), (R,)), ((B * H, T, 6), (R,)), ((3, H, T, keys), fast), ((B, 3, T, keys), fast),
        ((1, B, H, T, keys), fast), ((0, keys), (R,)),
    ]  # fmt: skip
    padding_shapes = [((), fast), ((6,), fast), ((3, keys), fast), ((B, 6), fast), ((B, 1), fast), ((1, B, keys), fast)]
    situations = []
    for name, expectation, shapes in (("attn_mask", attn, attn_shapes), ("key_padding_mask", padding, padding_shapes)):
        for shape, theirs in shapes:
            given = str(shape).replace("(", r"\(").replace(")", r"\)") + "$"
            situations.append(Situation(name, expectation, given, theirs, {**inputs, name: x(*shape, dtype=BOOL)}))
            there = tuple(t for t in theirs if t is A) or theirs  # floating masks take no fast path
            situations.append(Situation(name, expectation, given, there, {**inputs, name: x(*shape)}))
        good = (T, keys) if name == "attn_mask" else (B, keys)
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex32):
            expected = "be bool or floating point"
            changes = {**inputs, name: x(*good, dtype=dtype)}
            situations.append(Situation(name, expected, f"{dtype}$", (A,), changes, TypeError))
    return situations


@pytest.mark.parametrize("situation", mask_situations(same=False) + mask_situations(same=True), ids=str)
def test_masks(situation: Situation) -> None:
    on_every_road(situation)


UNBATCHED = {"query": x(T, E), "key": x(S, E), "value": x(S, E)}


@pytest.mark.parametrize(
    "situation",
    [
        Situation("attn_mask", r"have shape \(T, S\) = \(5, 7\), .*= \(4, 5, 7\).*", r"\(3, 5, 7\)", (A,),
                  {**UNBATCHED, "attn_mask": x(3, T, S)}),
        Situation("attn_mask", r"have shape \(T, S\) = \(5, 7\), .*", r"\(4, 7\)", (R,),
                  {**UNBATCHED, "attn_mask": x(4, S)}),
        Situation("attn_mask", r"have shape \(T, S\) = \(5, 7\), .*", r"\(1, 3, 5, 7\)", (A,),
                  {**UNBATCHED, "attn_mask": x(1, 3, T, S)}),
        Situation("key_padding_mask", r"have shape .*\(S,\) = \(7,\)", r"\(6,\)", (A,),
                  {**UNBATCHED, "key_padding_mask": x(6)}),
        Situation("key_padding_mask", r"have shape .*\(S,\) = \(7,\)", r"\(2, 7\)", (A,),
                  {**UNBATCHED, "key_padding_mask": x(2, S)}),
    ],
    ids=str,
)  # fmt: skip
def test_unbatched_masks(situation: Situation) -> None:
    on_every_road(situation)


# --------------------------------------------------------------------------------------------- dtypes, devices, layouts
def of_kind(name: str, given: Any) -> dict[str, Any]:
    return {"self": given} if name == "self" else {name: given}


def kind_situations() -> list[Situation]:
    situations = []
    shapes = {"query": (T, B, E), "key": (S, B, E), "value": (S, B, E), "self": (T, B, E)}
    other = (torch.float64, torch.bfloat16, torch.int64, BOOL, torch.complex64, torch.float8_e4m3fn)
    for name, shape in shapes.items():
        named = "query" if name == "self" else name
        for dtype in other:
            given = of_kind(name, x(*shape).to(dtype))
            expected = r"have the parameters' dtype torch.float32"
            situations.append(Situation(named, expected, f"{dtype}$", (R,), given, TypeError))
        given = of_kind(name, x(*shape, device="meta"))
        situations.append(Situation(named, "be on the parameters' device cpu", "meta$", (R,), given))
        for changes in (of_kind(name, x(*shape).to_sparse()), {**UNBATCHED, **of_kind(name, x(S, E).to_sparse_csr())}):
            layout = changes[name].layout
            sparse = (R, NotImplementedError) if name == "self" and layout == torch.sparse_coo else (R,)
            situations.append(Situation(named, "be a dense tensor .*", f"layout {layout}$", sparse, changes, TypeError))
        quantized = torch.quantize_per_tensor(x(*shape), 0.1, 0, torch.qint8)
        expected = r"have the parameters' dtype torch.float32"
        situations.append(Situation(named, expected, "torch.qint8$", (R,), of_kind(name, quantized), TypeError))
    meta = {"device": "meta"}
    situations.append(Situation("query", "be on the parameters' device meta", "cpu$", (R,), {}, options=meta))
    situations.append(
        Situation("query", "be on the parameters' device meta", "cpu$", (R,), {"self": x(T, B, E)}, options=meta)
    )
    return situations


@pytest.mark.parametrize("situation", kind_situations(), ids=str)
def test_dtypes_devices_and_layouts(situation: Situation) -> None:
    on_every_road(situation)


@pytest.mark.parametrize("given", [[[1.0]], "ones", 1.0], ids=repr)
@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "key_padding_mask"])
def test_no_tensor(name: str, given: Any) -> None:
    theirs = (TypeError,) if "mask" in name else (AttributeError,)
    situation = Situation(name, "be a tensor", f"{type(given).__name__}$", theirs, {name: given}, TypeError)
    on_every_road(situation)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_none(name: str) -> None:
    on_every_road(Situation(name, "be a tensor", "NoneType$", (AttributeError,), {name: None}, TypeError))


def nested(layout: torch.layout, *lengths: int, width: int = E, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.nested.nested_tensor([x(n, width, dtype=dtype) for n in lengths], layout=layout)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested(layout: torch.layout) -> None:
    """The original takes nested tensors in its fast path alone; here batch_first is enough. Masks may not be nested."""
    own, other, wide = nested(layout, 5, 3), nested(layout, 5, 4), nested(layout, 5, 3, width=11)
    double = nested(layout, 5, 3, dtype=torch.float64)
    mixture = "all be nested or all be dense"
    cases = [
        ("query, key and value", mixture, "nested, dense, dense", {"query": own}, ValueError),
        ("query, key and value", mixture, "dense, nested, nested", {"key": own, "value": own}, ValueError),
        (
            "attn_mask and key_padding_mask",
            "be None for nested inputs",
            "",
            {"self": own, "attn_mask": x(5, 5)},
            ValueError,
        ),
        (
            "attn_mask and key_padding_mask",
            "be None for nested",
            "",
            {"self": own, "key_padding_mask": x(2, 5)},
            ValueError,
        ),
        ("value", r"have key's lengths \[5, 3\]", r"\[5, 4\]", {"query": own, "key": own, "value": other}, ValueError),
        ("query", r"have last size 12 \(embed_dim\)", r"shape \(2, 5, 11\)", {"self": wide}, ValueError),
        ("query", "have the parameters' dtype torch.float32", "torch.float64", {"self": double}, TypeError),
        (
            "attn_mask",
            "be a dense tensor .*",
            "a nested tensor",
            {"attn_mask": nested(layout, 5, 3, width=S)},
            TypeError,
        ),
        ("key_padding_mask", "be a dense tensor .*", "a nested tensor", {"key_padding_mask": own}, TypeError),
    ]
    for argument, expectation, given, changes, kind in cases:
        for name, need_weights in itertools.product(MODES, (True, False)):
            situation = Situation(argument, expectation + ".*", given, (), changes, kind)
            road = (name, need_weights, True)
            theirs = outcome(lambda situation=situation, road=road: call(nn.MultiheadAttention, situation, road))
            assert theirs is not None
            assert_refused(
                lambda situation=situation, road=road: call(mha_ext.MultiheadAttention, situation, road),
                situation, "MultiheadAttention", theirs,
            )  # fmt: skip
    situation = Situation("batch_first", "be True for nested inputs", "False", (A,), {"self": own})
    for need_weights in (True, False):
        road = ("train", need_weights, False)
        theirs = outcome(lambda road=road: call(nn.MultiheadAttention, situation, road))
        assert_refused(
            lambda road=road: call(mha_ext.MultiheadAttention, situation, road), situation, "MultiheadAttention", theirs
        )
        assert type(theirs) is A


# ------------------------------------------------------------------------------------------------------ the constructor
@pytest.mark.parametrize(
    ("options", "kind", "theirs", "message"),
    [
        ({"embed_dim": 0}, ValueError, ValueError, "embed_dim must be greater than 0, got 0"),
        ({"embed_dim": -12}, ValueError, ValueError, "embed_dim must be greater than 0, got -12"),
        ({"num_heads": 0}, ValueError, ValueError, "num_heads must be greater than 0, got 0"),
        ({"num_heads": -4}, ValueError, ValueError, "num_heads must be greater than 0, got -4"),
        ({"num_heads": 5}, ValueError, A, "embed_dim must be divisible by num_heads, got embed_dim 12 and num_heads 5"),
        ({"num_heads": 24}, ValueError, A, "embed_dim must be divisible by num_heads, got .*12 and num_heads 24"),
        ({"kdim": -1}, ValueError, R, "kdim must be greater than 0, got -1"),
        ({"vdim": -1}, ValueError, R, "vdim must be greater than 0, got -1"),
        ({"embed_dim": 12.0}, TypeError, TypeError, "embed_dim must be an int, got float"),
        ({"embed_dim": None}, TypeError, TypeError, "embed_dim must be an int, got NoneType"),
        ({"num_heads": "4"}, TypeError, TypeError, "num_heads must be an int, got str"),
        ({"kdim": 8.0}, TypeError, TypeError, "kdim must be an int, got float"),
        ({"dtype": torch.int64}, TypeError, R, "dtype must be float64, float32, .*, got torch.int64"),
        ({"dtype": "float32"}, TypeError, TypeError, "dtype must be float64, float32, .*, got float32"),
        # The original notices these in the first call, or never.
        ({"dtype": torch.complex64}, TypeError, None, "dtype must be float64, float32, .*, got torch.complex64"),
        ({"kdim": 0}, ValueError, None, "kdim must be greater than 0, got 0"),
        ({"dropout": 1.0}, ValueError, None, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": 1.5}, ValueError, None, r"dropout must be in \[0, 1\), got 1.5"),
        ({"dropout": -0.1}, ValueError, None, r"dropout must be in \[0, 1\), got -0.1"),
        ({"dropout": float("nan")}, ValueError, None, r"dropout must be in \[0, 1\), got nan"),
    ],
    ids=str,
)  # fmt: skip
def test_constructor(options: dict[str, Any], kind: type, theirs: type | None, message: str) -> None:
    options = {"embed_dim": E, "num_heads": H, **options}
    raised = outcome(lambda: nn.MultiheadAttention(**options))
    assert raised is None if theirs is None else type(raised) is theirs
    with pytest.raises(kind, match=f"MultiheadAttention: {message}") as ours:
        mha_ext.MultiheadAttention(**options)
    assert theirs is None or isinstance(ours.value, theirs)


# --------------------------------------------------------------------------------------- parameters that were exchanged
def spoiled(kind: type[nn.MultiheadAttention], name: str, given: Any, **options: Any) -> nn.MultiheadAttention:
    module = kind(E, H, **options)
    setattr(module, name, nn.Parameter(given) if isinstance(given, Tensor) else given)
    return module


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("name", "given", "options", "message"),
    [
        ("in_proj_weight", x(35, E), {}, "in_proj_weight must have .*, got .*35"),
        ("in_proj_weight", x(36, 11), {}, "in_proj_weight must have .*12.*, got .*11"),
        ("in_proj_bias", x(35), {}, "in_proj_bias must have .*36.*, got .*35"),
        ("in_proj_bias", x(36, device="meta"), {}, "in_proj_bias must .*cpu, got .*meta"),
        ("q_proj_weight", x(E, 11), KDIM, r"q_proj_weight must have shape \(4 \* head_dim, 12\).*, got \(12, 11\)"),
        ("k_proj_weight", x(11, 8), KDIM, r"k_proj_weight must have shape \(4 \* 3, 8\).*, got \(11, 8\)"),
        ("v_proj_weight", x(E, 7), KDIM, r"v_proj_weight must have shape \(4 \* 3, 6\).*, got \(12, 7\)"),
        ("bias_k", x(1, 1, E), {}, "bias_v must be a tensor because bias_k is given, got None"),
        ("bias_v", x(1, 1, E), {}, "bias_k must be a tensor because bias_v is given, got None"),
        ("bias_k", None, {"add_bias_kv": True}, "bias_k must be a tensor because bias_v is given, got None"),
        ("dropout", 1.5, {}, r"dropout must be in \[0, 1\), got 1.5"),
    ],
    ids=lambda v: v if isinstance(v, str) and " " not in v else None,
)  # fmt: skip
def test_exchanged_parameters(need_weights: bool, name: str, given: Any, options: dict[str, Any], message: str) -> None:
    inputs = (x(T, B, E), x(S, B, options.get("kdim", E)), x(S, B, options.get("vdim", E)))
    theirs = outcome(lambda: spoiled(nn.MultiheadAttention, name, given, **options)(*inputs, need_weights=need_weights))
    assert isinstance(theirs, (A, R, ValueError))
    with pytest.raises(ValueError, match=f"^[mM]ulti_?[hH]ead_?[aA]ttention: {message}") as ours:
        spoiled(mha_ext.MultiheadAttention, name, given, **options)(*inputs, need_weights=need_weights)
    assert isinstance(ours.value, type(theirs))
