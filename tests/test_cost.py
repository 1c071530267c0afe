"""Parameter and operation counts, and the shape trace, against numbers counted by hand and against real modules."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mha_ext.cost import kv_cache_bytes, parameter_count, self_attention_flops, shape_trace

heads = st.sampled_from([(12, 1, 1), (12, 2, 1), (12, 3, 3), (12, 4, 2), (12, 12, 3), (32, 8, 1)])
sizes = st.integers(0, 40)


class Counter:
    """A matrix product that counts its multiply-adds."""

    def __init__(self) -> None:
        self.multiply_adds = 0

    def matmul(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        product = left @ right
        self.multiply_adds += product.size * left.shape[-1]
        return product


def counted_layer(batch: int, queries: int, keys: int, width: int, num_heads: int, num_kv_heads: int) -> Counter:
    """Run the matrix products of a layer head by head and count what they did."""
    counter = Counter()
    head_dim = width // num_heads
    for _ in range(batch):
        for rows, heads_here in ((queries, num_heads), (keys, num_kv_heads), (keys, num_kv_heads)):
            counter.matmul(np.ones((rows, width)), np.ones((width, heads_here * head_dim)))
        for _ in range(num_heads):
            scores = counter.matmul(np.ones((queries, head_dim)), np.ones((head_dim, keys)))
            counter.matmul(scores, np.ones((keys, head_dim)))
        counter.matmul(np.ones((queries, width)), np.ones((width, width)))
    return counter


def test_parameter_count_by_hand() -> None:
    # d = 6: four 6 x 6 matrices hold 4 * 36 = 144 numbers; their biases 4 * 6 = 24 more.
    assert parameter_count(6) == 144
    assert parameter_count(6, bias=True) == 168
    # 3 heads of width 2 sharing one key/value head: keys and values need a 6 x 2 matrix each: 36 + 12 + 12 + 36 = 96.
    assert parameter_count(6, num_heads=3, num_kv_heads=1) == 96
    assert parameter_count(6, num_heads=3, num_kv_heads=1, bias=True) == 96 + 6 + 2 + 2 + 6


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 12])
def test_parameter_count_is_that_of_the_module(num_heads: int, bias: bool) -> None:
    module = torch.nn.MultiheadAttention(12, num_heads, bias=bias)
    assert parameter_count(12, num_heads=num_heads, bias=bias) == sum(p.numel() for p in module.parameters())


def test_flops_by_hand() -> None:
    # B = 2, T = 3, d = 4. Four projections of 6 rows: 4 * 6 * 16 = 384. Scores and mixtures: 2 * (2 * 9 * 4) = 144.
    assert self_attention_flops(2, 3, 4) == 384 + 144
    # A bias is added to each of the 4 * 6 * 4 = 96 projected numbers.
    assert self_attention_flops(2, 3, 4, bias=True) == 384 + 144 + 96
    # Two query heads sharing one key/value head: keys and values project to width 2: 2 * 6 * 16 + 2 * 6 * 8 = 288.
    assert self_attention_flops(2, 3, 4, num_heads=2, num_kv_heads=1) == 288 + 144


@given(st.integers(0, 3), st.integers(0, 9), heads)
def test_flops_are_those_of_the_products(batch: int, length: int, config: tuple[int, int, int]) -> None:
    width, num_heads, num_kv_heads = config
    counted = counted_layer(batch, length, length, width, num_heads, num_kv_heads).multiply_adds
    assert self_attention_flops(batch, length, width, num_heads=num_heads, num_kv_heads=num_kv_heads) == counted


def test_number_of_heads_changes_neither_parameters_nor_operations() -> None:
    """Claim 4: more heads at the same width cost the same parameters and the same leading multiply-adds."""
    traces = {num_heads: shape_trace(2, 7, 24, num_heads) for num_heads in (1, 2, 3, 4, 6, 8, 12, 24)}
    assert {trace.parameters for trace in traces.values()} == {parameter_count(24)} == {4 * 24 * 24}
    assert {trace.multiply_adds for trace in traces.values()} == {self_attention_flops(2, 7, 24)}
    assert {num_heads: trace["query heads"].shape for num_heads, trace in traces.items()} == {
        num_heads: (2, num_heads, 7, 24 // num_heads) for num_heads in traces
    }


@given(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), heads, st.booleans())
def test_trace_adds_up(batch: int, queries: int, keys: int, config: tuple[int, int, int], bias: bool) -> None:
    """Claim 6: the trace of any configuration leads from (B, T, d) to (B, T, d), and its costs are the real ones."""
    width, num_heads, num_kv_heads = config
    trace = shape_trace(batch, queries, width, num_heads, key_length=keys, num_kv_heads=num_kv_heads, bias=bias)
    assert trace.steps[0].shape == trace.steps[-1].shape == (batch, queries, width)
    biases = sum(trace[name].numel for name in ("query", "key", "value", "output")) if bias else 0
    counted = counted_layer(batch, queries, keys, width, num_heads, num_kv_heads).multiply_adds
    assert trace.multiply_adds == counted + biases
    assert trace.attention_weights == batch * num_heads * queries * keys


def test_trace_of_a_grouped_cross_attention_layer_prints_every_step() -> None:
    trace = shape_trace(2, 5, 12, 6, key_length=7, num_kv_heads=2, bias=True)
    assert [step.shape for step in trace.steps] == [
        *[(2, 5, 12), (2, 7, 12), (2, 7, 12)],
        *[(2, 5, 12), (2, 7, 4), (2, 7, 4)],
        *[(2, 6, 5, 2), (2, 2, 7, 2), (2, 2, 7, 2)],
        *[(2, 6, 5, 7), (2, 6, 5, 7), (2, 6, 5, 2)],
        *[(2, 5, 12), (2, 5, 12)],
    ]
    assert [step.name for step in trace.steps if not step.stored] == ["scores", "weights"]
    table = str(trace)
    lines = table.splitlines()
    for step, line in zip(trace.steps, lines[2:], strict=False):
        assert line.startswith(step.name)
        assert str(step.shape) in line
    # 12 x 12 + 12 x 4 + 12 x 4 + 12 x 12 weights and 12 + 4 + 4 + 12 biases; 2 * 6 * 5 * 7 attention weights.
    assert "416" in lines[-3]
    assert f"{trace.multiply_adds:,}" in lines[-2]
    assert "420 numbers" in lines[-1]
    with pytest.raises(KeyError, match="no step 'queries'; the steps are query input, "):
        trace["queries"]


def test_kv_cache_bytes() -> None:
    # Two tensors of 3 x 2 x 5 x 4 = 120 numbers of 2 bytes.
    assert kv_cache_bytes(3, 5, 2, 4, element_size=2) == 480
    # Grouped heads shrink the cache by H / H_kv.
    assert kv_cache_bytes(3, 5, 8, 4) == 4 * kv_cache_bytes(3, 5, 2, 4)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="parameter_count: model_width must not be negative, got -1"):
        parameter_count(-1)
    with pytest.raises(TypeError, match="parameter_count: model_width must be an int, got float"):
        parameter_count(4.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parameter_count: num_heads must be given with num_kv_heads, got None"):
        parameter_count(4, num_kv_heads=1)
    with pytest.raises(ValueError, match="embed_dim 10 is not divisible by num_heads 3"):
        self_attention_flops(1, 1, 10, num_heads=3)
    with pytest.raises(ValueError, match="shape_trace: num_heads 4 is not divisible by num_kv_heads 3"):
        shape_trace(1, 1, 8, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match="shape_trace: num_heads must be at least 1, got 0"):
        shape_trace(1, 1, 8, 0)
    with pytest.raises(ValueError, match="shape_trace: key_length must not be negative, got -2"):
        shape_trace(1, 1, 8, 2, key_length=-2)
    with pytest.raises(ValueError, match="kv_cache_bytes: length must not be negative, got -5"):
        kv_cache_bytes(1, -5, 1, 1)
