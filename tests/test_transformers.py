"""Converted ``nn.Transformer`` and its parts against their equations in float64, in every mode, with every mask."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformer_cases as truth
from layer_cases import EMBED, HEADS, causal_mask, last_hidden, sequence
from switches import threads
from tolerances import assert_within, double_limit
from torch import Tensor, nn
from tracing import Operators
from transformer_cases import MODES, addend, mask_cases, running

import mha_ext

B, T, S, LAYERS = 3, 5, 6, 2
CASES = mask_cases(B, T, HEADS)


def build(kind: type[nn.Module], norm_first: bool, batch_first: bool) -> Any:
    """A float64 model without dropout, converted, with biases that are not zero."""
    options = {"batch_first": batch_first, "norm_first": norm_first, "dtype": torch.float64}
    layers = {
        nn.TransformerEncoder: nn.TransformerEncoderLayer,
        nn.TransformerDecoder: nn.TransformerDecoderLayer,
    }
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind is nn.Transformer:
            model: Any = nn.Transformer(EMBED, HEADS, LAYERS, LAYERS, 32, 0.0, **options)
        elif kind in layers:
            model = kind(layers[kind](EMBED, HEADS, 32, 0.0, **options), LAYERS)
        else:
            model = kind(EMBED, HEADS, 32, 0.0, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return mha_ext.convert(model)


def inputs(batch_first: bool) -> tuple[Tensor, Tensor]:
    """Target and source as the model takes them, with gradients."""
    pair = sequence(B, T), sequence(B, S, seed=2)
    target, source = (x if batch_first else x.transpose(0, 1).contiguous() for x in pair)
    return target.requires_grad_(), source.requires_grad_()


def attention_layers(model: nn.Module) -> int:
    return sum(isinstance(module, nn.MultiheadAttention) for module in model.modules())


@threads(1)
def check(model: nn.Module, name: str, call: Any, exact: Any, leaves: tuple[Tensor, ...]) -> None:
    """Output, operators and, in training, gradients of one call; ``exact`` has the layout of ``call``."""
    with running(model, name):
        with Operators() as ran:
            got = call()
        assert ran.ours == attention_layers(model) and not ran.theirs
    want = exact()
    assert_within(got, want, double_limit(want, 100 * LAYERS), name)
    if name == "train":
        grad_out = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view(got.shape)
        wrt = [*leaves, *model.parameters()]
        gots, wants = (torch.autograd.grad(out, wrt, grad_out, allow_unused=True) for out in (got, want))
        for g, w in zip(gots, wants, strict=True):
            assert (g is None) == (w is None)
            if w is not None:
                assert_within(g, w, double_limit(w, 100 * LAYERS), f"{name}, gradient")


def laid_out(x: Tensor, batch_first: bool) -> Tensor:
    return x if batch_first else x.transpose(0, 1)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_encoder_layer(norm_first: bool, batch_first: bool, name: str) -> None:
    model = build(nn.TransformerEncoderLayer, norm_first, batch_first)
    x, _ = inputs(batch_first)
    for masks in CASES.values():
        keywords = dict(zip(("src_mask", "src_key_padding_mask", "is_causal"), masks, strict=True))
        exact = lambda masks=masks: laid_out(  # noqa: E731
            truth.encoder_layer(model, laid_out(x, batch_first), addend(*masks, (B, T, T))), batch_first
        )
        check(model, name, lambda keywords=keywords: model(x, **keywords), exact, (x,))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_decoder_layer(norm_first: bool, batch_first: bool, name: str) -> None:
    model = build(nn.TransformerDecoderLayer, norm_first, batch_first)
    x, memory = inputs(batch_first)
    seen = last_hidden(B, S)
    bias = torch.randn(T, S, dtype=torch.float64)
    for number, masks in enumerate(CASES.values()):
        keywords = dict(zip(("tgt_mask", "tgt_key_padding_mask", "tgt_is_causal"), masks, strict=True))
        memory_masks = ((None, None), (None, seen), (bias > 0, None), (bias, None))[number % 4]
        keywords |= dict(zip(("memory_mask", "memory_key_padding_mask"), memory_masks, strict=True))
        exact = lambda masks=masks, memory_masks=memory_masks: laid_out(  # noqa: E731
            truth.decoder_layer(
                model,
                laid_out(x, batch_first),
                laid_out(memory, batch_first),
                addend(*masks, (B, T, T)),
                addend(*memory_masks, False, (B, T, S)),
            ),
            batch_first,
        )
        check(model, name, lambda keywords=keywords: model(x, memory, **keywords), exact, (x, memory))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_encoder(norm_first: bool, batch_first: bool, name: str) -> None:
    """It finds causal masks by itself; and in eval without gradients, with padding at the end, it hands its layers a
    nested tensor and gives zeros for padded positions."""
    model = build(nn.TransformerEncoder, norm_first, batch_first)
    assert model.use_nested_tensor == (batch_first and not norm_first)
    x, _ = inputs(batch_first)
    for case, masks in CASES.items():
        keywords = dict(zip(("mask", "src_key_padding_mask", "is_causal"), masks, strict=True))
        nested = model.use_nested_tensor and name in ("no_grad", "inference")
        nested = nested and masks[0] is None and masks[1] is not None
        if nested and case == "everything hidden":
            continue  # the encoder itself fails to pad the nested tensor that it made

        def exact(masks: Any = masks, nested: bool = nested) -> Tensor:
            out = truth.encoder(model, laid_out(x, batch_first), addend(*masks, (B, T, T)))
            return laid_out(out.masked_fill((masks[1] != 0)[..., None], 0.0) if nested else out, batch_first)

        check(model, name, lambda keywords=keywords: model(x, **keywords), exact, (x,))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_decoder(norm_first: bool, batch_first: bool, name: str) -> None:
    model = build(nn.TransformerDecoder, norm_first, batch_first)
    x, memory = inputs(batch_first)
    for case in ("none", "causal and hint", "padding at the start, causal", "float mask and float padding"):
        masks = CASES[case]
        keywords = dict(zip(("tgt_mask", "tgt_key_padding_mask", "tgt_is_causal"), masks, strict=True))
        exact = lambda masks=masks: laid_out(  # noqa: E731
            truth.decoder(
                model, laid_out(x, batch_first), laid_out(memory, batch_first), addend(*masks, (B, T, T)), 0.0
            ),
            batch_first,
        )
        check(model, name, lambda keywords=keywords: model(x, memory, **keywords), exact, (x, memory))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_transformer(norm_first: bool, batch_first: bool, name: str) -> None:
    """As it is used to translate: padding on both sides, and a causal target."""
    model = build(nn.Transformer, norm_first, batch_first)
    target, source = inputs(batch_first)
    source_hidden, target_hidden, future = last_hidden(B, S), last_hidden(B, T), causal_mask(T)

    def call() -> Tensor:
        return model(
            source,
            target,
            tgt_mask=future,
            tgt_is_causal=True,
            src_key_padding_mask=source_hidden,
            tgt_key_padding_mask=target_hidden,
            memory_key_padding_mask=source_hidden,
        )

    def exact() -> Tensor:
        first, second = laid_out(source, batch_first), laid_out(target, batch_first)
        memory = truth.encoder(model.encoder, first, addend(None, source_hidden, False, (B, S, S)))
        own, cross = addend(future, target_hidden, True, (B, T, T)), addend(None, source_hidden, False, (B, T, S))
        return laid_out(truth.decoder(model.decoder, second, memory, own, cross), batch_first)

    check(model, name, call, exact, (target, source))


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerEncoder])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_jagged_inputs(kind: Any, norm_first: bool, name: str) -> None:
    """One nested tensor gives what each sequence gives alone; gradients reach the sequences and the weights."""
    model = build(kind, norm_first, batch_first=True)
    parts = [sequence(1, n, seed=n)[0].requires_grad_() for n in (5, 1, 3)]
    grads = [sequence(1, n, seed=n + 10)[0] for n in (5, 1, 3)]
    with running(model, name):
        with Operators() as ran:
            out = model(torch.nested.as_nested_tensor(parts, layout=torch.jagged))
        assert ran.ours == attention_layers(model) and not ran.theirs and out.layout == torch.jagged
        got = out.unbind()
    want = [
        (truth.encoder_layer if kind is nn.TransformerEncoderLayer else truth.encoder)(model, x[None], 0.0)[0]
        for x in parts
    ]
    for g, w in zip(got, want, strict=True):
        assert_within(g, w, double_limit(w, 100 * LAYERS), name)
    if name == "train":
        leaves = [*parts, *model.parameters()]
        gots, wants = (torch.autograd.grad(list(outs), leaves, grads) for outs in (got, want))
        for g, w in zip(gots, wants, strict=True):
            assert_within(g, w, double_limit(w, 100 * LAYERS), "gradient")


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_inputs_without_any_token(layout: torch.layout) -> None:
    module = mha_ext.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64)
    empty, full = ([torch.ones(n, EMBED, dtype=torch.float64) for n in lengths] for lengths in ((0, 0), (2, 1)))
    empty, full = (torch.nested.nested_tensor(parts, layout=layout) for parts in (empty, full))
    for query, memory, lengths in ((empty, empty, [0, 0]), (empty, full, [0, 0]), (full, empty, [2, 1])):
        out, weights = module(query, memory, memory)
        assert [len(part) for part in out.unbind()] == lengths and weights.shape[:2] == (2, max(lengths))
        assert all(torch.equal(part, module.out_proj.bias.expand(len(part), -1)) for part in out.unbind())
