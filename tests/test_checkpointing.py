"""Saved tensors: computed again, packed elsewhere, kept for a second backward pass, changed in between.

Every way of running a forward and a backward pass gives, to the bit, what the plain way gives; what was changed in
place after the forward pass raises, or is not needed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from layer_cases import SHARED_HEADS, VARIANTS, inputs_for, last_hidden, make
from module_variant_cases import variant
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mha_ext.functional import scaled_dot_product_attention

B, H, T, S, D = 2, 4, 9, 11, 8


class Call(NamedTuple):
    """A function of leaves by name, and these."""

    function: Callable[..., tuple[Tensor, ...]]
    leaves: dict[str, Tensor]


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def of_attention(dtype: torch.dtype = torch.float64, kv_heads: int = H, **options: Any) -> Call:
    """The function with a float mask that hides keys, some rows of it all of them, and what else is asked for."""
    shapes = {"query": (B, H, T, D), "key": (B, kv_heads, S, D), "value": (B, kv_heads, S, D)}
    leaves = {n: numbers(*shape, seed=i, dtype=dtype) for i, (n, shape) in enumerate(shapes.items())}
    mask = numbers(1, 1, T, S, seed=5).detach().masked_fill(torch.ones(T, S, dtype=torch.bool).triu(3), -math.inf)
    mask[..., 4, :] = -math.inf
    leaves["attn_mask"] = mask.requires_grad_()
    if options.pop("sink", False):
        leaves["sink"] = numbers(H, seed=6)

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        tensors = dict(zip(leaves, given, strict=True))
        return scaled_dot_product_attention(
            **tensors, enable_gqa=True, return_lse=True, key_padding_mask=last_hidden(B, S), **options
        )

    return Call(function, leaves)


def of_layer(module: Any = None, need_weights: bool = False, **options: Any) -> Call:
    """A layer and its parameters; weights are asked for or not, which takes it to pieces or not."""
    module = make(**options) if module is None else module
    query, key, value = (x.to(module.out_proj.weight.dtype).requires_grad_() for x in inputs_for(module))
    leaves = {"query": query, "key": key, "value": value, "attn_mask": numbers(5, 7, seed=8)}
    leaves |= dict(module.named_parameters())

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        masks = {"attn_mask": given[3], "key_padding_mask": last_hidden(2, 7), "is_causal": True}
        results = module(*given[:3], need_weights=need_weights, **masks)
        return tuple(x for x in results if x is not None)

    return Call(function, leaves)


CALLS: dict[str, Callable[[], Call]] = {
    "attention": of_attention,
    "grouped": partial(of_attention, kv_heads=2, is_causal=True),
    "weights": partial(of_attention, return_weights="per_head"),
    "mean weights": partial(of_attention, return_weights="mean"),
    "dropout": partial(of_attention, dropout_p=0.4),
    "bfloat16": partial(of_attention, torch.bfloat16),
    "variants": partial(of_attention, window=(4, 2), softcap=2.0, sink=True, alibi_slopes=torch.rand(H)),
    "layer": of_layer,
    "layer in pieces": partial(of_layer, need_weights=True),
    "layer with dropout": partial(of_layer, dropout=0.3),
    "layer in pieces with dropout": partial(of_layer, need_weights=True, dropout=0.3),
    "layer of bfloat16": partial(of_layer, dtype=torch.bfloat16),
    "layer of variants": lambda: of_layer(variant({"window": (3, 1), "sink": True, "qk_norm": True, "rope": True})),
    **{f"layer {o}": partial(of_layer, **o) for o in (*VARIANTS[2:5], *SHARED_HEADS)},
}
every_call = pytest.mark.parametrize("name", CALLS)


def loss_of(results: tuple[Tensor, ...]) -> Tensor:
    """Of everything; rows without keys have a log-sum-exp of -inf and no part in it."""
    return sum((x.double().masked_fill(x.isinf(), 0.0).square().sum() for x in results), torch.zeros(()))


def run(call: Call, around: Callable[..., Any] | None = None) -> list[Tensor]:
    """Results and gradients of a call with a fresh seed, ``around`` what calls the function."""
    torch.manual_seed(3)
    function = call.function if around is None else partial(around, call.function)
    results = function(*call.leaves.values())
    return [*results, *gradients(call, results)]


def gradients(call: Call, results: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    for leaf in call.leaves.values():
        leaf.grad = None
    loss_of(results).backward(**options)
    return [leaf.grad for leaf in call.leaves.values() if leaf.grad is not None]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) > 1
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ------------------------------------------------------------------------------------------------------ computed again
@every_call
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(name: str, reentrant: bool) -> None:
    """Also the mask of dropout is the same."""
    call = CALLS[name]()
    calls = []

    def counted(function: Callable[..., Any], *given: Tensor) -> Any:
        def again(*leaves: Tensor) -> Any:
            calls.append(torch.is_grad_enabled())
            return function(*leaves)

        return checkpoint(again, *given, use_reentrant=reentrant)

    same(run(call, counted), run(call))
    assert calls == [not reentrant, True]


# ---------------------------------------------------------------------------------------------------- packed elsewhere
def on_cpu(function: Callable[..., Any], *given: Tensor) -> Any:
    with save_on_cpu():
        return function(*given)


@every_call
def test_save_on_cpu(name: str) -> None:
    call = CALLS[name]()
    same(run(call, on_cpu), run(call))


@every_call
def test_saved_tensors_may_be_kept_as_anything(name: str) -> None:
    """As bytes, here; what is read back has other storage and no history."""
    call, packed, unpacked = CALLS[name](), [], []

    def pack(x: Tensor) -> tuple[bytes, torch.Size, torch.dtype]:
        packed.append(x.shape)
        return bytes(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()), x.shape, x.dtype

    def unpack(kept: tuple[bytes, torch.Size, torch.dtype]) -> Tensor:
        data, shape, dtype = kept
        unpacked.append(shape)
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)

    def hooked(function: Callable[..., Any], *given: Tensor) -> Any:
        with saved_tensors_hooks(pack, unpack):
            return function(*given)

    same(run(call, hooked), run(call))
    assert len(unpacked) >= len(packed) - 3 and call.leaves["query"].shape in packed  # the loss has its own


@pytest.mark.parametrize("name", ["attention", "layer", "layer in pieces"])
def test_what_hooks_give_back_is_what_is_used(name: str) -> None:
    call = CALLS[name]()

    def twice(function: Callable[..., Any], *given: Tensor) -> Any:
        with saved_tensors_hooks(lambda x: x, lambda x: 2 * x if x.is_floating_point() else x):
            return function(*given)

    got, want = run(call, twice), run(call)
    query = len(got) - len(call.leaves)
    assert torch.equal(got[0], want[0]) and not torch.allclose(got[query], want[query])


# ------------------------------------------------------------------------------------------------- backward, and again
@every_call
def test_retained_graph_gives_the_same_gradient_again(name: str) -> None:
    call = CALLS[name]()
    want = run(call)
    torch.manual_seed(3)
    results = call.function(*call.leaves.values())
    for retained in (True, True, False):
        same([*results, *gradients(call, results, retain_graph=retained)], want)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(call, results)


@every_call
def test_backward_inside_of_backward(name: str) -> None:
    """A hook that differentiates the same call, and another, while the engine is at work."""
    call, other = CALLS[name](), CALLS["layer"]()
    want = run(call)
    of_query, of_other = want[-len(call.leaves)], run(other)[-len(other.leaves)]
    inside: list[Tensor] = []
    torch.manual_seed(3)
    results = call.function(*call.leaves.values())

    def again(_: Tensor) -> None:
        for one in (call, other):
            query, *others = (x.detach().clone().requires_grad_() for x in one.leaves.values())
            torch.manual_seed(3)
            with torch.enable_grad():
                inside.extend(torch.autograd.grad(loss_of(one.function(query, *others)), query))

    results[0].register_hook(again)
    same([*results, *gradients(call, results)], want)
    same(inside, [of_query, of_other])


@pytest.mark.parametrize("name", ["attention", "weights", "layer", "layer in pieces"])
def test_hooks_on_tensors_and_nodes(name: str) -> None:
    call = CALLS[name]()
    want = run(call)
    seen: list[str] = []
    torch.manual_seed(3)
    results = call.function(*call.leaves.values())
    query = call.leaves["query"]
    removed = [
        query.register_hook(lambda grad: 2 * grad),
        query.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated")),
        results[0].register_hook(lambda grad: seen.append("out")),
        results[0].grad_fn.register_prehook(lambda grads: seen.append("before")),
        results[0].grad_fn.register_hook(lambda *_: seen.append("after")),
    ]
    got = gradients(call, results)
    for handle in removed:
        handle.remove()
    assert torch.equal(got[0], 2 * want[len(results)])
    same([*results, *got[1:]], [*want[: len(results)], *want[len(results) + 1 :]])
    assert seen.index("out") < seen.index("before") < seen.index("after") < seen.index("accumulated")


# --------------------------------------------------------------------------------------------------- changed in between
def changed(call: Call, which: str, names: tuple[str, ...]) -> str | None:
    """What backward raises after ``which`` was changed in place; where it does not, its gradients are those before."""
    want = run(call)
    torch.manual_seed(3)
    results = call.function(*call.leaves.values())
    loss = loss_of(tuple(x.clone() for x in results))  # which itself needs none of them
    for leaf in call.leaves.values():
        leaf.grad = None
    with torch.no_grad():
        {**call.leaves, **dict(zip(names, results, strict=True))}[which].mul_(1.5)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    same([leaf.grad for leaf in call.leaves.values() if leaf.grad is not None], want[len(results) :])
    return None


@every_call
def test_changes_in_place_raise_where_the_value_is_needed(name: str) -> None:
    """Every input and parameter is, but keys that are appended, which are copied; of the results, the output and the
    log-sum-exp of attention."""
    call, of_heads = CALLS[name](), not name.startswith("layer")
    names = ("out", "lse", "weights") if of_heads else ("out", "weights")
    names = names[: len(call.function(*call.leaves.values()))]
    for which in (*call.leaves, *names):
        message = changed(call, which, names)
        needed = which not in ("bias_k", "bias_v") if which in call.leaves else of_heads and which != "weights"
        assert (message is not None) == needed, which
        assert message is None or ("modified" in message and "inplace" in message), message


# ------------------------------------------------------------------------------------------------------------ anomalies
@every_call
def test_anomaly_mode_finds_nothing_where_rows_are_masked(name: str) -> None:
    """-inf in masks, rows without keys, a log-sum-exp of -inf: no NaN is met on the way."""
    call = CALLS[name]()
    want = run(call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is on
        with torch.autograd.detect_anomaly():
            same(run(call), want)


@pytest.mark.parametrize("name", ["attention", "weights", "layer", "layer in pieces"])
def test_anomaly_mode_names_the_call_that_made_a_nan(name: str) -> None:
    call = CALLS[name]()
    with torch.no_grad():
        call.leaves["query"][0].fill_(math.nan)

    def the_call_to_blame() -> tuple[Tensor, ...]:
        return call.function(*call.leaves.values())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly():
            out = the_call_to_blame()[0]
            with pytest.raises(RuntimeError, match=r"mha_ext::.* returned nan values"):
                out.backward(torch.ones_like(out))
    assert any("the_call_to_blame" in str(warning.message) for warning in caught)
