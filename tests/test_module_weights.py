"""Weights that are more than leaves: computed by parametrizations, pruned, tied, replaced for one call, quantized, of
classes of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_cases import EMBED, HEADS, MODES, assert_agree, inputs_for, make, mode, pair, sequence
from tolerances import assert_within, double_limit
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, stateless

import mha_ext

SOME: list[dict[str, Any]] = [
    {},
    {"add_bias_kv": True, "batch_first": False},
    {"kdim": 8, "vdim": 6, "add_zero_attn": True},
    {"kdim": 8, "vdim": 6, "add_bias_kv": True, "bias": False},
]
WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")


def places(module: Any) -> list[tuple[Any, str]]:
    """Every parameter of a layer, by its owner and name."""
    owned = [(module, n) for n in WEIGHTS if getattr(module, n) is not None]
    return owned + [(module.out_proj, n) for n in ("weight", "bias") if getattr(module.out_proj, n) is not None]


# ------------------------------------------------------------------------------------------------------------- computed
class Doubled(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return 2 * x


class Sample(nn.Module):
    """Another value at every reading, as weight noise and stochastic quantization have it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def run_output_hooks(module: nn.MultiheadAttention, _: Any) -> None:
    """The original reads the output weight without calling the projection; the older norms and pruning compute it in a
    hook before that call."""
    for hook in module.out_proj._forward_pre_hooks.values():
        hook(module.out_proj, ())


Change = Callable[[Any, str], Any]
NORMS: dict[str, tuple[Change, Change]] = {
    "doubled": (
        lambda m, n: parametrize.register_parametrization(m, n, Doubled()),
        lambda m, n: parametrize.remove_parametrizations(m, n),
    ),
    "weight_norm": (
        lambda m, n: parametrizations.weight_norm(m, n),
        lambda m, n: parametrize.remove_parametrizations(m, n, leave_parametrized=True),
    ),
    "spectral_norm": (
        lambda m, n: parametrizations.spectral_norm(m, n),
        lambda m, n: parametrize.remove_parametrizations(m, n, leave_parametrized=True),
    ),
    "orthogonal": (
        lambda m, n: parametrizations.orthogonal(m, n),
        lambda m, n: parametrize.remove_parametrizations(m, n, leave_parametrized=True),
    ),
    "old weight_norm": (
        lambda m, n: nn.utils.weight_norm(m, n),
        lambda m, n: nn.utils.remove_weight_norm(m, n),
    ),
    "old spectral_norm": (
        lambda m, n: nn.utils.spectral_norm(m, n),
        lambda m, n: nn.utils.remove_spectral_norm(m, n),
    ),
    "pruned": (lambda m, n: prune.l1_unstructured(m, n, amount=0.4), lambda m, n: prune.remove(m, n)),
    "pruned rows": (lambda m, n: prune.ln_structured(m, n, amount=0.4, n=2, dim=0), lambda m, n: prune.remove(m, n)),
}
FOR_VECTORS = ("doubled", "weight_norm", "pruned")


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("options", SOME, ids=str)
def test_every_weight_may_be_computed(options: dict[str, Any], norm: str) -> None:
    """Outputs, weights, and the gradients of what the weights are computed from, are the original's; after a step of
    training, in a copy, and when the norm is taken away again."""
    put, take = NORMS[norm]
    ours, theirs = pair(**options)
    chosen = [i for i, (_, name) in enumerate(places(ours)) if "weight" in name or norm in FOR_VECTORS]
    for module in (ours, theirs):
        torch.manual_seed(2)
        for i in chosen:
            put(*places(module)[i])
        module.eval()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.25)
    hook = theirs.register_forward_pre_hook(run_output_hooks)
    inputs = inputs_for(ours)
    copyable = norm in ("doubled", "weight_norm", "spectral_norm", "orthogonal")
    assert_agree(copy.deepcopy(ours) if copyable else ours, theirs, inputs)
    hook.remove()
    for module in (ours, theirs):
        for i in chosen:
            take(*places(module)[i])
    assert_agree(ours, theirs, inputs)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("options", SOME, ids=str)
def test_a_computed_weight_is_computed_once_a_call(options: dict[str, Any], name: str, need_weights: bool) -> None:
    module = make(**options)
    doubled = [Doubled() for _ in places(module)]
    for parametrization, (owner, weight) in zip(doubled, places(module), strict=True):
        parametrize.register_parametrization(owner, weight, parametrization)
    for parametrization in doubled:
        parametrization.calls = 0
    with mode(module, name):
        module(*inputs_for(module), need_weights=need_weights)
        assert [p.calls for p in doubled] == [1] * len(doubled)
        with parametrize.cached():
            for _ in range(3):
                module(*inputs_for(module), need_weights=need_weights)
    assert [p.calls for p in doubled] == [2] * len(doubled)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", SOME, ids=str)
def test_a_weight_that_is_drawn_anew_is_one_in_a_call(options: dict[str, Any], need_weights: bool) -> None:
    """In a cached block every reader sees one value: the output is that of a plain layer that holds it."""
    module, plain = make(**options), make(nn.MultiheadAttention, **options)
    for owner, weight in places(module):
        parametrize.register_parametrization(owner, weight, Sample())
    inputs = inputs_for(module)
    outputs = []
    for _ in range(2):
        with parametrize.cached():
            outputs.append(module(*inputs, need_weights=need_weights)[0])
            with torch.no_grad():
                for (owner, weight), (twin, _) in zip(places(module), places(plain), strict=True):
                    getattr(twin, weight).copy_(getattr(owner, weight))
        want = plain(*inputs)[0]
        assert_within(outputs[-1], want, double_limit(want, EMBED))
    assert not torch.equal(*outputs)


# ----------------------------------------------------------------------------------------------------------------- tied
class Stack(nn.Module):
    """Two layers and a linear map that share weights: across modules, and an output weight with a query's."""

    def __init__(self, kind: type[nn.MultiheadAttention]) -> None:
        super().__init__()
        self.first, self.second = make(kind, 1), make(kind, 2)
        self.cross = make(kind, 3, kdim=8)
        self.plain = nn.Linear(EMBED, 3 * EMBED, bias=False, dtype=torch.float64)
        self.second.in_proj_weight = self.first.in_proj_weight
        self.second.out_proj.weight = self.first.out_proj.weight
        self.plain.weight = self.first.in_proj_weight
        self.cross.out_proj.weight = self.cross.q_proj_weight

    def forward(self, x: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        y = self.first(x, x, x, need_weights=need_weights)[0]
        y = self.second(y, y, x, need_weights=need_weights)[0]
        y = self.cross(y, x[..., :8], x, need_weights=need_weights)[0]
        return y + self.plain(y)[..., :EMBED], None


def tied_pair() -> tuple[Stack, Stack]:
    ours, theirs = Stack(mha_ext.MultiheadAttention), Stack(nn.MultiheadAttention)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("need_weights", [True, False])
def test_tied_weights_add_up_and_stay_tied(need_weights: bool) -> None:
    ours, theirs = tied_pair()
    x = sequence(2, 5)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    theirs(x, True)[0].square().sum().backward()
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), ours):
        assert twin.second.in_proj_weight is twin.first.in_proj_weight is twin.plain.weight
        twin(x, need_weights)[0].square().sum().backward()
        for (name, got), want in zip(twin.named_parameters(), theirs.parameters(), strict=True):
            assert_within(got.grad, want.grad, double_limit(want.grad, 1000), name)
    assert ours.first.in_proj_weight.grad is not None


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("call", [torch.func.functional_call, stateless.functional_call])
@pytest.mark.filterwarnings("ignore:.*stateless.functional_call:FutureWarning")
def test_replaced_for_one_call(call: Callable[..., Any], tie: bool) -> None:
    """Gradients flow into what was passed, to every place that is tied to it or to the one that is named, and the
    module's own parameters stay as they were."""
    x = sequence(2, 5)
    results = []
    for module in tied_pair():
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
        given = {n: (p * 0.5).requires_grad_() for n, p in before.items()}
        out = call(module, given, (x,), tie_weights=tie)[0]
        grads = torch.autograd.grad(out.square().sum(), list(given.values()))
        results.append([out, *grads])
        assert all(torch.equal(p, before[n]) and p.grad is None for n, p in module.named_parameters())
    for got, want in zip(*results, strict=True):
        assert_within(got, want, double_limit(want, 1000))


@pytest.mark.parametrize("options", SOME, ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_some_replaced_for_one_call(options: dict[str, Any], need_weights: bool) -> None:
    """Each parameter alone; a tensor that is computed is as good as a leaf."""
    ours, theirs = pair(**options)
    inputs = inputs_for(ours)
    for name, parameter in ours.named_parameters():
        results = []
        for module in (ours, theirs):
            source = parameter.detach().clone().requires_grad_()
            flags = {"need_weights": need_weights}
            out = torch.func.functional_call(module, {name: source.sin()}, inputs, flags)[0]
            results.append([out, *torch.autograd.grad(out.square().sum(), source)])
        for got, want in zip(*results, strict=True):
            assert_within(got, want, double_limit(want, 100), name)


# ----------------------------------------------------------------------------------------------- other kinds of weights
class OnlyLinear(Tensor):
    """A weight that knows one thing, a linear map, as packed and quantized weights of other libraries do."""

    weight: Tensor

    @staticmethod
    def __new__(cls, weight: Tensor) -> OnlyLinear:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)
        wrapper.weight = weight
        return wrapper

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return F.linear(args[0], args[1].weight, *args[2:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return OnlyLinear(args[0].weight)
        raise NotImplementedError(f"a linear map must be all, got {func}")


@pytest.mark.parametrize("need_weights", [True, False])
def test_weights_that_know_only_a_linear_map(need_weights: bool) -> None:
    module, x = make(), sequence(2, 5)
    want = module(x, x, x)[0]
    for owner, name in ((module.out_proj, "weight"), (module, "in_proj_weight")):
        setattr(owner, name, nn.Parameter(OnlyLinear(getattr(owner, name).detach()), requires_grad=False))
        assert_within(module(x, x, x, need_weights=need_weights)[0], want, double_limit(want, EMBED))


quantization = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def quantizable(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    model.attention = mha_ext.MultiheadAttention(EMBED, HEADS, batch_first=True)
    for name, child in children.items():
        setattr(model.attention, name, child)
    return model.eval()


@quantization
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("output", "mapping"),
    [
        (nn.Linear(EMBED, EMBED), None),
        (None, {type(make().out_proj): torch.ao.nn.quantized.dynamic.Linear}),
    ],
    ids=["plain linear", "named"],
)
def test_dynamic_quantization_of_the_output(
    output: nn.Module | None, mapping: dict[type, type] | None, need_weights: bool
) -> None:
    """Where it swaps the output projection for a quantized one, that one is called."""
    model, x = quantizable(**({} if output is None else {"out_proj": output})), sequence(2, 5, dtype=torch.float32)
    swapped = torch.ao.quantization.quantize_dynamic(model, mapping and set(mapping), torch.qint8, mapping).attention
    assert type(swapped.out_proj) is torch.ao.nn.quantized.dynamic.Linear
    model.attention.out_proj = nn.Identity()
    want = swapped.out_proj(model.attention(x, x, x, need_weights=need_weights)[0])
    assert torch.equal(swapped(x, x, x, need_weights=need_weights)[0], want)


@quantization
def test_dynamic_quantization_leaves_an_ordinary_layer_alone() -> None:
    model, x = quantizable(), sequence(2, 5, dtype=torch.float32)
    swapped = torch.ao.quantization.quantize_dynamic(model, dtype=torch.qint8)
    assert type(swapped.attention) is mha_ext.MultiheadAttention
    assert torch.equal(swapped.attention(x, x, x)[0], model.attention(x, x, x)[0])


@quantization
def test_what_cannot_be_quantized_is_refused() -> None:
    """The original's quantizable twin takes exactly the original; quantized inputs are named.

    An observed ``out_proj`` is called as a module, whose product may add in another order: two sums of EMBED terms,
    each below 1 (weights below 1 / sqrt(EMBED), values of a few units).
    """
    twin = torch.ao.nn.quantizable.MultiheadAttention
    model = quantizable()
    mapping = {mha_ext.MultiheadAttention: twin}
    with pytest.raises(AssertionError, match=r"Expected type .*got .*mha_ext"):
        torch.ao.quantization.quantize_dynamic(model, set(mapping), torch.qint8, mapping)
    model.attention.qconfig = torch.ao.quantization.default_qconfig
    with pytest.raises(AssertionError, match=r"Expected type .*got .*mha_ext"):
        twin.from_float(model.attention)
    prepared = torch.ao.quantization.prepare(model)
    x = sequence(2, 5, dtype=torch.float32)
    want = model.attention(x, x, x)[0]
    assert_within(prepared.attention(x, x, x)[0], want, 2 * EMBED * EMBED * 2**-24)
    converted = torch.ao.quantization.convert(prepared)
    with pytest.raises(NotImplementedError, match="quantized::linear"):
        converted.attention(x, x, x)
    y = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    with pytest.raises(TypeError, match=r"query must have the parameters' dtype torch.float32, got torch.quint8"):
        model.attention(y, y, y)
