"""``torch.compile``: every option in one graph, with at most one more for other lengths and batches; the values,
gradients and dropout of uncompiled calls, through every kind of backward pass that there is; caches; clear errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import ops
from layer_cases import MODES, causal_mask, exact_layer, last_hidden, make, mode, sequence
from module_variant_cases import KEYWORDS, variant
from tolerances import assert_within, double_limit
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch.func import functional_call, grad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mha_ext import functional as F

Call = Callable[..., Any]
LONG = pytest.mark.long
BACKENDS = ["eager", "aot_eager", "inductor"]
WEIGHTS = [False, pytest.param(True, marks=LONG)]
HIDDEN = last_hidden(2, 5)
BIAS = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"need_weights": False}),
    "weights": ({}, {}),
    "weights of heads": ({}, {"average_attn_weights": False, "is_causal": True}),
    "bool mask": ({}, {"attn_mask": causal_mask(5)}),
    "float mask": ({}, {"attn_mask": BIAS, "need_weights": False}),
    "masks": ({}, {"attn_mask": BIAS, "key_padding_mask": HIDDEN, "is_causal": True, "need_weights": False}),
    "float padding": ({}, {"key_padding_mask": HIDDEN.double(), "average_attn_weights": False}),
    "appended keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"is_causal": True}),
    "widths": ({"kdim": 8, "vdim": 6}, {"need_weights": False}),
    "length first": ({"batch_first": False}, {"is_causal": True, "need_weights": False}),
    "length first, weights": ({"batch_first": False, "bias": False}, {}),
    "grouped": ({"num_kv_heads": 2, "head_dim": 6}, {"need_weights": False}),
}


def some(names: Any, chosen: tuple[str, ...]) -> list[Any]:
    """All of them, those that are not chosen among the long tests."""
    return [name if name in chosen else pytest.param(name, marks=LONG) for name in names]


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> None:
    torch._dynamo.reset()


def whole(function: Call, backend: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def results(call: Call, module: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """What a call returns, and the gradients of its inputs, which may be one tensor, and of a module's parameters."""
    torch.manual_seed(3)
    leaves = {id(x): x.clone().requires_grad_() for x in inputs}
    given = call(*[leaves[id(x)] for x in inputs], **options)
    tensors = [x for x in (given if isinstance(given, tuple) else (given,)) if x is not None]
    loss = sum((x.double() * (n + 1)).square().sum() for n, x in enumerate(tensors))
    wanted = [*leaves.values(), *module.parameters()]
    return [*(x.detach() for x in tensors), *torch.autograd.grad(loss, wanted)]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert_within(a, b, double_limit(b, 100))


def alone(module: nn.Module, **options: Any) -> Call:
    """Self-attention as a function of one tensor, without weights."""
    return lambda x: module(x, x, x, need_weights=False, **options)[0]


# ------------------------------------------------------------------------------------------------------------ one graph
def check_one_graph(module: Any, inputs: tuple[Tensor, ...], options: dict[str, Any], backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    got = results(whole(module, counter), module, inputs, **options)
    same(got, results(module, module, inputs, **options))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", some(CALLS, ("plain", "weights", "masks", "appended keys", "widths", "grouped")))
def test_every_option_is_part_of_one_graph(name: str) -> None:
    keywords, options = CALLS[name]
    module = make(**keywords)
    x = sequence(2, 5) if module.batch_first else sequence(5, 2)
    inputs = (x, x, x) if module.kdim == module.embed_dim else (x, sequence(2, 5, 8, 2), sequence(2, 5, 6, 3))
    check_one_graph(module, inputs, options, "aot_eager")


@pytest.mark.parametrize("name", some(KEYWORDS, ("right window", "all")))
def test_every_variant_is_part_of_one_graph(name: str) -> None:
    x = sequence(2, 5)
    check_one_graph(variant(KEYWORDS[name]), (x, x, x), {"is_causal": True, "need_weights": len(name) > 5}, "aot_eager")


@pytest.mark.parametrize("need_weights", [False, True])
def test_unbatched_inputs_and_other_lengths_of_keys(need_weights: bool) -> None:
    module, x, memory = make(), sequence(2, 5), sequence(2, 7, seed=2)
    check_one_graph(module, (x[0], x[0], x[0]), {"need_weights": need_weights}, "eager")
    torch._dynamo.reset()
    check_one_graph(module, (x, memory, memory), {"need_weights": need_weights}, "aot_eager")


@pytest.mark.parametrize("need_weights", WEIGHTS)
@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_half_types(kind: str, need_weights: bool) -> None:
    """To the bit: the same kernels on the same casts."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    module, x = make(dtype=dtype), sequence(2, 5, dtype=dtype)

    def call(y: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            return module(y, y, y, need_weights=need_weights)

    got, want = (results(f, module, (x,)) for f in (whole(call), call))
    assert got[0].dtype == torch.bfloat16
    for a, b in zip(got, want, strict=True):
        assert_within(a, b, 0.02 * float(b.abs().max()) if need_weights else 0.0)


def test_the_answer_is_the_exact_one() -> None:
    module, x = make(), sequence(2, 5)
    got = whole(module)(x, x, x, is_causal=True, key_padding_mask=HIDDEN, average_attn_weights=False)
    want = exact_layer(module, (x, x, x), is_causal=True, key_padding_mask=HIDDEN)
    same(list(got), [want.out, want.weights])


# ---------------------------------------------------------------------------------------------------------- recompiling
@pytest.mark.parametrize(
    ("name", "masked"),
    [(n, m) if (n, m) == ("train", True) else pytest.param(n, m, marks=LONG) for n in MODES for m in (True, False)],
)
def test_other_lengths_and_batches_cost_one_more_graph(name: str, masked: bool) -> None:
    module, counter = make(), CompileCounterWithBackend("aot_eager")

    def call(y: Tensor, padding: Tensor) -> Tensor:
        masks = {"key_padding_mask": padding, "is_causal": True} if masked else {}
        return module(y, y, y, need_weights=False, **masks)[0]

    compiled = whole(call, counter)
    for batch, length in ((2, 5), (3, 9), (2, 33), (5, 65)):
        x, padding = sequence(batch, length), last_hidden(batch, length)
        with mode(module, name):
            if name == "no_grad":
                same([compiled(x, padding)], [call(x, padding)])
            else:
                got, want = (results(partial(f, padding=padding), module, (x,)) for f in (compiled, call))
                same(got, want)
    assert counter.frame_count == 2


@pytest.mark.parametrize("need_weights", WEIGHTS)
def test_marked_as_dynamic_one_graph_serves_every_size(need_weights: bool) -> None:
    """The first call compiles it twice: Dynamo takes Python's floats for variable, and begins anew without."""
    module, counter = make(), CompileCounterWithBackend("aot_eager")
    compiled, counts = whole(module, counter, dynamic=True), set()
    for batch, length in ((2, 5), (3, 9), (4, 65)):
        x = sequence(batch, length)
        options = {"need_weights": need_weights, "is_causal": True}
        same(results(compiled, module, (x, x, x), **options), results(module, module, (x, x, x), **options))
        counts.add(counter.frame_count)
    assert len(counts) == 1


# -------------------------------------------------------------------------------------------------------------- dropout
class Two(nn.Module):
    """Two layers with dropout, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = make(dropout=0.4), make(dropout=0.4, seed=2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x, x, x, need_weights=False)[0])
        out: Tensor = self.second(x, x, x, need_weights=False)[0]
        return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_that_of_the_uncompiled_call(backend: str) -> None:
    """The same seeds in the same order, forward and backward, and others with every call."""
    module, x = Two(), sequence(2, 9)
    compiled = whole(module, backend)
    same(results(compiled, module, (x,)), results(module, module, (x,)))
    torch.manual_seed(3)
    several = [compiled(x) for _ in range(3)]
    torch.manual_seed(3)
    same(several, [module(x) for _ in range(3)])
    assert not torch.equal(several[0], several[1]) and not torch.equal(several[1], several[2])
    assert torch.equal(compiled.eval()(x), compiled(x))


@pytest.mark.parametrize("backend", some(("aot_eager", "inductor"), ("aot_eager",)))
def test_gradients_belong_to_the_mask_that_was_drawn(backend: str) -> None:
    """With its mask fixed the output is linear in the values: what it gives against a direction is their gradient's
    product with themselves, and no other mask's."""
    query, key, value, direction = (torch.randn(2, 4, 9, 8, dtype=torch.float64) for _ in range(4))
    compiled = whole(F.scaled_dot_product_attention, backend)
    value.requires_grad_()
    for _ in range(2):
        out = compiled(query, key, value, dropout_p=0.5)
        (gradient,) = torch.autograd.grad(out, value, direction)
        assert_within((gradient * value).sum(), (out * direction).sum(), 1e-12)
    other = compiled(query, key, value, dropout_p=0.5)
    assert abs(float(((gradient * value).sum() - (other * direction).sum()).detach())) > 1e-3


# ---------------------------------------------------------------------------------------------------------- checkpoints
def policy(wanted: CheckpointPolicy, context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return wanted if operator is ops.multi_head_attention.default else CheckpointPolicy.PREFER_RECOMPUTE


def graphs_of(found: list[str]) -> Any:
    """A backend that notes which operators of ours the forward and the backward graph hold."""

    def note(graph: Any, _: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if "mha_ext" in str(node.target)]
        found.append(" ".join(name.split(".")[1] for name in names))
        return make_boxed_func(graph.forward)

    return lambda graph, inputs: aot_module_simplified(graph, inputs, fw_compiler=note, bw_compiler=note)


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        ("plain", "multi_head_attention "),
        (CheckpointPolicy.MUST_SAVE, ""),
        (CheckpointPolicy.PREFER_RECOMPUTE, "multi_head_attention "),
    ],
    ids=str,
)
def test_checkpoints_keep_what_they_are_told_to(kind: Any, again: str) -> None:
    """Values, with dropout, are those of a call that keeps everything; the graphs show what runs again in backward."""
    module, x = make(dropout=0.3), sequence(2, 9)
    call = alone(module)
    options = (
        {} if kind == "plain" else {"context_fn": partial(create_selective_checkpoint_contexts, partial(policy, kind))}
    )

    def inner(y: Tensor) -> Tensor:
        return call(torch.sin(y))

    def checkpointed(y: Tensor) -> Tensor:
        out: Tensor = checkpoint(inner, y, use_reentrant=False, **options)
        return out

    found: list[str] = []
    same(results(whole(checkpointed, graphs_of(found)), module, (x,)), results(inner, module, (x,)))
    assert found == ["multi_head_attention", f"{again}multi_head_attention_backward"]


@pytest.mark.long
def test_checkpoints_compiled_by_inductor() -> None:
    module, x = make(dropout=0.3), sequence(2, 9)
    call = alone(module)
    compiled = whole(lambda y: checkpoint(call, y, use_reentrant=False), "inductor")
    same(results(compiled, module, (x,)), results(call, module, (x,)))


# ------------------------------------------------------------------------------------------------------ ways to compile
@pytest.mark.parametrize(
    ("forward", "need_weights"),
    [
        ("compiled", True),
        *(pytest.param(f, w, marks=LONG) for f, w in (("eager", True), ("eager", False), ("compiled", False))),
    ],
)
def test_compiled_autograd(forward: str, need_weights: bool) -> None:
    """The backward pass recorded as it runs and compiled, in which graphs may break."""
    module, x = make(), sequence(2, 5)
    options = {"need_weights": need_weights, "is_causal": True}
    want = results(module, module, (x, x, x), **options)
    counter = CompileCounterWithBackend("aot_eager")
    call = whole(module) if forward == "compiled" else module
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=counter)):
        same(results(call, module, (x, x, x), **options), want)
    assert counter.frame_count >= 1


@pytest.mark.long
@pytest.mark.parametrize("how", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_of_inductor(how: str) -> None:
    module, x = Two(), sequence(2, 9)
    compiled = torch.compile(module, fullgraph=True, mode=how)
    for seed in range(2):
        torch.manual_seed(seed)
        same(results(compiled, module, (x + seed,)), results(module, module, (x + seed,)))


# ------------------------------------------------------------------------------------------------------------ functions
def test_attention_functions_and_their_gradients() -> None:
    q, k, v = (torch.randn(2, h, 6, 8, dtype=torch.float64) for h in (4, 2, 2))
    mask = torch.randn(4, 6, 6, dtype=torch.float64)
    none = nn.Module()

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        options = {"is_causal": True, "enable_gqa": True, "window": (3, 0), "softcap": 2.0}
        return F.scaled_dot_product_attention(q, k, v, mask, **options, return_lse=True, return_weights="per_head")

    same(results(whole(attend), none, (q, k, v, mask)), results(attend, none, (q, k, v, mask)))

    def pack(q: Tensor, k: Tensor, v: Tensor) -> Any:
        starts = torch.tensor([0, 2, 2, 6])
        return F.varlen_attention(q, k, v, starts, starts, 4, 4, is_causal=True, return_lse=True)

    packed = tuple(x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    same(results(whole(pack), none, packed), results(pack, none, packed))


@pytest.mark.parametrize("need_weights", WEIGHTS)
def test_the_layer_as_a_function(need_weights: bool) -> None:
    module, x = make(batch_first=False), sequence(5, 2)

    def call(y: Tensor) -> Any:
        own = (module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0)
        last = (module.out_proj.weight, module.out_proj.bias)
        return F.multi_head_attention_forward(y, y, y, 16, 4, *own, *last, need_weights=need_weights, is_causal=True)

    same(results(whole(call), module, (x,)), results(call, module, (x,)))


# ----------------------------------------------------------------------------------------------------------- transforms
@pytest.mark.long
@pytest.mark.parametrize("need_weights", WEIGHTS)
def test_grad_inside_once_and_twice(need_weights: bool) -> None:
    module, x = make(), sequence(1, 4)
    parameters = {n: p.detach() for n, p in module.named_parameters()}

    def loss(p: dict[str, Tensor], y: Tensor) -> Tensor:
        return functional_call(module, p, (y, y, y), {"need_weights": need_weights})[0].square().sum()

    def penalty(p: dict[str, Tensor], y: Tensor) -> Tensor:
        return grad(loss, 1)(p, y).square().sum()

    for function in (loss, penalty):
        got, want = whole(grad(function))(parameters, x), grad(function)(parameters, x)
        same(list(got.values()), list(want.values()))


def test_grad_of_compiled_code_says_how_it_is_done() -> None:
    with pytest.raises(
        torch._dynamo.exc.Unsupported,
        match="torch.func.grad is also wrapped within a torch.compile function".replace(".", r"\."),
    ):
        grad(lambda y: whole(alone(make()))(y).sum())(sequence(1, 4))


@pytest.mark.long
@pytest.mark.parametrize("need_weights", WEIGHTS)
def test_double_backward_is_refused_and_what_works_instead(need_weights: bool) -> None:
    """AOTAutograd has none for any operator and says so. The backend without it has, and ``torch.func`` inside."""
    module, x = make(), sequence(1, 4)

    def call(y: Tensor) -> Tensor:
        out: Tensor = module(y, y, y, need_weights=need_weights)[0]
        return out

    def twice(function: Call) -> Tensor:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    with pytest.raises(RuntimeError, match="aot_autograd does not currently support double backward"):
        twice(whole(call))
    torch._dynamo.reset()
    want = twice(call)
    inside = grad(lambda y: grad(lambda z: call(z).square().sum())(y).square().sum())
    same([twice(whole(call, "eager")), whole(inside)(x)], [want, want])
