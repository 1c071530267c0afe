"""What roads.py has no axis for: static keys and values, masks of unusual make, strides beyond 32 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import truth
from layer_cases import EMBED, HEADS, make, mode, sequence
from tolerances import assert_within, double_limit
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant, causal_upper_left

from mha_ext import functional

DIM = EMBED // HEADS


@pytest.fixture(autouse=True)
def _one_thread(set_threads: Callable[[int], None]) -> None:
    set_threads(1)  # these problems are too small to share


# --------------------------------------------------------------------------------------------- static keys and values
class Static:
    """A call of the function with PyTorch's signature that uses ready-made keys, values or both."""

    def __init__(self, which: str, separate: bool, add_zero: bool, planted: float | None = None) -> None:
        batch, queries, keys = 2, 4, 6
        torch.manual_seed(1)
        both = which == "both"
        self.module = make(kdim=8, vdim=6, add_zero_attn=add_zero) if separate else make(add_zero_attn=add_zero)
        self.which, self.out_weight = which, torch.randn(10, EMBED, dtype=torch.float64)
        length = 3 if both else keys  # of the inputs that nobody looks at
        self.inputs = [sequence(queries, batch, seed=2)]
        widths = (8, 6) if separate else (EMBED, EMBED)
        self.inputs += [sequence(length, batch, width, seed=3) for width in widths]
        self.static = [torch.randn(batch * HEADS, keys, DIM, dtype=torch.float64) for _ in range(2)]
        self.padding = torch.arange(keys).expand(batch, keys) >= torch.tensor([[6], [4]])
        self.mask = torch.rand(queries, keys) > 0.7
        self.mask[2] = True
        if planted is not None:
            for x in self.static:
                x.unflatten(0, (batch, HEADS)).transpose(1, 2)[self.padding] = planted
            for x in self.inputs[1:]:
                x.transpose(0, 1)[torch.ones(batch, length, dtype=torch.bool) if both else self.padding] = planted
            if not add_zero:
                self.inputs[0][2] = planted

    def leaves(self) -> dict[str, Tensor]:
        names = ("query", "key", "value", "static_k", "static_v")
        tensors = dict(zip(names, (*self.inputs, *self.static), strict=True)) | {"out_proj.weight": self.out_weight}
        used = {n: p for n, p in self.module.named_parameters() if n != "out_proj.weight" and n != "out_proj.bias"}
        return {n: x.detach().clone().requires_grad_() for n, x in {**tensors, **used}.items()}

    def given(self, x: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        return x["static_k"] if self.which != "value" else None, x["static_v"] if self.which != "key" else None

    def ours(self, x: dict[str, Tensor], need_weights: bool) -> tuple[Tensor, Tensor | None]:
        static_k, static_v = self.given(x)
        separate = {f"{n}_proj_weight": x[f"{n}_proj_weight"] for n in "qkv" if "in_proj_weight" not in x}
        return functional.multi_head_attention_forward(
            x["query"], x["key"], x["value"], EMBED, HEADS, x.get("in_proj_weight"), x["in_proj_bias"], None, None,
            self.module.add_zero_attn, 0.3, x["out_proj.weight"], None, False, self.padding, need_weights, self.mask,
            bool(separate), **separate, static_k=static_k, static_v=static_v, average_attn_weights=False,
            is_causal=True,
        )  # fmt: skip

    def exact(self, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        sizes = (2, HEADS, self.mask.shape[0], self.mask.shape[1])
        masks = [self.mask, self.padding[:, None, None]]
        who = truth.rules(sizes, masks, truth.UPPER_LEFT, int(self.module.add_zero_attn))
        static = tuple(None if s is None else s.unflatten(0, (2, HEADS)) for s in self.given(x))
        inputs = tuple(x[n].transpose(0, 1) for n in ("query", "key", "value"))
        out, weights = truth.layer(x, inputs, (HEADS, HEADS, DIM), who, self.module.add_zero_attn, static)
        return out.transpose(0, 1), torch.cat(weights, 1)


@pytest.mark.parametrize("which", ["key", "value", "both"])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("add_zero", [False, True])
@pytest.mark.parametrize("planted", [None, math.nan, -math.inf])
def test_static_keys_and_values(which: str, separate: bool, add_zero: bool, planted: float | None) -> None:
    """Output, weights and gradients, with masks, padding and causality, an output of another width, and anything in
    rows that nobody uses."""
    problem = Static(which, separate, add_zero, planted)
    mine, exact = problem.leaves(), problem.leaves()
    want, want_weights = problem.exact(exact)
    grad = torch.randn_like(want)
    for need_weights in (True, False):
        out, weights = problem.ours(mine, need_weights)
        assert_within(out, want, double_limit(want, EMBED), "out")
        assert (weights is not None) == need_weights
        if weights is not None:
            assert_within(weights, want_weights, double_limit(want_weights, EMBED), "weights")
        got = torch.autograd.grad(out, list(mine.values()), grad, allow_unused=True)
        wanted = torch.autograd.grad(want, list(exact.values()), grad, retain_graph=True, allow_unused=True)
        for name, a, b in zip(mine, got, wanted, strict=True):
            a, b = (torch.zeros_like(mine[name]) if g is None else g for g in (a, b))
            assert_within(a, b, double_limit(b, 100), f"grad of {name}")


# ------------------------------------------------------------------------------------------------ masks of unusual make
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_masks_made_in_inference_mode_serve_in_training(need_weights: bool, kind: torch.dtype) -> None:
    """A mask that evaluation has cached."""
    module, x = make(), sequence(2, 5).requires_grad_()
    with torch.inference_mode():
        masks = {"attn_mask": torch.eye(5).to(kind), "key_padding_mask": torch.eye(5)[:2].to(kind)}
    plain = {name: mask.clone() for name, mask in masks.items()}
    got, want = (
        torch.autograd.grad(module(x, x, x, need_weights=need_weights, **m)[0].sum(), x)[0] for m in (masks, plain)
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_attention_on_heads_trains_with_masks_made_in_inference_mode(kind: torch.dtype) -> None:
    q = torch.randn(2, 2, 5, 4, requires_grad=True)
    with torch.inference_mode():
        masks = {"attn_mask": torch.eye(5).to(kind), "key_padding_mask": torch.eye(5)[:2].to(kind)}
    plain = {name: mask.clone() for name, mask in masks.items()}
    got, want = (
        torch.autograd.grad(functional.scaled_dot_product_attention(q, q, q, **m).sum(), q)[0] for m in (masks, plain)
    )
    assert torch.equal(got, want)


class OwnBias(CausalBias):
    """A subclass, as a library may have one."""


@pytest.mark.parametrize("variant", list(CausalVariant))
def test_subclasses_of_causal_bias_are_causal(variant: CausalVariant) -> None:
    q, k = torch.randn(1, 2, 3, 8, dtype=torch.float64), torch.randn(1, 2, 5, 8, dtype=torch.float64)
    who = truth.rules((1, 2, 3, 5), [], {"UPPER_LEFT": 1, "LOWER_RIGHT": 2}[variant.name])
    got = functional.scaled_dot_product_attention(q, k, k, attn_mask=OwnBias(variant, 3, 5))
    assert_within(got, truth.attention(q, k, k, who).out, 1e-13)


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_a_causal_bias_where_a_tensor_is_expected_is_refused(name: str) -> None:
    """Its own numbers are uninitialised memory."""
    module, x = make(), sequence(2, 5)
    with pytest.raises(TypeError, match=rf"MultiheadAttention: {name} must be a plain tensor .* got CausalBias"):
        module(x, x, x, **{name: causal_upper_left(5, 5)})


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_the_smallest_number_of_a_wider_type_hides_nothing(
    need_weights: bool, kind: torch.dtype, autocast: torch.dtype | None
) -> None:
    """A finite mask stays finite where it is narrowed: rows that it covers attend to all keys alike."""
    module, x = make(dtype=torch.float32), sequence(2, 5, dtype=torch.float32)
    mask = torch.full((5, 5), torch.finfo(kind).min, dtype=kind)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        out = module(x, x, x, attn_mask=mask, need_weights=need_weights)[0]
    exact = {n: p.double() for n, p in module.named_parameters()}
    zeros = dict(exact, in_proj_weight=exact["in_proj_weight"].clone())
    zeros["in_proj_weight"][:EMBED], zeros["in_proj_bias"] = 0.0, exact["in_proj_bias"].clone()
    zeros["in_proj_bias"][:EMBED] = 0.0  # queries of zeros see all keys alike
    want = truth.layer(zeros, (x.double(),) * 3, (HEADS, HEADS, DIM), truth.rules((2, HEADS, 5, 5), []))[0]
    assert_within(out, want, 16 * torch.finfo(autocast or torch.float32).eps * float(want.detach().abs().max()))


# ----------------------------------------------------------------------------------------------- strides beyond 32 bits
@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float16])
def test_masks_with_strides_beyond_32_bits(name: str, kind: torch.dtype) -> None:
    """Two examples further apart than 2^31 elements, in memory that is reserved and not touched."""
    q = torch.randn(2, 1, 8, 16)
    hidden = torch.arange(8) > torch.tensor([[3], [6]])
    small = hidden if name == "key_padding_mask" else ~hidden[:, None, None].expand(2, 1, 8, 8)
    small = small if kind == torch.bool else torch.randn(small.shape).to(kind)
    memory = torch.empty(2**31 + 4096, dtype=kind)
    steps = (2**31 + 64, 1) if name == "key_padding_mask" else (2**31 + 64, 64, 8, 1)
    far: dict[str, Any] = {name: memory.as_strided(small.shape, steps).copy_(small)}
    got = functional.scaled_dot_product_attention(q, q, q, **far)
    assert torch.equal(got, functional.scaled_dot_product_attention(q, q, q, **{name: small.contiguous()}))


# ------------------------------------------------------------------------------------------------- sequences of nothing
@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("appended", [(), ("add_zero_attn",), ("add_bias_kv", "add_zero_attn")], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_masks_of_empty_sequences(sizes: tuple[int, int], appended: tuple[str, ...], need_weights: bool) -> None:
    """Every shape of mask that fits no queries or no keys; then only appended keys, or nothing, are attended to."""
    module, (queries, keys) = make(**dict.fromkeys(appended, True)), sizes
    query, key = sequence(2, queries), sequence(2, keys)
    who = truth.rules((2, HEADS, queries, keys), [], 0, len(appended))
    shapes = [(queries, keys), (2 * HEADS, queries, keys), (2, 1, queries, keys), (1, keys), (keys,)]
    parameters = dict(module.named_parameters())
    heads = (HEADS, HEADS, DIM)
    want = truth.layer(parameters, (query, key, key), heads, who, module.add_zero_attn)[0].detach()
    for shape in shapes:
        for mask in (torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)):
            with mode(module, "train"):
                out = module(query, key, key, attn_mask=mask, key_padding_mask=torch.zeros(2, keys).bool(),
                             need_weights=need_weights)[0]  # fmt: skip
            assert_within(out, want, double_limit(want, EMBED), str(shape))
            out.sum().backward()


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_masks_of_eight_bits(kind: torch.dtype) -> None:
    """Floating masks of every dtype are cast: the result is that of the same numbers in float64."""
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, n, 8, dtype=torch.float64, generator=g) for n in (5, 7, 7))
    mask = torch.randn(5, 7, generator=g).to(kind)
    padding = torch.randn(2, 7, generator=g).to(kind)
    got = functional.scaled_dot_product_attention(query, key, value, mask, key_padding_mask=padding)
    bias = mask.to(torch.float64) + padding.to(torch.float64)[:, None, None]
    want = torch.softmax(query @ key.mT / 8**0.5 + bias, -1) @ value
    assert_within(got, want, double_limit(want, 7 * 8))
    module, x = make(), sequence(2, 7)
    for need_weights in (True, False):
        got, _ = module(x, x, x, padding, need_weights, mask[:1].expand(7, 7))
        want, _ = module(x, x, x, padding.double(), need_weights, mask[:1].double().expand(7, 7))
        assert torch.equal(got, want)
