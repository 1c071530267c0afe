"""PyTorch's own samples for ``nn.MultiheadAttention``, run on ours, with the checks that its test suite makes of every
module.

All samples are unbatched ("for validating the no-batch-dim support", says their source); ``batched`` makes two examples
of each. Parameters are random, biases too: a bias of zeros, as a new module has, would hide that it was forgotten.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from cases import DTYPES, generator
from tolerances import assert_within, double_limit
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch_layer_samples import as_function, check_layer, layer_truth
from torch_samples import Call, check_derivatives, evaluate, mild, strided

import mha_ext

(ENTRY,) = [entry for entry in module_db if entry.module_cls is nn.MultiheadAttention]


def samples(entry: ModuleInfo = ENTRY, training: bool = True) -> list[ModuleInput]:
    torch.manual_seed(0)
    return entry.module_inputs_func(entry, device="cpu", dtype=torch.float64, requires_grad=False, training=training)


SAMPLES = samples()
FEW = SAMPLES[::9]  # enough for every kind, as a test says


def kinds(sample: ModuleInput) -> set[str]:
    options, masks = sample.constructor_input.kwargs, sample.forward_input.kwargs
    flags = {f"{n}={options[n]}" for n in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")}
    return flags | {f"{n}: {masks[n] is not None}" for n in ("key_padding_mask", "attn_mask")}


def build(
    sample: ModuleInput, kind: type[nn.MultiheadAttention] = mha_ext.MultiheadAttention, **options: Any
) -> nn.MultiheadAttention:
    module = kind(**{**sample.constructor_input.kwargs, "dtype": torch.float64, **options})
    g = generator(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=g, dtype=torch.float64) * 2 - 1)
    return module


def call_of(module: nn.MultiheadAttention, sample: ModuleInput, batched: bool = False, **more: Any) -> Call:
    """A sample as a call of the layer as a function; two examples of it, one with other numbers, if ``batched``."""
    inputs, masks = list(sample.forward_input.args), dict(sample.forward_input.kwargs)
    if batched:
        inputs = [torch.stack([x, x.flip(0)], 1) for x in inputs]
        if masks["key_padding_mask"] is not None:
            masks["key_padding_mask"] = torch.stack([masks["key_padding_mask"], torch.tensor([False, True, False])])
        if masks["attn_mask"] is not None:
            masks["attn_mask"] = masks["attn_mask"].repeat(2, 1, 1)
    parameters = {n.replace("out_proj.", "out_proj_"): x.detach() for n, x in module.named_parameters()}
    absent = dict.fromkeys(("in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "out_proj_bias"))
    sizes = {"embed_dim_to_check": module.embed_dim, "num_heads": module.num_heads}
    options = {"add_zero_attn": module.add_zero_attn, "dropout_p": module.dropout, "training": module.training}
    return {
        **dict(zip(("query", "key", "value"), inputs, strict=True)), **sizes, **absent, **parameters, **options,
        **masks, **more,
    }  # fmt: skip


def forward(module: nn.Module, sample: ModuleInput) -> tuple[Tensor, Tensor]:
    return module(*sample.forward_input.args, **sample.forward_input.kwargs)


def same_bits(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The samples are too small to share."""
    torch.set_num_threads(1)


# --------------------------------------------------------------------------------------------------- nothing is missing
def test_the_samples_are_all_there_and_of_every_kind() -> None:
    assert len(SAMPLES) >= 64 and len(samples(training=False)) == len(SAMPLES) and len(FEW) >= 8
    for chosen in (SAMPLES, FEW):
        seen = Counter(kind for sample in chosen for kind in kinds(sample))
        flags = {f"{n}={b}" for n in ("bias", "add_bias_kv", "add_zero_attn", "batch_first") for b in (True, False)}
        assert set(seen) == flags | {f"{n}: {b}" for n in ("key_padding_mask", "attn_mask") for b in (True, False)}
    assert all(sample.reference_fn is not None for sample in SAMPLES)
    assert ENTRY.module_error_inputs_func is None, "PyTorch has samples of errors: a test for them is missing"


# ----------------------------------------------------------------------------------------------- results and gradients
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples(dtype: torch.dtype) -> None:
    for i, sample in enumerate(FEW):
        module = build(sample).train(i % 4 < 2)
        check_layer(as_function(module), call_of(module, sample, batched=i % 2 == 0), dtype)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_sample(dtype: torch.dtype, dropout: float, is_causal: bool) -> None:
    for sample in SAMPLES:
        module = build(sample, dropout=dropout)
        for batched in (False, True):
            call = call_of(module, sample, batched)
            if is_causal and call["attn_mask"] is None:
                call["is_causal"] = True
            check_layer(as_function(module), call, dtype)
            check_layer(strided(as_function(module)), call, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_samples_with_dropout_with_the_causal_flag_and_not_contiguous(dtype: torch.dtype) -> None:
    done = 0
    for sample in FEW:
        module = build(sample, dropout=0.4)
        call = call_of(module, sample, batched=True, dropout_p=0.4)
        check_layer(as_function(module), call, dtype)
        if call["attn_mask"] is None:
            check_layer(strided(as_function(module)), call | {"is_causal": True}, dtype)
            done += 1
    assert done >= 4


def test_without_a_batch_axis_as_pytorch_refers_to_it() -> None:
    for sample in SAMPLES:
        module, given = build(sample), sample.forward_input
        assert same_bits(forward(module, sample), sample.reference_fn(module, *given.args, **given.kwargs))


def test_train_eval_and_no_grad_are_one_answer_and_pytorchs() -> None:
    for sample in SAMPLES:
        module, theirs = build(sample), build(sample, nn.MultiheadAttention)
        trained, without_grad = forward(module.train(), sample), None
        with torch.no_grad():
            without_grad = forward(module.eval(), sample)
        assert same_bits(trained, without_grad) and same_bits(trained, forward(module, sample))
        for got, want in zip(trained, forward(theirs, sample), strict=True):
            assert_within(got, want, double_limit(want, 3))


def test_an_example_with_every_key_hidden() -> None:
    """Where PyTorch's own answer is NaN, so that only the exact one counts: the attention is 0."""
    for sample in SAMPLES:
        module = build(sample)
        call = call_of(module, sample, batched=True)
        call["key_padding_mask"] = torch.tensor([[False] * 3, [True] * 3])
        want, _ = layer_truth(call, torch.float64)
        got = evaluate(as_function(module), call | {"average_attn_weights": False}, torch.float64)
        for name, x in got.items():
            assert_within(x, want[name], double_limit(want[name], 100), name)
        if not (module.add_zero_attn or module.bias_k is not None):
            alone = torch.zeros(3) if module.in_proj_bias is None else module.out_proj.bias
            assert torch.equal(got["out"][:, 1], alone.detach().double().expand(3, 3))


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_samples_of_size_zero(empty: str) -> None:
    for sample in FEW:
        module = build(sample)
        call = call_of(module, sample, batched=True, attn_mask=None, key_padding_mask=None)
        cut = {"batch": (slice(None), slice(0)), "queries": (slice(0),), "keys": (slice(0),)}[empty]
        names = {"batch": ("query", "key", "value"), "queries": ("query",), "keys": ("key", "value")}[empty]
        call |= {n: call[n][cut] for n in names}
        want, _ = layer_truth(call, torch.float64)
        got = evaluate(as_function(module), call | {"average_attn_weights": False}, torch.float64)
        assert {n for n, x in want.items() if x.any()} <= set(got)
        for name, x in got.items():
            assert_within(x, want[name], double_limit(want[name], 100), name)


# --------------------------------------------------------------------------------------------------------- derivatives
def test_first_and_second_derivatives() -> None:
    for i, sample in enumerate(FEW[::5]):
        module = build(sample)
        check_derivatives(as_function(module), mild(call_of(module, sample, batched=i % 2 == 0)), fast=True)


@pytest.mark.long
@pytest.mark.parametrize("training", [True, False])
def test_first_and_second_derivatives_of_many_samples(training: bool) -> None:
    """In random directions; for a few of them number by number, which takes ten times as long."""
    for i, sample in enumerate(SAMPLES[::4]):
        module = build(sample, dropout=0.4).train(training)
        check_derivatives(as_function(module), mild(call_of(module, sample, batched=True)), fast=True)
        if i % 5 == 0:
            check_derivatives(as_function(module), mild(call_of(module, sample)), fast=False)


# ------------------------------------------------------------------------------------- what every module is checked for
def test_parameters_go_where_the_factory_arguments_say() -> None:
    for sample in SAMPLES:
        for device, dtype in (("meta", torch.float64), ("cpu", torch.bfloat16)):
            module = build(sample, device=device, dtype=dtype)
            assert {(p.device.type, p.dtype) for p in module.parameters()} == {(device, dtype)}
            with torch.device(device):
                module = mha_ext.MultiheadAttention(**sample.constructor_input.kwargs)
            assert {p.device.type for p in module.parameters()} == {device}


def test_state_pickle_and_copies_give_the_same_bits() -> None:
    for sample in SAMPLES:
        module, theirs = build(sample), build(sample, nn.MultiheadAttention)
        fresh = mha_ext.MultiheadAttention(**sample.constructor_input.kwargs, dtype=torch.float64)
        fresh.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(module.state_dict())
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        twins = (
            fresh,
            copy.deepcopy(module),
            pickle.loads(pickle.dumps(module)),
            torch.load(buffer, weights_only=False),
        )
        for twin in twins:
            assert repr(twin) == repr(module) and same_bits(forward(twin, sample), forward(module, sample))


def test_moving_changes_the_parameters_alone() -> None:
    """``to`` a dtype and back, to a memory format (no parameter has four axes), and ``to_empty`` from meta."""
    for sample in SAMPLES:
        module = build(sample)
        want = forward(module, sample)
        parameters = list(module.parameters())
        assert all(p.dtype == torch.float32 for p in module.to(torch.float32).parameters())
        assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
        module.load_state_dict(build(sample).state_dict())
        module.to(torch.float64).load_state_dict(build(sample).state_dict())
        assert same_bits(forward(module.to(memory_format=torch.channels_last), sample), want)
        empty = build(sample, device="meta").to_empty(device="cpu")
        empty.load_state_dict(module.state_dict())
        assert same_bits(forward(empty, sample), want)


def test_the_mode_matters_with_dropout_and_only_then() -> None:
    assert ENTRY.train_and_eval_differ
    for sample in SAMPLES:
        module = build(sample, dropout=0.5)
        still = forward(module.eval(), sample)
        assert same_bits(still, forward(module, sample)) and not same_bits(still, forward(module.train(), sample))


# ------------------------------------------------------------------------------------------------ inside other modules
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Transformer])
@pytest.mark.parametrize("training", [True, False])
def test_samples_of_transformers_with_ours_inside(kind: type[nn.Module], training: bool) -> None:
    (entry,) = [entry for entry in module_db if entry.module_cls is kind]
    done = 0
    for sample in samples(entry, training):
        made, given = sample.constructor_input, sample.forward_input
        torch.manual_seed(1)
        theirs = kind(*made.args, **made.kwargs).double().train(training)
        model = copy.deepcopy(theirs)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.MultiheadAttention):
                    options = {"bias": child.in_proj_bias is not None, "batch_first": child.batch_first}
                    ours = mha_ext.MultiheadAttention(child.embed_dim, child.num_heads, **options).double()
                    ours.load_state_dict(child.state_dict())
                    setattr(parent, name, ours.train(training))
                    done += 1
        for grad in (
            True,
            False,
        ):  # without, PyTorch's encoder leaves zeros at padded positions, which a decoder may read
            with torch.set_grad_enabled(grad):
                got, want = (x(*given.args, **given.kwargs) for x in (model, theirs))
            assert_within(got, want, double_limit(want, 100))
    assert done >= 32
