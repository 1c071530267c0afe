"""Kinds of failures reported in public against attention implementations, that the other files do not already hold.

Rows with nothing to attend to, what masks mean, layouts and dropout have files of their own; here are the rest and the
combinations: modes giving different answers, huge activations in half precision, windows with padding, mismatched
batches, meta initialisation, per-call options, weights that are trained through, and counting of operations.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, build, check, ops
from layer_cases import (
    EMBED,
    HEADS,
    MODES,
    causal_mask,
    exact_layer,
    gradients,
    last_hidden,
    make,
    mode,
    pair,
    sequence,
)
from tolerances import assert_within, double_limit, growth, peer_limit, roundoff
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mha_ext
from mha_ext import functional, reference


# ------------------------------------------------------------------------------------- one answer in every mode and way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": False}, {"add_zero_attn": True}], ids=str)
def test_all_ways_of_calling_agree(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Training, eval, eval without gradients, inference mode; with weights, without; shared and separate tensors;
    masks as bool and as float: one answer within twice PyTorch's own rounding."""
    ours, theirs = pair(dtype=dtype, **options)
    x = sequence(3, 3, dtype=dtype)
    hidden = last_hidden(3, 3)
    truth = exact_layer(
        ours, tuple(v.transpose(0, 1) if "batch_first" in options else v for v in (x,) * 3), key_padding_mask=hidden
    )
    want = truth.out.transpose(0, 1) if "batch_first" in options else truth.out
    limit = peer_limit(theirs(x, x, x, key_padding_mask=hidden)[0], want, dtype)
    limit = max(limit, peer_limit(theirs(x, x, x, key_padding_mask=hidden, need_weights=False)[0], want, dtype))
    paddings = (hidden, torch.zeros(3, 3).masked_fill(hidden, -math.inf))
    for name in MODES:
        for padding in paddings:
            for need in (True, False):
                for inputs in ((x, x, x), (x, x.clone(), x.clone())):
                    with mode(ours, name):
                        out = ours(*inputs, key_padding_mask=padding, need_weights=need)[0]
                    assert_within(out, want, limit, f"{name} {need}")
                    assert out.is_contiguous()
    with torch.inference_mode():
        assert_within(ours(x, x, x, key_padding_mask=hidden)[0], want, limit)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("need_weights", [True, False])
def test_nothing_leaks_from_the_future(name: str, need_weights: bool) -> None:
    """Changing a later token changes no earlier output, bit for bit, however causality is asked for."""
    module, x = make(), sequence(2, 9)
    y = x.clone()
    y[:, 5:] = 7.0
    ways = [
        {"is_causal": True},
        {"is_causal": True, "attn_mask": causal_mask(9)},
        {"attn_mask": causal_mask(9)},
        {"attn_mask": causal_mask(9, dtype=torch.float64)},
        {"is_causal": True, "attn_mask": torch.zeros(9, 9, dtype=torch.bool)},
        {"is_causal": True, "key_padding_mask": last_hidden(2, 9)},
    ]
    with mode(module, name):
        for masks in ways:
            first, second = (module(z, z, z, need_weights=need_weights, **masks)[0] for z in (x, y))
            assert torch.equal(first[:, :5], second[:, :5]), masks
            assert not torch.equal(first[:, 5:], second[:, 5:])


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", MODES)
def test_half_precision_survives_huge_activations(need_weights: bool, name: str) -> None:
    """Scores far above 65504, which a float16 product of queries and keys cannot hold."""
    module = make(embed_dim=64, num_heads=1, dtype=torch.float16)
    x = (sequence(1, 6, 64) * 2000).half()
    with mode(module, name):
        out, weights = module(x, x, x, need_weights=need_weights)
    truth = exact_layer(module, (x, x, x))
    assert bool(out.isfinite().all())
    size = float(truth.out.abs().max())
    assert_within(out, truth.out, 40 * roundoff(torch.float16) * size)
    assert weights is None or bool(weights.isfinite().all())


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("as_float", [True, False])
def test_local_windows_with_padding_train(width: int, need_weights: bool, as_float: bool) -> None:
    """A sliding window whose keys are all padded for some queries: finite exact gradients, also for a loss over all
    rows."""
    module, x, hidden = make(), sequence(3, 8), torch.arange(8) >= torch.tensor([[8], [3], [0]])
    position = torch.arange(8)
    outside = (position[:, None] - position).abs() >= width
    mask = torch.zeros(8, 8, dtype=torch.float64).masked_fill(outside, -math.inf) if as_float else outside
    grad_out = torch.randn_like(x)
    truth = exact_layer(module, (x, x, x), grad_out, attn_mask=mask, key_padding_mask=hidden)
    got = gradients(module, (x, x, x), grad_out, attn_mask=mask, key_padding_mask=hidden, need_weights=need_weights)
    for name, grad in got.items():
        assert_within(grad, truth.grads[name], double_limit(truth.grads[name], 100), name)


def test_bucketing_does_not_change_a_sequence() -> None:
    """A sequence gives the same result alone, padded to any length, and beside any neighbours."""
    module, x = make(), sequence(1, 6)
    want = module(x, x, x, need_weights=False)[0]
    for length in (7, 16, 33, 70):
        batch = torch.full((3, length, EMBED), 3.0, dtype=torch.float64)
        batch[1, :6] = x[0]
        hidden = torch.arange(length).expand(3, length) >= torch.tensor([[length], [6], [1]])
        assert_within(module(batch, batch, batch, key_padding_mask=hidden, need_weights=False)[0][1:2, :6], want, 1e-13)


# --------------------------------------------------------------------------------------------------- what masks mean
@pytest.mark.parametrize("mask_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("need_weights", [True, False])
def test_float_masks_of_any_float_dtype(mask_dtype: torch.dtype, dtype: torch.dtype, need_weights: bool) -> None:
    module, x = make(dtype=dtype), sequence(2, 5, dtype=dtype)
    mask = causal_mask(5, dtype=mask_dtype)
    want = module(x, x, x, attn_mask=causal_mask(5), need_weights=need_weights)[0]
    assert torch.equal(module(x, x, x, attn_mask=mask, need_weights=need_weights)[0], want)


def test_three_axes_are_batch_major() -> None:
    module, x = make(), sequence(2, 5)
    mask = torch.zeros(2, HEADS, 5, 5, dtype=torch.bool)
    mask[1, :, :, 2:] = True
    mask[0, 3, :, 1:] = True
    weights = module(x, x, x, attn_mask=mask.flatten(0, 1), average_attn_weights=False)[1]
    assert torch.equal(weights == 0, mask)
    assert torch.equal(module(x, x, x, attn_mask=mask, average_attn_weights=False)[1], weights)


@pytest.mark.parametrize(
    "options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str
)
@pytest.mark.parametrize("need_weights", [True, False])
def test_appended_keys_stay_visible(options: dict[str, Any], need_weights: bool) -> None:
    """Under causality and with every key of an example padded; a hidden example then attends to the appended keys
    alone."""
    module, x = make(**options), sequence(2, 5)
    hidden = torch.tensor([[False] * 5, [True] * 5])
    truth = exact_layer(module, (x, x, x), is_causal=True, key_padding_mask=hidden)
    out, weights = module(x, x, x, is_causal=True, key_padding_mask=hidden, need_weights=need_weights)
    assert_within(out, truth.out, double_limit(truth.out, EMBED))
    if need_weights:
        assert weights.shape == (2, 5, 5 + len(options))
        assert_within(weights[1, :, 5:].sum(-1), torch.ones(5), 1e-13)


@pytest.mark.parametrize("lower_right", [False, True])
@pytest.mark.parametrize("sizes", [(1, 9), (3, 9), (9, 3), (5, 5)], ids=str)
def test_decoding_with_earlier_keys(lower_right: bool, sizes: tuple[int, int]) -> None:
    """New queries against all keys so far: aligned to the end, each sees what it would see in one long pass."""
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (sizes[0], sizes[1], sizes[1]))
    visible = torch.ones(sizes, dtype=torch.bool).tril(sizes[1] - sizes[0] if lower_right else 0)
    got = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, causal_alignment="lower_right" if lower_right else "upper_left"
    )
    assert_within(got, reference.attention(q, k, v, visible[None, None])[0], 1e-13)


# -------------------------------------------------------------------------------------------------- sizes and layouts
@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"kdim": 8, "vdim": 6}, {"add_bias_kv": True}], ids=str)
def test_empty_sequences_and_batches(sizes: tuple[int, int, int], need_weights: bool, options: dict[str, Any]) -> None:
    batch, queries, keys = sizes
    module = make(**options)
    inputs = (sequence(batch, queries), sequence(batch, keys, module.kdim), sequence(batch, keys, module.vdim))
    for name in MODES:
        with mode(module, name):
            out, weights = module(*inputs, need_weights=need_weights)
        assert out.shape == (batch, queries, EMBED)
        assert weights is None or weights.shape == (batch, queries, keys + ("add_bias_kv" in options))
        if keys == 0 and not options.get("add_bias_kv"):
            assert torch.equal(out, module.out_proj.bias.expand_as(out))
    grads = gradients(module, inputs, torch.ones(batch, queries, EMBED, dtype=torch.float64), need_weights=need_weights)
    assert all(bool(g.isfinite().all()) for g in grads.values())
    if "kdim" not in options:
        x = sequence(batch, queries)
        assert module(x, x, x, need_weights=need_weights)[0].shape == x.shape


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 17, 65, 127, 193, 257, 320, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_and_large_head_sizes(dim: int, dtype: torch.dtype) -> None:
    check(build(Case(1, 2, 2, 19, 35, dim, dtype=dtype, causal=1)))


def test_inputs_that_are_views() -> None:
    """Transposed, sliced, expanded and stepped activations give the bits of their copies."""
    module = make()
    base = sequence(6, 14, 2 * EMBED)
    for view in (
        base[:, ::2, :EMBED],
        base[..., ::2],
        base[:2, :, EMBED:],
        base[:1, :, :EMBED].expand(3, 14, EMBED),
        base.transpose(0, 1)[..., :EMBED],
    ):
        copied = view.contiguous()
        assert_within(module(view, view, view)[0], module(copied, copied, copied)[0], 1e-13)
        got = gradients(module, (view,) * 3, torch.ones(view.shape, dtype=torch.float64), need_weights=False)
        want = gradients(module, (copied,) * 3, torch.ones(view.shape, dtype=torch.float64), need_weights=False)
        for name, grad in got.items():
            assert_within(grad, want[name], double_limit(want[name], 100), name)


# --------------------------------------------------------------------------------------------------- derivatives
@pytest.mark.parametrize("shape", [(5, 5), (2 * HEADS, 5, 5), (2, 1, 5, 5), (1, HEADS, 1, 5)], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_learned_masks(shape: tuple[int, ...], need_weights: bool, frozen: bool) -> None:
    module, x = make().requires_grad_(not frozen), sequence(2, 5)
    mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    padding = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    grad_out = torch.randn_like(x)
    truth = exact_layer(module, (x, x, x), grad_out, attn_mask=mask.detach(), key_padding_mask=padding.detach())
    out = module(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=need_weights)[0]
    got = torch.autograd.grad(out, (mask, padding), grad_out)
    for name, grad in zip(("attn_mask", "key_padding_mask"), got, strict=True):
        assert_within(grad, truth.grads[name], double_limit(truth.grads[name], 100), name)


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_any_subset_of_gradients(shared: int, need_weights: bool, batch_first: bool) -> None:
    """Every input alone, every pair of inputs, and every single parameter: what is asked for is what the full pass
    gives."""
    module = make(batch_first=batch_first)
    inputs = [sequence(3, 3), sequence(3, 3, seed=2), sequence(3, 3, seed=3)][: 3 - shared]
    inputs += [inputs[-1]] * shared
    mask = torch.randn(3, HEADS, 3, 3, dtype=torch.float64)
    masks = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
    grad_out = torch.randn(3, 3, EMBED, dtype=torch.float64)
    full = gradients(module, tuple(inputs), grad_out, **masks)
    names = ("query", "key", "value")[: 3 - shared]
    subsets = [(n,) for n in full] + [tuple(n for n in names if n != left) for left in names if len(names) > 1]
    for wanted in subsets:
        module.requires_grad_(False)
        leaves = {n: x.clone().requires_grad_(n in wanted) for n, x in zip(names, inputs, strict=False)}
        given = [*leaves.values()]
        given += [given[-1]] * shared
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in wanted)
        used = mask.clone().requires_grad_("attn_mask" in wanted)
        out = module(*given, **{**masks, "attn_mask": used})[0]
        sources = {**leaves, "attn_mask": used, **dict(module.named_parameters())}
        got = torch.autograd.grad(out, [sources[n] for n in wanted], grad_out)
        for name, grad in zip(wanted, got, strict=True):
            assert_within(grad, full[name], double_limit(full[name], 100), f"{name} of {wanted}")


def test_gradient_penalty_is_the_same_with_and_without_weights() -> None:
    results = []
    for need_weights in (True, False):
        module, x = make(), sequence(2, 5).requires_grad_()
        (first,) = torch.autograd.grad(
            module(x, x, x, need_weights=need_weights)[0].square().sum(), x, create_graph=True
        )
        first.square().sum().backward()
        results.append([x.grad, *[p.grad for p in module.parameters()]])
    for got, want in zip(*results, strict=True):
        assert_within(got, want, double_limit(want, 1000))


def test_attention_entropy_can_be_trained() -> None:
    """A loss on the returned weights, averaged and per head, has the exact gradient."""
    for average in (True, False):
        ours, theirs = pair()
        x = sequence(2, 6)
        results = []
        for module in (ours, theirs):
            weights = module(x, x, x, average_attn_weights=average)[1]
            loss = -(weights * weights.log()).sum()
            results.append(torch.autograd.grad(loss, [module.in_proj_weight, module.in_proj_bias]))
        for got, want in zip(*results, strict=True):
            assert_within(got, want, double_limit(want, 1000))


# --------------------------------------------------------------------------------------------------- use in programs
def test_repeating_a_training_step_gives_the_same_bits() -> None:
    results = []
    for _ in range(2):
        module, x = (
            make(embed_dim=64, dropout=0.2, dtype=torch.float32),
            sequence(4, 65, 64, dtype=torch.float32).requires_grad_(),
        )
        torch.manual_seed(7)
        module(x, x, x, need_weights=False)[0].square().sum().backward()
        results.append([x.grad, *[p.grad for p in module.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["eval", "no_grad"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_operations_are_counted(name: str, need_weights: bool) -> None:
    """The flop counter sees projections and attention: 4 linear maps of 2 L E^2 and two products of 2 L^2 E."""
    module, x = make(embed_dim=64, dtype=torch.float32), sequence(1, 128, 64, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter, mode(module, name):
        module(x, x, x, need_weights=need_weights)
    assert counter.get_total_flops() == 4 * 2 * 128 * 64 * 64 + 2 * 2 * 128 * 128 * 64


def test_a_warning_is_not_raised_in_ordinary_use() -> None:
    module, x = make(), sequence(2, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for masks in ({"is_causal": True}, {"attn_mask": causal_mask(5), "key_padding_mask": torch.zeros(2, 5)}):
            module(x, x, x, **masks)[0].sum().backward()


def test_optimisers_and_copies_between_modules_share_nothing() -> None:
    module, x = make(), sequence(2, 5)
    twin = copy.deepcopy(module)
    before = twin(x, x, x)[0]
    module(x, x, x)[0].sum().backward()
    torch.optim.SGD(module.parameters(), 1.0).step()
    assert torch.equal(twin(x, x, x)[0], before) and not torch.equal(module(x, x, x)[0], before)
    assert all(p.grad is None for p in twin.parameters())


def test_constant_values_come_back_unchanged_in_long_rows() -> None:
    """An average of equal numbers is that number: within the rounding of one sum over 20,000 keys."""
    q, k = torch.randn(1, 1, 3, 16), torch.randn(1, 1, 20_000, 16)
    out, lse = ops.attention(q, k, torch.full((1, 1, 20_000, 4), 0.7))
    assert_within(out, torch.full((1, 1, 3, 4), 0.7), 0.7 * growth(20_000, torch.float32))
    want = torch.logsumexp(q.double() @ k.double().mT / 4, -1)
    assert_within(lse, want, 1e-5)


def test_plain_pytorch_module_is_untouched() -> None:
    """Importing the package changes nothing of PyTorch."""
    assert nn.MultiheadAttention.__module__ == "torch.nn.modules.activation"
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    assert mha_ext.MultiheadAttention is not nn.MultiheadAttention
