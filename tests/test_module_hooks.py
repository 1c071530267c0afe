"""Hooks on the module, on its output projection, on parameters and everywhere; whatever stands in for the output
projection acts. The original reads the projection's weight and passes by all of this."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_cases import EMBED, MODES, gradients, make, mode, pair, sequence
from tolerances import assert_within, double_limit
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear


class Adapter(nn.Module):
    """A low-rank update beside a frozen linear map, as fine-tuning libraries insert it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=torch.float64))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("need_weights", [True, False])
def test_an_adapter_on_the_output_projection_acts(name: str, need_weights: bool) -> None:
    module, x = make(), sequence(2, 5)
    merged = make()
    module.out_proj = Adapter(module.out_proj)
    with torch.no_grad():
        merged.out_proj.weight += module.out_proj.up @ module.out_proj.down
    with mode(module, name), mode(merged, name):
        out, want = (m(x, x, x, need_weights=need_weights)[0] for m in (module, merged))
    assert_within(out, want, double_limit(want, EMBED))
    if name == "train":
        out.sum().backward()
        assert (
            module.out_proj.up.grad.any()
            and module.out_proj.down.grad.any()
            and module.out_proj.base.weight.grad is None
        )


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("need_weights", [True, False])
def test_hooks_on_the_output_projection_and_on_the_module_run(name: str, need_weights: bool) -> None:
    module, x = make(), sequence(2, 5)
    with mode(module, name):
        want = module(x, x, x, need_weights=need_weights)[0]
        calls: list[str] = []
        handles = [
            module.out_proj.register_forward_pre_hook(lambda *_: calls.append("pre")),
            module.out_proj.register_forward_hook(lambda m, i, o: (calls.append("post"), o + 1)[1]),
            module.register_forward_hook(lambda m, i, o: (calls.append("module"), (o[0] * 2, o[1]))[1]),
        ]
        out = module(x, x, x, need_weights=need_weights)[0]
        assert calls == ["pre", "post", "module"]
        assert_within(out, 2 * (want + 1), double_limit(want, EMBED))
        for handle in handles:
            handle.remove()
        assert torch.equal(module(x, x, x, need_weights=need_weights)[0], want)


@pytest.mark.parametrize("kind", ["pre", "post", "backward", "global", "instance"])
def test_each_way_of_reaching_into_the_output_projection_alone(kind: str) -> None:
    module, x = make(), sequence(2, 5).requires_grad_()
    calls: list[str] = []

    def note(*_: Any) -> None:
        calls.append(kind)

    plain = module.out_proj.forward
    handle = None
    if kind == "pre":
        handle = module.out_proj.register_forward_pre_hook(note)
    elif kind == "post":
        handle = module.out_proj.register_forward_hook(note)
    elif kind == "backward":
        handle = module.out_proj.register_full_backward_hook(note)
    elif kind == "global":
        handle = nn.modules.module.register_module_forward_hook(lambda m, *_: note() if m is module.out_proj else None)
    else:
        module.out_proj.forward = lambda y: (note(), plain(y))[1]
    try:
        module(x, x, x, need_weights=False)[0].sum().backward()
    finally:
        if handle is not None:
            handle.remove()
    assert calls == [kind]


# -------------------------------------------------------------------------------------- before and after the output
class Halved(nn.Linear):
    """A linear map by its type, not by what it does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class HalvedToo(NonDynamicallyQuantizableLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def replaced_by(kind: type[nn.Linear]) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        other = kind(EMBED, EMBED, dtype=torch.float64)
        other.load_state_dict(module.out_proj.state_dict())
        module.out_proj = other

    return change


def instance_forward(module: Any) -> None:
    plain = module.out_proj.forward
    module.out_proj.forward = lambda x: plain(x) / 2


def wrapped(module: Any) -> None:
    module.out_proj = nn.Sequential(module.out_proj, nn.LayerNorm(EMBED, dtype=torch.float64))


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "pre": (
        lambda m: m.out_proj.register_forward_pre_hook(lambda _, x: (2 * x[0],)),
        lambda x, w, b: F.linear(2 * x, w, b),
    ),
    "pre, one tensor": (
        lambda m: m.out_proj.register_forward_pre_hook(lambda _, x: x[0] + 1),
        lambda x, w, b: F.linear(x + 1, w, b),
    ),
    "pre with keywords": (
        lambda m: m.out_proj.register_forward_pre_hook(lambda _, x, k: ((-x[0],), k), with_kwargs=True),
        lambda x, w, b: F.linear(-x, w, b),
    ),
    "post": (
        lambda m: m.out_proj.register_forward_hook(lambda _, x, y: y + x[0]),
        lambda x, w, b: F.linear(x, w, b) + x,
    ),
    "post with keywords": (
        lambda m: m.out_proj.register_forward_hook(lambda _, x, k, y: y * (len(k) + 3), with_kwargs=True),
        lambda x, w, b: F.linear(x, w, b) * 3,
    ),
    "module post": (
        lambda m: m.register_forward_hook(lambda _, x, y: (y[0] - x[0], y[1])),
        lambda x, w, b: F.linear(x, w, b) - sequence(2, 5),
    ),
    "forward of the instance": (instance_forward, lambda x, w, b: F.linear(x, w, b) / 2),
    "subclass": (replaced_by(Halved), lambda x, w, b: F.linear(x, w, b) / 2),
    "other subclass": (replaced_by(HalvedToo), lambda x, w, b: F.linear(x, w, b) / 2),
    "container": (wrapped, lambda x, w, b: F.layer_norm(F.linear(x, w, b), (EMBED,))),
    "nothing": (lambda m: setattr(m, "out_proj", nn.Identity()), lambda x, w, b: x),
}


def context_of(theirs: nn.MultiheadAttention, *inputs: Tensor) -> Tensor:
    """What the original computes before its output projection."""
    bare = copy.deepcopy(theirs)
    with torch.no_grad():
        bare.out_proj.weight.copy_(torch.eye(EMBED))
        bare.out_proj.bias.zero_()
        return bare(*inputs)[0]


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_the_output_projection_is_in_the_output(change: str, need_weights: bool, name: str) -> None:
    ours, theirs = pair()
    x = sequence(2, 5)
    want = CHANGES[change][1](context_of(theirs, x, x, x), theirs.out_proj.weight, theirs.out_proj.bias)
    CHANGES[change][0](ours)
    for module in (ours, copy.deepcopy(ours)) if change != "forward of the instance" else (ours,):
        with mode(module, name):
            assert_within(module(x, x, x, need_weights=need_weights)[0], want, double_limit(want, EMBED))


EVERYWHERE = {
    "pre": everywhere.register_module_forward_pre_hook,
    "post": everywhere.register_module_forward_hook,
    "backward": everywhere.register_module_full_backward_hook,
    "backward pre": everywhere.register_module_full_backward_pre_hook,
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", EVERYWHERE)
def test_hooks_on_all_modules_see_the_output_projection_and_the_module(kind: str, need_weights: bool) -> None:
    module, x = make(), sequence(2, 5).requires_grad_()
    seen: list[nn.Module] = []
    handle = EVERYWHERE[kind](lambda m, *_: seen.append(m))  # type: ignore[func-returns-value]
    try:
        module(x, x, x, need_weights=need_weights)[0].sum().backward()
    finally:
        handle.remove()
    inner_first = kind in ("post", "backward")
    assert seen == ([module.out_proj, module] if inner_first else [module, module.out_proj])


@pytest.mark.parametrize("need_weights", [True, False])
def test_hooks_that_are_always_called_are_called_after_an_error(need_weights: bool) -> None:
    module, x, calls = make(), sequence(2, 5), []

    def fails(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    module.out_proj.register_forward_hook(lambda *_: calls.append("output"), always_call=True)
    module.register_forward_hook(lambda *_: calls.append("module"), always_call=True)
    module.out_proj.register_forward_pre_hook(fails)
    with pytest.raises(ArithmeticError, match="on purpose"):
        module(x, x, x, need_weights=need_weights)
    assert calls == ["output", "module"]


def test_keywords_reach_hooks_on_the_module_and_come_back_changed() -> None:
    """How attention maps are taken out of models that do not return them."""
    ours, theirs = pair()
    x = sequence(2, 5)
    results = []
    for module in (ours, theirs):
        maps: list[Tensor] = []
        module.register_forward_pre_hook(
            lambda _, x, k: (x, {**k, "need_weights": True, "average_attn_weights": False}), with_kwargs=True
        )
        module.register_forward_hook(lambda _, x, k, y, maps=maps: maps.append(y[1]), with_kwargs=True)
        module(x, x, x, need_weights=False)
        results.append(maps[0])
    assert_within(results[0], results[1], 1e-13)


# ------------------------------------------------------------------------------------------------------------- backward
@pytest.mark.parametrize("need_weights", [True, False])
def test_backward_hooks_on_the_output_projection_change_what_flows_on(need_weights: bool) -> None:
    """A hook after its backward pass scales what goes on to the input side; one before it scales everything."""
    x, grad_out = sequence(2, 5), torch.randn(2, 5, EMBED, dtype=torch.float64)
    plain = gradients(make(), (x, x, x), grad_out)
    after, before = make(), make()
    after.out_proj.register_full_backward_hook(lambda _, grads, __: (3 * grads[0],))
    before.out_proj.register_full_backward_pre_hook(lambda _, grads: (3 * grads[0],))
    for module, unscaled in ((after, ("out_proj.weight", "out_proj.bias")), (before, ())):
        for name, grad in gradients(module, (x, x, x), grad_out, need_weights=need_weights).items():
            want = plain[name] * (1 if name in unscaled else 3)
            assert_within(grad, want, double_limit(want, 100), name)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_backward_hooks_on_the_module_see_and_change_gradients(need_weights: bool, shared: bool) -> None:
    """The original hands the same gradients to the same hooks, in self-attention three."""
    results = []
    for module in pair():
        seen: dict[str, Any] = {}

        def after(_: nn.Module, inputs: Any, outputs: Any, seen: dict[str, Any] = seen) -> Any:
            seen.update(inputs=inputs, outputs=outputs)
            return tuple(2 * g for g in inputs)

        module.register_full_backward_hook(after)
        module.register_full_backward_pre_hook(lambda _, grads: (5 * grads[0], *grads[1:]))
        leaves = [sequence(2, 5, seed=s).requires_grad_() for s in (1, 2, 3)]
        given = [leaves[0]] * 3 if shared else leaves
        module(*given, need_weights=need_weights)[0].square().sum().backward()
        sent = [g for g in (*seen["inputs"], *seen["outputs"]) if g is not None]
        results.append(
            [*sent, *[x.grad for x in (leaves[:1] if shared else leaves)], *[p.grad for p in module.parameters()]]
        )
    for got, want in zip(*results, strict=True):
        assert_within(got, want, double_limit(want, 100))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"kdim": 16, "vdim": 6, "add_bias_kv": True}], ids=str)
def test_hooks_on_parameters(options: dict[str, Any], need_weights: bool) -> None:
    """A tensor hook changes a parameter's gradient alone; a hook after accumulation runs once for each parameter."""
    module, plain = make(**options), make(**options)
    inputs = (sequence(2, 5), sequence(2, 5, module.kdim, 2), sequence(2, 5, module.vdim, 3))
    plain(*inputs)[0].square().sum().backward()
    done: list[Tensor] = []
    for factor, parameter in enumerate(module.parameters(), 2):
        parameter.register_hook(lambda g, factor=factor: factor * g)
        parameter.register_post_accumulate_grad_hook(done.append)
    module(*inputs, need_weights=need_weights)[0].square().sum().backward()
    assert sorted(map(id, done)) == sorted(map(id, module.parameters()))
    for factor, (got, want) in enumerate(zip(module.parameters(), plain.parameters(), strict=True), 2):
        assert_within(got.grad, factor * want.grad, factor * double_limit(want.grad, 100))


# ----------------------------------------------------------------------------------------------------- whole modules
def add_one(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output[0] + 1, output[1]


def twice(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def test_copies_and_files_carry_hooks() -> None:
    module, x = make(), sequence(2, 5)
    want = 2 * module(x, x, x)[0] + 1
    module.register_forward_hook(add_one)
    module.out_proj.register_forward_hook(twice)
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for need_weights in (True, False):
            assert_within(twin(x, x, x, need_weights=need_weights)[0], want, double_limit(want, EMBED))


def test_hooks_on_state_dicts() -> None:
    """Those that rename what is stored and what is loaded, as wrappers of whole models do."""
    ours, theirs = pair()
    calls: list[str] = []
    for module in (ours, theirs):
        module.register_state_dict_pre_hook(lambda *_: calls.append("before"))
        module.register_state_dict_post_hook(
            lambda m, state, prefix, _: state.update({"w": state.pop(prefix + "in_proj_weight")})
        )
        module.register_load_state_dict_pre_hook(
            lambda m, state, prefix, *_: state.update({prefix + "in_proj_weight": state.pop("w")})
        )
        module.register_load_state_dict_post_hook(lambda m, keys: calls.append(str(keys)))
    state = ours.state_dict()
    assert list(state) == list(theirs.state_dict()) and "w" in state
    state["w"] = state["w"] * 2
    ours.load_state_dict(dict(state))
    theirs.load_state_dict(dict(state))
    assert calls[:2] == ["before", "before"] and calls[2] == calls[3]
    assert torch.equal(ours.in_proj_weight, state["w"]) and torch.equal(theirs.in_proj_weight, state["w"])
