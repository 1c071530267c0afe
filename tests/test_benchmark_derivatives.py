"""The benchmark's derivatives: both peers compute the same, which is what the case asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.cases import DERIVATIVES, Case, floating_point_operations
from benchmarks.inputs import make_inputs
from benchmarks.peers import OURS, peers_for
from benchmarks.work import TOLERANCES, largest_difference, results

SMALL = Case("derivative", "forward", batch=2, heads=4, length=24, head_dim=8, variant="jvp")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", DERIVATIVES)
def test_both_ways_compute_the_same(variant: str, causal: bool) -> None:
    case = replace(SMALL, variant=variant, causal=causal)
    able, _ = peers_for(case, lambda peer: peer.by_default)
    assert [peer.name for peer in able] == ["F.sdpa, math"]
    ours = results(case, OURS["derivative"])
    assert largest_difference(ours, results(case, able[0]))[1] <= TOLERANCES["fp32"]
    rows = {"jvp": case.batch}.get(variant, 3 * case.batch)  # a result for each of query, key and value
    assert ours["output"].shape == (rows, case.heads, case.length, case.head_dim)


def test_the_tangent_is_a_difference_of_outputs() -> None:
    case = replace(SMALL, dtype="fp64")
    query, key, value = make_inputs(case).arguments
    step = 1e-6

    def output(move: float) -> torch.Tensor:
        moved = (query + move * key, key + move * value, value + move * query)
        return (moved[0] @ moved[1].mT / case.head_dim**0.5).softmax(-1) @ moved[2]

    want = (output(step) - output(-step)) / (2 * step)
    torch.testing.assert_close(results(case, OURS["derivative"])["output"], want, rtol=1e-7, atol=1e-8)


def test_operations_are_those_of_the_products() -> None:
    one = 2 * 2 * 4 * 24 * 24 * 8  # a product of a head's pairs with a head's width
    counts = [floating_point_operations(replace(SMALL, variant=name)) for name in DERIVATIVES]
    assert counts == [(2 + 5) * one, (2 + 5 + 5 + 11) * one, (2 + 5) * one]
