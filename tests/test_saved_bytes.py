"""What a forward pass keeps for the backward pass, to the byte: the table in README.

Counted are the storages behind everything that autograd saves, each once and whole, whatever view of it is saved; less
those that exist anyway, the arguments and the parameters. n is the bytes of a number, a the bytes of the type that sums
run in (4, for float64 8). Half types also keep what rounding took from the output of attention, 2 bytes a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

import mha_ext
from mha_ext.functional import scaled_dot_product_attention as attention

B, T, S, H, D = 2, 24, 40, 4, 16
E = H * D
SEED = 8


def rounding_bytes(dtype: torch.dtype) -> int:
    return 2 if dtype in (torch.bfloat16, torch.float16) else 0


def saved_bytes(call: Callable[[], object], existing: Iterable[Tensor]) -> int:
    """Bytes that autograd holds on to after a call, beyond the storages of the tensors that exist."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()  # held: a storage that was freed could be counted as another one
    assert result is not None
    known = {tensor.untyped_storage().data_ptr() for tensor in existing}
    return sum(size for address, size in storages.items() if address not in known)


def layer_bytes(layer: torch.nn.MultiheadAttention, inputs: tuple[Tensor, ...], **options: object) -> int:
    masks = [option for option in options.values() if isinstance(option, Tensor)]
    return saved_bytes(lambda: layer(*inputs, **options), [*inputs, *masks, *layer.parameters()])


def inputs_of(kind: str, batch_first: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    def one(length: int) -> Tensor:
        return torch.randn((B, length, E) if batch_first else (length, B, E), dtype=dtype)

    query = one(T).requires_grad_()
    if kind == "self":
        return query, query, query
    key = one(S)
    return query, key, key if kind == "shared" else one(S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", ["none", "averaged", "per head"])
@pytest.mark.parametrize("kind", ["self", "shared", "separate"])
def test_layer(kind: str, weights: str, batch_first: bool, dtype: torch.dtype) -> None:
    """Projected query, key and value, the context, and one log-sum-exp a row; the weights are computed again."""
    layer = mha_ext.MultiheadAttention(E, H, dropout=0.1, batch_first=batch_first, dtype=dtype)
    inputs = inputs_of(kind, batch_first, dtype)
    keys = T if kind == "self" else S
    options = {"need_weights": weights != "none", "average_attn_weights": weights == "averaged"}
    n, a = dtype.itemsize, max(4, dtype.itemsize)
    want = n * (2 * B * T * E + 2 * B * keys * E) + rounding_bytes(dtype) * B * T * E + a * B * H * T + SEED
    assert layer_bytes(layer, inputs, is_causal=True, **options) == want


@pytest.mark.parametrize("need_weights", [False, True])
def test_masks_of_a_layer(need_weights: bool) -> None:
    """A bool attn_mask is kept turned round, one byte a pair; a float one and the padding stay as they are given."""
    layer = mha_ext.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(B, T, E, requires_grad=True)
    inputs, padding = (x, x, x), torch.zeros(B, T, dtype=torch.bool)
    plain = 4 * (4 * B * T * E + B * H * T)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    for mask, want in ((None, plain), (torch.randn(T, T), plain), (future, plain + T * T)):
        got = layer_bytes(layer, inputs, attn_mask=mask, key_padding_mask=padding, need_weights=need_weights)
        assert got == want


def test_appended_keys_are_a_second_key_and_value() -> None:
    layer = mha_ext.MultiheadAttention(E, H, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    x = torch.randn(B, T, E, requires_grad=True)
    want = 4 * (4 * B * T * E + 2 * B * (T + 2) * E + B * H * T)
    assert layer_bytes(layer, (x, x, x), need_weights=False) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("returned", [None, "mean", "per_head"])
def test_core(returned: str | None, dtype: torch.dtype) -> None:
    """Output and log-sum-exp; query, key, value and mask exist anyway."""
    value_dim = 24
    query = torch.randn(B, H, T, D, dtype=dtype, requires_grad=True)
    key = torch.randn(B, 2, S, D, dtype=dtype)
    value = torch.randn(B, 2, S, value_dim, dtype=dtype)
    mask = torch.randn(H, T, S, dtype=dtype, requires_grad=True)

    def call() -> object:
        return attention(query, key, value, mask, dropout_p=0.1, enable_gqa=True, return_weights=returned)

    numbers = dtype.itemsize + rounding_bytes(dtype)
    want = numbers * B * H * T * value_dim + max(4, dtype.itemsize) * B * H * T + SEED
    assert saved_bytes(call, [query, key, value, mask]) == want


def test_nothing_without_gradients() -> None:
    layer = mha_ext.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(B, T, E)
    with torch.no_grad():
        assert layer_bytes(layer, (x, x, x)) == 0
    layer.requires_grad_(False)
    assert layer_bytes(layer, (x, x, x)) == 0
