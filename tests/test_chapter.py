"""The chapter's functions: hand-worked numbers, the reference for every kind of mask, arrays, and errors."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mha_ext
from mha_ext import reference

INF = math.inf


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(width: int, kv_width: int | None = None, seed: int = 50) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kv_width = width if kv_width is None else kv_width
    shapes = [(width, width), (width, kv_width), (width, kv_width), (width, width)]
    w_q, w_k, w_v, w_o = (randn(*shape, seed=seed + index) / math.sqrt(width) for index, shape in enumerate(shapes))
    return w_q, w_k, w_v, w_o


def same(x: Tensor) -> Tensor:
    return x


def to_numpy(x: Tensor) -> Any:
    return x.numpy()


kinds = pytest.mark.parametrize("kind", [same, to_numpy])


def assert_close(actual: Any, expected: Tensor, kind: Callable[[Tensor], Any] = same, **tolerance: float) -> None:
    assert type(actual) is type(kind(expected.detach()))
    actual = torch.as_tensor(actual)
    assert not actual.requires_grad
    torch.testing.assert_close(actual, expected.detach(), **tolerance)


class TestByHand:
    """Q K^T is scaled so that exp(S) = [[1, 3], [2, 2]]: the weights are [[1/4, 3/4], [1/2, 1/2]]."""

    query = torch.eye(2, dtype=torch.float64) * math.sqrt(2)
    key = torch.tensor([[0.0, math.log(2)], [math.log(3), math.log(2)]], dtype=torch.float64)
    value = torch.tensor([[4.0, 0.0], [0.0, 8.0]], dtype=torch.float64)

    @kinds
    def test_attention(self, kind: Callable[[Tensor], Any]) -> None:
        out, cache = mha_ext.attention_forward(kind(self.query), kind(self.key), kind(self.value), None, True)
        # 1/4 (4, 0) + 3/4 (0, 8) and 1/2 (4, 0) + 1/2 (0, 8).
        assert_close(out, torch.tensor([[1.0, 6.0], [2.0, 4.0]], dtype=torch.float64), kind)
        grads = mha_ext.attention_backward(kind(torch.eye(2, dtype=torch.float64)), cache)
        # dP = dO V^T = [[4, 0], [0, 8]], sum_j P dP = 1 and 4, so dS = [[3/4, -3/4], [-2, 2]]; the scale is 1/√2.
        # dQ = dS K / √2: rows 3/4 (k1 - k2) and 2 (k2 - k1), with k2 - k1 = (log 3, 0).
        slope = math.log(3) / math.sqrt(2)
        assert_close(grads[0], torch.tensor([[-0.75 * slope, 0.0], [2 * slope, 0.0]], dtype=torch.float64), kind)
        # dK = dS^T Q / √2, and Q / √2 is the identity.
        assert_close(grads[1], torch.tensor([[0.75, -2.0], [-0.75, 2.0]], dtype=torch.float64), kind)
        # dV = P^T dO.
        assert_close(grads[2], torch.tensor([[0.25, 0.5], [0.75, 0.5]], dtype=torch.float64), kind)

    @kinds
    def test_layer(self, kind: Callable[[Tensor], Any]) -> None:
        """Two heads of width 1. All keys are alike, so every head averages its value column over the two positions."""
        xq, xkv = torch.ones(1, 1, 2, dtype=torch.float64), self.value[None]  # values (4, 0) and (0, 8): means 2 and 4
        eye, zero = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
        w_o = torch.tensor([[1.0, 10.0], [0.0, 1.0]], dtype=torch.float64)
        params = [kind(w) for w in (eye, zero, eye, w_o)]
        out, cache = mha_ext.multi_head_attention_forward(
            kind(xq), kind(xkv), kind(xkv), params, num_heads=2, return_cache=True
        )
        # (2, 4) W_O = (2, 20 + 4).
        assert_close(out, torch.tensor([[[2.0, 24.0]]], dtype=torch.float64), kind)
        (dxq, dxk, dxv), (dw_q, dw_k, dw_v, dw_o) = mha_ext.multi_head_attention_backward(
            kind(torch.tensor([[[1.0, 1.0]]], dtype=torch.float64)), cache
        )
        # dYcat = (1, 1) W_O^T = (11, 1); dW_O = Ycat^T dY = (2, 4)^T (1, 1).
        assert_close(dw_o, torch.tensor([[2.0, 2.0], [4.0, 4.0]], dtype=torch.float64), kind)
        # Half of dYcat goes to each position's value; W_V is the identity.
        assert_close(dxv, torch.tensor([[[5.5, 0.5], [5.5, 0.5]]], dtype=torch.float64), kind)
        # dW_V = Xv^T dV = [[4, 0], [0, 8]]^T [[5.5, 0.5], [5.5, 0.5]].
        assert_close(dw_v, torch.tensor([[22.0, 2.0], [44.0, 4.0]], dtype=torch.float64), kind)
        # Head 1: dP = 11 (4, 0), mean 22, dS = (11, -11); head 2: dP = (0, 8), mean 4, dS = (-2, 2); Q = (1, 1).
        # dW_K = Xk^T dK = [[4, 0], [0, 8]]^T [[11, -2], [-11, 2]]. K = 0, so nothing reaches Q; W_K = 0 stops at Xk.
        assert_close(dw_k, torch.tensor([[44.0, -8.0], [-88.0, 16.0]], dtype=torch.float64), kind)
        for zeros, shape in ((dxq, xq), (dxk, xkv), (dw_q, eye)):
            assert_close(zeros, torch.zeros_like(shape), kind)

    @kinds
    def test_heads(self, kind: Callable[[Tensor], Any]) -> None:
        """The first d / H columns are head one, the next head two."""
        x = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]])
        heads = torch.tensor([[[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0], [7.0, 8.0]]]])
        assert_close(mha_ext.split_heads(kind(x), 2), heads, kind)
        assert_close(mha_ext.combine_heads(kind(heads)), x, kind)


@kinds
@given(st.integers(0, 3), st.integers(0, 5), st.integers(1, 6), st.integers(1, 4))
def test_combine_undoes_split(kind: Callable[[Tensor], Any], batch: int, length: int, heads: int, dim: int) -> None:
    x = randn(batch, length, heads * dim)
    split = mha_ext.split_heads(kind(x), heads)
    assert split.shape == (batch, heads, length, dim)
    for head in range(heads):
        assert_close(split[:, head], x[..., head * dim : (head + 1) * dim], kind)
    assert_close(mha_ext.combine_heads(split), x, kind)


MASKS: dict[str, Callable[[int, int, int, int], Tensor | None]] = {
    "none": lambda B, H, T, S: None,
    "causal": lambda B, H, T, S: torch.ones(T, S, dtype=torch.bool).tril(),
    "bool": lambda B, H, T, S: randn(B, H, T, S, seed=8) > 0.5,
    "float": lambda B, H, T, S: randn(B, H, T, S, seed=9).masked_fill(randn(B, H, T, S, seed=8) > 0.5, -INF),
    "per head": lambda B, H, T, S: randn(H, 1, S, seed=10)[None],
    "per example": lambda B, H, T, S: randn(B, T, S, seed=11),
    "padding": lambda B, H, T, S: (torch.arange(S) < torch.arange(B)[:, None] + 1)[:, None, None],
    "per key": lambda B, H, T, S: randn(S, seed=12),
    "one number": lambda B, H, T, S: randn(1, seed=13).squeeze(),
    "bfloat16": lambda B, H, T, S: randn(T, S, seed=14, dtype=torch.bfloat16),
}
masks = pytest.mark.parametrize("mask_name", MASKS)


def as_four_axes(mask: Tensor | None) -> Tensor | None:
    """The rule for a mask (B, T, S): per example."""
    return mask[:, None] if mask is not None and mask.dim() == 3 else mask


@masks
@kinds
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_is_the_reference(num_kv_heads: int, kind: Callable[[Tensor], Any], mask_name: str) -> None:
    query, key = randn(2, 4, 5, 3), randn(2, num_kv_heads, 6, 3, seed=1)
    value, grad_out = randn(2, num_kv_heads, 6, 2, seed=2), randn(2, 4, 5, 2, seed=3)
    mask = MASKS[mask_name](2, 4, 5, 6)
    given_mask = mask if mask is None or mask.dtype == torch.bfloat16 else kind(mask)
    out, cache = mha_ext.attention_forward(kind(query), kind(key), kind(value), given_mask, return_cache=True)
    assert_close(out, reference.attention(query, key, value, as_four_axes(mask))[0], kind)
    grads = mha_ext.attention_backward(kind(grad_out), cache, return_grad_mask=True)
    expected = reference.attention_backward(grad_out, query, key, value, as_four_axes(mask))
    for actual, wanted in zip(grads[:3], expected[:3], strict=True):
        assert_close(actual, wanted, kind)
    for actual, wanted in zip(mha_ext.attention_backward(kind(grad_out), cache), grads[:3], strict=True):
        assert np.array_equal(actual, wanted)
    if expected.attn_mask is None:
        assert grads[3] is None
    else:
        assert mask is not None
        assert_close(grads[3], expected.attn_mask.reshape(mask.shape), same if mask_name == "bfloat16" else kind)


@given(st.lists(st.integers(0, 3), max_size=3), st.integers(0, 3), st.integers(0, 4), st.integers(0, 4), st.data())
def test_any_leading_axes(axes: list[int], heads: int, queries: int, keys: int, data: st.DataObject) -> None:
    """Leading axes are independent problems; a mask broadcasts over them, its gradient is summed over them."""
    axes = [*axes, heads] if heads else []
    query, key, value = randn(*axes, queries, 3), randn(*axes, keys, 3, seed=1), randn(*axes, keys, 2, seed=2)
    grad_out = randn(*axes, queries, 2, seed=3)
    full = [*axes, queries, keys]
    kept = data.draw(st.integers(0, len(full)))
    shape = [size if data.draw(st.booleans()) else 1 for size in full[len(full) - kept :]]
    shape = [1, *shape] if len(axes) == 2 and len(shape) == 3 and shape[0] != 1 else shape
    mask = randn(*shape, seed=4)
    leaves = [x.requires_grad_() for x in (query, key, value, mask)]
    scores = query @ key.mT / math.sqrt(3) + (mask[:, None] if len(axes) == 2 and mask.dim() == 3 else mask)
    expected = scores.softmax(-1) @ value
    wanted = torch.autograd.grad(expected, leaves, grad_out, allow_unused=True, materialize_grads=True)
    out, cache = mha_ext.attention_forward(query, key, value, mask, return_cache=True)
    assert_close(out, expected)
    for actual, grad in zip(mha_ext.attention_backward(grad_out, cache, return_grad_mask=True), wanted, strict=True):
        assert_close(actual, grad)


@masks
@kinds
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_layer_is_the_reference(num_kv_heads: int, kind: Callable[[Tensor], Any], mask_name: str) -> None:
    """Claim 2: queries from one sequence, keys and values from others, each with a gradient of its own."""
    inputs = [randn(2, 5, 6), randn(2, 7, 6, seed=1), randn(2, 7, 6, seed=2)]
    params, grad_output = layer(6, 2 * num_kv_heads), randn(2, 5, 6, seed=3)
    mask = MASKS[mask_name](2, 3, 5, 7)
    float_mask = mask is not None and mask.is_floating_point()
    leaves = [x.clone().requires_grad_() for x in [*inputs, *params]]
    mask_leaf = mask.clone().requires_grad_() if mask is not None and float_mask else mask
    expected = reference.multi_head_attention(
        *leaves[:3], reference.LayerParameters(*leaves[3:]), 3, attn_mask=as_four_axes(mask_leaf)
    )[0]
    wanted = torch.autograd.grad(expected, leaves + ([mask_leaf] if float_mask else []), grad_output)
    out, cache = mha_ext.multi_head_attention_forward(
        *map(kind, inputs), tuple(map(kind, params)), 3, mask, return_cache=True
    )
    assert_close(out, expected, kind)
    grads_x, grads_w, grad_mask = mha_ext.multi_head_attention_backward(kind(grad_output), cache, return_grad_mask=True)
    for actual, grad in zip([*grads_x, *grads_w], wanted[:7], strict=True):
        assert_close(actual, grad, kind)
    if float_mask:
        assert_close(grad_mask, wanted[7])
    else:
        assert grad_mask is None
    plain = mha_ext.multi_head_attention_backward(kind(grad_output), cache)
    assert [len(part) for part in plain] == [3, 4]
    assert all(np.array_equal(x, y) for x, y in zip(plain[0] + plain[1], grads_x + grads_w, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x, params = randn(2, 5, 6).to(dtype), tuple(w.to(dtype) for w in layer(6))
    out, cache = mha_ext.multi_head_attention_forward(x, x, x, params, 2, return_cache=True)
    doubles = reference.LayerParameters(*(w.double() for w in params))
    expected = reference.multi_head_attention(x.double(), x.double(), x.double(), doubles, 2)[0]
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)
    grads_x, grads_w = mha_ext.multi_head_attention_backward(out, cache)
    assert {grad.dtype for grad in (*grads_x, *grads_w)} == {dtype}


@pytest.mark.parametrize("bad_key", [0, 60, 199])
def test_visible_nan_reaches_no_hidden_key(bad_key: int) -> None:
    """Half the queries see a key that is NaN; key 100 is hidden from all, in the same tile of keys or in another."""
    query, key, value = randn(1, 1, 70, 4), randn(1, 1, 200, 4, seed=1), randn(1, 1, 200, 4, seed=2)
    key[:, :, bad_key] = math.nan
    mask = torch.ones(70, 200, dtype=torch.bool)
    mask[:, 100] = False
    mask[::2, bad_key] = False
    out, cache = mha_ext.attention_forward(query, key, value, mask, return_cache=True)
    assert_close(out, reference.attention(query, key, value, mask)[0], equal_nan=True)
    grads = mha_ext.attention_backward(torch.ones_like(out), cache)
    expected = reference.attention_backward(torch.ones_like(out), query, key, value, mask)
    assert [int(grad[0, 0, 100].count_nonzero()) for grad in expected[1:3]] == [0, 0]
    for actual, wanted in zip(grads, expected[:3], strict=True):
        assert_close(actual, wanted, equal_nan=True)


def test_arrays_of_any_strides() -> None:
    """Reversed, transposed and read-only arrays are read in place or copied, and never written."""
    x = randn(2, 4, 6).numpy()
    params = [w.numpy() for w in layer(6)]
    expected = mha_ext.multi_head_attention_forward(x, x, x, params, 2)
    strange = [np.ascontiguousarray(x[:, ::-1])[:, ::-1], x.T.copy().T, x.copy()]
    strange[2].setflags(write=False)
    actual = mha_ext.multi_head_attention_forward(*strange, [w.T.copy().T for w in params], 2)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


Call = Callable[[], Any]
X, PARAMS = randn(2, 5, 6), layer(6)
Q4 = randn(2, 4, 5, 6)


def forward(x: Any, num_heads: int = 2, **changed: Any) -> Any:
    """Self-attention of x with some arguments changed, in float64."""
    arguments = (
        dict(zip(("w_q", "w_k", "w_v", "w_o"), PARAMS, strict=True)) | {"xk": x, "xv": x, "mask": None} | changed
    )
    params = tuple(arguments[name] for name in ("w_q", "w_k", "w_v", "w_o"))
    return mha_ext.multi_head_attention_forward(
        x, arguments["xk"], arguments["xv"], params, num_heads, arguments["mask"]
    )


def backward(grad: Any) -> Any:
    cache = mha_ext.multi_head_attention_forward(X, X, X, PARAMS, 2, return_cache=True)[1]
    return mha_ext.multi_head_attention_backward(grad, cache)


WRONG_VALUES: dict[str, Call] = {
    r"^embed_dim 10 is not divisible by num_heads 3$": lambda: mha_ext.split_heads(torch.zeros(1, 2, 10), 3),
    r"^embed_dim 6 is not divisible by num_heads 4$": lambda: forward(X, 4),
    r"split_heads: x must have 3 axes, got shape \(2, 10\)": lambda: mha_ext.split_heads(np.zeros((2, 10)), 2),
    r"split_heads: num_heads must be at least 1, got 0": lambda: mha_ext.split_heads(X, 0),
    r"combine_heads: x must have 4 axes, got shape \(2, 5, 6\)": lambda: mha_ext.combine_heads(X),
    r"params must be \(W_Q, W_K, W_V, W_O\), got 3 of them": lambda: mha_ext.multi_head_attention_forward(
        *(X, X, X),
        PARAMS[:3],  # type: ignore[arg-type]
        2,
    ),
    r"forward: num_heads must be at least 1, got -1": lambda: forward(X, -1),
    r"Xk must have 3 axes, got shape \(5, 6\)": lambda: forward(X, xk=X[0]),
    r"W_O must have 2 axes, got shape \(2, 6, 6\)": lambda: forward(X, w_o=randn(2, 6, 6)),
    r"W_K must have 6 rows, got shape \(5, 6\)": lambda: forward(X, w_k=randn(5, 6)),
    r"W_K must have as many columns as W_Q, 6, or .* got shape \(6, 4\)": lambda: forward(X, 3, w_k=randn(6, 4)),
    r"W_V must have 3 heads, got shape \(6, 4\)": lambda: forward(X, 3, w_v=randn(6, 4)),
    r"W_O must have 6 rows, got shape \(5, 6\)": lambda: forward(X, w_o=randn(5, 6)),
    r"Xk must have Xq's batch 2, got 1": lambda: forward(X, xk=X[:1], xv=X[:1]),
    r"Xv must have Xk's batch and length \(2, 5\), got \(2, 4\)": lambda: forward(X, xv=X[:, :4]),
    r"forward: mask must be broadcastable to \(2, 2, 5, 5\) or to \(B, T, S\) = \(2, 5, 5\), got \(3, 5, 5\)": (
        lambda: forward(X, mask=torch.ones(3, 5, 5))
    ),
    r"attention_forward: K must have Q's last size, at least 1, got Q, K, V of shape \(2, 5, 6\), \(2, 5, 5\)": (
        lambda: mha_ext.attention_forward(X, X[..., :5], X)
    ),
    r"V must have K's axes but for the last, got": lambda: mha_ext.attention_forward(X, X, X[:, :4]),
    r"K must have Q's leading axes, got": lambda: mha_ext.attention_forward(Q4, Q4[:1], Q4[:1]),
    r"K's heads must divide Q's heads, got": lambda: mha_ext.attention_forward(Q4, Q4[:, :3], Q4[:, :3]),
    r"Q must have at least 2 axes, got shape \(6,\)": lambda: mha_ext.attention_forward(X[0, 0], X[0], X[0]),
    r"attention_forward: mask must be broadcastable to \(2, 5, 5\), got \(1, 2, 5, 5\)": (
        lambda: mha_ext.attention_forward(X, X, X, torch.ones(1, 2, 5, 5))
    ),
    r"grad_output must have the output's shape \(2, 5, 6\), got \(2, 5, 5\)": lambda: backward(X[..., :5]),
    r"attention_backward: grad_O must have the output's shape \(2, 4, 5, 6\)": lambda: mha_ext.attention_backward(
        X, mha_ext.attention_forward(Q4, Q4, Q4, return_cache=True)[1]
    ),
}
WRONG_TYPES: dict[str, Call] = {
    r"split_heads: x must be a tensor or a NumPy array, got list": lambda: mha_ext.split_heads([[[1.0]]], 1),  # type: ignore[type-var]
    r"forward: Xk must be a tensor or a NumPy array, got list": lambda: forward(X, xk=[1.0]),
    r"forward: mask must be a tensor or a NumPy array, got str": lambda: forward(X, mask="causal"),
    r"forward: W_V must have Xq's dtype torch.float64, got torch.float32": lambda: forward(X, w_v=PARAMS[2].float()),
    r"forward: Xq must be floating point, got torch.int64": lambda: forward(X.long()),
    r"forward: mask must be bool or floating point, got torch.int64": lambda: forward(X, mask=torch.ones(5, 5).long()),
    r"grad_output must have the output's dtype torch.float64, got torch.float32": lambda: backward(X.float()),
}


@pytest.mark.parametrize("message", WRONG_VALUES)
def test_wrong_values(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WRONG_VALUES[message]()


@pytest.mark.parametrize("message", WRONG_TYPES)
def test_wrong_types(message: str) -> None:
    with pytest.raises(TypeError, match=message):
        WRONG_TYPES[message]()
