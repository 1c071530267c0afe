"""The oracle's dropout, layer and grouped heads: integers, ``nn.MultiheadAttention`` in float64, repeated heads."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mha_ext import reference


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def keep_in_integers(seed: int, head: int, i: int, j: int, dropout_p: float) -> bool:
    """The hash of one pair in Python's own integers."""
    ones64, ones32 = 2**64 - 1, 2**32 - 1

    def splitmix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & ones64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ones64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ones64
        return x ^ (x >> 31)

    row = splitmix64((splitmix64(splitmix64(seed & ones64) ^ head) + j) & ones64)
    x = i ^ (row & ones32)
    x = (x ^ (x >> 16)) * 0x7FEB352D & ones32
    x = ((x ^ (x >> 15)) + (row >> 32)) & ones32
    x = x * 0x846CA68B & ones32
    x = (x ^ (x >> 16)) * 0x9E3779B1 & ones32
    return x ^ (x >> 15) >= int(dropout_p * 2**32)


class TestDropoutKeep:
    def test_splitmix64_has_its_published_first_value(self) -> None:
        """The generator's first output from state 0 is 0xE220A8397B1DCDAF."""
        assert reference._splitmix64(torch.tensor(0)).item() == 0xE220A8397B1DCDAF - 2**64

    @given(st.integers(-(2**63), 2**63 - 1), st.floats(0, 0.99))
    def test_every_pair_in_integers(self, seed: int, dropout_p: float) -> None:
        keep = reference.dropout_keep(seed, 2, 3, 4, 5, dropout_p)
        expected = [keep_in_integers(seed, h, i, j, dropout_p) for h in range(6) for i in range(4) for j in range(5)]
        assert keep.flatten().tolist() == expected

    @pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 0.9])
    def test_share_and_independence(self, dropout_p: float) -> None:
        keep = reference.dropout_keep(7, 2, 3, 100, 200, dropout_p).double()
        # 120,000 draws: the share is within five standard deviations, and neighbours along each axis are uncorrelated.
        deviation = math.sqrt(dropout_p * (1 - dropout_p) / keep.numel())
        assert abs(keep.mean().item() - (1 - dropout_p)) <= 5 * deviation
        if dropout_p:
            centred = (keep - keep.mean()) / keep.std()
            for axis in range(4):
                size = keep.size(axis)
                pairs = centred.narrow(axis, 0, size - 1) * centred.narrow(axis, 1, size - 1)
                assert abs(pairs.mean().item()) <= 5 / math.sqrt(pairs.numel())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 7}])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_layer_is_the_module(bias: bool, widths: dict[str, int], extra: dict[str, bool]) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(12, 3, bias=bias, batch_first=True, dtype=torch.float64, **widths, **extra)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    xq, xk, xv = (
        randn(2, 4, 12),
        randn(2, 5, widths.get("kdim", 12), seed=1),
        randn(2, 5, widths.get("vdim", 12), seed=2),
    )
    padding = torch.tensor([[False] * 5, [False, True, False, True, False]])
    blocked = randn(4, 5, seed=3) > 1
    expected, expected_weights = module(
        xq, xk, xv, attn_mask=blocked, key_padding_mask=padding, average_attn_weights=False
    )
    layer = reference.layer_parameters(module)
    actual, _, weights = reference.multi_head_attention(
        xq, xk, xv, layer, 3, attn_mask=~blocked, key_padding_mask=padding
    )
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(weights, expected_weights)


def test_layer_parameters_convert_and_stay_attached() -> None:
    module = nn.MultiheadAttention(6, 2)
    layer = reference.layer_parameters(module, torch.float64)
    assert layer.w_q.dtype == layer.b_o.dtype == torch.float64  # type: ignore[union-attr]
    torch.testing.assert_close(layer.w_k, module.in_proj_weight[6:12].T.double())
    layer.w_o.sum().backward()
    assert torch.equal(module.out_proj.weight.grad, torch.ones(6, 6))  # type: ignore[arg-type]


@given(st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3)]), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_grouped_heads_are_repeated_heads(heads: tuple[int, int], queries: int, keys: int, width: int) -> None:
    """Query head h reads key/value head h // (H / H_kv); the gradients of a shared head add up."""
    num_heads, num_kv_heads = heads
    query, key = randn(2, num_heads, queries, width), randn(2, num_kv_heads, keys, width, seed=1)
    value = randn(2, num_kv_heads, keys, 3, seed=2)
    group = num_heads // num_kv_heads
    repeated = [torch.stack([x[:, h // group] for h in range(num_heads)], dim=1) for x in (key, value)]
    out, _, _ = reference.attention(query, key, value)
    torch.testing.assert_close(out, reference.attention(query, *repeated)[0])
    grads = reference.attention_backward(out, query, key, value)
    full = reference.attention_backward(out, query, *repeated)
    for shared, each in ((grads.key, full.key), (grads.value, full.value)):
        sums = [sum(each[:, h] for h in range(num_heads) if h // group == g) for g in range(num_kv_heads)]
        torch.testing.assert_close(shared, torch.stack(sums, dim=1))
