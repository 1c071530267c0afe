"""``convert`` and ``revert`` on modules whose class is not the original: parametrized, users' subclasses, FSDP's."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import warnings
from abc import ABCMeta
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_cases import EMBED, HEADS, exact_layer, make, sequence
from tolerances import assert_within, double_limit
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, weight_norm
from tracing import Operators

import mha_ext


def original(**options: Any) -> Any:
    return make(nn.MultiheadAttention, **options)


def attend(module: nn.Module, x: Tensor, **options: Any) -> Tensor:
    return module(x, x, x, **{"need_weights": False, **options})[0]


def ours_ran(module: nn.Module, x: Tensor) -> bool:
    with Operators() as ran:
        attend(module, x)
    assert bool(ran.ours) != bool(ran.theirs)
    return bool(ran.ours)


class Halved(nn.Module):
    """A parametrization that has no state."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def decorated(function: Any) -> Any:
    return functools.wraps(function)(lambda *args, **options: function(*args, **options))


class Twice(nn.MultiheadAttention):
    """Changes what goes in and what comes out."""

    @decorated
    def forward(self, query: Tensor, *args: Any, **options: Any) -> Any:
        out, weights = super().forward(query * 0.5, *args, **options)
        return 2 * out, weights


def forward_of_named(self: Any, *args: Any, **options: Any) -> Any:
    return super(Named, self).forward(*args, **options)


class Named(nn.MultiheadAttention):
    """Calls super in the old way, from a function that was written outside."""

    forward = forward_of_named

    def extra_repr(self) -> str:
        return f"named, {super().extra_repr()}"


class Mixin:
    """Beside the original, as FSDP's."""

    def scale(self) -> int:
        return 3


class Mixed(Mixin, Twice, metaclass=ABCMeta):
    """Deeper, with a base and a metaclass of its own."""

    def forward(self, *args: Any, **options: Any) -> Any:
        out, weights = super().forward(*args, **options)
        return self.scale() * out, weights


class Reduced(nn.MultiheadAttention):
    """Says itself how it is copied."""

    def __reduce__(self) -> Any:
        return type(self), (EMBED, HEADS), self.__dict__


SUBCLASSES = (Twice, Named, Mixed, Reduced)


def wanted(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """The exact answer of one of the classes above with x as query, key and value."""
    plain = original()
    plain.load_state_dict(module.state_dict())
    factor = {Twice: 2, Mixed: 6}.get(next(cls for cls in type(module).__mro__ if cls in SUBCLASSES), 1)
    return factor * exact_layer(plain, (x if factor == 1 else 0.5 * x, x, x.clone())).out


def weight_normed(name: str) -> Any:
    return lambda module: parametrizations.weight_norm(module, name)


PARAMETRIZED: dict[str, tuple[str, Any]] = {
    "weight_norm": ("in_proj_weight", weight_normed("in_proj_weight")),
    "weight_norm of a bias": ("bias_k", weight_normed("bias_k")),
    "spectral_norm": ("in_proj_weight", lambda module: parametrizations.spectral_norm(module, "in_proj_weight")),
    "own": ("in_proj_bias", lambda m: parametrize.register_parametrization(m, "in_proj_bias", Halved())),
}


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, Twice])
@pytest.mark.parametrize(("name", "add"), PARAMETRIZED.values(), ids=PARAMETRIZED)
def test_parametrized_modules(kind: Any, name: str, add: Any) -> None:
    """Converted, copied, reverted, and the parametrization taken off in each of these states."""
    module = add(make(kind, add_bias_kv=True).eval())
    x, class_name, keys = sequence(2, 5), type(module).__name__, set(module.state_dict())
    want, state = attend(module, x).detach(), dict(module.__dict__)
    grads = torch.autograd.grad(attend(module, x).sum(), list(module.parameters()))
    mha_ext.convert(module, subclasses=True)
    assert type(module).__name__ == class_name and set(module.state_dict()) == keys
    assert isinstance(module, mha_ext.MultiheadAttention) and isinstance(module, kind)
    twin = copy.deepcopy(module)
    apart = mha_ext.revert(module, inplace=False)
    assert isinstance(twin, mha_ext.MultiheadAttention) and not isinstance(apart, mha_ext.MultiheadAttention)
    for each, ours in ((module, True), (twin, True), (apart, False)):
        assert ours_ran(each, x) == ours
        assert_within(attend(each, x), want, double_limit(want, 100))
        for got, grad in zip(torch.autograd.grad(attend(each, x).sum(), list(each.parameters())), grads, strict=True):
            assert_within(got, grad, double_limit(grad, 100))
    mha_ext.revert(module)
    assert module.__dict__ == state and type(module).__bases__ == (kind,)
    for each, ours in ((module, False), (apart, False), (twin, True)):
        parametrize.remove_parametrizations(each, name)
        assert not parametrize.is_parametrized(each) and ours_ran(each, x) == ours
        assert isinstance(each, kind) and (ours or type(each) is kind)
        assert_within(attend(each, x), want, double_limit(want, 100))


def test_a_second_parametrization_after_converting() -> None:
    module = parametrizations.weight_norm(original(), "in_proj_weight")
    mha_ext.convert(module)
    parametrize.register_parametrization(module, "in_proj_bias", Halved())
    parametrize.register_parametrization(module.out_proj, "weight", Halved())
    x, plain = sequence(2, 5), original()
    with torch.no_grad():
        plain.in_proj_bias /= 2
        plain.out_proj.weight /= 2
    want = exact_layer(plain, (x, x, x)).out
    for converted in (True, False):
        assert ours_ran(module, x) == converted
        assert_within(attend(module, x), want, double_limit(want, 100))
        mha_ext.revert(module)


def test_parametrizing_by_hooks() -> None:
    """The older weight_norm: the weight is an attribute that a hook sets before each call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = weight_norm(original(), "in_proj_weight")
    x = sequence(2, 5)
    want = attend(module, x)
    mha_ext.convert(module)
    with torch.no_grad():
        module.in_proj_weight_g *= 1.0
    assert ours_ran(module, x)
    assert_within(attend(module, x), want, double_limit(want, 100))
    assert "in_proj_weight" not in dict(mha_ext.revert(module).named_parameters())
    assert_within(attend(module, x), want, double_limit(want, 100))


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_subclasses_are_left_unless_asked_for(kind: Any) -> None:
    module = make(kind)
    before = dict(module.__dict__)
    assert type(mha_ext.convert(module)) is kind and module.__dict__ == before
    (entry,) = mha_ext.conversion_report(module)
    assert not entry.converted and "pass subclasses=True" in entry.reason
    assert entry.type_name == f"{__name__}.{kind.__name__}"


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_subclasses_keep_what_they_override(kind: Any, tmp_path: Path) -> None:
    module, x = make(kind), sequence(2, 5)
    want, text, before = wanted(module, x), repr(module), dict(module.__dict__)
    assert mha_ext.convert(module, subclasses=True) is module
    assert isinstance(module, kind) and isinstance(module, mha_ext.MultiheadAttention)
    assert repr(module).splitlines()[0] == text.splitlines()[0] and ("named, " in repr(module)) == ("named, " in text)
    assert mha_ext.conversion_report(module)[0].reason == "is mha_ext's; revert would swap it"
    torch.save(module, tmp_path / "module.pt")
    pickled = [pickle.loads(pickle.dumps(module, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    for each in (module, copy.deepcopy(module), copy.copy(module), loaded, *pickled):
        assert type(each) is type(module) and ours_ran(each, x)
        assert_within(attend(each, x), want, double_limit(want, 100))
    again = make(kind, seed=4)
    assert type(mha_ext.convert(again, subclasses=True)) is type(module)
    assert type(mha_ext.revert(loaded)) is kind
    mha_ext.revert(module)
    assert type(module) is kind and module.__dict__ == before and repr(module) == text
    assert not ours_ran(module, x)
    assert_within(attend(module, x), want, double_limit(want, 100))


def test_a_pickled_subclass_is_converted_where_none_is() -> None:
    """As in a process that only loads: the combined class is made from the names in the file."""
    module, x = mha_ext.convert(make(Named), subclasses=True), sequence(2, 5)
    want, data = attend(module, x).detach(), pickle.dumps(module)
    del module
    gc.collect()
    assert not Named.__subclasses__()
    loaded = pickle.loads(data)
    assert isinstance(loaded, Named) and ours_ran(loaded, x) and torch.equal(attend(loaded, x), want)


def test_classes_derived_from_ours_stay() -> None:
    class Derived(mha_ext.MultiheadAttention):
        pass

    module = Derived(EMBED, HEADS)
    assert type(mha_ext.revert(mha_ext.convert(module, subclasses=True))) is Derived
    assert mha_ext.conversion_report(module)[0].reason.endswith("a subclass of mha_ext.MultiheadAttention")


class OwnForward(nn.MultiheadAttention):
    def forward(self, query: Tensor, *_args: Any, **_options: Any) -> Any:
        return query, None


class BelowOwnForward(OwnForward):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


class ReadsPacked(nn.MultiheadAttention):
    @property
    def width(self) -> int:
        packed = lambda: self._qkv_same_embed_dim  # noqa: E731
        return self.in_proj_weight.shape[1] if packed() else self.q_proj_weight.shape[1]


class DefinesAttend(nn.MultiheadAttention):
    def _attend(self) -> int:
        return 0


class MentionsSuper(nn.MultiheadAttention):
    def forward(self, query: Tensor, *_args: Any, **_options: Any) -> Any:
        assert super() is not None
        return query, None


class Sealed(nn.MultiheadAttention):
    def __init_subclass__(cls) -> None:
        raise TypeError("nothing may derive from Sealed")


def replaced_forward() -> Any:
    module = original()
    module.forward = module.forward
    return module


def with_attributes(**attributes: Any) -> Any:
    module = original()
    module.__dict__.update(attributes)
    return module


def without(name: str) -> Any:
    module = original()
    del module.__dict__[name]
    return module


LEFT: dict[str, tuple[Any, str]] = {
    "forward replaced": (replaced_forward, "its forward was replaced on the object"),
    "dropout 1": (lambda: with_attributes(dropout=1.0), "dropout must be in [0, 1), got 1.0"),
    "our attribute": (lambda: with_attributes(_num_kv_heads=3), "it has an attribute _num_kv_heads of its own"),
    "no head_dim": (lambda: without("head_dim"), "it lacks the original's attribute head_dim"),
    "own forward": (lambda: OwnForward(EMBED, HEADS), "its own forward does not call super().forward"),
    "mentions super": (lambda: MentionsSuper(EMBED, HEADS), "its own forward does not call super().forward"),
    "below one": (lambda: BelowOwnForward(EMBED, HEADS), "its own forward does not call super().forward"),
    "a name of ours": (lambda: DefinesAttend(EMBED, HEADS), "it defines _attend, which mha_ext's class needs"),
    "sealed": (lambda: Sealed(EMBED, HEADS), "cannot have another base: nothing may derive from Sealed"),
    "quantizable": (
        lambda: torch.ao.nn.quantizable.MultiheadAttention(EMBED, HEADS),
        "its own forward does not call super().forward",
    ),
}


@pytest.mark.parametrize(("build", "reason"), LEFT.values(), ids=LEFT)
def test_what_cannot_be_swapped_is_left_and_told(build: Any, reason: str) -> None:
    model = nn.ModuleList([original(), build(), original()])
    kind, before = type(model[1]), dict(model[1].__dict__)
    mha_ext.convert(model, subclasses=True)
    assert [type(module) for module in model] == [mha_ext.MultiheadAttention, kind, mha_ext.MultiheadAttention]
    assert model[1].__dict__ == before
    report = mha_ext.conversion_report(model, subclasses=True)
    assert report[1].reason.startswith("left alone: ") and reason in report[1].reason
    mha_ext.revert(model)
    assert [type(module) for module in model] == [nn.MultiheadAttention, kind, nn.MultiheadAttention]


def test_a_subclass_may_ask_whether_the_weights_are_packed() -> None:
    for options in ({}, {"kdim": EMBED + 1}):
        module = mha_ext.convert(ReadsPacked(EMBED, HEADS, **options), subclasses=True)
        assert isinstance(module, mha_ext.MultiheadAttention) and module.width == EMBED


def test_a_forward_replaced_in_the_originals_class_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = original()
    monkeypatch.setattr(nn.MultiheadAttention, "forward", lambda self, *_args, **_options: None)
    assert type(mha_ext.convert(module)) is nn.MultiheadAttention
    assert mha_ext.conversion_report(module)[0].reason == "left alone: nn.MultiheadAttention.forward was replaced"


def test_assigned_heads_do_not_keep_a_module_from_going_back() -> None:
    module, x = original(), sequence(2, 5)
    module.num_heads = HEADS // 2
    want = module(x, x, x)[0]
    mha_ext.convert(module)
    assert_within(module(x, x, x)[0], want, double_limit(want, 100))
    assert type(mha_ext.revert(module)) is nn.MultiheadAttention


def test_a_replaced_forward_of_a_converted_module_stays() -> None:
    module = mha_ext.convert(original())
    module.forward = module.forward
    assert type(mha_ext.revert(module)) is mha_ext.MultiheadAttention
    assert "its forward was replaced" in mha_ext.conversion_report(module)[0].reason


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("first", [True, False])
def test_sharded_modules(first: bool) -> None:
    """FSDP derives a class of its own: convert before it, or after it with ``subclasses``."""
    module, x = original(), sequence(2, 5)
    want = exact_layer(module, (x, x, x), torch.ones_like(x))
    if first:
        mha_ext.convert(module)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    if not first:
        assert not mha_ext.conversion_report(mha_ext.convert(module))[0].converted
        mha_ext.convert(module, subclasses=True)
    assert ours_ran(module, x)
    out = attend(module, x)
    out.sum().backward()
    assert_within(out, want.out, double_limit(want.out, 100))
    grad = want.grads["in_proj_weight"]
    assert_within(module.in_proj_weight.grad.full_tensor(), grad, double_limit(grad, 100))
    mha_ext.revert(module)
    assert ours_ran(module, x) == first
