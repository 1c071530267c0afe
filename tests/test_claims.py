"""What the chapter claims, one test each, and exercise 20.4: finite differences of the explicit backward pass."""

import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mha_ext


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(width: int, kv_width: int | None = None, seed: int = 50) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kv_width = width if kv_width is None else kv_width
    shapes = [(width, width), (width, kv_width), (width, kv_width), (width, width)]
    w_q, w_k, w_v, w_o = (randn(*shape, seed=seed + index) / math.sqrt(width) for index, shape in enumerate(shapes))
    return w_q, w_k, w_v, w_o


def test_exercise_20_4_finite_differences() -> None:
    """Claim 3. The explicit backward pass against (L(x + h) - L(x - h)) / 2h, for every number of the shared input of
    self-attention and of W_Q, W_K, W_V and W_O; L = sum(Y * G), in float64, no autograd anywhere."""
    x, params, grad_output = randn(2, 4, 6), layer(6), randn(2, 4, 6, seed=3)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    step = 1e-5

    def loss(x: Tensor, params: tuple[Tensor, ...]) -> float:
        return float((mha_ext.multi_head_attention_forward(x, x, x, params, 3, causal) * grad_output).sum())

    def slopes(at: Tensor, loss_of: Callable[[Tensor], float]) -> Tensor:
        result = torch.empty_like(at)
        for index in range(at.numel()):
            ahead, behind = at.clone(), at.clone()
            ahead.view(-1)[index] += step
            behind.view(-1)[index] -= step
            result.view(-1)[index] = (loss_of(ahead) - loss_of(behind)) / (2 * step)
        return result

    _, cache = mha_ext.multi_head_attention_forward(x, x, x, params, 3, causal, return_cache=True)
    grads_x, grads_w = mha_ext.multi_head_attention_backward(grad_output, cache)
    tolerance = {"rtol": 1e-7, "atol": 1e-8}
    x_slopes = slopes(x, lambda moved: loss(moved, params))
    torch.testing.assert_close(sum(grads_x), x_slopes, **tolerance)
    for partial_sum in (grads_x[0] + grads_x[1], grads_x[1] + grads_x[2], grads_x[0] + grads_x[2]):
        assert (partial_sum - x_slopes).abs().max() > 1e-3  # each of the three paths counts
    for place, grad in enumerate(grads_w):
        w_slopes = slopes(params[place], lambda w, i=place: loss(x, (*params[:i], w, *params[i + 1 :])))  # type: ignore[misc]
        assert w_slopes.abs().max() > 1e-3
        torch.testing.assert_close(grad, w_slopes, **tolerance)


class TestClaims:
    def test_1_no_head_uses_a_forbidden_edge(self) -> None:
        """A causal mask is one for all heads, a padding mask one per example. With V the identity, O is the weights."""
        query, key, eye = randn(2, 3, 5, 4), randn(2, 3, 5, 4, seed=1), torch.eye(5, dtype=torch.float64)
        causal = torch.ones(5, 5, dtype=torch.bool).tril()
        lengths = torch.tensor([5, 3])
        padding = torch.arange(5) < lengths[:, None]
        for mask in (causal, padding[:, None, None], causal & padding[:, None], causal & padding[:, None, None]):
            weights = mha_ext.attention_forward(query, key, eye.expand(2, 3, 5, 5), mask)
            allowed = (mask[:, None] if mask.dim() == 3 else mask).expand(2, 3, 5, 5)
            assert torch.equal(weights != 0, allowed)
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))
        # The whole layer: what is forbidden may change, or be NaN, and no bit of the output or of a gradient does.
        x, params = randn(2, 5, 12), layer(12)
        spoilt = x.clone()
        spoilt[1, 3:] = math.nan
        keys_only = padding[:, None, None]
        results = []
        for keys in (x, spoilt):
            out, cache = mha_ext.multi_head_attention_forward(x, keys, keys, params, 3, keys_only, return_cache=True)
            grads_x, grads_w = mha_ext.multi_head_attention_backward(x, cache)
            results.append((out, *grads_x, *grads_w))
        assert all(torch.equal(clean, spoiled) for clean, spoiled in zip(*results, strict=True))

    def test_2_cross_attention_keeps_gradients_apart(self) -> None:
        xq, xk, xv = randn(2, 3, 6), randn(2, 8, 6, seed=1), randn(2, 8, 6, seed=2)
        out, cache = mha_ext.multi_head_attention_forward(xq, xk, xv, layer(6), 2, return_cache=True)
        grads, _ = mha_ext.multi_head_attention_backward(out, cache)
        assert [grad.shape for grad in grads] == [x.shape for x in (xq, xk, xv)]
        assert (grads[1] - grads[2]).abs().max() > 1e-3

    def test_4_heads_change_neither_parameters_nor_shapes(self) -> None:
        x, params = randn(2, 5, 12), layer(12)
        outputs = [mha_ext.multi_head_attention_forward(x, x, x, params, heads) for heads in (1, 2, 3, 4, 6, 12)]
        assert {out.shape for out in outputs} == {x.shape}
        assert sum(w.numel() for w in params) == mha_ext.parameter_count(12)
        for one, other in pairwise(outputs):
            assert (one - other).abs().max() > 1e-3  # yet other subspaces

    @given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 5), st.integers(1, 6), st.booleans())
    def test_5_heads_one_by_one(self, heads: int, queries: int, keys: int, causal: bool) -> None:
        """Slices of the projections, one single-head attention each, concatenated and projected."""
        xq, xkv, (w_q, w_k, w_v, w_o) = randn(2, queries, 12), randn(2, keys, 12, seed=1), layer(12)
        mask = torch.ones(queries, keys, dtype=torch.bool).tril() if causal else None
        dim = 12 // heads
        outputs = []
        for head in range(heads):
            columns = slice(head * dim, (head + 1) * dim)
            q, k, v = xq @ w_q[:, columns], xkv @ w_k[:, columns], xkv @ w_v[:, columns]
            scores = q @ k.mT / math.sqrt(dim)
            scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
            single = mha_ext.attention_forward(q, k, v, mask)
            torch.testing.assert_close(single, scores.softmax(-1) @ v)
            outputs.append(single)
        out = mha_ext.multi_head_attention_forward(xq, xkv, xkv, (w_q, w_k, w_v, w_o), heads, mask)
        torch.testing.assert_close(out, torch.cat(outputs, dim=-1) @ w_o)

    @pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
    def test_6_the_trace_shows_the_shapes_of_a_run(self, num_kv_heads: int) -> None:
        trace = mha_ext.shape_trace(2, 5, 12, 6, key_length=7, num_kv_heads=num_kv_heads)
        xq, xkv = randn(2, 5, 12), randn(2, 7, 12)
        out, cache = mha_ext.multi_head_attention_forward(
            xq, xkv, xkv, layer(12, 2 * num_kv_heads), 6, return_cache=True
        )
        held = cache.attention
        tensors = {"query heads": held.query, "key heads": held.key, "value heads": held.value, "heads": held.out}
        tensors |= {"combined": mha_ext.combine_heads(held.out), "output": out, "query input": cache.inputs[0]}
        assert {name: trace[name].shape for name in tensors} == {name: tuple(x.shape) for name, x in tensors.items()}
        assert trace.parameters == sum(w.numel() for w in cache.params)

    def test_7_no_weights_in_the_cache(self) -> None:
        """The cache grows with T, not with T², and shrinks with the number of key/value heads."""

        def cached(length: int, num_kv_heads: int) -> int:
            x = randn(1, length, 12)
            _, cache = mha_ext.multi_head_attention_forward(x, x, x, layer(12, 2 * num_kv_heads), 6, return_cache=True)
            held = cache.attention
            return sum(x.numel() for x in (held.query, held.key, held.value, held.out, held.lse))

        # Q, K, V and O of width 12, one log-sum-exp a head: 4 * 12 + 6 numbers a position.
        assert [cached(length, 6) for length in (10, 100, 1000)] == [540, 5400, 54000]
        assert cached(100, 6) - cached(100, 1) == 100 * 2 * (12 - 2)

    def test_7_no_weights_in_memory(self) -> None:
        """Forward and backward in a process of its own: the peak stays far below the 128 MiB of the weights."""
        script = """
            import resource, torch, mha_ext
            def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            def run(length):
                x, w = torch.randn(1, length, 16, dtype=torch.float64), torch.eye(16, dtype=torch.float64)
                mask = torch.ones(length, dtype=torch.bool)
                out, cache = mha_ext.multi_head_attention_forward(x, x, x, (w, w, w, w), 4, mask, return_cache=True)
                mha_ext.multi_head_attention_backward(out, cache)
            run(64)
            before = peak()
            run(2048)
            print(peak() - before)
        """
        command = [sys.executable, "-c", textwrap.dedent(script)]
        grown = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert grown < 32
