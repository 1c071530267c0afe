"""The forward pass: hand-worked numbers, sizes, layouts, dtypes, extreme values, and the functional call around it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, HEAD_DIMS, LAYOUTS, SIZES, Case, build, check, exact, ops, run
from hypothesis import given, settings
from hypothesis import strategies as st
from switches import threads
from tolerances import assert_within, attention_limits, growth, roundoff
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mha_ext import functional


# ---------------------------------------------------------------------------------------------------------- by hand
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_by_two_by_hand(dtype: torch.dtype) -> None:
    """Scores ln 3 and 0 give weights 3/4 and 1/4; the other query scores 0 and 0 and averages."""
    query = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=dtype)[None, None]
    key = torch.tensor([[math.log(3.0), 5.0], [0.0, -2.0]], dtype=dtype)[None, None]
    value = torch.tensor([[4.0, 0.0], [0.0, 8.0]], dtype=dtype)[None, None]
    out, lse = ops.attention(query, key, value, scale=1.0)
    limit = 8 * 4 * roundoff(dtype)
    assert_within(out[0, 0], torch.tensor([[3.0, 2.0], [2.0, 4.0]]), limit)
    assert_within(lse[0, 0], torch.tensor([math.log(4.0), math.log(2.0)], dtype=torch.float64), limit)


def test_default_scale_is_one_over_root_head_dim() -> None:
    """D = 4: q.k = 2 ln 3, halved by 1/sqrt(4)."""
    query = torch.tensor([2.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    key = torch.tensor([[math.log(3.0), 1, 1, 1], [0.0, 2, 2, 2]]).view(1, 1, 2, 4)
    out, lse = ops.attention(query, key, torch.tensor([4.0, 0.0]).view(1, 1, 2, 1))
    assert_within(out, torch.full((1, 1, 1, 1), 3.0), 1e-5)
    assert_within(lse, torch.full((1, 1, 1), math.log(4.0)), 1e-5)


def test_one_key_returns_its_value_and_equal_keys_the_mean() -> None:
    value = torch.randn(2, 3, 1, 5)
    out, _ = ops.attention(torch.randn(2, 3, 7, 4), torch.randn(2, 3, 1, 4), value)
    assert torch.equal(out, value.expand(2, 3, 7, 5))
    values = torch.randn(1, 1, 19, 5)
    out, _ = ops.attention(torch.randn(1, 1, 7, 4), torch.ones(1, 1, 19, 4).expand(1, 1, 19, 4), values)
    assert_within(
        out, values.mean(2, keepdim=True).expand(1, 1, 7, 5), growth(19, torch.float32) * float(values.abs().max())
    )


# ------------------------------------------------------------------------------------------------------------ sizes
def size_cases() -> list[Case]:
    """Every length with every following length as keys, every head size, head sizes apart for value, shared heads."""
    cases = [Case(1, 2, None, t, SIZES[(i * 5 + 3) % len(SIZES)], 16 + i) for i, t in enumerate(SIZES)]
    cases += [Case(1, 2, None, SIZES[(i * 3 + 5) % len(SIZES)], s, 32, 8 + i) for i, s in enumerate(SIZES)]
    cases += [Case(1, 2, None, 19, 35, d) for d in HEAD_DIMS]
    cases += [Case(1, 2, None, 33, 18, 20, d) for d in HEAD_DIMS]
    cases += [Case(2, 6, h, 17, 40, 24, 40) for h in (1, 2, 3, 6)]
    return cases


@pytest.mark.parametrize("case", size_cases(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sizes(case: Case, dtype: torch.dtype) -> None:
    check(build(Case(**{**case.__dict__, "dtype": dtype})), grads=False)


@pytest.mark.parametrize("case", size_cases()[::3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sizes_in_half_precision(case: Case, dtype: torch.dtype) -> None:
    check(build(Case(**{**case.__dict__, "dtype": dtype})), grads=False)


@pytest.mark.long
@pytest.mark.parametrize("queries", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_lengths(queries: int, dtype: torch.dtype) -> None:
    for i, keys in enumerate(SIZES):
        dim = (8, 17, 64)[i % 3]
        check(build(Case(1, 2, 1, queries, keys, dim, dim + 3, dtype, causal=(i + queries) % 3)))


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [0, 1, 2])
def test_zero_sizes(sizes: tuple[int, int, int], dtype: torch.dtype, causal: int) -> None:
    batch, queries, keys = sizes
    case = Case(batch, 4, 2, queries, keys, 8, 3, dtype, mask="float32:BHTS", padding="bool", causal=causal)
    case = case if batch else Case(**{**case.__dict__, "padding": "none"})
    problem = build(case)
    out, lse, grads = run(problem)
    assert out.shape == (batch, 4, queries, 3) and lse.shape == (batch, 4, queries)
    assert not out.any() and bool((lse == -math.inf).all())
    for name, grad in grads.items():
        assert grad.shape == getattr(problem, name).shape and not grad.any()


def test_heads_are_independent() -> None:
    """H heads at once equal H single-head calls, and shared key/value heads equal repeated ones."""
    q, k, v = torch.randn(2, 6, 21, 16), torch.randn(2, 2, 34, 16), torch.randn(2, 2, 34, 11)
    out, lse = ops.attention(q, k, v, causal=2)
    for h in range(6):
        one = ops.attention(q[:, h : h + 1], k[:, h // 3 : h // 3 + 1], v[:, h // 3 : h // 3 + 1], causal=2)
        assert torch.equal(out[:, h : h + 1], one[0]) and torch.equal(lse[:, h : h + 1], one[1])
    repeated = ops.attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), causal=2)
    assert torch.equal(out, repeated[0]) and torch.equal(lse, repeated[1])


# ---------------------------------------------------------------------------------------------------------- layouts
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    check(build(Case(2, 4, 2, 37, 50, 24, 20, dtype, causal=1, layout=layout)))


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """A view of the shape over a NaN-filled buffer: any order of axes, gaps, an offset, some axes expanded (stride
    0)."""
    order = draw(st.permutations(range(len(shape))))
    expanded = draw(st.sets(st.sampled_from(range(len(shape))), max_size=2))
    strides, step = [0] * len(shape), 1
    for axis in order:
        step *= draw(st.integers(1, 3))
        strides[axis] = 0 if axis in expanded else step
        step *= 1 if axis in expanded else shape[axis]
    offset = draw(st.integers(0, 9))
    end = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    buffer = torch.full((end + draw(st.integers(0, 3)),), math.nan)
    view = buffer.as_strided(shape, strides, offset)
    seed = draw(st.integers(0, 1000))
    values = torch.randn(
        [1 if s == 0 else n for n, s in zip(shape, strides, strict=True)], generator=torch.Generator().manual_seed(seed)
    )
    view[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)] = values
    return view


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.data(),
    st.sampled_from([1, 5, 16, 33]),
    st.sampled_from([1, 7, 33, 65]),
    st.sampled_from([1, 8, 19]),
    st.booleans(),
)
def test_any_strides(data: st.DataObject, queries: int, keys: int, dim: int, shared: bool) -> None:
    case = Case(2, 4, 2 if shared else 4, queries, keys, dim, dim + 1, causal=1)
    problem = build(case)
    problem.query = data.draw(strided((2, 4, queries, dim)))
    problem.key = data.draw(strided((2, case.heads_kv, keys, dim)))
    problem.value = data.draw(strided((2, case.heads_kv, keys, dim + 1)))
    problem.grad_out = data.draw(strided((2, 4, queries, dim + 1)))
    check(problem)


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_offsets_past_two_to_the_31(which: str) -> None:
    """The second example lies more than 2^31 elements after the first; the buffer between is never touched."""
    problem = build(Case(2, 1, 1, 40, 40, 16, dtype=torch.bfloat16, causal=1))
    stride = 2**31 + 64
    buffer = torch.empty(stride + 40 * 16, dtype=torch.bfloat16)
    far = buffer.as_strided((2, 1, 40, 16), (stride, 640, 16, 1))
    truth = exact(problem)
    setattr(problem, which, far.copy_(getattr(problem, which)))
    out, _ = ops.attention(*problem.tensors, **problem.options)
    assert_within(out, truth.out, attention_limits(truth, torch.bfloat16, 1)["out"])


def test_row_stride_past_two_to_the_31_between_keys() -> None:
    problem = build(Case(1, 1, 1, 3, 2, 8, dtype=torch.bfloat16))
    buffer = torch.empty(2**31 + 128, dtype=torch.bfloat16)
    truth = exact(problem)
    problem.key = buffer.as_strided((1, 1, 2, 8), (0, 0, 2**31 + 8, 1)).copy_(problem.key)
    out, _ = ops.attention(*problem.tensors, **problem.options)
    assert_within(out, truth.out, attention_limits(truth, torch.bfloat16, 1)["out"])


# --------------------------------------------------------------------------------------------------- extreme values
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [30.0, 200.0])
def test_huge_logits_pick_one_key(dtype: torch.dtype, size: float) -> None:
    """Scores of +-1e3 to 5e4, beyond what float16 products or a float32 exponential could hold."""
    query = torch.eye(8, dtype=torch.float64)[None, None].mul(size).to(dtype)
    value = torch.randn(1, 1, 8, 5, dtype=torch.float64).to(dtype)
    out, lse = ops.attention(query, query.clone(), value, scale=1.0)
    assert torch.equal(out, value)
    assert_within(lse, torch.full((1, 1, 8), size * size, dtype=lse.dtype), 4 * roundoff(lse.dtype) * size * size)


@pytest.mark.parametrize("shift", [-3e4, -2e2, 2e2, 3e4])
def test_a_constant_in_all_scores_changes_only_the_log_sum_exp(shift: float) -> None:
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float64) for _ in range(3))
    plain, lse = ops.attention(q, k, v)
    moved, lse_moved = ops.attention(q, k, v, torch.full((1, 1, 1, 1), shift, dtype=torch.float64))
    assert_within(moved, plain, 1e-15 * abs(shift) * 100)
    assert_within(lse_moved, lse + shift, 1e-15 * abs(shift) * 10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rising_and_falling_scores(dtype: torch.dtype) -> None:
    """The running maximum moves in every tile, or never again after the first."""
    for sign in (1.0, -1.0):
        problem = build(Case(1, 1, 1, 5, 700, 4, dtype=dtype))
        problem.key = (sign * torch.linspace(-60, 60, 700, dtype=dtype))[None, None, :, None].expand(1, 1, 700, 4)
        problem.query = torch.ones(1, 1, 5, 4, dtype=dtype)
        check(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 2, 2, 130, 130, 64), (2, 4, 4, 64, 64, 32), (1, 1, 1, 300, 300, 128)], ids=str)
def test_error_beside_that_of_pytorch(dtype: torch.dtype, causal: bool, sizes: tuple[int, ...]) -> None:
    """Root mean square error against float64 of output and all gradients, beside PyTorch's default kernels: at most
    twice theirs where both are a few roundings, at most theirs in half precision. Sharper than limits that hold
    elementwise."""
    problem = build(Case(*sizes, dtype=dtype, causal=int(causal)), seed=3)
    problem.grad_lse = torch.zeros_like(problem.grad_lse)
    truth = exact(problem)
    out, _, grads = run(problem, with_lse_grad=False)
    leaves = [x.detach().clone().requires_grad_() for x in (problem.query, problem.key, problem.value)]
    peer = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    peers = [peer.detach(), *torch.autograd.grad(peer, leaves, problem.grad_out)]
    share = 1.0 if dtype.itemsize == 2 else 2.0
    for name, ours, theirs in zip(("out", *grads), (out, *grads.values()), peers, strict=True):
        want = truth.out if name == "out" else truth.grads[name]
        errors = [float((x.double() - want).square().mean().sqrt()) for x in (ours, theirs)]
        assert errors[0] <= share * errors[1], f"{name}: {errors}"


# -------------------------------------------------------------------------------------------------------- threads
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": 1},
        {"mask": "bool:B1TS", "padding": "bool"},
        {"mask": "float32:11TS", "causal": 2},
        {"dropout_p": 0.3},
    ],
    ids=str,
)
def test_thread_count_changes_no_bit(dtype: torch.dtype, options: dict[str, object]) -> None:
    for sizes in ((1, 1, 1, 300, 300, 16), (2, 4, 2, 70, 90, 24)):
        problem = build(Case(*sizes, dtype=dtype, **options))
        results = []
        for count in (1, 2, 3):
            with threads(count):
                out, lse, grads = run(problem)
            results.append([out, lse, *grads.values()])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"causal": 1}, {"mask": "bool:B1TS", "padding": "float32"}], ids=str)
@pytest.mark.parametrize("sizes", [(6, 2, 1, 70, 1100, 16), (3, 1, 1, 130, 1030, 8)], ids=str)
def test_neither_threads_nor_a_split_of_the_batch_change_a_bit(
    dtype: torch.dtype, options: dict[str, object], sizes: tuple[int, ...]
) -> None:
    """Blocks of queries and ranges of keys are cut otherwise for one sample than for many, and for more threads."""
    problem = build(Case(*sizes, dtype=dtype, **options))
    with threads(1):
        out, lse, grads = run(problem)
    want = [out, lse, *(grads[name] for name in ("query", "key", "value"))]
    for count in (1, 2, 8):
        found = []
        for sample in range(sizes[0]):
            part = replace(
                problem,
                **{
                    name: value[sample : sample + 1]
                    for name, value in vars(problem).items()
                    if isinstance(value, torch.Tensor) and value.shape[:1] == sizes[:1]
                },
            )
            with threads(count):
                out, lse, grads = run(part)
            found.append([out, lse, *(grads[name] for name in ("query", "key", "value"))])
        for name, whole, parts in zip(("out", "lse", "dq", "dk", "dv"), want, zip(*found, strict=True), strict=True):
            assert torch.equal(whole, torch.cat(parts)), f"{name}, {count} threads"


# ------------------------------------------------------------------------------------------------- the functional call
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (2, 1, 2, 3)], ids=str)
def test_functional_takes_any_leading_axes(leading: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(*leading, n, 8, dtype=torch.float64) for n in (9, 13, 13))
    mask = torch.randn(9, 13, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(q, k, v, mask)
    out, lse = functional.scaled_dot_product_attention(q, k, v, mask, return_lse=True)
    assert_within(out, want, 1e-13)
    assert_within(lse, torch.logsumexp(q @ k.mT / 8**0.5 + mask, -1), 1e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("gqa", [False, True])
def test_functional_agrees_with_pytorch(causal: bool, scale: float | None, gqa: bool) -> None:
    q = torch.randn(2, 6, 11, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2 if gqa else 6, 14, n, dtype=torch.float64) for n in (8, 5))
    masks = [None] if causal else [None, torch.rand(11, 14) > 0.4, torch.randn(2, 1, 11, 14, dtype=torch.float64)]
    for mask in masks:
        if mask is not None and mask.dtype == torch.bool:
            mask[:, 0] = True
        with sdpa_kernel(SDPBackend.MATH):
            want = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=gqa)
        got = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=gqa)
        assert_within(got, want, 1e-13)


def test_functional_returns_the_weights() -> None:
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (9, 13, 13))
    mask = torch.rand(9, 13) > 0.4
    mask[3] = False
    weights = torch.softmax((q @ k.mT / 8**0.5).masked_fill(~mask, -math.inf), -1).nan_to_num(0.0)
    out, per_head = functional.scaled_dot_product_attention(q, k, v, mask, return_weights="per_head")
    assert_within(per_head, weights, 1e-13)
    assert_within(out, weights @ v, 1e-13)
    assert_within(
        functional.scaled_dot_product_attention(q, k, v, mask, return_weights="mean")[1], weights.mean(1), 1e-13
    )
    columns = functional.scaled_dot_product_attention(q, k, v, mask, return_weights="column_sum")[1]
    assert_within(columns, weights.sum(2), 1e-13)
    out, lse, mean = functional.scaled_dot_product_attention(q, k, v, mask, return_lse=True, return_weights="mean")
    assert lse.shape == (2, 4, 9) and mean.shape == (2, 9, 13) and bool((lse[:, :, 3] == -math.inf).all())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize("value_dim", [8, 5])
def test_functional_output_lies_as_the_query_does(order: tuple[int, ...], value_dim: int) -> None:
    """So that a program may view the output as it may view PyTorch's."""
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, value_dim)
    inverse = [order.index(axis) for axis in range(4)]
    q = q.permute(order).contiguous().permute(inverse)
    out = functional.scaled_dot_product_attention(q, k, v)
    assert out.permute(order).is_contiguous()
    if value_dim == 8:
        assert out.stride() == torch.nn.functional.scaled_dot_product_attention(q, k, v).stride()
