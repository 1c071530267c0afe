"""The benchmark's variants: every way to write one computes the same, and what is counted is what is visible."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("rich")

from benchmarks import presets
from benchmarks.cases import VARIANTS, Case, floating_point_operations, packed_lengths, visible_pairs
from benchmarks.inputs import make_inputs
from benchmarks.peers import OURS, find_peer, peers_for
from benchmarks.peers.own import comparisons
from benchmarks.work import TOLERANCES, largest_difference, results

SMALL = Case("variant", "backward", batch=2, heads=4, length=24, head_dim=8, causal=True)
CASES = {
    "grouped": replace(SMALL, variant="grouped", kv_heads=2, beside="repeated keys"),
    "decode": replace(SMALL, variant="decode", kv_heads=2, length=1, key_length=24, causal=False),
    "window": replace(SMALL, variant="window", window=5, causal=False, beside="a mask"),
    "packed": replace(SMALL, variant="packed", batch=5),
    "alibi": replace(SMALL, variant="alibi"),
    "softcap": replace(SMALL, variant="softcap"),
    "sink": replace(SMALL, variant="sink"),
}
PEERS = {
    "grouped": {"F.sdpa", "F.sdpa, repeated keys"},
    "decode": {"F.sdpa", "F.sdpa, folded", "grouped products"},
    "window": {"F.sdpa"},
    "packed": {"F.sdpa, padded", "F.sdpa, loop"},
    "alibi": {"F.sdpa"},
    "softcap": {"composed"},
    "sink": {"F.sdpa", "composed"},
}


@pytest.mark.parametrize("task", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_to_write_it_computes_the_same(variant: str, causal: bool, dtype: str, task: str) -> None:
    case = replace(CASES[variant], task=task, dtype=dtype, causal=causal and variant not in ("window", "decode"))
    able, _ = peers_for(case, lambda peer: peer.by_default)
    assert {peer.name for peer in able} == PEERS[variant]
    ours = results(case, OURS["variant"])
    assert task == "forward" or ours.keys() >= {f"gradient of {name}" for name in ("query", "key", "value")}
    for peer in (*able, *comparisons(case)):
        name, difference = largest_difference(ours, results(case, peer))
        assert difference <= TOLERANCES[dtype], (peer.name, name)


def test_a_case_is_measured_beside_what_it_asks_for() -> None:
    beside = {name: [peer.name for peer in comparisons(case)] for name, case in CASES.items()}
    assert beside["grouped"] == ["mha_ext, repeated keys"] and beside["window"] == ["mha_ext, a mask"]
    assert not any(beside[name] for name in ("decode", "packed", "alibi", "softcap", "sink"))


@pytest.mark.long
@pytest.mark.parametrize("variant", ["grouped", "window", "alibi", "softcap"])
def test_compiled_flex_attention_computes_the_same(variant: str) -> None:
    case = replace(CASES[variant], task="forward", length=64)
    peer = find_peer("variant", "compiled flex_attention")
    if missing := peer.missing():
        pytest.skip(missing)
    assert peer.unsupported(case) is None
    assert largest_difference(results(case, OURS["variant"]), results(case, peer))[1] <= TOLERANCES["fp32"]
    assert peer.unsupported(replace(case, task="backward")) == "has no backward pass on a CPU"


def test_a_way_says_what_it_is_no_way_to() -> None:
    assert find_peer("variant", "F.sdpa").unsupported(CASES["packed"]).startswith("is a way to write grouped and")
    composed = find_peer("variant", "composed")
    assert composed.unsupported(CASES["grouped"]) == "is a way to write softcap and sink alone"


def test_packed_lengths_go_up_to_the_longest() -> None:
    case = replace(CASES["packed"], length=80)
    assert packed_lengths(case) == [10, 28, 45, 63, 80]
    assert packed_lengths(replace(case, batch=1)) == [80] and packed_lengths(replace(case, length=1)) == [1] * 5
    inputs = make_inputs(case)
    assert all(x.shape == (226, 4, 8) for x in (*inputs.arguments, inputs.grad_output))


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "decode"])
def test_operations_are_those_of_visible_pairs(variant: str) -> None:
    """Counted from a matrix: two to a multiply-add, two products forward and five backward."""
    case = CASES[variant]
    pairs = 0
    for length in packed_lengths(case) if variant == "packed" else [case.length] * case.batch:
        distance = torch.arange(length)[:, None] - torch.arange(length)
        pairs += int(((distance >= 0) & (distance < (case.window or length))).sum())
    products = 2 * pairs * case.heads * case.head_dim
    assert floating_point_operations(case) == 5 * products
    assert floating_point_operations(replace(case, task="forward")) == 2 * products
    if variant == "window":
        assert visible_pairs(case) == 5 * 24 - (4 + 3 + 2 + 1)


def test_a_query_that_decodes_sees_every_key() -> None:
    case = replace(CASES["decode"], task="forward")
    assert floating_point_operations(case) == 2 * 2 * case.batch * case.heads * 24 * case.head_dim


@pytest.mark.parametrize("name", ["default", "goals", "full"])
def test_the_presets_hold_every_variant_forward_and_backward(name: str) -> None:
    cases = [case for case in presets.preset(name) if case.level == "variant"]
    for variant in VARIANTS:
        tasks = {"forward"} if variant == "decode" else {"forward", "backward"}
        assert tasks <= {case.task for case in cases if case.variant == variant}
    windows = {case.length for case in cases if case.variant == "window" and case.window == 256}
    assert {2048, 8192} <= windows
    assert {case.variant for case in cases if case.task == "memory"} >= {"grouped", "window", "packed"}
