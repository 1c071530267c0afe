"""The classes of the package's errors, and the calls that the original refuses and the package answers."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from layer_cases import EMBED, HEADS, MODES, exact_layer, last_hidden, make, mode, pair, sequence
from original_errors import outcome, x
from tolerances import assert_within, double_limit
from torch import Tensor, nn

import mha_ext
from mha_ext import errors, functional

CLASSES = {
    errors.InvalidValueError: (ValueError, AssertionError, RuntimeError),
    errors.InvalidTypeError: (TypeError, AssertionError, RuntimeError),
    errors.UnsupportedLayoutError: (TypeError, NotImplementedError, ValueError, AssertionError, RuntimeError),
}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_classes(kind: type[Exception]) -> None:
    """What callers may catch, and that an error survives the way from a worker process to its parent."""
    assert all(issubclass(kind, caught) for caught in CLASSES[kind])
    assert (kind.__module__, kind.__doc__ is not None) == ("mha_ext.errors", True)
    for twin in (pickle.loads(pickle.dumps(kind("f: a must b, got c"))), copy.copy(kind("f: a must b, got c"))):
        assert (type(twin), str(twin)) == (kind, "f: a must b, got c")


@pytest.mark.parametrize(
    ("given", "function", "kind", "message"),
    [
        (ValueError("attention: key must b, got c: d"), "f", errors.InvalidValueError, "f: key must b, got c: d"),
        (TypeError("attention: key must b, got c"), "g", errors.InvalidTypeError, "g: key must b, got c"),
        (ValueError("no operator said: this"), "f", ValueError, "no operator said: this"),
        (TypeError("nor this"), "f", TypeError, "nor this"),
    ],
)
def test_refusals_of_operators(given: Any, function: str, kind: type[Exception], message: str) -> None:
    error = outcome(lambda: errors.pass_on(given, function))
    assert (type(error), str(error)) == (kind, message)


def test_errors_of_others_pass_unchanged() -> None:
    """What a hook or a tensor subclass raises inside a call is not the package's to rename."""
    attention = make()
    attention.out_proj.register_forward_hook(lambda *_: (_ for _ in ()).throw(ValueError("from: a hook")))
    inputs = (sequence(2, 3),) * 3
    raised = outcome(lambda: attention(*inputs))
    assert (type(raised), str(raised)) == (ValueError, "from: a hook")


def test_a_refused_call_leaves_the_generator_alone() -> None:
    attention = make(dropout=0.5)
    inputs = (sequence(2, 3),) * 3
    wrong: list[dict[str, Any]] = [{"attn_mask": x(4, 3)}, {"key_padding_mask": x(2, 4)}, {"attn_mask": x(3, 3).int()}]
    before = torch.get_rng_state()
    for need_weights, masks in itertools.product((True, False), wrong):
        assert outcome(lambda n=need_weights, m=masks: attention(*inputs, need_weights=n, **m)) is not None
    assert torch.equal(torch.get_rng_state(), before)


# --------------------------------------------------------------------------------- refused by the original, right here
def accepted(batch: int, queries: int, keys: int) -> dict[str, dict[str, Any]]:
    """Keyword arguments of the layer that the original refuses, by a name."""
    g = torch.Generator().manual_seed(5)

    def bits(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g) < 0.3

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    return {
        "causal without a mask": {"is_causal": True},
        "mask (S,)": {"attn_mask": bits(keys)},
        "mask (1, S)": {"attn_mask": bits(1, keys)},
        "mask (T, 1)": {"attn_mask": floats(queries, 1)},
        "mask (1, T, S)": {"attn_mask": bits(1, queries, keys)},
        "mask (B, T, S)": {"attn_mask": bits(batch, queries, keys)},
        "mask (B, H, T, S)": {"attn_mask": floats(batch, HEADS, queries, keys)},
        "mask (1, H, T, S)": {"attn_mask": bits(1, HEADS, queries, keys)},
        "float32 mask": {"attn_mask": floats(queries, keys)},
        "bfloat16 mask": {"attn_mask": floats(queries, keys).bfloat16()},
        "float16 padding": {"key_padding_mask": floats(batch, keys).half()},
        "padding (S,)": {"key_padding_mask": last_hidden(batch, keys)[1]},
        "padding (1, S)": {"key_padding_mask": last_hidden(batch, keys)[1:2]},
    }


@pytest.mark.parametrize("name", accepted(2, 5, 7))
def test_accepted_masks(name: str) -> None:
    options = accepted(2, 5, 7)[name]
    ours, theirs = pair()
    inputs = (sequence(2, 5, seed=1), sequence(2, 7, seed=2), sequence(2, 7, seed=3))
    whole = {n: m.expand(2, 7) if n == "key_padding_mask" else m for n, m in options.items()}
    exact = exact_layer(ours, inputs, **whole)
    refused = []
    for name_, need_weights in itertools.product(MODES, (True, False)):
        with mode(theirs, name_):
            refused.append(outcome(lambda n=need_weights: theirs(*inputs, need_weights=n, **options)))
        with mode(ours, name_):
            out, weights = ours(*inputs, need_weights=need_weights, average_attn_weights=False, **options)
        assert_within(out, exact.out, double_limit(exact.out, EMBED))
        if weights is not None:
            assert_within(weights, exact.weights, double_limit(exact.weights, EMBED))
    assert any(isinstance(error, (RuntimeError, AssertionError)) for error in refused)


def test_accepted_masks_of_unbatched_inputs() -> None:
    """The original wants (S,) padding and (T, S) or (H, T, S) masks there."""
    ours, theirs = pair()
    inputs = (sequence(1, 5, seed=1)[0], sequence(1, 7, seed=2)[0], sequence(1, 7, seed=3)[0])
    batched = tuple(given.unsqueeze(0) for given in inputs)
    floats = torch.randn(1, HEADS, 5, 7, dtype=torch.float64)
    wanted = {"attn_mask": floats, "key_padding_mask": last_hidden(2, 7)[1:2]}
    for name, mask in [*wanted.items(), ("attn_mask", floats[0, 0, 0])]:
        assert isinstance(outcome(lambda n=name, m=mask: theirs(*inputs, **{n: m})), AssertionError)
        exact = exact_layer(ours, batched, **{name: mask})
        assert_within(ours(*inputs, **{name: mask})[0], exact.out[0], double_limit(exact.out, EMBED))


def test_accepted_heads() -> None:
    """A mask of another floating dtype, (S,) and scalar masks, and grouped heads without a batch."""
    q, k, v = (sequence(4, n, 8, seed=s).unsqueeze(0) for s, n in enumerate((5, 7, 7)))
    added = torch.randn(5, 7)
    cases: list[tuple[dict[str, Any], Tensor]] = [
        ({"attn_mask": added.half()}, added.half().double()),
        ({"attn_mask": added[0]}, added[0].double().expand(5, 7)),
        ({"attn_mask": torch.tensor(2.0)}, torch.zeros(5, 7, dtype=torch.float64)),
    ]
    for options, mask in cases:
        raised = outcome(lambda o=options: F.scaled_dot_product_attention(q, k, v, **o))
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5 + mask, -1)
        out = functional.scaled_dot_product_attention(q, k, v, **options)
        assert_within(out, weights @ v, double_limit(weights @ v, 8))
        assert isinstance(raised, (RuntimeError, IndexError))
    want = torch.softmax(q[0, 0] @ k[0, 0].T / 8**0.5, -1) @ v[0, 0]
    matrices = (q[0, 0], k[0, 0], v[0, 0])
    assert isinstance(outcome(lambda: F.scaled_dot_product_attention(*matrices, enable_gqa=True)), IndexError)
    assert_within(functional.scaled_dot_product_attention(*matrices, enable_gqa=True), want, double_limit(want, 8))


# ---------------------------------------------------------------------------- taken by the original without a word
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_masks_without_data(name: str, need_weights: bool) -> None:
    """A mask on the meta device holds nothing; the original computes with whatever that gives."""
    inputs = (x(5, 2, EMBED), x(7, 2, EMBED), x(7, 2, EMBED))
    mask = x(*((5, 7) if name == "attn_mask" else (2, 7)), device="meta")
    nn.MultiheadAttention(EMBED, HEADS)(*inputs, need_weights=need_weights, **{name: mask})
    with pytest.raises(ValueError, match=f"MultiheadAttention: {name} must be on query's device cpu, got meta"):
        mha_ext.MultiheadAttention(EMBED, HEADS)(*inputs, need_weights=need_weights, **{name: mask})


@pytest.mark.parametrize("need_weights", [True, False])
def test_weights_without_data(need_weights: bool) -> None:
    """One projection on the meta device, without a bias: the original gives back what was never computed."""
    inputs = (x(5, 2, EMBED), x(7, 2, 8), x(7, 2, 6))
    for kind in (nn.MultiheadAttention, mha_ext.MultiheadAttention):
        attention = kind(EMBED, HEADS, bias=False, kdim=8, vdim=6)
        attention.v_proj_weight = nn.Parameter(x(EMBED, 6, device="meta"))
        raised = outcome(lambda a=attention: a(*inputs, need_weights=need_weights))
        assert isinstance(raised, RuntimeError | None)
    message = r"MultiheadAttention: v_proj_weight must have .* on cpu, got \(16, 6\) on meta"
    with pytest.raises(ValueError, match=message):
        attention(*inputs, need_weights=need_weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast_does_not_hide_a_dtype(need_weights: bool, dtype: torch.dtype) -> None:
    """Autocast leaves float64 and everything that is not floating as it is."""
    given = x(5, 2, EMBED).to(dtype)
    message = f"MultiheadAttention: query must have the parameters' dtype torch.float32, got {dtype}"
    with torch.autocast("cpu", torch.bfloat16):
        theirs = outcome(lambda: nn.MultiheadAttention(EMBED, HEADS)(given, given, given, need_weights=need_weights))
        with pytest.raises(TypeError, match=message) as ours:
            mha_ext.MultiheadAttention(EMBED, HEADS)(given, given, given, need_weights=need_weights)
    assert isinstance(ours.value, type(theirs))
    assert isinstance(theirs, RuntimeError)


def test_flags_of_numpy_are_flags() -> None:
    """is_causal and enable_gqa of attention on heads: a string or None is refused, a truth value of NumPy is none."""
    numpy = pytest.importorskip("numpy")
    q = sequence(3, 4, 8).unsqueeze(0)
    want = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    got = functional.scaled_dot_product_attention(q, q, q, is_causal=numpy.True_, enable_gqa=numpy.False_)
    assert torch.equal(got, want) and not torch.equal(got, functional.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("in_proj_weight", None, "in_proj_weight must be a tensor, got None"),
        ("num_heads", 0, "num_heads must be greater than 0, got 0"),
        ("num_heads", -2, "num_heads must be greater than 0, got -2"),
        ("num_heads", "2", "num_heads must be an int, got str"),
        ("num_heads", 2.0, "num_heads must be an int, got float"),
    ],
)
def test_attributes_assigned_later(name: str, value: Any, message: str, need_weights: bool) -> None:
    attention, inputs = make(), (sequence(2, 3),) * 3
    setattr(attention, name, value)
    error = outcome(lambda: attention(*inputs, need_weights=need_weights))
    assert isinstance(error, (errors.InvalidValueError, errors.InvalidTypeError))
    assert str(error) == f"MultiheadAttention: {message}"


@pytest.mark.parametrize("name", ["need_weights", "average_attn_weights", "is_causal"])
def test_flags_of_the_layer(name: str) -> None:
    """Whatever has a truth value beyond doubt is a flag; a mask or a string in the wrong place is none."""
    attention, inputs = make(), (sequence(2, 3),) * 3
    parameters = [attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0]
    out_proj = [attention.out_proj.weight, attention.out_proj.bias]

    def function(**options: Any) -> Any:
        return functional.multi_head_attention_forward(*inputs, EMBED, HEADS, *parameters, *out_proj, **options)

    for call in (lambda **options: attention(*inputs, **options), function):
        for given in (0, 1, None, np.True_, 1.0):
            want, got = call(**{name: bool(given)}), call(**{name: given})
            assert torch.equal(got[0], want[0]) and (got[1] is None) == (want[1] is None)
        for given in ("False", [], torch.zeros(3, 3, dtype=torch.bool)):
            error = outcome(lambda call=call, given=given: call(**{name: given}))
            assert isinstance(error, errors.InvalidTypeError)
            assert f"{name} must be a bool, got {type(given).__name__}" in str(error)


@pytest.mark.parametrize(
    ("scale", "kind", "got"),
    [
        (10**400, errors.InvalidValueError, "scale must be finite, got an int beyond float64"),
        (torch.tensor(2j), errors.InvalidTypeError, "scale must be a real number, got .*2"),
        (torch.tensor(2.0, device="meta"), errors.InvalidTypeError, "scale must be a real number, got .*meta"),
    ],
)
def test_numbers_that_are_none(scale: Any, kind: type[Exception], got: str) -> None:
    query = x(2, 4, 5, 8)
    error = outcome(lambda: functional.scaled_dot_product_attention(query, query, query, scale=scale))
    assert type(error) is kind and re.search(got, str(error))


def test_a_nested_weight_is_refused_by_name() -> None:
    nested, inputs = torch.nested.nested_tensor([x(2, EMBED), x(3, EMBED)]), (x(5, 2, EMBED),) * 3
    weight = x(3 * EMBED, EMBED)
    error = outcome(
        lambda: functional.multi_head_attention_forward(
            *inputs, EMBED, HEADS, weight, None, None, None, False, 0.0, nested, None
        )
    )
    assert "out_proj_weight must be a dense tensor" in str(error)
