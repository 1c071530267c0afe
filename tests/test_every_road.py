"""Every road through the layer and through attention on heads gives one truth: all pairs of options, more at random.

Roads: train, eval, no_grad and inference mode; without weights, with their mean, with one matrix a head; the module,
the module in pieces, and the function with PyTorch's signature. Options and tensors are in roads.py and roads_heads.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import roads
import roads_heads
from covering import pairwise
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from switches import threads

PLAIN = {"appended": ("none",), "widths": ("same",)}  # what the layer in one operator takes
LAYERS = pairwise(roads.FACTORS) + pairwise({**roads.FACTORS, **PLAIN}, seed=1)
HEADS = pairwise(roads_heads.FACTORS)
PARTS = 10


def drawn(factors: dict[str, tuple[Any, ...]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in factors.items()})


def check_layer(options: dict[str, Any], seed: int) -> None:
    with threads(1):
        roads.check_every_road(roads.build(roads.Setting(**options).consistent(), seed))


def check_heads(options: dict[str, Any], seed: int) -> None:
    with threads(1):
        roads_heads.check(roads_heads.build(roads_heads.Setting(**options).consistent(), seed))


@pytest.mark.parametrize("part", range(PARTS))
def test_each_pair_of_a_layers_options(part: int) -> None:
    for seed, options in list(enumerate(LAYERS))[part::PARTS]:
        check_layer(options, seed)


@pytest.mark.parametrize("part", range(PARTS))
def test_each_pair_of_attentions_options(part: int) -> None:
    for seed, options in list(enumerate(HEADS))[part::PARTS]:
        check_heads(options, seed)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn(roads.FACTORS), st.integers(0, 2**16))
def test_any_layer(options: dict[str, Any], seed: int) -> None:
    check_layer(options, seed)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn(roads_heads.FACTORS), st.integers(0, 2**16))
def test_any_attention(options: dict[str, Any], seed: int) -> None:
    check_heads(options, seed)


@pytest.mark.long
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn(roads.FACTORS), st.integers(0, 2**16))
def test_many_layers(options: dict[str, Any], seed: int) -> None:
    check_layer(options, seed)


@pytest.mark.long
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn(roads_heads.FACTORS), st.integers(0, 2**16))
def test_many_attentions(options: dict[str, Any], seed: int) -> None:
    check_heads(options, seed)
