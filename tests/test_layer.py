"""The layer: the one-node operator, and what the module does beyond the original."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from cases import ops
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
from switches import threads
from tolerances import assert_within, double_limit, peer_limit
from torch import Tensor

from mha_ext import reference


# -------------------------------------------------------------------------------------------------- the operator itself
def parameters(embed: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, bias: bool) -> list[Tensor | None]:
    width = (heads + 2 * kv_heads) * dim
    shapes = [(width, embed), (width,) if bias else None, (embed + 1, heads * dim), (embed + 1,) if bias else None]
    return [
        None if s is None else (torch.randn(s, dtype=torch.float64) / s[-1] ** 0.5).to(dtype).requires_grad_()
        for s in shapes
    ]


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": 1}, {"causal": 2, "scale": 0.3}, {"dropout_p": 0.3}, {"mask": "bool"}, {"mask": "float"}],
    ids=str,
)
def test_operator_against_the_equations(
    shared: int, batch_first: bool, bias: bool, kv_heads: int, options: dict[str, Any]
) -> None:
    """Output and all nine gradients in float64; D = 5, E = 12, an output width of 13, lengths 9 and 20 (or 9 and 9)."""
    options = dict(options)
    queries, keys = 9, 9 if shared == 2 else 20
    inputs = [sequence(3, queries, 12, 1)] + [sequence(3, keys, 12, s) for s in (2, 3)]
    inputs = [inputs[0]] * 3 if shared == 2 else [inputs[0], inputs[1], inputs[1]] if shared == 1 else inputs
    leaves = [x.clone().requires_grad_() for x in inputs]
    leaves = [leaves[0]] * 3 if shared == 2 else [leaves[0], leaves[1], leaves[1]] if shared == 1 else leaves
    weights = parameters(12, 4, kv_heads, 5, torch.float64, bias)
    mask = padding = seed = keep = None
    kind = options.pop("mask", None)
    if kind == "bool":
        mask, padding = torch.rand(3, 1, queries, keys) > 0.4, last_hidden(3, keys)
    elif kind == "float":
        mask, padding = (
            torch.randn(1, 4, queries, keys, dtype=torch.float64, requires_grad=True),
            torch.randn(3, keys, requires_grad=True),
        )
    if "dropout_p" in options:
        seed = torch.tensor([17])
        keep = reference.dropout_keep(17, 3, 4, queries, keys, options["dropout_p"])
    given = [x if batch_first else x.transpose(0, 1) for x in leaves]
    given = [given[0]] * 3 if shared == 2 else [given[0], given[1], given[1]] if shared == 1 else given
    out, *_ = ops.multi_head_attention(
        *given,
        *weights,
        mask,
        padding,
        seed,
        num_heads=4,
        num_kv_heads=kv_heads,
        shared_inputs=shared,
        batch_first=batch_first,
        **options,
    )
    rows = weights[0].split([20, 5 * kv_heads, 5 * kv_heads])
    biases = [None] * 3 if not bias else list(weights[1].split([20, 5 * kv_heads, 5 * kv_heads]))
    names = reference.LayerParameters(*[w.mT for w in (*rows, weights[2])], *biases, weights[3])
    causal = options.pop("causal", 0)
    want = reference.multi_head_attention(
        *leaves, names, 4, attn_mask=mask, key_padding_mask=padding, is_causal=causal > 0,
        causal_alignment="lower_right" if causal == 2 else "upper_left", keep=keep, **options,
    )[0]  # fmt: skip
    want = want if batch_first else want.transpose(0, 1)
    assert_within(out, want, double_limit(want, 100), "output")
    assert out.is_contiguous()
    wanted = [x for x in (*dict.fromkeys(leaves), *weights, mask, padding) if x is not None and x.requires_grad]
    grad = torch.randn_like(out)
    for i, (a, b) in enumerate(
        zip(torch.autograd.grad(out, wanted, grad), torch.autograd.grad(want, wanted, grad), strict=True)
    ):
        assert_within(a, b, (1e7 if b.dtype == torch.float32 else 1) * double_limit(b, 100), f"gradient {i}")


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("kind", ["plain", "padding"])
def test_operator_gradcheck_and_gradgradcheck(shared: int, kind: str) -> None:
    weights = parameters(4, 2, 1, 2, torch.float64, True)
    inputs = [sequence(2, n, 4, s).requires_grad_() for s, n in enumerate((3, 3 if shared == 2 else 4, 4))]
    inputs = inputs[: 3 - shared]
    padding = last_hidden(2, 3 if shared == 2 else 4) if kind == "padding" else None

    def call(*tensors: Tensor) -> Tensor:
        given, rest = list(tensors[: 3 - shared]), tensors[3 - shared :]
        given += [given[-1]] * shared
        return ops.multi_head_attention(
            *given, *rest, None, padding, num_heads=2, num_kv_heads=1, shared_inputs=shared, causal=1
        )[0]

    assert torch.autograd.gradcheck(call, (*inputs, *weights))
    assert torch.autograd.gradgradcheck(call, (*inputs, *weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_thread_count_changes_no_bit(dtype: torch.dtype) -> None:
    weights = parameters(64, 4, 2, 16, dtype, True)
    x = sequence(3, 130, 64, dtype=dtype).requires_grad_()
    results = []
    for count in (1, 2):
        with threads(count):
            out = ops.multi_head_attention(x, x, x, *weights, num_heads=4, num_kv_heads=2, shared_inputs=2, causal=1)[0]
            results.append([out, *torch.autograd.grad(out, [x, *weights], torch.ones_like(out))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --------------------------------------------------------------------- right where the original is, and where it is not
KINDS: dict[str, dict[str, Any]] = {
    "causal flag": {"is_causal": True},
    "causal flag and padding": {"is_causal": True, "key_padding_mask": last_hidden(3, 7)},
    "causal flag and a mask that is not": {"is_causal": True, "attn_mask": torch.arange(49).view(7, 7) % 3 == 2},
    "an example with nothing": {"key_padding_mask": torch.tensor([[False] * 7, [True] * 7, [True] * 3 + [False] * 4])},
    "rows with nothing": {"attn_mask": torch.tensor([[i in (2, 6)] * 7 for i in range(7)])},
    "rows with nothing, float": {"attn_mask": torch.zeros(7, 7).masked_fill(torch.eye(7)[:, :1].bool(), -math.inf)},
    "window and padding": {
        "attn_mask": (torch.arange(7)[:, None] - torch.arange(7)).abs() > 1,
        "key_padding_mask": last_hidden(3, 7),
    },
    "left padding and causal": {"is_causal": True, "key_padding_mask": last_hidden(3, 7).flip(1)},
    "per example": {"attn_mask": torch.rand(3, 7, 7, generator=torch.Generator().manual_seed(1)) > 0.6},
    "per example and head": {"attn_mask": torch.rand(3, HEADS, 7, 7, generator=torch.Generator().manual_seed(1)) > 0.6},
    "per head": {"attn_mask": torch.randn(1, HEADS, 7, 7, generator=torch.Generator().manual_seed(1))},
    "batch major": {"attn_mask": torch.rand(3 * HEADS, 7, 7, generator=torch.Generator().manual_seed(1)) > 0.6},
    "float and bool": {
        "attn_mask": torch.randn(7, 7, generator=torch.Generator().manual_seed(1)),
        "key_padding_mask": last_hidden(3, 7),
    },
    "half float mask": {"attn_mask": causal_mask(7, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"add_bias_kv": True}, {"add_zero_attn": True, "add_bias_kv": True}, {"kdim": 8, "vdim": 6}],
    ids=str,
)
def test_masks_in_every_mode(kind: str, options: dict[str, Any]) -> None:
    """All modes, with and without weights, give the exact answer, gradients included; masked rows give the output
    bias."""
    module, masks = make(**options), KINDS[kind]
    x = sequence(3, 7)
    inputs = (x, x, x) if "kdim" not in options else (x, sequence(3, 7, 8, 2), sequence(3, 7, 6, 3))
    grad_out = torch.randn_like(x)
    truth = exact_layer(module, inputs, grad_out, **masks)
    for name, need, average in itertools.product(MODES, (False, True), (True, False)):
        with mode(module, name):
            out, weights = module(*inputs, need_weights=need, average_attn_weights=average, **masks)
        assert_within(out, truth.out, double_limit(truth.out, EMBED), name)
        if need:
            assert_within(weights, truth.weights.mean(1) if average else truth.weights, 1e-13, name)
    for need in (False, True):
        for name, grad in gradients(module, inputs, grad_out, need_weights=need, **masks).items():
            loose = 1e7 if grad.dtype == torch.float32 else 1e14 if grad.dtype == torch.bfloat16 else 1
            assert_within(grad, truth.grads[name], loose * double_limit(truth.grads[name], 100), name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"kdim": 8, "vdim": 6}, {"add_bias_kv": True}], ids=str)
def test_autocast(dtype: torch.dtype, need_weights: bool, options: dict[str, Any]) -> None:
    """Output dtype and exactness under autocast are PyTorch's or better; parameters get float32 gradients."""
    ours, theirs = pair(dtype=torch.float32, **options)
    widths = (EMBED, ours.kdim, ours.vdim)
    inputs = tuple(sequence(2, n, w, w, torch.float32) for n, w in zip((5, 7, 7), widths, strict=True))
    truth = exact_layer(ours, inputs)
    with torch.autocast("cpu", dtype):
        out = ours(*inputs, need_weights=need_weights)[0]
        peer = theirs(*inputs, need_weights=need_weights)[0]
    assert out.dtype == peer.dtype
    assert_within(out, truth.out, peer_limit(peer, truth.out, dtype))
    out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and bool(p.grad.isfinite().all()) for p in ours.parameters())
