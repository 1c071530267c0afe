"""Our module inside PyTorch's encoders, decoders and whole transformers, in every mode; and a short training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_cases import EMBED, HEADS, MODES, causal_mask, last_hidden, make, mode, pair, sequence
from tolerances import assert_within, double_limit, growth
from torch import nn

import mha_ext


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", MODES)
def test_encoder_layer_runs_our_forward(norm_first: bool, batch_first: bool, name: str) -> None:
    class Counting(mha_ext.MultiheadAttention):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            Counting.calls += 1
            return super().forward(*args, **kwargs)

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        EMBED, HEADS, 32, 0.0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    x = sequence(2, 6)
    masks = (
        {},
        {"src_key_padding_mask": last_hidden(2, 6) if batch_first else last_hidden(6, 2)},
        {"src_mask": causal_mask(*((6,) if batch_first else (2,)))},
    )
    with mode(layer, "train"):
        wants = [layer(x, **m) for m in masks]
    ours = Counting(EMBED, HEADS, batch_first=batch_first, dtype=torch.float64)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    with mode(layer, name):
        for masks_of, want in zip(masks, wants, strict=True):
            assert_within(layer(x, **masks_of), want, double_limit(want, 100))
    assert Counting.calls == len(masks)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("name", MODES)
def test_a_finished_encoder_with_our_module_put_in(nested: bool, name: str) -> None:
    """The encoder may hand nested tensors to its layers in eval without gradients; padded positions come out as zeros
    then."""
    torch.manual_seed(0)
    x, hidden = sequence(3, 6), last_hidden(3, 6)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
    with mode(encoder, name):
        want = encoder(x, src_key_padding_mask=hidden)
        for inner in encoder.layers:
            ours = mha_ext.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64)
            ours.load_state_dict(inner.self_attn.state_dict())
            inner.self_attn = ours
            ours.train(name == "train")
        got = encoder(x, src_key_padding_mask=hidden)
    real = ~hidden
    assert_within(got[real], want[real], double_limit(want, 100))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_nested_inputs(layout: torch.layout, need_weights: bool, name: str) -> None:
    """Sequences of different lengths in one nested tensor: each comes out as it does alone, causal or not."""
    module = make()
    parts = [sequence(1, n, seed=n)[0] for n in (6, 1, 4)]
    memory = [sequence(1, n, seed=n + 10)[0] for n in (3, 7, 2)]
    nested, other = (torch.nested.nested_tensor(x, layout=layout) for x in (parts, memory))
    with mode(module, name):
        for inputs, lists in (((nested,) * 3, (parts,) * 3), ((nested, other, other), (parts, memory, memory))):
            for causal in (False, True):
                out, weights = module(*inputs, need_weights=need_weights, is_causal=causal)
                assert out.is_nested and out.layout == layout and (weights is not None) == need_weights
                for i, got in enumerate(out.unbind()):
                    want, want_weights = module(*[x[i] for x in lists], need_weights=True, is_causal=causal)
                    assert_within(got, want, double_limit(want, 100))
                    if need_weights:
                        rows, columns = want_weights.shape
                        assert_within(weights[i, :rows, :columns], want_weights, 1e-13)
                        assert not weights[i, rows:].any() and not weights[i, :, columns:].any()


def test_decoder_layer_and_whole_transformer() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(EMBED, HEADS, 1, 2, 32, 0.0, batch_first=True, dtype=torch.float64)
    source, target = sequence(2, 6), sequence(2, 5, seed=2)
    call = {
        "tgt_mask": causal_mask(5),
        "tgt_is_causal": True,
        "memory_key_padding_mask": last_hidden(2, 6),
        "src_key_padding_mask": last_hidden(2, 6),
    }
    want = model(source, target, **call)
    for parent in model.modules():
        for child_name, child in list(parent.named_children()):
            if type(child) is nn.MultiheadAttention:
                ours = mha_ext.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64)
                ours.load_state_dict(child.state_dict())
                setattr(parent, child_name, ours)
    for name in MODES:
        with mode(model, name):
            assert_within(model(source, target, **call), want, double_limit(want, 200), name)


def test_training_steps_follow_the_original() -> None:
    """Ten steps of Adam in float64 leave the same parameters; an error in any gradient would grow."""
    modules = pair()
    x, target = sequence(4, 9), sequence(4, 9, seed=5)
    for module, optimiser in ((m, torch.optim.Adam(m.parameters(), 1e-2)) for m in modules):
        for _ in range(10):
            optimiser.zero_grad()
            (module(x, x, x, attn_mask=causal_mask(9))[0] - target).square().mean().backward()
            optimiser.step()
    for got, want in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert_within(got, want, 1e6 * growth(100, torch.float64))


@pytest.mark.parametrize("kind", ["jagged with holes", "strided, transposed"])
def test_nested_inputs_whose_parts_do_not_lie_side_by_side(kind: str) -> None:
    module, x, lengths = make(), sequence(2, 8), (3, 5)
    if kind == "jagged with holes":
        nested = torch.nested.narrow(x, 1, 0, torch.tensor(lengths), layout=torch.jagged)
    else:
        parts = [part[:n].T.contiguous() for part, n in zip(x, lengths, strict=True)]
        nested = torch.nested.nested_tensor(parts).transpose(1, 2)
    out, _ = module(nested, nested, nested, need_weights=False)
    for got, part, n in zip(out.unbind(), x, lengths, strict=True):
        want = module(part[:n], part[:n], part[:n])[0]
        assert_within(got, want, double_limit(want, 100))
