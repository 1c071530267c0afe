"""Windows, caps, sinks, biases and boundaries: output, log-sum-exp and weights, alone and in any combination."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import DTYPES, LOWER_RIGHT, UPPER_LEFT
from hypothesis import given, settings
from hypothesis import strategies as st
from variant_cases import Variant, check, check_weights, make, variants

SEEDS = st.integers(0, 2**31)
# One option each, on lengths around the edges of tiles.
ALONE = [
    Variant(T=130, S=130, window=(5, 0), causal=UPPER_LEFT),
    Variant(T=33, S=130, window=(5, 3)),
    Variant(T=33, S=130, window=(5, 3), ends=True),
    Variant(T=130, S=33, window=(0, 64), causal=LOWER_RIGHT),
    Variant(T=65, S=66, window=(None, 1)),
    Variant(T=66, S=65, window=(64, -1), ends=True),
    Variant(T=17, S=257, window=(0, 0)),
    Variant(T=33, S=66, softcap=50.0),
    Variant(T=33, S=66, softcap=0.5, scale=3.0),
    Variant(T=33, S=66, sink="float32"),
    Variant(T=3, S=130, sink="float64", mask="bool:11TS"),
    Variant(T=33, S=66, alibi="float32:H"),
    Variant(T=66, S=33, alibi="float64:BH", ends=True),
    Variant(T=33, S=130, relative="float32:H"),
    Variant(T=130, S=33, relative="float64:B1"),
    Variant(T=63, S=65, relative="bfloat16:BH"),
    Variant(T=3, S=130, relative="float32:1"),
    Variant(T=66, S=66, segments="one"),
    Variant(T=33, S=130, segments="pair"),
    Variant(T=130, S=33, segments="batch"),
    Variant(T=66, S=66, causal=UPPER_LEFT, prefix=20),
    Variant(T=33, S=130, causal=LOWER_RIGHT, prefix="batch"),
    Variant(T=66, S=65, key_range="T"),
    Variant(T=33, S=130, key_range="BT"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_alone(case: Variant, dtype: torch.dtype) -> None:
    check(make(replace(case, H=4, H_kv=2, dtype=dtype)), grads=False)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_weights_alone(case: Variant) -> None:
    check_weights(make(replace(case, H=4, H_kv=2, dropout_p=0.2)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(variants(), SEEDS)
def test_any_combination(case: Variant, seed: int) -> None:
    check(make(case, seed), grads=False)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(variants(), SEEDS)
def test_weights_of_any_combination(case: Variant, seed: int) -> None:
    check_weights(make(case, seed))


@pytest.mark.long
@settings(max_examples=2000, deadline=None)
@given(variants(long=True), SEEDS)
def test_any_combination_at_length(case: Variant, seed: int) -> None:
    check(make(case, seed), grads=False)


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(variants(long=True), SEEDS)
def test_weights_of_any_combination_at_length(case: Variant, seed: int) -> None:
    check_weights(make(case, seed))
