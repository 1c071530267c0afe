"""What a module lives through between two calls: made, seeded, copied, stored, loaded; beside the original, whose
parameters, files and attributes are ours."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import (
    EMBED,
    HEADS,
    SHARED_HEADS,
    VARIANTS,
    assert_agree,
    inputs_for,
    make,
    pair,
    same_states,
    sequence,
)
from torch import Tensor, nn

import mha_ext


# ---------------------------------------------------------------------------------------------------- made and seeded
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", [None, "cpu", "meta"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_same_seed_same_parameters_same_generator_state(
    options: dict[str, Any], device: str | None, dtype: torch.dtype | None
) -> None:
    options = {"num_heads": HEADS, "dropout": 0.1, **options, "device": device, "dtype": dtype}
    modules, states = [], []
    for kind in (mha_ext.MultiheadAttention, nn.MultiheadAttention):
        torch.manual_seed(3)
        modules.append(kind(EMBED, **options))
        states.append(torch.get_rng_state())
    assert same_states(*modules)
    assert torch.equal(*states)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_default_dtype_and_device_context(options: dict[str, Any]) -> None:
    options = {"num_heads": HEADS, **options}
    torch.set_default_dtype(torch.float64)
    for context in (contextlib.nullcontext(), torch.device("meta")):
        modules = []
        for kind in (mha_ext.MultiheadAttention, nn.MultiheadAttention):
            torch.manual_seed(3)
            with context:
                modules.append(kind(EMBED, **options))
        assert same_states(*modules) and modules[0].out_proj.weight.dtype == torch.float64


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_initialising_again(options: dict[str, Any]) -> None:
    """``_reset_parameters`` is the original's, which leaves the output weight alone; ``reset_parameters`` gives what a
    new module has."""
    ours, theirs = make(seed=1, **options), make(nn.MultiheadAttention, 1, **options)
    for module in (ours, theirs):
        torch.manual_seed(4)
        module._reset_parameters()
    assert same_states(ours, theirs)
    torch.manual_seed(5)
    ours.reset_parameters()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    new = nn.MultiheadAttention(EMBED, **{"num_heads": HEADS, "batch_first": True, "dtype": torch.float64, **options})
    assert same_states(ours, new) and torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("options", SHARED_HEADS, ids=str)
def test_shared_heads_are_initialised_again_and_shown(options: dict[str, Any]) -> None:
    module = make(**options)
    for name, parameter in module.named_parameters():
        nn.init.constant_(parameter, 7.0)
        assert bool((parameter == 7.0).all()), name
    torch.manual_seed(5)
    module.reset_parameters()
    torch.manual_seed(5)
    new = mha_ext.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64, **options)
    assert same_states(module, new)
    assert all(f"{name}={value}" in module.extra_repr() for name, value in options.items())


def test_repr_names_what_differs_from_the_defaults() -> None:
    assert mha_ext.MultiheadAttention(16, 4).extra_repr() == "16, 4"
    module = mha_ext.MultiheadAttention(
        16, 4, 0.1, False, True, True, 8, 6, True, num_kv_heads=2, head_dim=6, dtype=torch.float64
    )
    assert module.extra_repr() == (
        "16, 4, dropout=0.1, kdim=8, vdim=6, add_zero_attn=True, batch_first=True, num_kv_heads=2, head_dim=6, "
        "bias=False, add_bias_kv=True"
    )
    assert repr(module).startswith(f"MultiheadAttention(\n  {module.extra_repr()}\n  (out_proj): NonDynamically")


# --------------------------------------------------------------------------------------------------- stored and loaded
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_state_dict_both_ways_and_attributes(options: dict[str, Any]) -> None:
    ours, theirs = make(seed=1, **options), make(nn.MultiheadAttention, 2, **options)
    state = ours.state_dict()
    assert list(state) == list(theirs.state_dict()) and state._metadata == theirs.state_dict()._metadata
    theirs.load_state_dict(state, strict=True)
    assert same_states(ours, theirs)
    ours = make(seed=3, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert same_states(ours, theirs)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    for name in ("embed_dim", "num_heads", "head_dim", "kdim", "vdim", "dropout", "batch_first", "add_zero_attn"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in (
        "bias_k",
        "bias_v",
        "in_proj_weight",
        "in_proj_bias",
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
    ):
        assert (getattr(ours, name) is None) == (getattr(theirs, name) is None)
    assert type(ours.out_proj) is type(theirs.out_proj)
    assert ours._qkv_same_embed_dim is theirs._qkv_same_embed_dim
    assert ours.__constants__ == theirs.__constants__


def without_bias(state: dict[str, Tensor]) -> None:
    del state["in_proj_bias"]


def renamed(state: dict[str, Tensor]) -> None:
    state["module.in_proj_weight"] = state.pop("in_proj_weight")


def narrower(state: dict[str, Tensor]) -> None:
    state["out_proj.weight"] = state["out_proj.weight"][:, 1:]


@pytest.mark.parametrize("spoil", [without_bias, renamed, narrower])
def test_what_does_not_fit_is_named_as_in_the_original(spoil: Callable[[dict[str, Tensor]], None]) -> None:
    messages = []
    for module in pair():
        state = module.state_dict()
        spoil(state)
        with pytest.raises(RuntimeError, match="state_dict for MultiheadAttention") as caught:
            module.load_state_dict(state)
        messages.append(str(caught.value))
        if spoil is not narrower:
            messages.append(str(module.load_state_dict(state, strict=False)))
    assert messages[: len(messages) // 2] == messages[len(messages) // 2 :]


class Renaming(pickle.Unpickler):
    """Reads files that were written while the original stood under the name that ours has now."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.nn.modules.activation", "MultiheadAttention"):
            return mha_ext.MultiheadAttention
        return super().find_class(module, name)


def saved_and_loaded(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize("options", [*VARIANTS, *SHARED_HEADS], ids=str)
def test_copies_give_the_same_bits(options: dict[str, Any]) -> None:
    module = make(**options)
    inputs = inputs_for(module)
    want = module(*inputs)
    copies = [copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module)), saved_and_loaded(module)]
    for twin in copies:
        assert (
            type(twin) is type(module) and repr(twin) == repr(module) and twin.__dict__.keys() == module.__dict__.keys()
        )
        got = twin(*inputs)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_whole_modules_of_the_original_load_as_ours_and_ours_as_the_original(options: dict[str, Any]) -> None:
    ours, theirs = pair(**options)
    loaded = Renaming(io.BytesIO(pickle.dumps(theirs))).load()
    assert type(loaded) is mha_ext.MultiheadAttention and repr(loaded) == repr(ours)
    assert_agree(loaded, theirs, inputs_for(theirs))
    assert_agree(copy.deepcopy(loaded), theirs, inputs_for(theirs))
    back = nn.MultiheadAttention.__new__(nn.MultiheadAttention)
    back.__setstate__(dict(ours.__dict__))
    assert_agree(ours, back, inputs_for(theirs))


class _LinearWithBias(nn.Linear):
    """The class of the output projection between torch 1.4 and 1.8."""


@pytest.mark.parametrize("output", [nn.Linear, _LinearWithBias])
@pytest.mark.parametrize(
    "missing",
    [
        ("batch_first",),
        ("_qkv_same_embed_dim",),
        ("batch_first", "_qkv_same_embed_dim", "kdim", "vdim"),
        ("batch_first", "_qkv_same_embed_dim", "kdim", "vdim", "head_dim"),
    ],
    ids=str,
)
def test_old_files_that_lack_attributes(missing: tuple[str, ...], output: type[nn.Linear]) -> None:
    """What torch 1.0 and later stored: fewer attributes, no parameters that are None, another class for the output."""
    theirs = make(nn.MultiheadAttention, batch_first=False)
    projection = output(EMBED, EMBED, dtype=torch.float64)
    projection.load_state_dict(theirs.out_proj.state_dict())
    state = {n: x for n, x in copy.deepcopy(theirs).__dict__.items() if n not in missing}
    state["_parameters"] = {n: p for n, p in state["_parameters"].items() if p is not None}
    state["_modules"] = {"out_proj": projection}
    old = mha_ext.MultiheadAttention.__new__(mha_ext.MultiheadAttention)
    old.__setstate__(state)
    assert_agree(old, theirs, inputs_for(theirs))
    assert repr(old).startswith("MultiheadAttention(\n  16, 4\n") and old._qkv_same_embed_dim


def test_old_files_with_separate_and_packed_weights() -> None:
    """Between torch 1.1 and 1.3 the packed weight was there too, and unused: the flag decides, not its presence."""
    theirs = make(nn.MultiheadAttention, kdim=8, vdim=6)
    state = copy.deepcopy(theirs).__dict__
    state["_parameters"]["in_proj_weight"] = nn.Parameter(torch.randn(3 * EMBED, EMBED, dtype=torch.float64))
    old = mha_ext.MultiheadAttention.__new__(mha_ext.MultiheadAttention)
    old.__setstate__(dict(state))
    theirs.__setstate__(dict(state))
    assert_agree(old, theirs, inputs_for(theirs))
    assert not old._qkv_same_embed_dim


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("options", [*VARIANTS, *SHARED_HEADS], ids=str)
def test_materialised_from_the_meta_device(options: dict[str, Any], assign: bool) -> None:
    want = make(**options)
    module = make(device="meta", **options)
    inputs = inputs_for(want)
    out, weights = module(*[x.to("meta") for x in inputs])
    assert out.device.type == weights.device.type == "meta" and out.shape == want(*inputs)[0].shape
    module = module if assign else module.to_empty(device="cpu")
    state = copy.deepcopy(want.state_dict())
    module.load_state_dict(state, assign=assign)
    assert same_states(module, want) and torch.equal(module(*inputs)[0], want(*inputs)[0])
    assert (
        module.in_proj_bias is None or module.in_proj_bias.data_ptr() == state["in_proj_bias"].data_ptr()
    ) or not assign


def test_made_without_initialisation() -> None:
    before = torch.get_rng_state()
    module = nn.utils.skip_init(mha_ext.MultiheadAttention, EMBED, HEADS, dtype=torch.float64, batch_first=True)
    assert torch.equal(torch.get_rng_state(), before)
    module.load_state_dict(make().state_dict())
    x = sequence(2, 5)
    assert torch.equal(module(x, x, x)[0], make()(x, x, x)[0])
