"""Deliberate faults: each turns a right implementation into a wrong one, so that a comparison can show that it refuses.

A fault edits the arguments of a call or its result, outside the kernels, and leaves gradients flowing. ``ATTENTION``
holds those of functions with the signature of ``F.scaled_dot_product_attention``, ``LAYER`` those of a whole layer:

    bad = ATTENTION["scale_1_over_d"].attention(F.scaled_dot_product_attention)
    bad = LAYER["no_in_proj_bias"].module(nn.MultiheadAttention(8, 2))
    bad = LAYER["no_in_proj_bias"].function(F.multi_head_attention_forward)

A call that lacks what a fault ``needs`` is passed on unchanged: see ``acts_on`` with ``attention_has`` or
``layer_has``. A fault ``of_gradients`` leaves every result as it is. ``size`` is the relative change of a small fault,
which a dtype as coarse as bfloat16 may not show: see ``shows_in``.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Arguments = dict[str, Any]
ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
LAYER_ARGUMENTS = tuple(inspect.signature(F.multi_head_attention_forward).parameters)
FORWARD_ARGUMENTS = tuple(inspect.signature(nn.MultiheadAttention.forward).parameters)[1:]


@dataclass(frozen=True)
class Fault:
    """``edit`` changes the arguments in place, ``spoil`` returns the changed result."""

    edit: Callable[[Arguments], None] | None = None
    spoil: Callable[[Arguments, Any], Any] | None = None
    needs: frozenset[str] = frozenset()
    size: float | None = None
    of_gradients: bool = False

    def acts_on(self, has: set[str]) -> bool:
        return self.needs <= has

    def shows_in(self, dtype: torch.dtype) -> bool:
        """Whether the change is far above the roundings of a short chain of operations in ``dtype``."""
        return self.size is None or self.size > 16 * torch.finfo(dtype).eps

    def attention(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A faulty ``scaled_dot_product_attention``; keywords that it does not know are passed on."""

        def faulty(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
            return self._call(given, attention_has(given), lambda: function(**given))

        return faulty

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A faulty ``multi_head_attention_forward``."""

        def faulty(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(LAYER_ARGUMENTS, args, strict=False)) | kwargs
            return self._call(given, layer_has(given), lambda: function(**given))

        return faulty

    def module(self, module: nn.MultiheadAttention) -> nn.MultiheadAttention:
        """A faulty copy of a layer; its parameters are copies too."""
        right, faulty = copy.deepcopy(module), copy.deepcopy(module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(FORWARD_ARGUMENTS, args, strict=False)) | kwargs
            inputs = set(given)
            given |= {name.replace("out_proj.", "out_proj_"): x for name, x in faulty.named_parameters()}
            given |= {"num_heads": faulty.num_heads, "training": faulty.training}
            given |= {"dropout_p": faulty.dropout, "batch_first": faulty.batch_first}
            right.train(faulty.training)

            def call() -> Any:
                parameters = {n: given[n.replace("out_proj.", "out_proj_")] for n, _ in faulty.named_parameters()}
                options = {n: x for n, x in given.items() if n in FORWARD_ARGUMENTS and (n in inputs or x is not None)}
                return torch.func.functional_call(right, parameters, (), options)

            return self._call(given, layer_has(given), call)

        faulty.forward = forward
        return faulty

    def _call(self, given: Arguments, has: set[str], call: Callable[[], Any]) -> Any:
        if not self.acts_on(has):
            return call()
        if self.edit is not None:
            self.edit(given)
        result = call()
        return result if self.spoil is None else self.spoil(given, result)


def attention_has(given: Arguments) -> set[str]:
    """What one call of ``scaled_dot_product_attention`` has that a fault may need."""
    query, key, value = given["query"], given["key"], given["value"]
    has = {
        "heads": query.dim() > 2 and query.shape[-3] > 1,
        "keys": key.shape[-2] > 1,
        "same_width": key.shape == value.shape,
        "mask": given.get("attn_mask") is not None,
        "float_mask": given.get("attn_mask") is not None and given["attn_mask"].is_floating_point(),
        "causal": bool(given.get("is_causal")),
        "last_key": not given.get("is_causal") or query.shape[-2] >= key.shape[-2],
        "dropout": given.get("dropout_p", 0.0) > 0.0,
        "groups": key.dim() > 2 and query.dim() > 2 and 1 < key.shape[-3] < query.shape[-3],
    }
    return {name for name, present in has.items() if present}


def layer_has(given: Arguments) -> set[str]:
    """What one call of a layer has that a fault may need; a parameter that is None or 0 is missing."""
    mask = given.get("attn_mask")
    has = {
        "heads": given["num_heads"] > 1,
        "packed": given.get("in_proj_weight") is not None,
        "in_proj_bias": given.get("in_proj_bias") is not None and bool(given["in_proj_bias"].any()),
        "out_proj_bias": given.get("out_proj_bias") is not None and bool(given["out_proj_bias"].any()),
        "appended": given.get("bias_k") is not None,
        "mask": mask is not None,
        "padding": given.get("key_padding_mask") is not None,
        "dropout": given.get("training", True) and given["dropout_p"] > 0.0,
        "weights": given.get("need_weights", True),
        "mean": given.get("need_weights", True) and given.get("average_attn_weights", True),
        "causal": bool(given.get("is_causal")) and mask is None,
        "same_width": given.get("in_proj_weight") is not None
        or given["k_proj_weight"].shape == given["v_proj_weight"].shape,
    }
    return {name for name, present in has.items() if present}


# ------------------------------------------------------------------------------------------------------ gradients only
class _Enlarged(torch.autograd.Function):
    """The identity, with derivatives that are 1 % too large."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing to save."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.01

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * 1.01


def _wrong_gradient(name: str, *needs: str) -> Fault:
    def edit(given: Arguments) -> None:
        given[name] = _Enlarged.apply(given[name])

    return Fault(edit, needs=frozenset(needs), size=0.01, of_gradients=True)


# ---------------------------------------------------------------------------------------------------------- attention
def _scale(factor: Callable[[int], float]) -> Callable[[Arguments], None]:
    def edit(given: Arguments) -> None:
        dim = given["query"].shape[-1]
        scale = dim**-0.5 if given.get("scale") is None else given["scale"]
        given["scale"] = scale * factor(dim)

    return edit


def _shift_keys(name: str) -> Callable[[Arguments], None]:
    def edit(given: Arguments) -> None:
        given[name] = given[name].roll(1, -1)

    return edit


def _causal_until(last: int) -> Callable[[Arguments], None]:
    """Query i sees key j if ``j <= i + last``, as a mask (True = may attend) besides the one given."""

    def edit(given: Arguments) -> None:
        sizes = given["query"].shape[-2], given["key"].shape[-2]
        visible, mask = torch.ones(sizes, dtype=torch.bool).tril(last), given.get("attn_mask")
        given["is_causal"] = False
        if mask is not None and mask.dtype != torch.bool:
            given["attn_mask"] = mask.masked_fill(~visible, -math.inf)
        else:
            given["attn_mask"] = visible if mask is None else mask & visible

    return edit


def _swap_key_and_value(given: Arguments) -> None:
    given["key"], given["value"] = given["value"], given["key"]


def _drop_last_key(given: Arguments) -> None:
    given["key"], given["value"] = given["key"][..., :-1, :], given["value"][..., :-1, :]
    for name in ("attn_mask", "key_padding_mask"):
        mask = given.get(name)
        if mask is not None and mask.shape[-1] == given["key"].shape[-2] + 1:
            given[name] = mask[..., :-1]


def _interleave_groups(given: Arguments) -> None:
    """Query head h reads key head ``h % G``."""
    repeats = given["query"].shape[-3] // given["key"].shape[-3]
    for name in ("key", "value"):
        given[name] = torch.cat([given[name]] * repeats, -3)


def _of_output(change: Callable[[Tensor, Arguments], Tensor]) -> Callable[[Arguments, Any], Any]:
    """Change the first of the results, or the only one."""

    def spoil(given: Arguments, result: Any) -> Any:
        return change(result, given) if isinstance(result, Tensor) else (change(result[0], given), *result[1:])

    return spoil


def _with(*needs: str) -> frozenset[str]:
    return frozenset(needs)


ATTENTION: dict[str, Fault] = {
    "scale_1_over_d": Fault(_scale(lambda dim: dim**-0.5), needs=_with("keys")),
    "scale_1_percent": Fault(_scale(lambda dim: 1.01), needs=_with("keys"), size=0.01),
    "mask_off_by_one": Fault(_shift_keys("attn_mask"), needs=_with("mask")),
    "causal_sees_one_more": Fault(_causal_until(1), needs=_with("causal", "keys")),
    "causal_sees_one_less": Fault(_causal_until(-1), needs=_with("causal")),
    "causal_ignored": Fault(lambda given: given.update(is_causal=False), needs=_with("causal", "keys")),
    "last_key_dropped": Fault(_drop_last_key, needs=_with("keys", "last_key")),
    "heads_swapped": Fault(spoil=_of_output(lambda out, _: out.roll(1, -3)), needs=_with("heads")),
    "groups_interleaved": Fault(_interleave_groups, needs=_with("groups")),
    "key_value_swapped": Fault(_swap_key_and_value, needs=_with("same_width")),
    "dropout_times_p": Fault(
        spoil=_of_output(lambda out, given: out * (given["dropout_p"] * (1 - given["dropout_p"]))),
        needs=_with("dropout"),
    ),
    "dropout_not_scaled": Fault(
        spoil=_of_output(lambda out, given: out * (1 - given["dropout_p"])), needs=_with("dropout")
    ),
    "output_1_percent": Fault(spoil=_of_output(lambda out, _: out * 1.01), size=0.01),
    "query_gradient_1_percent": _wrong_gradient("query", "keys"),
    "key_gradient_1_percent": _wrong_gradient("key", "keys"),
    "value_gradient_1_percent": _wrong_gradient("value"),
    "mask_gradient_1_percent": _wrong_gradient("attn_mask", "float_mask", "keys"),
}


# ------------------------------------------------------------------------------------------------------------- layers
def _thirds(given: Arguments, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
    """Change the query, key and value parts of the input projections, weights and bias."""
    bias = given.get("in_proj_bias")
    if given.get("in_proj_weight") is not None:
        given["in_proj_weight"] = torch.cat(change(list(given["in_proj_weight"].chunk(3))))
    else:
        names = [f"{letter}_proj_weight" for letter in "qkv"]
        given.update(zip(names, change([given[n] for n in names]), strict=True))
    if bias is not None:
        given["in_proj_bias"] = torch.cat(change(list(bias.chunk(3))))


def _scale_queries(factor: Callable[[int], float]) -> Callable[[Arguments], None]:
    def edit(given: Arguments) -> None:
        dim = given["out_proj_weight"].shape[1] // given["num_heads"]
        _thirds(given, lambda parts: [parts[0] * factor(dim), *parts[1:]])

    return edit


def _roll_heads(given: Arguments) -> None:
    """Every head gets its neighbour's projections."""
    dim = given["out_proj_weight"].shape[1] // given["num_heads"]
    _thirds(given, lambda parts: [part.roll(dim, 0) for part in parts])


def _layer_causal_until(last: int) -> Callable[[Arguments], None]:
    """Query i sees key j if ``j <= i + last``, as a mask (True = may not attend) instead of the flag."""

    def edit(given: Arguments) -> None:
        query, key = given["query"], given["key"]
        axis = 1 if given.get("batch_first") and query.dim() == 3 else 0
        sizes = query.shape[axis], key.shape[axis]
        given.update(is_causal=False, attn_mask=torch.ones(sizes, dtype=torch.bool).triu(last + 1))

    return edit


def _times(name: str, factor: Callable[[Arguments], float]) -> Callable[[Arguments], None]:
    def edit(given: Arguments) -> None:
        given[name] = given[name] * factor(given)

    return edit


def _mean_as_sum(given: Arguments, result: Any) -> Any:
    return result[0], result[1] * given["num_heads"]


def _average_one_head_less(given: Arguments, result: Any) -> Any:
    return result[0], result[1] * (1 - 1 / given["num_heads"])


LAYER: dict[str, Fault] = {
    "scale_1_over_d": Fault(_scale_queries(lambda dim: dim**-0.5)),
    "scale_1_percent": Fault(_scale_queries(lambda dim: 1.01), size=0.01),
    "no_in_proj_bias": Fault(_times("in_proj_bias", lambda _: 0.0), needs=_with("in_proj_bias")),
    "no_out_proj_bias": Fault(_times("out_proj_bias", lambda _: 0.0), needs=_with("out_proj_bias")),
    "appended_key_dropped": Fault(_times("bias_k", lambda _: 0.0), needs=_with("appended")),
    "appended_value_dropped": Fault(_times("bias_v", lambda _: 0.0), needs=_with("appended")),
    "heads_swapped": Fault(_roll_heads, needs=_with("heads")),
    "key_value_swapped": Fault(
        lambda given: _thirds(given, lambda parts: [parts[0], parts[2], parts[1]]), needs=_with("same_width")
    ),
    "mask_off_by_one": Fault(_shift_keys("attn_mask"), needs=_with("mask")),
    "padding_off_by_one": Fault(_shift_keys("key_padding_mask"), needs=_with("padding")),
    "causal_sees_one_more": Fault(_layer_causal_until(1), needs=_with("causal")),
    "causal_sees_one_less": Fault(_layer_causal_until(-1), needs=_with("causal")),
    "causal_ignored": Fault(lambda given: given.update(is_causal=False), needs=_with("causal")),
    "dropout_times_p": Fault(
        _times("out_proj_weight", lambda given: given["dropout_p"] * (1 - given["dropout_p"])), needs=_with("dropout")
    ),
    "mean_weights_summed": Fault(spoil=_mean_as_sum, needs=_with("mean", "heads")),
    "mean_without_a_head": Fault(spoil=_average_one_head_less, needs=_with("mean", "heads")),
    "query_gradient_1_percent": _wrong_gradient("query"),
    "value_gradient_1_percent": _wrong_gradient("value"),
    "in_proj_gradient_1_percent": _wrong_gradient("in_proj_weight", "packed"),
    "in_proj_bias_gradient_1_percent": _wrong_gradient("in_proj_bias", "in_proj_bias"),
    "out_proj_gradient_1_percent": _wrong_gradient("out_proj_weight"),
    "appended_gradient_1_percent": _wrong_gradient("bias_v", "appended"),
}
