"""``convert``, ``revert`` and ``conversion_report`` on whole models: what is swapped and what keeps working."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from layer_cases import EMBED, HEADS, MODES, exact_layer, last_hidden, make, mode, sequence
from tolerances import assert_within, double_limit
from torch import Tensor, nn
from tracing import Operators

import mha_ext

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "time first, dropout": {"batch_first": False, "dropout": 0.3},
    "other widths": {"kdim": 6, "vdim": 10},
    "appended": {"add_bias_kv": True, "add_zero_attn": True},
    "float32": {"dtype": torch.float32},
}


def original(**options: Any) -> Any:
    return make(nn.MultiheadAttention, **options)


def attend(module: nn.Module, x: Tensor, **options: Any) -> Tensor:
    return module(x, x, x, **{"need_weights": False, **options})[0]


def twin_of(module: nn.Module, **options: Any) -> nn.MultiheadAttention:
    """A module of the original's class with the same parameters, never touched by convert."""
    twin = original(**options)
    twin.load_state_dict(module.state_dict())
    return twin


class Twice(nn.MultiheadAttention):
    """A user's class that changes what goes in and what comes out."""

    def forward(self, query: Tensor, *args: Any, **options: Any) -> Any:
        out, weights = super().forward(query * 0.5, *args, **options)
        return 2 * out, weights


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_converted_module_is_like_one_built_as_ours(options: dict[str, Any]) -> None:
    built, module = make(**options), original(**options)
    assert mha_ext.convert(module) is module
    assert type(module) is mha_ext.MultiheadAttention
    assert module.__dict__.keys() == built.__dict__.keys()
    plain = {name for name, value in built.__dict__.items() if isinstance(value, (int, float, bool, type(None)))}
    assert {name: module.__dict__[name] for name in plain} == {name: built.__dict__[name] for name in plain}
    assert module.state_dict().keys() == built.state_dict().keys()
    assert repr(module) == repr(built)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_revert_leaves_what_was_there(options: dict[str, Any]) -> None:
    module = original(**options).eval()
    module.in_proj_bias = None if module.in_proj_bias is None else module.in_proj_bias.requires_grad_(False)
    before, text, pickled = dict(module.__dict__), repr(module), pickle.dumps(dict(module.state_dict()))
    assert mha_ext.revert(mha_ext.convert(module)) is module
    assert type(module) is nn.MultiheadAttention
    assert module.__dict__.keys() == before.keys()
    assert all(module.__dict__[name] is before[name] for name in before)
    assert (repr(module), pickle.dumps(dict(module.state_dict()))) == (text, pickled)
    assert type(pickle.loads(pickle.dumps(module))) is type(copy.deepcopy(module)) is nn.MultiheadAttention


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_modules_built_as_ours_become_the_original(options: dict[str, Any]) -> None:
    module, plain = make(**options), original(**options)
    mha_ext.revert(module)
    assert type(module) is nn.MultiheadAttention
    assert module.__dict__.keys() == plain.__dict__.keys()
    assert module._qkv_same_embed_dim == plain._qkv_same_embed_dim
    query, width = sequence(2, 5).to(module.out_proj.weight.dtype), module.out_proj.weight.dtype
    key, value = sequence(2, 5, module.kdim, 2, width), sequence(2, 5, module.vdim, 3, width)
    with mode(module, "eval"), mode(plain, "eval"):
        assert torch.equal(module(query, key, value)[0], plain(query, key, value)[0])


@pytest.mark.parametrize("options", [{"num_kv_heads": 2}, {"head_dim": 8}], ids=str)
def test_what_the_original_cannot_express_stays_ours(options: dict[str, Any]) -> None:
    module = make(**options)
    before = dict(module.__dict__)
    mha_ext.revert(module)
    assert type(module) is mha_ext.MultiheadAttention and module.__dict__ == before
    (entry,) = mha_ext.conversion_report(module)
    assert entry.converted and next(iter(options)) in entry.reason and "revert leaves it" in entry.reason


@pytest.mark.parametrize("name", MODES)
def test_our_kernels_run_after_convert_and_theirs_after_revert(name: str) -> None:
    model = nn.ModuleDict({"a": original(), "b": nn.Sequential(original(seed=3))})
    x, wants = sequence(2, 6), {}
    for key, module in (("a", model["a"]), ("b", model["b"][0])):
        wants[key] = exact_layer(module, (x, x, x), is_causal=True).out
    with mode(model, name):
        for converted in (True, False):
            (mha_ext.convert if converted else mha_ext.revert)(model)
            for key, module in (("a", model["a"]), ("b", model["b"][0])):
                with Operators() as ran:
                    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
                    got = attend(module, x, attn_mask=mask, is_causal=True)
                assert (ran.ours == 1) == converted and bool(ran.theirs) != converted
                assert_within(got, wants[key], double_limit(wants[key], 100))


def test_reverted_modules_can_be_scripted_and_take_the_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True, dtype=torch.float64).eval()
    x = sequence(2, 6)
    with torch.no_grad():
        want = layer(x)
        mha_ext.convert(layer)
        with Operators() as ran:
            assert_within(layer(x), want, double_limit(want, 100))
        assert ran.ours == 1 and not ran.theirs
        mha_ext.revert(layer)
        with Operators() as ran:
            assert torch.equal(layer(x), want)
        assert ran.theirs == {"aten::_transformer_encoder_layer_fwd"}
        assert torch.equal(torch.jit.script(layer.self_attn)(x, x, x)[0], layer.self_attn(x, x, x)[0])


def test_converting_twice_is_converting_once() -> None:
    model = nn.Transformer(EMBED, HEADS, 1, 1, 32, batch_first=True)
    once = {name: dict(module.__dict__) for name, module in mha_ext.convert(model).named_modules()}
    twice = {name: dict(module.__dict__) for name, module in mha_ext.convert(model).named_modules()}
    assert once == twice
    layers = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    assert len(layers) == 3 and all(type(module) is mha_ext.MultiheadAttention for module in layers)


@pytest.mark.parametrize("swap", [mha_ext.convert, mha_ext.revert])
def test_out_of_place_leaves_the_model_alone(swap: Any) -> None:
    model = nn.ModuleList([original(), Twice(EMBED, HEADS), make()])
    model.append(model[0])
    kinds, states = [type(module) for module in model], [dict(module.__dict__) for module in model]
    other = swap(model, inplace=False)
    assert other is not model and other[3] is other[0]
    wanted = mha_ext.MultiheadAttention if swap is mha_ext.convert else nn.MultiheadAttention
    assert [type(module) for module in other] == [wanted, Twice, wanted, wanted]
    assert [type(module) for module in model] == kinds and [dict(module.__dict__) for module in model] == states
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}


def test_shared_modules_and_tied_weights_stay_shared() -> None:
    shared, tied = original(), original(seed=3)
    tied.in_proj_weight = shared.in_proj_weight
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": tied})
    mha_ext.convert(model)
    assert model["a"] is model["b"][0] is shared and model["c"].in_proj_weight is shared.in_proj_weight
    assert [entry.name for entry in mha_ext.conversion_report(model)] == ["a", "c"]
    x = sequence(2, 5)
    (attend(model["a"], x) + attend(model["c"], x)).sum().backward()
    got = shared.in_proj_weight.grad
    grads = [exact_layer(m, (x, x, x), torch.ones_like(x)).grads["in_proj_weight"] for m in (shared, tied)]
    assert_within(got, sum(grads), double_limit(got, 100))


def test_an_optimiser_made_before_keeps_its_parameters_and_state() -> None:
    """Five steps, convert, five steps, revert, five steps: as fifteen steps of a module that nobody touches."""
    modules = original(), original()
    x, target = sequence(3, 7), sequence(3, 7, seed=5)
    optimisers = [torch.optim.SGD(module.parameters(), 0.1, momentum=0.9) for module in modules]
    for swap in (lambda module: module, mha_ext.convert, mha_ext.revert):
        swap(modules[0])
        for module, optimiser in zip(modules, optimisers, strict=True):
            for _ in range(5):
                optimiser.zero_grad()
                (attend(module, x) - target).square().mean().backward()
                optimiser.step()
    for got, want in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert_within(got, want, double_limit(want, 15 * 100))


def test_hooks_registered_before_stay() -> None:
    module, calls = original(), []
    note = lambda name: lambda *_args, **_options: calls.append(name)  # noqa: E731
    module.register_forward_pre_hook(note("pre"), with_kwargs=True)
    module.register_forward_hook(lambda _module, _args, options, _out: calls.append(sorted(options)), with_kwargs=True)
    module.register_full_backward_pre_hook(note("backward pre"))
    module.register_full_backward_hook(note("backward"))
    module.register_state_dict_pre_hook(note("state_dict pre"))
    module.register_state_dict_post_hook(note("state_dict"))
    module.register_load_state_dict_pre_hook(note("load pre"))
    module.register_load_state_dict_post_hook(note("load"))
    module.out_proj.register_forward_hook(note("out_proj"))
    module.in_proj_weight.register_hook(note("weight"))
    x = sequence(1, 3).requires_grad_()

    def life() -> list[Any]:
        calls.clear()
        attend(module, x).sum().backward()
        module.load_state_dict(module.state_dict())
        return list(calls)

    first = life()  # the original skips out_proj
    wanted = [*first[:1], "out_proj", *first[1:]]
    assert first[0] == "pre" and ["need_weights"] in first and len(first) == 9
    mha_ext.convert(module)
    assert life() == wanted
    mha_ext.revert(module)
    assert life() == first


def test_frozen_parameters_modes_and_attributes_stay() -> None:
    module = original(dropout=0.5).eval()
    module.in_proj_weight.requires_grad_(False)
    module.tag = object()
    wanted = {name: (parameter, parameter.requires_grad) for name, parameter in module.named_parameters()}
    tag = module.tag
    mha_ext.convert(module)
    assert {n: (p, p.requires_grad) for n, p in module.named_parameters()} == wanted
    assert not module.training and module.tag is tag
    x = sequence(1, 4)
    attend(module, x).sum().backward()
    assert module.in_proj_weight.grad is None and module.out_proj.weight.grad is not None


def test_meta_modules_are_swapped_and_given_memory_later() -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True, dtype=torch.float64)
    filled = nn.TransformerEncoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True, dtype=torch.float64)
    assert mha_ext.convert(model).self_attn.in_proj_weight.is_meta
    model.to_empty(device="cpu").load_state_dict(filled.state_dict())
    x = sequence(2, 5)
    want = filled(x)
    assert_within(model(x), want, double_limit(want, 100))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_wrapped_models(wrap: Any) -> None:
    """A compiled model sees that the class changed, in both directions, and compiles again."""
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True, dtype=torch.float64)
    model, x = wrap(layer), sequence(2, 5)
    want = model(x)
    for swap, ours in ((mha_ext.convert, 1), (mha_ext.revert, 0)):
        assert swap(model) is model
        with Operators() as ran:
            got = model(x)
        assert ran.ours == ours and bool(ran.theirs) != bool(ours)
        assert_within(got, want, double_limit(want, 100))


def test_adapter_on_out_proj() -> None:
    class LowRank(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down, self.up = (nn.Parameter(sequence(1, *s)[0]) for s in ((2, EMBED), (EMBED, 2)))

        @property
        def weight(self) -> Tensor:
            return self.base.weight

        @property
        def bias(self) -> Tensor:
            return self.base.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.down.mT @ self.up.mT

    module = original()
    merged = twin_of(module)
    module.out_proj = LowRank(module.out_proj)
    with torch.no_grad():
        merged.out_proj.weight += module.out_proj.up @ module.out_proj.down
    mha_ext.convert(module)
    x = sequence(2, 5)
    want = exact_layer(merged, (x, x, x)).out
    assert_within(attend(module, x), want, double_limit(want, 100))
    mha_ext.revert(module)
    assert isinstance(module.out_proj, LowRank)


def test_separate_weights_though_widths_are_equal() -> None:
    """Some code splits the packed weight and says so in ``_qkv_same_embed_dim``; copies have to keep to it too."""
    module = original()
    x = sequence(2, 5)
    want = exact_layer(module, (x, x, x)).out
    for name, part in zip(
        ("q_proj_weight", "k_proj_weight", "v_proj_weight"), module.in_proj_weight.chunk(3), strict=True
    ):
        setattr(module, name, nn.Parameter(part.detach().clone()))
    module.in_proj_weight = None
    module._qkv_same_embed_dim = False
    mha_ext.convert(module)
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_within(attend(each, x), want, double_limit(want, 100))
        assert mha_ext.revert(each)._qkv_same_embed_dim is False
        assert_within(attend(each, x), want, double_limit(want, 100))


@pytest.mark.parametrize("where", [mha_ext.convert, mha_ext.revert, mha_ext.conversion_report])
def test_only_modules_are_taken(where: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{where.__name__}: model must be a torch.nn.Module, got dict$"):
        where({"a": original()})


def test_report_before_and_after() -> None:
    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoderLayer(8, 2, batch_first=True),
            "own": Twice(8, 2),
            "grouped": make(num_kv_heads=1),
        }
    )
    original_name, own_name = "torch.nn.modules.activation.MultiheadAttention", f"{__name__}.Twice"
    report = mha_ext.conversion_report(model)
    assert isinstance(report, list) and [tuple(entry)[:3] for entry in report] == [
        ("encoder.self_attn", original_name, False),
        ("own", own_name, False),
        ("grouped", "mha_ext.module.MultiheadAttention", True),
    ]
    assert str(report).splitlines() == [
        f"encoder.self_attn: {original_name}, convert would swap it",
        f"own: {own_name}, left alone: a subclass of nn.MultiheadAttention; pass subclasses=True to swap it",
        "grouped: mha_ext.module.MultiheadAttention, is mha_ext's; revert leaves it: num_kv_heads 1 differs from "
        "num_heads 4",
    ]
    assert mha_ext.conversion_report(model, subclasses=True)[1].reason == "convert would swap it"
    mha_ext.convert(model)
    assert [entry.converted for entry in mha_ext.conversion_report(model)] == [True, False, True]
    assert str(mha_ext.conversion_report(nn.Linear(2, 2))) == "no nn.MultiheadAttention"
    (entry,) = mha_ext.conversion_report(original())
    assert str(entry) == f"(the model): {original_name}, convert would swap it"


@pytest.mark.parametrize("compile_model", [torch.jit.script, lambda m: torch.jit.trace(m, (torch.randn(2, 3, 8),))])
def test_scripted_models_are_told_and_left(compile_model: Any) -> None:
    scripted = compile_model(nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True))
    (entry,) = mha_ext.conversion_report(mha_ext.convert(scripted))
    assert entry.name == "self_attn" and not entry.converted and "torch.jit" in entry.reason


def test_a_module_of_an_old_release() -> None:
    """Without the attributes that came later, as unpickling leaves it."""
    module = original(batch_first=False)
    want = attend(module, sequence(2, 5))
    for name in ("batch_first", "kdim", "vdim", "_qkv_same_embed_dim"):
        del module.__dict__[name]
    mha_ext.convert(module)
    assert_within(attend(module, sequence(2, 5)), want, double_limit(want, 100))
    mha_ext.revert(module)
    assert_within(attend(module, sequence(2, 5)), want, double_limit(want, 100))


def test_saved_converted_models_load_as_ours() -> None:
    model = mha_ext.convert(nn.TransformerEncoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True, dtype=torch.float64))
    file, x, hidden = io.BytesIO(), sequence(2, 5), last_hidden(2, 5)
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded.self_attn) is mha_ext.MultiheadAttention
    with Operators() as ran:
        assert torch.equal(loaded(x, src_key_padding_mask=hidden), model(x, src_key_padding_mask=hidden))
    assert ran.ours == 2
