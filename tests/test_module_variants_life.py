"""Layers with a window, softcap, sink, qk_norm or rope: made, stored, shown, converted, pooled, compiled."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from layer_cases import EMBED, HEADS, MODES, causal_mask, inputs_for, last_hidden, make, mode, same_states, sequence
from module_variant_cases import KEYWORDS, exact_variant, variant
from tolerances import assert_within, double_limit
from torch import Tensor, nn
from tracing import Operators

import mha_ext

ALL = KEYWORDS["all"]


# ---------------------------------------------------------------------------------------------------- made and stored
def test_nothing_asked_for_is_nothing_added() -> None:
    """A layer without variants has the original's attributes; so has one whose keywords say so at length."""
    plain = make()
    spelled = make(window=(None, -1), softcap=None, sink=False, qk_norm=False, rope=False)
    theirs = make(nn.MultiheadAttention)
    assert vars(plain).keys() == vars(spelled).keys() == vars(theirs).keys()
    assert repr(plain) == repr(spelled) and plain.extra_repr() == "16, 4, batch_first=True"
    assert plain._parameters.keys() == theirs._parameters.keys() and plain._modules.keys() == theirs._modules.keys()
    x = sequence(2, 5)
    with Operators() as seen:
        spelled(x, x, x, need_weights=False)
    assert seen.counts.get("mha_ext::multi_head_attention") == 1


@pytest.mark.parametrize("name", KEYWORDS)
def test_same_seed_same_shared_parameters(name: str) -> None:
    """Variants draw no random numbers; what they add starts at zero and one, and is initialised again."""
    states = []
    for keywords in ({}, KEYWORDS[name]):
        torch.manual_seed(3)
        module = mha_ext.MultiheadAttention(EMBED, HEADS, add_bias_kv=True, **keywords)
        states.append((copy.deepcopy(module.state_dict()), torch.get_rng_state()))
    (plain, state), (own, state_too) = states
    assert torch.equal(state, state_too) and all(torch.equal(own[n], x) for n, x in plain.items())
    added = {n: x for n, x in own.items() if n not in plain}
    starts = {"sink": torch.zeros(HEADS), "q_norm.weight": torch.ones(4), "k_norm.weight": torch.ones(4)}
    assert all(torch.equal(x, starts[n]) for n, x in added.items())
    assert ("sink" in added, "q_norm.weight" in added) == tuple(k in KEYWORDS[name] for k in ("sink", "qk_norm"))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7.0)
    torch.manual_seed(3)
    module.reset_parameters()
    assert all(torch.equal(module.state_dict()[n], x) for n, x in added.items())


@pytest.mark.parametrize("name", KEYWORDS)
def test_copies_and_files(name: str) -> None:
    module = variant(KEYWORDS[name], num_kv_heads=2)
    fresh = make(seed=5, num_kv_heads=2, **KEYWORDS[name])
    fresh.load_state_dict(module.state_dict())
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    inputs = inputs_for(module)
    want = module(*inputs)[0]
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded, fresh):
        assert same_states(again, module) and repr(again) == repr(module)
        assert torch.equal(again(*inputs)[0], want)


def test_devices_and_dtypes() -> None:
    module = mha_ext.MultiheadAttention(EMBED, HEADS, device="meta", dtype=torch.float16, **ALL)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.float16)}
    module = mha_ext.MultiheadAttention(EMBED, HEADS, **ALL).double()
    assert {p.dtype for p in module.parameters()} == {torch.float64}


def test_shown() -> None:
    assert make(window=[3, None]).extra_repr() == "16, 4, batch_first=True, window=(3, -1)"
    assert variant(ALL).extra_repr() == "16, 4, batch_first=True, window=(3, 1), softcap=2.0, sink=True, qk_norm=True"
    assert make(rope=True).extra_repr() == "16, 4, batch_first=True"
    assert "(rope): RotaryEmbedding(4)" in repr(make(rope=True)) and "(q_norm): RMSNorm((4,)" in repr(variant(ALL))


def test_attributes_may_be_assigned() -> None:
    """As those of the original: the next call follows, and a wrong one is refused by name."""
    module, x = variant({"window": (2, 0), "softcap": 3.0, "rope": True}), sequence(2, 6)
    module.window, module.softcap, module.rope = (0, None), None, None
    truth = exact_variant(module, {"window": (0, None)}, (x, x, x))
    assert_within(module(x, x, x)[0], truth.out, double_limit(truth.out, EMBED))
    module.window = None
    assert_within(module(x, x, x)[0], want := exact_variant(module, {}, (x, x, x)).out, double_limit(want, EMBED))
    module.window = (-2, 0)
    with pytest.raises(ValueError, match="MultiheadAttention: window must have sides of at least 0"):
        module(x, x, x)


# ------------------------------------------------------------------------------------------------------- in other hands
def test_revert_leaves_them_and_says_why() -> None:
    model = nn.Sequential(make(**ALL), make(rope=True), make())
    assert mha_ext.revert(model) is model
    kinds = [type(layer) for layer in model]
    assert kinds == [mha_ext.MultiheadAttention, mha_ext.MultiheadAttention, nn.MultiheadAttention]
    reasons = [report.reason for report in mha_ext.conversion_report(model)]
    assert reasons[0] == "is mha_ext's; revert leaves it: it has window, softcap, rope, sink, qk_norm"
    assert reasons[1] == "is mha_ext's; revert leaves it: it has rope"
    before = copy.deepcopy(model[0])
    assert same_states(mha_ext.convert(model)[0], before) and repr(model[0]) == repr(before)


@pytest.mark.parametrize("name", KEYWORDS)
def test_grouping_carries_them_over(name: str) -> None:
    """Their values are copied, not shared, and a pooled layer with equal heads is the same function."""
    module = variant(KEYWORDS[name])
    with torch.no_grad():
        for part in (module.in_proj_weight, module.in_proj_bias):
            heads = part[EMBED:].unflatten(0, (2, 2, 2, 4))
            heads[:, :, 1] = heads[:, :, 0]
    grouped = mha_ext.to_grouped_query(module, 2)
    inputs = inputs_for(module)
    want = module(*inputs, is_causal=True)[0]
    assert_within(grouped(*inputs, is_causal=True)[0], want, double_limit(want, EMBED))
    assert grouped.extra_repr() == module.extra_repr().replace("batch_first=True", "batch_first=True, num_kv_heads=2")
    storage = {p.data_ptr() for p in module.parameters()}
    assert storage.isdisjoint(p.data_ptr() for p in grouped.parameters())
    assert grouped._modules.get("rope") is not module._modules.get("rope") or module._modules.get("rope") is None


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("keywords", ["all", "rope", "sink", "window"])
def test_inside_an_encoder_layer(keywords: str, name: str) -> None:
    """No road past the variants: each mode gives the layer of the exact attention, and none of PyTorch's operators
    runs."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = variant(KEYWORDS[keywords])
    x, hidden = sequence(2, 6), last_hidden(2, 6)
    for masks, own in (
        ({}, {}),
        ({"src_key_padding_mask": hidden}, {"key_padding_mask": hidden}),
        ({"src_mask": causal_mask(6), "is_causal": True}, {"is_causal": True}),
    ):
        attended = exact_variant(layer.self_attn, KEYWORDS[keywords], (x, x, x), **own).out
        want = layer.norm1(x + attended)
        want = layer.norm2(want + layer.linear2(layer.linear1(want).relu()))
        with mode(layer, name), Operators() as seen:
            got = layer(x, **masks)
        assert_within(got, want, double_limit(want, 100))
        assert seen.ours == 1 and not seen.theirs
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    with mode(encoder, name):
        got = encoder(x)
        assert_within(got, layer(x), double_limit(got, 100))


@pytest.mark.parametrize("name", MODES)
def test_inside_a_decoder_layer(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn, layer.multihead_attn = variant(ALL), variant(KEYWORDS["norm and rope"], seed=3)
    x, memory = sequence(2, 6), sequence(2, 9, seed=4)
    want = layer.norm1(x + exact_variant(layer.self_attn, ALL, (x, x, x), is_causal=True).out)
    across = exact_variant(layer.multihead_attn, KEYWORDS["norm and rope"], (want.detach(), memory, memory)).out
    want = layer.norm2(want + across)
    want = layer.norm3(want + layer.linear2(layer.linear1(want).relu()))
    with mode(layer, name):
        got = layer(x, memory, tgt_mask=causal_mask(6), tgt_is_causal=True)
    assert_within(got, want, double_limit(want, 100))


def test_packed_weights_are_not_offered_to_who_would_skip_forward() -> None:
    assert make()._qkv_same_embed_dim
    assert not any(make(**keywords)._qkv_same_embed_dim for keywords in KEYWORDS.values())


def test_nested_inputs() -> None:
    """Each part is a sequence of its own, counted from 0."""
    module = variant(ALL)
    parts = [sequence(1, length, seed=length)[0] for length in (5, 2, 7)]
    for layout in (torch.jagged, torch.strided):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        out = module(nested, nested, nested, is_causal=True, need_weights=False)[0]
        for part, got in zip(parts, out.unbind(), strict=True):
            want = exact_variant(module, ALL, (part[None],) * 3, is_causal=True).out[0]
            assert_within(got, want, double_limit(want, EMBED))


@pytest.mark.parametrize("need_weights", [True, False])
def test_transforms(need_weights: bool) -> None:
    """Other parameters by functional_call, samples by vmap, and a compiled graph of any length."""
    module, other = variant(ALL), variant(ALL, seed=6)
    x = sequence(3, 7)
    own = {"need_weights": need_weights, "is_causal": True}
    got = torch.func.functional_call(module, dict(other.named_parameters()), (x, x, x), own)[0]
    assert torch.equal(got, other(x, x, x, **own)[0])

    def alone(sample: Tensor) -> Tensor:
        out: Tensor = module(sample, sample, sample, **own)[0]
        return out

    want = module(x, x, x, **own)[0]
    assert_within(torch.func.vmap(alone)(x), want, double_limit(want, EMBED))
    if need_weights:
        return
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (7, 4):
        part = x[:, :length].contiguous()
        want = module(part, part, part, **own)[0]
        assert_within(compiled(part, part, part, **own)[0], want, double_limit(want, EMBED))


def test_a_hook_on_a_norm_acts() -> None:
    module, x = variant({"qk_norm": True}), sequence(2, 5)
    module.q_norm.register_forward_hook(lambda _module, _inputs, out: torch.zeros_like(out))
    weights = module(x, x, x)[1]
    assert_within(weights, torch.full_like(weights, 0.2), 1e-15)


# ------------------------------------------------------------------------------------------------------------- refused
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"window": 3}, TypeError, "window must be a pair (left, right), got 3"),
    ({"window": (1, 2, 3)}, TypeError, "window must be a pair (left, right), got (1, 2, 3)"),
    ({"window": (1.0, 0)}, TypeError, "window must be an int, got float"),
    ({"window": (-2, 0)}, ValueError, "window must have sides of at least 0 (None: no limit), got (-2, 0)"),
    ({"softcap": 0}, ValueError, "softcap must be positive and finite, got 0"),
    ({"softcap": float("inf")}, ValueError, "softcap must be positive and finite, got inf"),
    ({"softcap": "big"}, TypeError, "softcap must be a number, got str"),
    ({"sink": torch.zeros(4)}, TypeError, "sink must be a bool, got Tensor"),
    ({"qk_norm": 1}, TypeError, "qk_norm must be a bool, got int"),
    ({"rope": 1e4}, TypeError, "rope must be None, a bool or a mha_ext.RotaryEmbedding, got float"),
    ({"rope": mha_ext.RotaryEmbedding(8)}, ValueError, "rope must be for head_dim 4, got RotaryEmbedding(8)"),
    (
        {"rope": True, "head_dim": 5},
        ValueError,
        "rope must be a RotaryEmbedding where head_dim 5 is odd, got True",
    ),
]


@pytest.mark.parametrize(("keywords", "kind", "message"), WRONG, ids=lambda v: v if isinstance(v, str) else None)
def test_refused(keywords: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(f"MultiheadAttention: {message}")):
        make(**keywords)


def test_odd_heads_turn_as_far_as_they_are_told() -> None:
    rope = mha_ext.RotaryEmbedding(5, rotary_dim=4)
    module, x = variant({"rope": rope}, head_dim=5), sequence(2, 6)
    want = exact_variant(module, {"rope": rope}, (x, x, x)).out
    assert_within(module(x, x, x)[0], want, double_limit(want, EMBED))
