"""torch.export of the layer, strict and not: one program for any batch and lengths, data-dependent ones included, that
trains, decomposes, is saved and loaded, compiled ahead of time and run from Python and C++. TorchScript as far as it
goes."""

from __future__ import annotations

import importlib.util
import io
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_cases import EMBED, HEADS, exact_layer, gradients, last_hidden, make, sequence
from module_variant_cases import KEYWORDS, exact_variant, variant
from tolerances import assert_within, double_limit
from torch import Tensor, nn

import mha_ext

ATTENTION = torch.ops.mha_ext.attention.default
WITH_WEIGHTS = torch.ops.mha_ext.attention_with_weights.default
LAYER = torch.ops.mha_ext.multi_head_attention.default
BATCH, QUERIES, KEYS = (torch.export.Dim(name, max=64) for name in ("batch", "queries", "keys"))
SIZES = {
    "query": {0: BATCH, 1: QUERIES},
    "key": {0: BATCH, 1: KEYS},
    "value": {0: BATCH, 1: KEYS},
    "key_padding_mask": {0: BATCH, 1: KEYS},
    "attn_mask": {0: QUERIES, 1: KEYS},
}
Results = tuple[Tensor, ...]


class Fixed(nn.Module):
    """A layer with options that are not tensors; what is None is left out of the results."""

    def __init__(self, layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = layer, options

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Results:
        results = self.layer(query, key, value, key_padding_mask, attn_mask=attn_mask, **self.options)
        return tuple(x for x in results if x is not None)


class Alone(nn.Module):
    """Causal self-attention of one tensor, the output only."""

    def __init__(self, layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = layer, options

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, x, x, need_weights=False, is_causal=True, **self.options)[0]
        return out


def inputs_of(batch: int, queries: int, keys: int, masks: str, widths: dict[str, int]) -> dict[str, Tensor]:
    inputs = {
        "query": sequence(batch, queries),
        "key": sequence(batch, keys, widths.get("kdim", EMBED), seed=2),
        "value": sequence(batch, keys, widths.get("vdim", EMBED), seed=3),
    }
    if "padding" in masks:
        inputs["key_padding_mask"] = last_hidden(batch, keys)
    if "float" in masks:
        inputs["attn_mask"] = sequence(1, queries, keys, seed=4)[0]
    if "bool" in masks:
        inputs["attn_mask"] = sequence(1, queries, keys, seed=4)[0] > 0.5
        inputs["attn_mask"][:, 0] = False
    return inputs


def operators(program: torch.export.ExportedProgram) -> set[Any]:
    return {node.target for node in program.graph.nodes if node.op == "call_function"}


def same(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        assert_within(x.detach(), y.detach(), double_limit(y.detach(), EMBED))


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


# ------------------------------------------------------------------------------------------- the layer and its options
Row = tuple[dict[str, Any], dict[str, Any], str, Any]
LAYERS: dict[str, Row] = {
    "one operator": ({}, {"need_weights": False, "is_causal": True}, "padding", LAYER),
    "weights": ({"num_kv_heads": 2}, {}, "float padding", WITH_WEIGHTS),
}
MORE_LAYERS: dict[str, Row] = {
    "plain": ({}, {"need_weights": False}, "", LAYER),
    "bool mask": ({"bias": False}, {"need_weights": False}, "bool padding", LAYER),
    "per head": ({}, {"average_attn_weights": False, "is_causal": True}, "bool", WITH_WEIGHTS),
    "separate": ({"kdim": 8, "vdim": 6}, {"need_weights": False}, "padding", ATTENTION),
    "appended": ({"add_bias_kv": True, "add_zero_attn": True}, {"need_weights": False}, "padding", ATTENTION),
    "multi-query": ({"num_kv_heads": 1}, {"need_weights": False, "is_causal": True}, "float", LAYER),
}


def check_layer(name: str, strict: bool) -> None:
    """One program, exported with some sizes, is right with others: as it is, decomposed, and saved and loaded."""
    options, call, masks, operator = {**LAYERS, **MORE_LAYERS}[name]
    layer, widths = make(**options), {n: x for n, x in options.items() if n in ("kdim", "vdim")}
    example, other = (inputs_of(*sizes, masks, widths) for sizes in ((2, 5, 6), (3, 7, 4)))
    sizes = {n: SIZES.get(n) if n in example else None for n in SIZES}
    program = torch.export.export(
        Fixed(layer, **call).eval(), (), example, dynamic_shapes={n: sizes[n] for n in example}, strict=strict
    )
    assert operator in operators(program)
    given = {n: x for n, x in other.items() if n not in ("query", "key", "value")}
    answer = exact_layer(layer, tuple(other.values())[:3], **given, is_causal=call.get("is_causal", False))
    weights = answer.weights.mean(1) if call.get("average_attn_weights", True) else answer.weights
    want = (answer.out, weights)[: 2 if call.get("need_weights", True) else 1]
    decomposed = program.run_decompositions()
    assert operator in operators(decomposed)
    for each in (program, decomposed, saved_and_loaded(program)):
        same(each.module()(**other), want)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str, strict: bool) -> None:
    check_layer(name, strict)


@pytest.mark.long
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MORE_LAYERS)
def test_more_layers(name: str, strict: bool) -> None:
    check_layer(name, strict)


def check_variant(name: str, strict: bool) -> None:
    keywords = KEYWORDS[name]
    layer = variant(keywords)
    program = torch.export.export(
        Alone(layer).eval(), (sequence(2, 5),), dynamic_shapes=({0: BATCH, 1: QUERIES},), strict=strict
    )
    assert ATTENTION in operators(program)
    x = sequence(3, 7)
    want = exact_variant(layer, keywords, (x, x, x), is_causal=True).out
    for each in (program, program.run_decompositions(), saved_and_loaded(program)):
        same([each.module()(x)], [want])


@pytest.mark.long
@pytest.mark.parametrize("strict", [False, True])
def test_every_variant_at_once(strict: bool) -> None:
    """A window, a softcap, sinks, norms and rotations."""
    check_variant("all", strict)


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in KEYWORDS if n != "all"])
def test_variants(name: str) -> None:
    check_variant(name, strict=True)


# ------------------------------------------------------------------------------------------------- data-dependent sizes
class Chosen(nn.Module):
    """Attention among the examples that a mask chooses."""

    def __init__(self, layer: nn.Module, need_weights: bool) -> None:
        super().__init__()
        self.layer, self.need_weights = layer, need_weights

    def forward(self, x: Tensor, chosen: Tensor, padding: Tensor) -> Tensor:
        y, hidden = x[chosen], padding[chosen]
        out: Tensor = self.layer(y, y, y, key_padding_mask=hidden, need_weights=self.need_weights)[0]
        return out


class Shortened(nn.Module):
    """Attention to as many keys as a tensor says."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, memory: Tensor, length: Tensor) -> Tensor:
        n = length.item()
        torch._check(n >= 1)
        torch._check(n <= memory.shape[1])
        keys = memory[:, :n]
        out: Tensor = self.layer(x, keys, keys, need_weights=False)[0]
        return out


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
def test_data_dependent_batch(strict: bool, need_weights: bool) -> None:
    """Any number of chosen examples, none and one included."""
    layer, x, hidden = make(), sequence(4, 5), last_hidden(4, 5)
    chosen = torch.tensor([True, False, True, False])
    program = torch.export.export(Chosen(layer, need_weights).eval(), (x, chosen, hidden), strict=strict)
    for pattern in ((1, 1, 0, 1), (0, 1, 0, 0), (0, 0, 0, 0)):
        chosen = torch.tensor(pattern, dtype=torch.bool)
        y = x[chosen]
        want = exact_layer(layer, (y, y, y), key_padding_mask=hidden[chosen]).out if y.numel() else y
        for each in (program, saved_and_loaded(program)):
            got = each.module()(x, chosen, hidden)
            assert got.shape == want.shape
            if y.numel():
                same([got], [want])


@pytest.mark.parametrize("strict", [False, True])
def test_data_dependent_length(strict: bool) -> None:
    layer, x, memory = make(), sequence(2, 3), sequence(2, 9, seed=2)
    program = torch.export.export(Shortened(layer).eval(), (x, memory, torch.tensor(4)), strict=strict)
    for length in (1, 7, 9):
        keys = memory[:, :length]
        got = program.module()(x, memory, torch.tensor(length))
        same([got], [exact_layer(layer, (x, keys, keys)).out])


# -------------------------------------------------------------------------------------------------- training and caches
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_trains(strict: bool) -> None:
    """Its gradients, of inputs and of every parameter by name, are the exact ones."""
    layer, x, sent = make(), sequence(2, 5), sequence(2, 5, seed=6)
    program = torch.export.export(Alone(layer).train(), (x,), strict=strict)
    trained = program.module()
    leaf = x.clone().requires_grad_()
    trained(leaf).backward(sent)
    want = exact_layer(layer, (x, x, x), sent, is_causal=True).grads
    got = {n.removeprefix("layer."): p.grad for n, p in trained.named_parameters()}
    assert got.keys() <= want.keys() and len(got) == 4
    same(got.values(), [want[n] for n in got])
    same([leaf.grad], [gradients(layer, (x, x, x), sent, need_weights=False, is_causal=True)["query"]])


def test_dropout_of_an_exported_program_is_drawn_anew() -> None:
    """The seed is drawn inside the program: the same as in the layer after the same manual_seed, another one each
    call."""
    layer, x = make(dropout=0.4), sequence(2, 9)
    model = Alone(layer).train()
    program = torch.export.export(model, (x,)).module()
    torch.manual_seed(3)
    first, second = program(x), program(x)
    torch.manual_seed(3)
    assert torch.equal(first, model(x)) and not torch.equal(first, second)


class Decoded(nn.Module):
    """A prompt and then one token, through a cache that the call makes and drops."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, prompt: Tensor, token: Tensor) -> Results:
        cache = mha_ext.KVCache(prompt.shape[0], HEADS, 16, EMBED // HEADS, dtype=prompt.dtype)
        results = [self.layer(x, x, x, need_weights=False, kv_cache=cache)[0] for x in (prompt, token)]
        return tuple(results)


class Crossed(nn.Module):
    """An encoder's output projected once, for two layers' queries."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, memory: Tensor) -> Results:
        cache = self.layer.project_keys(memory, memory)
        first = self.layer(x, None, None, need_weights=False, kv_cache=cache)[0]
        return first, self.layer(first, None, None, need_weights=False, kv_cache=cache)[0]


@pytest.mark.parametrize("strict", [False, True])
def test_a_growing_cache_exports(strict: bool) -> None:
    """For prompts of any length that leaves room for the token, up to a full cache."""
    layer, longest = make().requires_grad_(False), 15
    example = (sequence(2, 5, seed=3), sequence(2, 1, seed=4))
    sizes = {"prompt": {1: torch.export.Dim("length", min=2, max=longest)}, "token": None}
    program = torch.export.export(Decoded(layer).eval(), example, strict=strict, dynamic_shapes=sizes)
    for length in (5, longest):
        x = sequence(2, length + 1)
        want = exact_layer(layer, (x, x, x), is_causal=True).out
        same(program.module()(x[:, :length], x[:, length:]), (want[:, :length], want[:, length:]))


class Kept(nn.Module):
    """A cache that outlives the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cache = make().requires_grad_(False), mha_ext.KVCache(2, HEADS, 8, EMBED // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, x, x, need_weights=False, kv_cache=self.cache)[0]
        return out


def test_a_cache_that_is_kept_is_refused() -> None:
    """The program would write to the same place at every call. The cache is left as it was."""
    model = Kept().eval()
    with pytest.raises(NotImplementedError, match=r"kv_cache must be made inside of what torch\.export exports"):
        torch.export.export(model, (sequence(2, 1),), strict=False)
    assert model.cache.length == 0


@pytest.mark.parametrize("strict", [False, True])
def test_a_cross_cache_exports(strict: bool) -> None:
    layer, x, memory = make(), sequence(2, 3), sequence(2, 6, seed=2)
    program = torch.export.export(
        Crossed(layer).eval(), (sequence(2, 3, seed=5), sequence(2, 6, seed=6)), strict=strict
    )
    first = exact_layer(layer, (x, memory, memory)).out
    same(program.module()(x, memory), (first, exact_layer(layer, (first, memory, memory)).out))


# -------------------------------------------------------------------------------------------------- ahead of time, C++
@pytest.fixture(scope="module")
def example() -> Any:
    path = Path(__file__).parents[1] / "examples" / "aot_inductor" / "run.py"
    spec = importlib.util.spec_from_file_location("aot_inductor_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_ahead_of_time_from_python_and_from_cpp(example: Any, tmp_path: Path) -> None:
    """One package that AOTInductor compiled for any batch and length, loaded in Python and in a C++ program that loads
    the extension's library: both give the exact answer for sizes that the export had not seen."""
    layer = make(embed_dim=32, dtype=torch.float32).eval()
    package = example.package(example.SelfAttention(layer), tmp_path)
    x = sequence(5, 17, 32, dtype=torch.float32)
    results = {"Python": torch._inductor.aoti_load_package(str(package))(x)}
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):  # else the extension's library cannot be loaded without Python
        results["C++"] = example.run(example.build(tmp_path), package, x, tmp_path)
    want = exact_layer(layer, (x, x, x), is_causal=True).out
    for where, got in results.items():
        assert_within(got.detach(), want, 3e-6 * want.abs().max().item(), where)


# ---------------------------------------------------------------------------------------------------------- TorchScript
@pytest.mark.filterwarnings("ignore")  # of tracing: TorchScript is deprecated, sizes become constants of checks
@pytest.mark.parametrize(
    "wrap", [lambda x: x, torch.jit.freeze, lambda x: reloaded(x)], ids=["traced", "frozen", "loaded"]
)
def test_a_traced_layer(wrap: Callable[[Any], Any]) -> None:
    """torch.jit.trace records the operators: right for other sizes, also frozen, also saved and loaded."""
    layer = make()
    traced = wrap(torch.jit.trace(Alone(layer).eval(), (sequence(2, 5),)))
    x = sequence(3, 7)
    same([traced(x)], [exact_layer(layer, (x, x, x), is_causal=True).out])


def reloaded(traced: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.filterwarnings("ignore")
def test_the_operators_can_be_scripted_and_the_layer_cannot() -> None:
    """A scripted function may call the operators; the layer's keyword-only arguments TorchScript does not know, and
    says so."""

    @torch.jit.script
    def scripted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.ops.mha_ext.attention(query, key, value, causal=1)[0]

    heads = [sequence(2, 12, 8, seed=i).view(2, 3, 4, 8) for i in range(3)]
    same([scripted(*heads)], [mha_ext.reference.attention(*heads, is_causal=True)[0]])
    with pytest.raises(Exception, match="keyword-only"):
        torch.jit.script(make())
