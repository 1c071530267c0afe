"""The oracle itself: hand-worked numbers, PyTorch's own math in float64, autograd and finite differences."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mha_ext import reference

INF, NAN = math.inf, math.nan


def tensor(rows: list[list[float]]) -> Tensor:
    """One example, one head."""
    return torch.tensor(rows, dtype=torch.float64)[None, None]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def visible_by_loops(sizes: tuple[int, int, int, int], options: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """The visible pairs, asked one at a time."""
    batch, heads, queries, keys = sizes
    appended = options.get("num_appended_keys", 0)
    own = keys - appended
    mask = options.get("attn_mask")
    mask = None if mask is None else mask.expand(batch, heads, queries, own)
    padding = options.get("key_padding_mask")

    def sees(b: int, h: int, i: int, j: int) -> bool:
        if j >= own:
            return True
        if options.get("is_causal") and j > i + (own - queries if options["causal_alignment"] == "lower_right" else 0):
            return False
        if padding is not None:
            entry = padding[b if padding.size(0) > 1 else 0, j].item()
            if entry is True or entry == -INF:
                return False
        return mask is None or (mask[b, h, i, j].item() is not False and mask[b, h, i, j].item() != -INF)

    pairs = [(b, h, i, j) for b in range(batch) for h in range(heads) for i in range(queries) for j in range(keys)]
    return [pair for pair in pairs if sees(*pair)]


class TestByHand:
    """D = D_v = 2, T = S = 2. With a scale of 1 and scores log 1, log 2, log 3 … the weights are simple fractions."""

    query = tensor([[1.0, 0.0], [0.0, 1.0]])
    # Q K^T = [[log 1, log 3], [log 2, log 2]]: the columns of K^T are the keys (0, log 2) and (log 3, log 2).
    key = tensor([[0.0, math.log(2)], [math.log(3), math.log(2)]])
    value = tensor([[4.0, 0.0], [0.0, 8.0]])

    def test_forward(self) -> None:
        out, lse, weights = reference.attention(self.query, self.key, self.value, scale=1.0)
        # Row 1: exp(S) = 1, 3 of 4; row 2: 2, 2 of 4.
        torch.testing.assert_close(weights, tensor([[0.25, 0.75], [0.5, 0.5]]))
        # Row 1: 1/4 (4, 0) + 3/4 (0, 8) = (1, 6); row 2: 1/2 (4, 0) + 1/2 (0, 8) = (2, 4).
        torch.testing.assert_close(out, tensor([[1.0, 6.0], [2.0, 4.0]]))
        # log(1 + 3) and log(2 + 2).
        torch.testing.assert_close(lse[0, 0], torch.tensor([math.log(4), math.log(4)], dtype=torch.float64))

    def test_default_scale_is_the_head_width(self) -> None:
        """Scores are divided by √2, so queries √2 times as long give the same weights."""
        weights = reference.attention(self.query * math.sqrt(2), self.key, self.value)[2]
        torch.testing.assert_close(weights, tensor([[0.25, 0.75], [0.5, 0.5]]))

    def test_backward(self) -> None:
        grad_out = tensor([[1.0, 0.0], [0.0, 1.0]])
        grads = reference.attention_backward(grad_out, self.query, self.key, self.value, scale=1.0)
        # dV = P^T dO = [[1/4, 1/2], [3/4, 1/2]].
        torch.testing.assert_close(grads.value, tensor([[0.25, 0.5], [0.75, 0.5]]))
        # dP = dO V^T = [[4, 0], [0, 8]]; sum_j P dP = 1 and 4; dS = P (dP - sum) =
        #   row 1: 1/4 (4 - 1), 3/4 (0 - 1) = 3/4, -3/4; row 2: 1/2 (0 - 4), 1/2 (8 - 4) = -2, 2.
        # dQ = dS K: row 1: 3/4 (k1 - k2) = (-3/4 log 3, 0); row 2: 2 (k2 - k1) = (2 log 3, 0).
        torch.testing.assert_close(grads.query, tensor([[-0.75 * math.log(3), 0.0], [2 * math.log(3), 0.0]]))
        # dK = dS^T Q, and Q is the identity: dS^T = [[3/4, -2], [-3/4, 2]].
        torch.testing.assert_close(grads.key, tensor([[0.75, -2.0], [-0.75, 2.0]]))

    def test_gradient_of_lse(self) -> None:
        zero = torch.zeros_like(self.query)
        grad_lse = torch.tensor([[[1.0, 10.0]]], dtype=torch.float64)
        grads = reference.attention_backward(zero, self.query, self.key, self.value, grad_lse=grad_lse, scale=1.0)
        # dS = P dL = [[1/4, 3/4], [5, 5]]; dK = dS^T Q = dS^T.
        torch.testing.assert_close(grads.key, tensor([[0.25, 5.0], [0.75, 5.0]]))

    def test_causal(self) -> None:
        out, lse, weights = reference.attention(self.query, self.key, self.value, scale=1.0, is_causal=True)
        torch.testing.assert_close(weights, tensor([[1.0, 0.0], [0.5, 0.5]]))
        torch.testing.assert_close(out, tensor([[4.0, 0.0], [2.0, 4.0]]))
        torch.testing.assert_close(lse[0, 0], torch.tensor([0.0, math.log(4)], dtype=torch.float64))

    def test_added_mask_and_its_gradient(self) -> None:
        # log 3 added to the first score of row 1 makes it 3, 3 of 6.
        mask = tensor([[math.log(3), 0.0], [0.0, 0.0]])
        out, _, weights = reference.attention(self.query, self.key, self.value, mask, scale=1.0)
        torch.testing.assert_close(weights, tensor([[0.5, 0.5], [0.5, 0.5]]))
        grad = reference.attention_backward(out * 0 + 1, self.query, self.key, self.value, mask, scale=1.0).attn_mask
        # dP = (1, 1) V^T = (4, 8) in both rows, its mean 6: dS = 1/2 (-2, 2).
        torch.testing.assert_close(grad, tensor([[-1.0, 1.0], [-1.0, 1.0]]))

    def test_dropout(self) -> None:
        keep = torch.tensor([[True, False], [False, True]])[None, None]
        options: dict[str, Any] = {"scale": 1.0, "keep": keep, "dropout_p": 0.5}
        out, lse, weights = reference.attention(self.query, self.key, self.value, **options)
        # The kept weights are doubled; the log-sum-exp is that of the scores, before dropout.
        torch.testing.assert_close(weights, tensor([[0.5, 0.0], [0.0, 1.0]]))
        torch.testing.assert_close(out, tensor([[2.0, 0.0], [0.0, 8.0]]))
        torch.testing.assert_close(lse[0, 0], torch.tensor([math.log(4)] * 2, dtype=torch.float64))
        grads = reference.attention_backward(torch.ones_like(out), self.query, self.key, self.value, **options)
        # dP = keep (4, 8) / 0.5 = [[8, 0], [0, 16]]; sum_j P dP = 2 and 8; dS = P (dP - sum) = [[3/2, -3/2], [-4, 4]].
        torch.testing.assert_close(grads.key, tensor([[1.5, -4.0], [-1.5, 4.0]]))
        torch.testing.assert_close(grads.value, tensor([[0.5, 0.5], [1.0, 1.0]]))

    def test_layer(self) -> None:
        """Two heads of width 1 with identity projections; the output projection swaps the heads."""
        eye, swap = torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64).flip(0)
        x = torch.tensor([[[0.0, math.log(2)], [1.0, 0.0]]], dtype=torch.float64)
        layer = reference.LayerParameters(eye, eye, eye, swap)
        out, _, weights = reference.multi_head_attention(x, x, x, layer, 2)
        # Head 1 holds (0, 1): row 1 scores 0, 0; row 2 scores 0, 1: weights 1 and e of 1 + e.
        e = math.e / (1 + math.e)
        torch.testing.assert_close(weights[0, 0], torch.tensor([[0.5, 0.5], [1 - e, e]], dtype=torch.float64))
        # Head 2 holds (log 2, 0): row 1 scores log² 2, 0; row 2 scores 0, 0.
        f = 1 / (1 + math.exp(-(math.log(2) ** 2)))
        torch.testing.assert_close(weights[0, 1], torch.tensor([[f, 1 - f], [0.5, 0.5]], dtype=torch.float64))
        # Outputs: head 1 gives 1/2, e; head 2 gives f log 2, 1/2 log 2; swapped by W_O.
        expected = torch.tensor([[[f * math.log(2), 0.5], [0.5 * math.log(2), e]]], dtype=torch.float64)
        torch.testing.assert_close(out, expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True, "causal_alignment": "upper_left"},
    "causal from the end": {"is_causal": True, "causal_alignment": "lower_right"},
    "bool mask": {"attn_mask": randn(2, 1, 4, 5, seed=1) > -0.5},
    "float mask": {"attn_mask": randn(4, 1, 5, seed=2).masked_fill(randn(4, 1, 5, seed=3) > 0.8, -INF)},
    "mask per query": {"attn_mask": randn(4, 1, seed=4)},
    "padding": {"key_padding_mask": randn(2, 5, seed=5) > 0.5},
    "float padding": {"key_padding_mask": randn(2, 5, seed=6).masked_fill(randn(2, 5, seed=7) > 0.5, -INF)},
    "all": {
        "attn_mask": randn(4, 4, 5, seed=8),
        "key_padding_mask": randn(2, 5, seed=9) > 0,
        "is_causal": True,
        "causal_alignment": "upper_left",
    },
    "empty rows": {"attn_mask": torch.arange(4)[:, None] % 2 == 1},
    "dropout": {"keep": reference.dropout_keep(3, 2, 4, 4, 5, 0.4), "dropout_p": 0.4},
}
APPENDED = {"appended": {"num_appended_keys": 2, "is_causal": True, "causal_alignment": "lower_right"}}
MASKED_APPENDED = {
    "masked appended": {"num_appended_keys": 1, "key_padding_mask": torch.ones(2, 4, dtype=torch.bool)},
    "added appended": {"num_appended_keys": 1, "attn_mask": randn(4, 4, seed=10)},
}
GRID = {**OPTIONS, **APPENDED, **MASKED_APPENDED}
grid = pytest.mark.parametrize("name", GRID)
kv_heads = pytest.mark.parametrize("num_kv_heads", [1, 2, 4])


def inputs(num_kv_heads: int = 4, value_width: int = 2) -> list[Tensor]:
    """B = 2, H = 4, T = 4, S = 5, D = 3."""
    shapes = [(2, 4, 4, 3), (2, num_kv_heads, 5, 3), (2, num_kv_heads, 5, value_width)]
    return [randn(*shape, seed=20 + index) for index, shape in enumerate(shapes)]


def run(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    rest = {name: option for name, option in options.items() if name != "attn_mask"}
    return reference.attention(query, key, value, options.get("attn_mask"), **rest)


@grid
@kv_heads
def test_one_pair_at_a_time(name: str, num_kv_heads: int) -> None:
    """The definition in scalar arithmetic, for every option."""
    options = GRID[name]
    query, key, value = inputs(num_kv_heads)
    pairs = visible_by_loops((2, 4, 4, 5), options)
    out, weights = torch.zeros(2, 4, 4, 2, dtype=torch.float64), torch.zeros(2, 4, 4, 5, dtype=torch.float64)
    lse = torch.full((2, 4, 4), -INF, dtype=torch.float64)
    masks = [options.get("attn_mask"), options.get("key_padding_mask")]
    masks[1] = None if masks[1] is None else masks[1][:, None, None]
    own = 5 - options.get("num_appended_keys", 0)
    added = [m.expand(2, 4, 4, own) for m in masks if m is not None and m.is_floating_point()]
    rows: dict[tuple[int, int, int], dict[int, float]] = {}
    for b, h, i, j in pairs:
        dot = sum(query[b, h, i, d].item() * key[b, h * num_kv_heads // 4, j, d].item() for d in range(3))
        bias = sum(m[b, h, i, j].item() for m in added if j < own)
        rows.setdefault((b, h, i), {})[j] = math.exp(dot * options.get("scale", 1 / math.sqrt(3)) + bias)
    for (b, h, i), exponentials in rows.items():
        total = sum(exponentials.values())
        lse[b, h, i] = math.log(total)
        for j, exponential in exponentials.items():
            kept = options["keep"][b, h, i, j].item() / (1 - options["dropout_p"]) if "keep" in options else 1
            weights[b, h, i, j] = exponential / total * kept
            out[b, h, i] += weights[b, h, i, j] * value[b, h * num_kv_heads // 4, j]
    for actual, expected in zip(run(query, key, value, options), (out, lse, weights), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", ["plain", "scale", "causal", "bool mask", "float mask", "mask per query"])
@kv_heads
def test_against_torch_attention(name: str, num_kv_heads: int) -> None:
    options = {key: option for key, option in OPTIONS[name].items() if key != "causal_alignment"}
    query, key, value = inputs(num_kv_heads)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
    actual = run(query, key, value, options)[0]
    seen = ~expected.isnan()  # rows that see nothing are undefined there
    torch.testing.assert_close(actual[seen], expected[seen])


@grid
@kv_heads
def test_closed_form_backward_is_autograd(name: str, num_kv_heads: int) -> None:
    options = dict(GRID[name])
    query, key, value = (x.requires_grad_() for x in inputs(num_kv_heads))
    leaves: dict[str, Tensor] = {"query": query, "key": key, "value": value}
    for mask in ("attn_mask", "key_padding_mask"):
        if mask in options and options[mask].is_floating_point():
            leaves[mask] = options[mask] = options[mask].clone().requires_grad_()
    out, lse, weights = run(query, key, value, options)
    grads = {"grad_lse": randn(*lse.shape, seed=31), "grad_weights": randn(*weights.shape, seed=32)}
    grad_out = randn(*out.shape, seed=30)
    lse = lse.masked_fill(lse == -INF, 0)
    loss = (out * grad_out).sum() + (lse * grads["grad_lse"]).sum() + (weights * grads["grad_weights"]).sum()
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    actual = reference.attention_backward(grad_out, query, key, value, **options, **grads)
    for leaf in reference.Gradients._fields:
        if leaf in leaves:
            torch.testing.assert_close(getattr(actual, leaf), expected[leaf])
        else:
            assert getattr(actual, leaf) is None


@grid
def test_closed_form_backward_is_finite_differences(name: str) -> None:
    """(L(x + h) - L(x - h)) / 2h for every entry of query, key, value and float masks."""
    options = dict(GRID[name])
    named = dict(zip(("query", "key", "value"), inputs(2), strict=True))
    grad_out = randn(2, 4, 4, 2, seed=30)
    grads = reference.attention_backward(grad_out, **named, **options)
    for mask in ("attn_mask", "key_padding_mask"):
        if mask in options and options[mask].is_floating_point():
            named[mask] = options.pop(mask)
    step = 1e-6
    for leaf, x in named.items():
        for index in range(0, x.numel(), 3):
            losses = []
            for sign in (1, -1):
                moved = x.clone()
                moved.view(-1)[index] += sign * step
                losses.append((reference.attention(**{**named, leaf: moved}, **options)[0] * grad_out).sum())
            slope = (losses[0] - losses[1]) / (2 * step)
            torch.testing.assert_close(getattr(grads, leaf).view(-1)[index], slope, rtol=1e-6, atol=1e-8)


def test_second_derivatives() -> None:
    mask = OPTIONS["float mask"]["attn_mask"].masked_fill(OPTIONS["empty rows"]["attn_mask"], -INF)
    tensors = [x.requires_grad_() for x in inputs(2)]
    assert torch.autograd.gradgradcheck(lambda q, k, v: reference.attention(q, k, v, mask)[:2], tensors)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("spoiled", ["query", "key", "value"])
def test_hidden_values_reach_nothing(spoiled: str, bad: float) -> None:
    """Query 1, key 1 and value 1 are hidden behind masks; anything may be stored there."""
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1, :] = False
    mask[:, 1] = False
    clean = dict(zip(("query", "key", "value"), inputs(), strict=True))
    spoilt = {name: x.clone() for name, x in clean.items()}
    spoilt[spoiled][:, :, 1] = bad
    for actual, expected in zip(
        reference.attention(**spoilt, attn_mask=mask), reference.attention(**clean, attn_mask=mask), strict=True
    ):
        torch.testing.assert_close(actual, expected)
    grad_out = randn(2, 4, 4, 2, seed=30)
    expected_grads = reference.attention_backward(grad_out, **clean, attn_mask=mask)[:3]
    explicit = reference.attention_backward(grad_out, **spoilt, attn_mask=mask)[:3]
    leaves = {name: x.clone().requires_grad_() for name, x in spoilt.items()}
    out = reference.attention(**leaves, attn_mask=mask)[0]
    automatic = torch.autograd.grad(out, list(leaves.values()), grad_out)
    for actual, by_autograd, expected in zip(explicit, automatic, expected_grads, strict=True):
        assert (expected[:, :, 1] == 0).all()
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(by_autograd, expected)


def test_visible_nan_stays_in_the_rows_that_use_it() -> None:
    query, key, value = inputs()
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    key[:, :, 1] = NAN
    out, lse, weights = reference.attention(query, key, value, mask)
    rows = torch.tensor([True, False, True, False])
    assert torch.equal(out.isnan().all(-1), rows.expand(2, 4, 4))
    assert torch.equal(out.isnan().any(-1), rows.expand(2, 4, 4))
    assert torch.equal(lse.isnan(), rows.expand(2, 4, 4))
    assert torch.equal(weights.isnan(), (mask & rows[:, None]).expand(2, 4, 4, 5))
    grads = reference.attention_backward(torch.ones_like(out), query, key, value, mask)
    assert torch.equal(grads.query.isnan().any(-1), rows.expand(2, 4, 4))
    used = torch.tensor([True, True, False, True, False])  # keys that share a row with the NaN
    assert torch.equal(grads.key.isnan().any(-1), used.expand(2, 4, 5))
    assert torch.equal(grads.value.isnan().any(-1), used.expand(2, 4, 5))
    float_mask = torch.zeros(4, 5, dtype=torch.float64).masked_fill(~mask, -INF)
    grad_mask = reference.attention_backward(torch.ones_like(out), query, key, value, float_mask).attn_mask
    assert grad_mask is not None and torch.equal(grad_mask.isnan(), mask & rows[:, None])


@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_dropout_hides_no_nan(spoiled: int) -> None:
    """Dropout multiplies by 0, and 0 times NaN is NaN."""
    tensors = inputs()
    tensors[spoiled][:, :, 1] = NAN
    keep = torch.zeros(2, 4, 4, 5, dtype=torch.bool)
    out, _, _ = reference.attention(*tensors, keep=keep, dropout_p=0.5)
    expected = (torch.tensor([False, True, False, False]) if spoiled == 0 else torch.tensor(True)).expand(2, 4, 4)
    assert torch.equal(out.isnan().all(-1), expected)


def test_rows_that_see_nothing() -> None:
    query, key, value = inputs()
    options = OPTIONS["empty rows"]
    float_mask = torch.zeros(4, 1, dtype=torch.float64).masked_fill(~options["attn_mask"], -INF).expand(4, 5)
    out, lse, weights = run(query, key, value, options)
    assert (out[:, :, ::2] == 0).all() and (weights[:, :, ::2] == 0).all() and (lse[:, :, ::2] == -INF).all()
    assert (out[:, :, 1::2] != 0).all() and lse[:, :, 1::2].isfinite().all()
    grads = reference.attention_backward(
        torch.ones_like(out),
        query,
        key,
        value,
        **options,
        grad_lse=torch.full_like(lse, NAN).masked_fill(lse > -INF, 1),
    )
    assert (grads.query[:, :, ::2] == 0).all() and grads.key.isfinite().all()
    empty = torch.full_like(out, NAN).masked_fill(torch.arange(4)[:, None] % 2 == 1, 1)
    grads = reference.attention_backward(empty, query, key, value, float_mask)
    assert all(grad is not None and grad.isfinite().all() for grad in grads[:4])


def test_smallest_finite_mask_hides_nothing() -> None:
    """finfo.min is a number: when every score gets it, the row is a plain mean up to rounding."""
    query, key, value = inputs()
    mask = torch.full((4, 5), torch.finfo(torch.float64).min, dtype=torch.float64)
    out, lse, _ = reference.attention(query, key, value, mask)
    torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand_as(out))
    assert lse.isfinite().all()


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 2, 3), (2, 0, 3), (2, 2, 0), (0, 0, 0)])
def test_zero_sizes(batch: int, queries: int, keys: int) -> None:
    query, key, value = randn(batch, 4, queries, 3), randn(batch, 2, keys, 3), randn(batch, 2, keys, 5)
    mask = randn(queries, keys)
    out, lse, weights = reference.attention(query, key, value, mask)
    assert out.shape == (batch, 4, queries, 5) and not out.any()
    assert lse.shape == (batch, 4, queries) and (lse == -INF).all()
    assert weights.shape == (batch, 4, queries, keys)
    grads = reference.attention_backward(torch.ones_like(out), query, key, value, mask)
    assert [x is not None and x.shape for x in grads[:4]] == [x.shape for x in (query, key, value, mask)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    tensors = [x.to(dtype) for x in inputs(2)]
    mask = randn(4, 5)
    expected = reference.attention(*(x.double() for x in tensors), mask)[0]
    actual = reference.attention(*tensors, mask)[0]
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)
    grads = reference.attention_backward(torch.ones_like(actual), *tensors, mask)
    assert [x is not None and x.dtype for x in grads[:4]] == [dtype] * 3 + [torch.float64]
