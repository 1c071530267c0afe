"""Decoding with a ``KVCache`` under ``torch.compile``: the whole step is one graph, whatever has been appended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from layer_cases import make, sequence
from tolerances import assert_within, double_limit
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import mha_ext

LONG = partial(pytest.param, marks=pytest.mark.long)
Step = tuple[Callable[..., Any], mha_ext.KVCache]
LENGTHS = [5, 3, *[1] * 10, 4]


def cache(**options: Any) -> mha_ext.KVCache:
    return mha_ext.KVCache(2, num_kv_heads=2, max_length=64, head_dim=4, dtype=torch.float64, **options)


class Decoder(nn.Module):
    """A layer that keeps its cache, or is given one."""

    def __init__(self, own: mha_ext.KVCache | None = None, **options: Any) -> None:
        super().__init__()
        self.layer, self.cache = make(num_kv_heads=2, **options).eval(), own

    def forward(self, x: Tensor, given: mha_ext.KVCache | None = None) -> Any:
        kept = self.cache if given is None else given
        return self.layer(x, x, x, kv_cache=kept, need_weights=False)[0]


def decode(step: Callable[[Tensor], Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [step(sequence(2, length, seed=n)) for n, length in enumerate(LENGTHS)]


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kept", "storage"),
    [
        (True, None),
        pytest.param(False, None, marks=pytest.mark.long),
        pytest.param(True, "int8", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_decoding_is_one_graph(kept: bool, storage: str | None) -> None:
    """One for the prompt, one for chunks of any length and one for single tokens; also where a model keeps the cache,
    whose numbers a compiler would take for constants. The caches hold the same afterwards."""
    counter = CompileCounterWithBackend("aot_eager")
    plain, traced = cache(storage=storage), cache(storage=storage)
    model = Decoder(traced if kept else None, rope=True)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    got = decode(compiled if kept else lambda x: compiled(x, traced))
    reference = Decoder(rope=True)
    for a, b in zip(got, decode(lambda x: reference(x, plain)), strict=True):
        assert_within(a, b, double_limit(b, 100))
    assert counter.frame_count == 3
    assert traced.length == plain.length == sum(LENGTHS) and not traced.ragged
    for a, b in zip(traced.key_value(), plain.key_value(), strict=True):
        assert_within(a, b, double_limit(b, 100))


@pytest.mark.long
def test_decoding_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the environment says that it is a continuous integration, which makes inductor stricter."""
    monkeypatch.setenv("CI", "true")
    plain, traced = cache(), cache()
    model = Decoder(rope=True, softcap=2.0)
    compiled = torch.compile(model, fullgraph=True)
    pairs = zip(decode(lambda x: compiled(x, traced)), decode(lambda x: model(x, plain)), strict=True)
    for a, b in pairs:
        assert_within(a, b, double_limit(b, 100))


@pytest.mark.long
def test_a_compiled_step_is_refused_as_an_uncompiled_one_is() -> None:
    """What does not fit changes nothing."""
    traced, model = cache(), Decoder()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(sequence(2, 60), traced)
        with pytest.raises(ValueError, match="key must fit into the cache's max_length 64"):
            compiled(sequence(2, 5), traced)
        assert traced.length == 60


# Options of the cache and of the layer, real positions of each row's first three, and the number of graphs that serve
# every call: a first token, tokens, chunks; with a window also the first move to the front, tokens after, more moves.
FOLLOWED: dict[str, tuple[dict[str, Any], dict[str, Any], list[int] | None, int]] = {
    "window": ({"window": 8}, {"window": (7, 0)}, None, 6),
    "ragged": ({}, {}, [3, 1], 3),
    "ragged int8": ({"storage": "int8"}, {}, [3, 1], 3),
    "ragged window": ({"window": 8}, {"window": (7, 0)}, [3, 1], 6),
    "an empty row": ({}, {}, [3, 0], 3),
}


def filled(lengths: list[int] | None, **options: Any) -> mha_ext.KVCache:
    first, new = sequence(2, 2 * 3, 4).view(2, 2, 3, 4), cache(**options)
    new.append(first, first, lengths)
    return new


def assert_same_steps(got: Step, want: Step, lengths: list[int]) -> None:
    """Steps with caches that are in the same state before and after each of them."""
    (compiled, traced), (model, plain) = got, want
    with torch.no_grad():
        for n, length in enumerate(lengths):
            x = sequence(2, length, seed=n)
            right = model(x, plain)
            assert_within(compiled(x, traced), right, double_limit(right, 100))
            for name in ("held", "dropped", "padding"):
                assert getattr(traced._rows, name) == getattr(plain._rows, name)


@pytest.mark.parametrize("kind", [LONG(name) if name != "ragged window" else name for name in FOLLOWED])
def test_rows_of_different_length_and_windows_are_part_of_the_graph(kind: str) -> None:
    """A window of 8 keeps 16 slots: 45 positions roll five times."""
    options, keywords, lengths, graphs = FOLLOWED[kind]
    counter, model = CompileCounterWithBackend("aot_eager"), Decoder(rope=True, **keywords)
    plain, traced = filled(lengths, **options), filled(lengths, **options)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    assert_same_steps((compiled, traced), (model, plain), [1, 1, 1, 2, 3, 1, 4, *[1] * 29])
    assert counter.frame_count == graphs


@pytest.mark.long
def test_rows_that_differ_in_padding_alone_agree_again() -> None:
    plain, traced = filled([3, 1]), filled([3, 1])
    for each in (plain, traced):
        each.append(*[sequence(2, 2 * 2, 4).view(2, 2, 2, 4)] * 2, [0, 2])
    assert traced.ragged and len(set(traced.held.tolist())) == 1
    model = Decoder()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same_steps((compiled, traced), (model, plain), [1, 1, 1])
    assert not traced.ragged


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pages", "lengths"])
def test_pages_and_given_lengths_break_the_graph_and_say_so(kind: str) -> None:
    plain, traced = (filled(None, page_size=16) if kind == "pages" else cache() for _ in range(2))
    layer, padding = make(num_kv_heads=2).eval(), torch.tensor([[False, False], [False, True]])

    def call(x: Tensor, kept: mha_ext.KVCache) -> Any:
        mask = padding if kind == "lengths" and x.shape[1] == 2 else None
        return layer(x, x, x, kv_cache=kept, need_weights=False, key_padding_mask=mask)[0]

    refusal = pytest.raises(torch._dynamo.exc.Unsupported, match="numbers that a graph does not have")
    with refusal, torch.no_grad():
        torch.compile(call, fullgraph=True, backend="eager")(sequence(2, 2), traced)
    torch._dynamo.reset()
    assert_same_steps((torch.compile(call, backend="eager"), traced), (call, plain), [2, 1, 1])


def test_keys_projected_once() -> None:
    """A ``CrossCache`` is made and read in graphs, and passes gradients."""
    layer, memory, x = make(), sequence(2, 7, seed=2), sequence(2, 3)

    def call(memory: Tensor, x: Tensor) -> Tensor:
        kept = layer.project_keys(memory, memory)
        out: Tensor = layer(x, None, None, kv_cache=kept, need_weights=False)[0]
        return out

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, call):
        leaf = memory.clone().requires_grad_()
        out = function(leaf, x)
        found.append((out, *torch.autograd.grad(out.square().sum(), [leaf, *layer.parameters()])))
    for a, b in zip(*found, strict=True):
        assert_within(a, b, double_limit(b, 100))
