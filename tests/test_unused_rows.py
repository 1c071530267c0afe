"""What nobody sees may hold NaN or infinity: it reaches no output, and no gradient of a loss that leaves it out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import EMBED, HEADS, gradients, make, sequence
from tolerances import assert_within, double_limit
from torch import Tensor, nn

import mha_ext
from mha_ext import functional, layer, unused_rows

UNSEEN: dict[str, dict[str, Any]] = {
    "padding": {"key_padding_mask": torch.arange(7).expand(2, 7) >= 5},
    "float padding": {"key_padding_mask": torch.zeros(2, 7).masked_fill(torch.arange(7) >= 5, -math.inf)},
    "mask": {"attn_mask": (torch.arange(7) >= 5).expand(4, 7)},
    "float mask": {"attn_mask": torch.zeros(4, 7).masked_fill(torch.arange(7) >= 5, -math.inf)},
    "causal": {"is_causal": True},
    "both": {"attn_mask": (torch.arange(7) == 5).expand(4, 7), "key_padding_mask": torch.arange(7).expand(2, 7) >= 6},
    "empty rows": {"attn_mask": (torch.arange(4)[:, None] == 1) | (torch.arange(7) >= 5)},
}


@pytest.mark.parametrize("kind", UNSEEN)
@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True}, {"kdim": 8, "vdim": 6}, {"bias": False}, {"num_kv_heads": 1}], ids=str
)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unseen_inputs_may_hold_anything(kind: str, options: dict[str, Any], need_weights: bool, bad: float) -> None:
    """Cross-attention over a memory that holds NaN where nobody looks, and queries that are NaN where they see nothing:
    output and every gradient are those of zeros in these places."""
    module, masks = make(**options), UNSEEN[kind]
    query, key, value = sequence(2, 4), sequence(2, 7, module.kdim, 2), sequence(2, 7, module.vdim, 3)
    unseen_keys = torch.arange(7) >= (4 if kind == "causal" else 5)
    blind = (torch.arange(4) == 1) & (kind == "empty rows") & ("add_bias_kv" not in options)
    results = []
    for filling in (0.0, bad):
        inputs = (
            query.masked_fill(blind[:, None], filling),
            key.masked_fill(unseen_keys[:, None], filling),
            value.masked_fill(unseen_keys[:, None], filling),
        )
        out = module(*inputs, need_weights=need_weights, **masks)[0]
        results.append(
            {"out": out, **gradients(module, inputs, torch.ones_like(query), need_weights=need_weights, **masks)}
        )
    for name, want in results[0].items():
        assert_within(results[1][name], want, double_limit(want, 100), name)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_padded_example_does_not_spoil_the_others(need_weights: bool) -> None:
    """Loss over the other examples only: the parameters' gradients are those of a batch without the padded one."""
    module, x = make(), sequence(3, 6)
    hidden = torch.zeros(3, 6, dtype=torch.bool)
    hidden[1] = True
    grads = []
    for rows, padding in ((slice(None), hidden), ([0, 2], None)):
        y = x[rows]
        out = module(y, y, y, key_padding_mask=padding, need_weights=need_weights)[0]
        loss = out.square().sum((1, 2))
        loss = loss[0] + loss[-1]
        grads.append(torch.autograd.grad(loss, list(module.parameters())))
    for got, want in zip(*grads, strict=True):
        assert_within(got, want, double_limit(want, 100))


# ------------------------------------------------------- self-attention, where a hidden key is a query that sees others
BATCH, LENGTH = 3, 6
RIGHT = torch.arange(LENGTH).expand(BATCH, LENGTH) >= torch.tensor([6, 4, 5])[:, None]
HIDDEN: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "padding": (RIGHT, {"key_padding_mask": RIGHT}),
    "float padding": (RIGHT, {"key_padding_mask": torch.zeros(BATCH, LENGTH).masked_fill(RIGHT, -math.inf)}),
    "mask": (RIGHT[1:2].expand(BATCH, -1), {"attn_mask": RIGHT[1].expand(LENGTH, LENGTH)}),
    "mask per example": (RIGHT, {"attn_mask": RIGHT[:, None].expand(BATCH, LENGTH, LENGTH)}),
    "padding, causal": (RIGHT, {"key_padding_mask": RIGHT, "is_causal": True}),
    "left padding, causal": (RIGHT.flip(1), {"key_padding_mask": RIGHT.flip(1), "is_causal": True}),
    "all of one example": (torch.arange(BATCH)[:, None] == torch.ones(LENGTH), {}),
}
HIDDEN["all of one example"][1]["key_padding_mask"] = HIDDEN["all of one example"][0]


def sees_nothing(hidden: Tensor, masks: dict[str, Any], module: nn.MultiheadAttention) -> Tensor:
    """(B, T): queries to which all keys are hidden."""
    if module.bias_k is not None:
        return torch.zeros_like(hidden)
    visible = hidden.logical_not()[:, None].expand(-1, LENGTH, -1)
    return ~(visible.tril() if masks.get("is_causal") else visible).any(-1)


def results(module: Any, x: Tensor, kept: Tensor, **options: Any) -> dict[str, Tensor]:
    """Output, weights, and the gradients of a loss over the kept positions."""
    x = x.clone().requires_grad_()
    inputs = (x, x, x) if module._is_packed() else (x, x, x[..., : module.vdim])
    out, weights = module(*inputs, **options)
    loss = (out.square() * kept.unsqueeze(-1)).where(kept.unsqueeze(-1), 0.0).sum()
    names = ["x", *(name for name, _ in module.named_parameters())]
    grads = torch.autograd.grad(loss, [x, *module.parameters()])
    found = {"out": out, **dict(zip(names, grads, strict=True))}
    return found if weights is None else {**found, "weights": weights}


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"vdim": 6}, {"bias": False}], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_hidden_positions_of_self_attention(kind: str, options: dict[str, Any], need_weights: bool, bad: float) -> None:
    """Their own outputs and weights are NaN, unless they see nothing; all else is as if they held zeros."""
    hidden, masks = HIDDEN[kind]
    module = make(**options)
    masks = {**masks, "need_weights": need_weights}
    clean = sequence(BATCH, LENGTH).masked_fill(hidden[..., None], 0.0)
    dirty = clean.clone()
    dirty[..., 3] = dirty[..., 3].masked_fill(hidden, bad)
    want, got = (results(module, x, ~hidden, **masks) for x in (clean, dirty))
    lost = hidden & ~sees_nothing(hidden, masks, module)
    want["out"] = want["out"].masked_fill(lost[..., None], math.nan)
    if need_weights:
        want["weights"] = torch.where(lost[..., None] & (want["weights"] != 0), math.nan, want["weights"])
    for name, value in want.items():
        assert_within(got[name], value, double_limit(value.nan_to_num(), 100), name)


SAME: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "views": lambda x: (x, x.view_as(x), x.view_as(x)),
    "copies": lambda x: (x * 1, x * 1, x * 1),
    "positions": lambda x: (x + 1, x + 1, x),
    "query and key": lambda x: (x, x, x * 1),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["padding", "left padding, causal", "mask per example"])
@pytest.mark.parametrize("same", SAME)
def test_self_attention_need_not_be_one_tensor(same: str, kind: str, need_weights: bool) -> None:
    hidden, masks = HIDDEN[kind]
    module, grads = make(), []
    for filling in (0.0, math.nan):
        x = sequence(BATCH, LENGTH).masked_fill(hidden[..., None], filling).requires_grad_()
        out, _ = module(*SAME[same](x), need_weights=need_weights, **masks)
        kept = out.masked_select(~hidden[..., None])
        grads.append((kept, *torch.autograd.grad(kept.square().sum(), [x, *module.parameters()])))
    for want, got in zip(*grads, strict=True):
        assert_within(got, want, double_limit(want, 100))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("dtype", "autocast", "size"),
    [
        (torch.float32, torch.float16, 1e6),
        (torch.float32, None, 3e38),
        (torch.float16, None, 6e4),
        (torch.bfloat16, None, 3e38),
    ],
)
def test_hidden_positions_that_overflow(
    dtype: torch.dtype, autocast: torch.dtype | None, size: float, need_weights: bool
) -> None:
    """Finite on the way in, not on the way out: gradients are those of zeros, the positions' own results stay."""
    hidden, masks = HIDDEN["padding"]
    module, grads = make(dtype=dtype), []
    signs = torch.where(sequence(BATCH, LENGTH) > 0, size, -size)
    for filling in (torch.zeros(()), signs):
        x = torch.where(hidden[..., None], filling, sequence(BATCH, LENGTH)).to(dtype).requires_grad_()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            out, weights = module(x, x, x, need_weights=need_weights, **masks)
            with torch.no_grad():
                raw, raw_weights = module(x, x, x, need_weights=need_weights, **masks)
        kept = out.masked_select(~hidden[..., None])
        grads.append((kept, *torch.autograd.grad(kept.float().square().sum(), [x, *module.parameters()])))
        assert torch.equal(out.nan_to_num(nan=7.0), raw.nan_to_num(nan=7.0))
        if weights is not None:
            assert_within(weights, raw_weights, 4 * torch.finfo(weights.dtype).eps)
    assert not out.isfinite().all()
    for want, got in zip(*grads, strict=True):
        assert torch.equal(got, want)


def test_no_square_tensor_where_masks_are_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mha_ext.unused_rows._hidden_pairs", None)
    module = make(num_kv_heads=1)
    for causal in (True, False):
        for masks in ({"key_padding_mask": RIGHT}, {"attn_mask": RIGHT[1]}, {"attn_mask": RIGHT[:, None, None]}):
            for x in (sequence(BATCH, LENGTH), sequence(BATCH, LENGTH).masked_fill(RIGHT[..., None], math.nan)):
                module(x, x, x, is_causal=causal, need_weights=False, **masks)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(6, 6), (3, 6), (6, 3), (5, 0), (0, 4)])
def test_unused_rows_by_key_are_those_by_pair(sizes: tuple[int, int], causal: bool) -> None:
    """The closed form for masks of keys, against the definition pair by pair."""
    queries, keys = sizes
    g = torch.Generator().manual_seed(queries)
    for heads in (1, 2):
        mask = torch.rand(BATCH, heads, 1, keys, generator=g) < 0.4
        padding = torch.rand(BATCH, keys, generator=g) < 0.6
        options = layer.Options(mask, padding, causal=int(causal))
        no_query, no_key = unused_rows._unused_by_key(options, queries, keys, mask.device)
        hidden = mask.logical_not() | padding[:, None, None]
        hidden = hidden.expand(-1, -1, queries, -1) | (torch.ones(queries, keys, dtype=torch.bool).triu(1) & causal)
        assert torch.equal(no_query.expand(BATCH, -1), hidden.all(2).all(1))
        assert torch.equal(no_key.expand(BATCH, -1), hidden.all(3).all(1))


def test_a_trace_in_either_mode_serves_both() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = make()

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
            return out

    module, x, hidden = Layer(), sequence(BATCH, LENGTH), RIGHT
    traced = torch.jit.trace(module, (x, hidden))
    with torch.no_grad():
        want = module(x, hidden)
        assert_within(traced(x, hidden), want, double_limit(want, 100))


@pytest.mark.parametrize("need_weights", [True, False])
def test_hidden_positions_in_the_functional_and_with_the_length_first(need_weights: bool) -> None:
    hidden, masks = HIDDEN["padding"]
    module = make(batch_first=False)
    x = sequence(BATCH, LENGTH).transpose(0, 1)
    dirty = x.masked_fill(hidden.T[..., None], math.nan)
    found = []
    for inputs in (x, dirty):
        out, _ = functional.multi_head_attention_forward(
            inputs, inputs, inputs, EMBED, HEADS, module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0,
            module.out_proj.weight, module.out_proj.bias, need_weights=need_weights, **masks,
        )  # fmt: skip
        by_module, _ = module(inputs, inputs, inputs, need_weights=need_weights, **masks)
        assert_within(by_module, out, double_limit(x, 100))
        kept = out.masked_select(~hidden.T[..., None])
        found.append((kept, *torch.autograd.grad(kept.square().sum(), list(module.parameters()))))
    assert bool(out[hidden.T].isnan().all())
    for want, got in zip(*found, strict=True):
        assert_within(got, want, double_limit(want, 100))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["padding", "left padding, causal", "mask"])
def test_hidden_positions_in_compiled_programs(kind: str, need_weights: bool) -> None:
    hidden, masks = HIDDEN[kind]
    module = make()
    dirty = sequence(BATCH, LENGTH).masked_fill(hidden[..., None], math.nan)
    masks = {**masks, "need_weights": need_weights}
    want = results(module, dirty, ~hidden, **masks)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager")
    got = results(compiled, dirty, ~hidden, **masks)
    for (name, value), other in zip(want.items(), got.values(), strict=True):
        assert_within(other, value, double_limit(value.nan_to_num(), 100), name)


def test_a_visible_nan_is_not_hidden() -> None:
    """A NaN that some query sees stays NaN in every gradient that it meets."""
    module, x = make(), sequence(BATCH, LENGTH)
    x[0, 2, 3] = math.nan
    found = results(module, x, torch.ones(BATCH, LENGTH, dtype=torch.bool), key_padding_mask=RIGHT, need_weights=False)
    assert bool(found["out"][0].isnan().all()) and bool(found["out"][1:].isfinite().all())
    assert bool(found["in_proj_weight"].isnan().any())


def test_training_of_an_encoder_over_dirty_padding() -> None:
    """One step of a layer whose padding holds NaN moves the attention's parameters as one over zeros does."""
    module = mha_ext.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64)
    clean = sequence(BATCH, LENGTH).masked_fill(RIGHT[..., None], 0.0)
    steps = []
    for x in (clean, clean.masked_fill(RIGHT[..., None], math.nan)):
        out, _ = module(x, x, x, key_padding_mask=RIGHT, need_weights=False)
        loss = (x + out)[~RIGHT].square().mean()
        steps.append(torch.autograd.grad(loss, list(module.parameters())))
    for want, got in zip(*steps, strict=True):
        assert_within(got, want, double_limit(want, 100))
