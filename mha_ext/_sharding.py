"""How our operators run on ``torch.distributed.tensor.DTensor``: which shards they take as they lie, what they give.

An operator runs on shards of the batch, of the heads, or of the queries, whichever its inputs already have; what does
not fit is redistributed first. Importing this module registers the rules. Importing ``mha_ext`` does so where DTensor
is there already, importing ``mha_ext.distributed`` does so in any case.

What a shard cannot know is not split: a dropped pair is a hash of its sample's and head's numbers, so with dropout all
is gathered; a query's own position decides under a causal order, a window or a relative bias, and queries are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.distributed.tensor.placement_types import Placement

from mha_ext._ops import operators
from mha_ext.errors import InvalidValueError

__all__: list[str] = []

Shape = tuple[int, ...]


class Axes(NamedTuple):
    """Which axis of a tensor counts samples, heads and queries."""

    batch: int | None = None
    heads: int | None = None
    queries: int | None = None


_ROWS = Axes(0, 1, 2)
_ATTENTION = {
    "query": _ROWS,
    "key": Axes(0, 1),
    "value": Axes(0, 1),
    "attn_mask": _ROWS,
    "key_padding_mask": Axes(0),
    "dropout_seed": Axes(),
    "out": _ROWS,
    "lse": _ROWS,
    "rounding": _ROWS,
    "grad_out": _ROWS,
    "grad_lse": _ROWS,
    "weights": _ROWS,
    "grad_weights": _ROWS,
    "key_range": Axes(1, None, 2),
    "relative_bias": Axes(0, 1),
    "sink": Axes(None, 0),
}
_MEAN_WEIGHTS = Axes(0, None, 1)
_INPUTS = ("query", "key", "value", "attn_mask", "key_padding_mask", "relative_bias", "sink")
_WEIGHTS_INPUTS = tuple(name for name in _INPUTS if name != "value")
_LAYER_INPUTS = ("query", "key", "value", "in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias")
_LAYER_STATE = ("q", "k", "v", "context", "lse", "rounding")
_LAYER_SEQUENCES = ("query", "key", "value", "q", "k", "v", "context", "rounding", "out", "grad_out")
_HALF = (torch.bfloat16, torch.float16)


class Rule(NamedTuple):
    """What an operator returns: results by name, or gradients of the inputs of that name."""

    results: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    last: tuple[str, ...] = ()  # results behind the gradients


_RULES = {
    operators.attention: Rule(("out", "lse")),
    operators.attention_with_weights: Rule(("out", "lse", "weights")),
    operators.attention_for_backward: Rule(("out", "lse", "weights", "rounding")),
    operators.attention_backward: Rule(gradients=_INPUTS),
    operators.attention_weights_backward: Rule(gradients=_WEIGHTS_INPUTS),
    operators.attention_jvp: Rule(("out", "lse")),
    operators.attention_backward_jvp: Rule(gradients=_INPUTS, last=("out", "lse")),
    operators.multi_head_attention: Rule(("out", *_LAYER_STATE)),
    operators.multi_head_attention_backward: Rule(gradients=(*_LAYER_INPUTS, "attn_mask", "key_padding_mask")),
}
_LAYERS = (operators.multi_head_attention, operators.multi_head_attention_backward)


class Call(NamedTuple):
    """The shapes of a call's tensors by name, in the operator's order of them, and its other arguments."""

    shapes: Mapping[str, Shape]
    others: Mapping[str, Any]
    is_layer: bool

    @property
    def weights(self) -> int:
        """0: the call has to do with no weights, 1: with their mean over heads, 2: with those of every head."""
        average = self.others.get("average")
        return int(self.others.get("weights", 0)) if average is None else 1 if average else 2


def _call(schema: OpSchema) -> Call:
    arguments = schema.op._schema.arguments
    given: dict[str, Any] = {a.name: a.default_value for a in arguments if a.has_default_value()}
    for argument, value in zip(arguments, schema.args_schema, strict=False):
        given[argument.name] = value
    positional = [argument.name for argument in arguments][: len(schema.args_schema)]
    given |= schema.kwargs_schema
    names = [*positional, *schema.kwargs_schema]
    shapes = {name: tuple(given[name].shape) for name in names if isinstance(given[name], OpStrategy)}
    others = {name: value for name, value in given.items() if name not in shapes}
    first = schema.args_strategy[0].strategies[0].output_spec
    others["is_half"] = first.tensor_meta is not None and first.tensor_meta.dtype in _HALF
    return Call(shapes, others, schema.op.overloadpacket in _LAYERS)


def _axes(call: Call, name: str) -> Axes:
    """The axes of a tensor that count samples, heads and queries."""
    name = name.removesuffix("_tangent")
    if call.is_layer:
        if name in _LAYER_SEQUENCES:
            return Axes(0 if call.others["batch_first"] else 1)
        return Axes(0 if name in ("attn_mask", "key_padding_mask", "lse") else None)
    return _MEAN_WEIGHTS if name in ("weights", "grad_weights") and call.weights == 1 else _ATTENTION[name]


def _cut(call: Call, name: str, kind: str) -> Placement:
    """Where a tensor of the call lies when samples, heads or queries are cut; whole if it broadcasts, or is empty."""
    axis: int | None = getattr(_axes(call, name), kind)
    shape = call.shapes[name]
    return Replicate() if axis is None or len(shape) <= axis or shape[axis] < 2 else Shard(axis)


def _result(call: Call, name: str, kind: str) -> Placement:
    axis: int | None = getattr(_axes(call, name), kind)
    return Replicate() if axis is None or _is_empty(call, name) else Shard(axis)


def _is_empty(call: Call, name: str) -> bool:
    """Whether a result is not there in this call."""
    if name == "rounding":
        return not (call.others["is_half"] and call.others.get("keep_rounding", True))
    if name in ("k", "v"):
        return int(call.others["shared_inputs"]) >= (2 if name == "k" else 1)
    return name == "weights" and call.weights == 0


def _gradient(call: Call, name: str, kind: str) -> Placement:
    """A gradient lies as its input does; where that is whole, every shard has a part of the sum."""
    placement = _cut(call, name, kind) if name in call.shapes else Replicate()
    return placement if placement.is_shard() else Partial()


def _kinds(call: Call) -> list[str]:
    """What may be cut."""
    others = call.others
    kinds = ["batch"]
    if not call.is_layer:
        kinds += [] if call.weights == 1 else ["heads"]
        knows_places = others["causal"] in (1, 2) or "relative_bias" in call.shapes
        limited = others["window_left"] >= 0 or others["window_right"] >= 0
        kinds += [] if knows_places or limited else ["queries"]
    return [] if others["dropout_p"] else [kind for kind in kinds if _cut(call, "query", kind).is_shard()]


def _placements(call: Call, rule: Rule, kind: str) -> list[Placement | None]:
    """Of the results, then of the call's tensors."""
    return [
        *(_result(call, name, kind) for name in rule.results),
        *(_gradient(call, name, kind) for name in rule.gradients),
        *(_result(call, name, kind) for name in rule.last),
        *(_cut(call, name, kind) for name in call.shapes),
    ]


def _shards_of_heads(spec: DTensorSpec) -> int:
    shards = 1
    for placement, size in zip(spec.placements, spec.mesh.shape, strict=True):
        shards *= size if placement.is_shard(dim=1) else 1
    return shards


def _strategy(rule: Rule, schema: OpSchema) -> OpStrategy:
    """Every way to run a call: whole on all devices, or cut along one kind of axis for each axis of the mesh."""
    call = _call(schema)
    returns = len(schema.op._schema.returns)
    ways: list[list[Placement | None]] = [[Replicate()] * (returns + len(call.shapes))]
    ways += [_placements(call, rule, kind) for kind in _kinds(call)]
    kwargs = [value.strategies[0].output_spec.placements for value in schema.kwargs_strategy]
    key_heads = 1 if call.is_layer else call.shapes["key"][1]
    query = list(call.shapes).index("query")

    def fits(inputs: list[DTensorSpec], _: Any) -> bool:
        if not call.is_layer and key_heads > 1 and key_heads % _shards_of_heads(inputs[query]):
            return False
        # Dispatch redistributes arguments by position, never those by keyword.
        return [spec.placements for spec in inputs[len(inputs) - len(kwargs) :]] == kwargs

    mesh = schema.get_mesh_from_args()
    strategy = expand_to_full_mesh_op_strategy(mesh, schema, ways, input_index=returns, is_valid_strategy_cb=fits)
    if not strategy.strategies:
        names = list(call.shapes)[len(call.shapes) - len(kwargs) :]
        lie = ", ".join(f"{name} {tuple(map(str, spec))}" for name, spec in zip(names, kwargs, strict=True))
        raise InvalidValueError(
            f"{schema.op.overloadpacket.__name__}: tensors by keyword must lie as one way to run the call needs them "
            f"(Replicate always does), got {lie}"
        )
    return strategy


def _register() -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    for packet, rule in _RULES.items():
        operator = packet.default
        by_keyword = [argument.name for argument in operator._schema.arguments if argument.kwarg_only]
        info = RuntimeSchemaInfo(static_argnum=0, static_kwargkey=by_keyword)
        propagator.register_op_strategy(operator, partial(_strategy, rule), info)


_register()
