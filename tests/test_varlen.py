"""Packed sequences: each is attended to as if it were alone, forward and backward, and wrong bounds are refused."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import DTYPES
from covering import pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from switches import cpu_capability, threads
from tolerances import Exact, assert_within, attention_limits, growth
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from variant_truth import by_name, dense

import mha_ext
from mha_ext.functional import scaled_dot_product_attention, varlen_attention

CAPABILITIES = mha_ext.available_cpu_capabilities()
LENGTHS = {
    "alike": ([17, 17, 17], [17, 17, 17]),
    "one": ([130], [130]),
    "crossing": ([3, 65, 1, 16], [31, 2, 130, 16]),
    "empty ones": ([0, 5, 0, 33, 7, 0], [4, 0, 0, 65, 7, 9]),
    "all empty": ([0, 0], [0, 0]),
    "none": ([], []),
    "one long": ([1, 1, 200, 1], [1, 2, 257, 1]),
    "many short": ([2, 3, 1] * 20, [3, 1, 4] * 20),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal at the end": {"is_causal": True, "causal_alignment": "lower_right"},
    "window": {"window": (5, 2)},
    "window at the end": {"window": (5, 2), "causal_alignment": "lower_right"},
    "causal window": {"is_causal": True, "window": (5, None), "causal_alignment": "lower_right"},
    "right side": {"window": (-1, 3)},
    "softcap": {"softcap": 1.5, "scale": -0.8},
    "dropout": {"dropout_p": 0.3, "is_causal": True},
}


@dataclass
class Packed:
    """Sequences of so many queries and keys, one behind the other."""

    queries: list[int]
    keys: list[int]
    tensors: dict[str, Tensor]
    grad_out: Tensor
    grad_lse: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def places(self) -> list[tuple[slice, slice]]:
        """Where each sequence lies."""
        found, t, s = [], 0, 0
        for queries, keys in zip(self.queries, self.keys, strict=True):
            found.append((slice(t, t + queries), slice(s, s + keys)))
            t, s = t + queries, s + keys
        return found

    def bounds(self, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor, int, int]:
        starts = [torch.tensor([0, *x]).cumsum(0).to(dtype) for x in (self.queries, self.keys)]
        return (*starts, max([0, *self.queries]), max([0, *self.keys]))

    def keep(self) -> Tensor | None:
        """The pairs that dropout keeps, (H, total_T, total_S): those of one call on everything."""
        p, (total_t, heads, _), total_s = self.options.get("dropout_p"), self.tensors["query"].shape, sum(self.keys)
        if not p or not total_t or not total_s:
            return None
        zeros, eye = torch.zeros(1, heads, 1, 1), torch.eye(total_s).expand(1, heads, -1, -1)
        query, key = zeros.expand(-1, -1, total_t, 1), zeros.expand(-1, -1, total_s, 1)
        torch.manual_seed(5)
        return scaled_dot_product_attention(query, key, eye, dropout_p=p)[0] != 0

    def ours(self, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        return varlen_attention(*tensors.values(), *self.bounds(), **self.options, return_lse=True)

    def results(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        return by_name(self.ours, self.tensors, {}, {"out": self.grad_out, "lse": self.grad_lse})


def pack(
    lengths: tuple[list[int], list[int]], heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (16, 24),
    dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any,
) -> Packed:  # fmt: skip
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    total_t, total_s = map(sum, lengths)
    tensors = {"query": normal(total_t, heads[0], dims[0]), "key": normal(total_s, heads[1], dims[0])}
    tensors["value"] = normal(total_s, heads[1], dims[1])
    grad_lse = normal(heads[0], total_t).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return Packed(*lengths, tensors, normal(total_t, heads[0], dims[1]), grad_lse, options)


def one_by_one(packed: Packed) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The exact results of every sequence alone, put one behind the other, and their limits."""
    keep, dtype = packed.keep(), packed.tensors["query"].dtype
    wanted: dict[str, list[Tensor]] = {n: [] for n in ("out", "lse", "query", "key", "value")}
    allowed: dict[str, list[Tensor]] = {n: [] for n in wanted}
    for queries, keys in packed.places():
        places = {"query": queries, "key": keys, "value": keys}
        tensors = {n: x[places[n]].transpose(0, 1)[None].double() for n, x in packed.tensors.items()}
        mine = None if keep is None else keep[None, :, queries, keys]
        exact = _exact(tensors, packed, (packed.grad_out[queries], packed.grad_lse[:, queries]), mine)
        limits = attention_limits(exact, dtype, tensors["key"].shape[1])
        found = {"out": exact.out, "lse": exact.lse, **exact.grads}
        for name in wanted:
            wanted[name].append(found[name][0])
            allowed[name].append(limits[name][0])

    def joined(parts: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        return {n: torch.cat(x, 1) if n == "lse" else torch.cat(x, 1).transpose(0, 1) for n, x in parts.items()}

    return joined(wanted), joined(allowed)


def _exact(tensors: dict[str, Tensor], packed: Packed, sent: tuple[Tensor, Tensor], keep: Tensor | None) -> Exact:
    """One sequence's answer by dense float64 math."""
    found = []

    def function(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        found.append(dense(query, key, value, packed.options, keep))
        return found[-1].out, found[-1].lse.nan_to_num(neginf=0.0)

    grad_out, grad_lse = sent[0].double().transpose(0, 1)[None], sent[1].double()[None]
    with torch.no_grad():
        function(**tensors)
    grad_lse = torch.where(found[0].lse == -math.inf, 0.0, grad_lse)
    _, grads = by_name(function, tensors, {}, {"out": grad_out, "lse": grad_lse})
    answer, repeats = found[-1], tensors["query"].shape[1] // tensors["key"].shape[1]
    heads = [tensors["query"], *(tensors[n].repeat_interleave(repeats, 1) for n in ("key", "value"))]
    drop = torch.ones_like(answer.weights) if keep is None else keep.double() / (1 - packed.options["dropout_p"])
    scale = packed.options.get("scale") or tensors["query"].shape[3] ** -0.5
    made = [x.detach() for x in (answer.bias, answer.probabilities, drop, answer.out, answer.lse)]
    return Exact(*heads, *made, scale, grad_out, grad_lse, grads, packed.options.get("softcap", 0.0))


def check(packed: Packed) -> None:
    if not packed.queries:
        (out, lse), grads = packed.results()
        assert out.shape == packed.grad_out.shape and lse.shape == packed.grad_lse.shape
        return
    want, limits = one_by_one(packed)
    (out, lse), grads = packed.results()
    for name, got in {"out": out, "lse": lse, **grads}.items():
        assert_within(got, want[name], limits[name], name)
    assert out.dtype == packed.tensors["query"].dtype and lse.is_contiguous()


@pytest.mark.parametrize("row", pairwise({"lengths": LENGTHS, "options": OPTIONS, "dtype": DTYPES}), ids=str)
def test_each_sequence_is_as_if_alone(row: dict[str, Any]) -> None:
    check(pack(LENGTHS[row["lengths"]], dtype=row["dtype"], **OPTIONS[row["options"]]))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("lengths", "heads"), [("crossing", (4, 4)), ("empty ones", (6, 1)), ("one long", (6, 2))])
def test_every_instruction_set_and_grouping(lengths: str, heads: tuple[int, int], capability: str) -> None:
    with cpu_capability(capability):
        for dtype in DTYPES:
            check(pack(LENGTHS[lengths], heads, (33, 8), dtype, **OPTIONS["causal window"]))


_LENGTHS = st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 5, 16, 17, 33, 64, 65, 130])] * 2), max_size=5)


def sweep(lengths: list[tuple[int, int]], options: list[str], dtype: torch.dtype, group: int, seed: int) -> None:
    merged: dict[str, Any] = {}
    for name in options:
        merged |= OPTIONS[name]
    queries, keys = [t for t, _ in lengths], [s for _, s in lengths]
    check(pack((queries, keys), (2 * group, 2), (17, 8), dtype, seed, **merged))


DRAWN = (_LENGTHS, st.lists(st.sampled_from(sorted(OPTIONS)), max_size=3), st.sampled_from(DTYPES), st.integers(1, 3))
test_any_lengths_and_options = settings(max_examples=60, deadline=None, derandomize=True)(
    given(*DRAWN, st.integers(0, 2**31))(sweep)
)
test_any_lengths_and_options_for_long = pytest.mark.long(
    settings(max_examples=1500, deadline=None)(given(*DRAWN, st.integers(0, 2**31))(sweep))
)


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    """NaN in a neighbour's keys and values, in queries and in what comes back: this one keeps every bit."""
    packed = pack(([33, 40, 65], [20, 70, 65]), is_causal=True)
    (clean, clean_lse), clean_grads = packed.results()
    (_, second), (_, third) = packed.places()[1], packed.places()[2]
    packed.tensors["query"][73:] = math.nan
    for name in ("key", "value"):
        packed.tensors[name][third] = math.nan
    packed.grad_out[73:] = math.nan
    (out, lse), grads = packed.results()
    assert torch.equal(out[:73], clean[:73]) and torch.equal(lse[:, :73], clean_lse[:, :73])
    assert torch.equal(grads["query"][:73], clean_grads["query"][:73])
    for name in ("key", "value"):
        assert torch.equal(grads[name][: second.stop], clean_grads[name][: second.stop])
    assert out[73:].isnan().all()


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("lengths", ["crossing", "many short", "one long"])
def test_thread_count_changes_no_bit(lengths: str, capability: str) -> None:
    with cpu_capability(capability):
        results = []
        for count in (1, 2, 3):
            with threads(count):
                found, grads = pack(LENGTHS[lengths], **OPTIONS["dropout"]).results()
                results.append([*found, *grads.values()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_strides_and_kinds_of_bounds() -> None:
    packed = pack(([3, 65], [31, 40]), is_causal=True)
    want = packed.ours(**packed.tensors)
    views = {n: torch.stack([x, -x], 1)[:, 0] for n, x in packed.tensors.items()}
    views["query"] = packed.tensors["query"].transpose(0, 1).contiguous().transpose(0, 1)
    for tensors in (packed.tensors, views):
        for dtype in (torch.int32, torch.int64):
            bounds = packed.bounds(dtype)
            strided = [torch.stack([x, x], -1)[:, 0] for x in bounds[:2]]
            got = varlen_attention(*tensors.values(), *strided, 65, 1000, is_causal=True, return_lse=True)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    alone = varlen_attention(*packed.tensors.values(), *packed.bounds(), is_causal=True)
    assert isinstance(alone, Tensor) and torch.equal(alone, want[0])


@pytest.mark.parametrize("side", [1000, 2**31, 2**40, sys.maxsize])
@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
def test_a_window_wider_than_everything_is_none(side: int, alignment: str) -> None:
    packed = pack(([3, 65], [31, 40]))
    want = packed.ours(**packed.tensors)
    for window in ((side, side), (None, side), (side, None)):
        packed.options = {"window": window, "causal_alignment": alignment}
        got = packed.ours(**packed.tensors)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), window


@pytest.mark.parametrize("options", ["plain", "causal window", "softcap", "dropout"])
def test_gradcheck_and_gradgradcheck(options: str) -> None:
    packed = pack(([2, 0, 3], [3, 1, 2]), (2, 1), (3, 2), torch.float64, **OPTIONS[options])
    inputs = [x.requires_grad_() for x in packed.tensors.values()]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = packed.ours(**dict(zip(packed.tensors, tensors, strict=True)))
        return tuple(torch.where(x == -math.inf, 0.0, x) for x in found)

    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_second_derivatives_over_several_tiles(dtype: torch.dtype) -> None:
    packed = pack(([33, 70], [65, 40]), (2, 2), (8, 8), dtype, **OPTIONS["causal window"])
    results = []
    for mine in (True, False):
        leaves = [(x if mine else x.double()).detach().requires_grad_() for x in packed.tensors.values()]
        if mine:
            out = packed.ours(**dict(zip(packed.tensors, leaves, strict=True)))[0]
        else:
            parts = []
            for queries, keys in packed.places():
                one = [x[place].transpose(0, 1)[None] for x, place in zip(leaves, (queries, keys, keys), strict=True)]
                parts.append(dense(*one, packed.options).out[0].transpose(0, 1))
            out = torch.cat(parts)
        first = torch.autograd.grad(out, leaves, packed.grad_out.to(out.dtype), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for got, right in zip(*results, strict=True):
        assert_within(got, right, 100 * growth(65 * 70, dtype) * float(right.abs().max()))


def test_a_compiled_call_gives_the_same() -> None:
    packed = pack(([3, 33], [31, 40]), dtype=torch.float64, is_causal=True)
    compiled = torch.compile(varlen_attention, backend="aot_eager", fullgraph=True)
    want = packed.ours(**packed.tensors)
    got = compiled(*packed.tensors.values(), *packed.bounds(), is_causal=True, return_lse=True)
    for a, b in zip(got, want, strict=True):
        assert_within(a, b, 1e-13)


# --------------------------------------------------------------------------------------------------------------- errors
Q, KV = torch.randn(7, 4, 8), torch.randn(9, 2, 8)
GOOD: dict[str, Any] = {
    "query": Q, "key": KV, "value": KV, "cu_seqlens_q": torch.tensor([0, 3, 7]),
    "cu_seqlens_k": torch.tensor([0, 4, 9]), "max_seqlen_q": 4, "max_seqlen_k": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"cu_seqlens_q": torch.tensor([1, 3, 7])}, ValueError, "cu_seqlens_q must begin with 0.*got 1"),
        ({"cu_seqlens_k": torch.tensor([0, 4, 8])}, ValueError, "cu_seqlens_k must .*end with 9, got 0 and 8"),
        ({"cu_seqlens_k": torch.tensor([0, 4, 10])}, ValueError, "cu_seqlens_k must .*end with 9, got 0 and 10"),
        ({"cu_seqlens_q": torch.tensor([0, 8, 7])}, ValueError, r"cu_seqlens_q must not decrease, got 8 before 7"),
        ({"cu_seqlens_q": torch.tensor([0, -1, 7])}, ValueError, r"cu_seqlens_q must not decrease, got 0 before -1"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 5, 7])}, ValueError, "cu_seqlens_k must have as many .*got 4 and 3"),
        ({"cu_seqlens_q": torch.tensor([0.0, 3.0, 7.0])}, TypeError, "cu_seqlens_q must be int32 or int64, got .*32"),
        ({"cu_seqlens_k": torch.tensor([0, 4, 9]).short()}, TypeError, "cu_seqlens_k must be int32.*got torch.int16"),
        ({"cu_seqlens_q": [0, 3, 7]}, TypeError, "cu_seqlens_q must be a tensor, got list"),
        ({"cu_seqlens_q": torch.tensor([[0, 3, 7]])}, ValueError, r"cu_seqlens_q must have shape .*got \(1, 3\)"),
        ({"cu_seqlens_q": torch.tensor([]).long()}, ValueError, r"cu_seqlens_q must have shape .*got \(0,\)"),
        ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q must be at least .*4, got 3"),
        ({"max_seqlen_k": 4}, ValueError, "max_seqlen_k must be at least .*5, got 4"),
        ({"max_seqlen_k": 5.5}, TypeError, "max_seqlen_k must .*got"),
        ({"query": Q[None]}, ValueError, r"query must have 3 dimensions .*got shape \(1, 7, 4, 8\)"),
        ({"key": KV[:, :, 0]}, ValueError, r"key must have 3 dimensions .*got shape \(9, 2\)"),
        ({"value": KV[:8]}, ValueError, "value must .*9.*got 8"),
        ({"key": KV[..., :7]}, ValueError, "key must .*8.*got 7"),
        ({"key": KV[:, :1], "value": KV}, ValueError, "value must .*1.*got 2"),
        ({"key": torch.randn(9, 3, 8), "value": torch.randn(9, 3, 8)}, ValueError, "(key|query) must .*got"),
        ({"key": KV.double()}, TypeError, "key must .*got"),
        ({"window": (-2, 0)}, ValueError, r"window must .*got \(-2, 0\)"),
        ({"window": 5}, TypeError, "window must be a pair.*got 5"),
        ({"softcap": 0.0}, ValueError, "softcap must .*got 0.0"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must .*got 1.0"),
        ({"scale": math.inf}, ValueError, "scale must .*got inf"),
        ({"causal_alignment": "right"}, ValueError, "causal_alignment must .*got 'right'"),
        ({"is_causal": "yes"}, TypeError, "is_causal must .*got"),
    ],
    ids=lambda x: str(x)[:60] if isinstance(x, str) else "",
)
def test_wrong_arguments_are_named(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    varlen_attention(**GOOD)
    with pytest.raises(kind, match=f"^varlen_attention: {message}"):
        varlen_attention(**{**GOOD, **changes})
