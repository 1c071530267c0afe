"""The oracle of the variants is right: off, it is PyTorch's composition; on, it is what a loop over pairs gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_within
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_attention
from variant_cases import Call, Variant, make, variants
from variant_truth import dense, pairs


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("scale", [None, -0.7])
@pytest.mark.parametrize("mask", ["none", "float64:BHTS", "bool:11TS"])
def test_with_every_option_off_it_is_pytorchs_composition(causal: int, scale: float | None, mask: str) -> None:
    call = make(Variant(2, 4, 2, 9, 14, 8, 5, torch.float64, mask, causal=causal, scale=scale))
    attn_mask = call.options.get("attn_mask")
    if attn_mask is not None:  # PyTorch gives NaN where a query sees nothing, and takes one mask only
        attn_mask[..., 0] = True if attn_mask.dtype == torch.bool else 0.0
        order = torch.ones(9, 14, dtype=torch.bool).tril() if causal else torch.ones(9, 14, dtype=torch.bool)
        merged = attn_mask & order if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~order, -torch.inf)
    results = []
    for theirs in (True, False):
        leaves = [call.tensors[n].detach().requires_grad_() for n in ("query", "key", "value")]
        if theirs:
            given_mask = None if attn_mask is None else merged
            with sdpa_kernel(SDPBackend.MATH):
                out = torch_attention(
                    *leaves, given_mask, is_causal=bool(causal) and given_mask is None, scale=scale, enable_gqa=True
                )
        else:
            out = dense(*leaves, call.options).out
        results.append([out, *torch.autograd.grad(out, leaves, call.grad_out)])
    for got, want in zip(*reversed(results), strict=True):
        assert_within(got, want, 1e-13)


def small(case: Variant) -> Call:
    """The variant on few pairs, so that a loop over them ends."""
    keys = min(case.keys, 7)
    queries = min(case.T, 7) if case.segments != "one" else keys
    return make(replace(case, T=queries, S=keys, H_kv=1, H=min(case.H, 2), D=min(case.D, 8), D_v=2, dropout_p=0.0))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(variants(dtypes=[torch.float64]), st.integers(0, 2**31))
def test_the_matrix_is_what_a_loop_over_pairs_gives(case: Variant, seed: int) -> None:
    call = small(case)
    tensors = [call.tensors[n] for n in ("query", "key", "value")]
    answer = dense(*tensors, call.options)
    out, lse = pairs(*tensors, call.options)
    assert_within(answer.out, out, 1e-12 * max(1.0, float(out.abs().max())))
    assert_within(answer.lse, lse, 1e-12 * max(1.0, float(lse.nan_to_num(neginf=0.0).abs().max())))


def test_the_oracle_differentiates() -> None:
    """Autograd through dense math, with everything that has a gradient at once."""
    case = Variant(
        2, 2, 1, 3, 5, 2, 2, torch.float64, "float64:1HTS", "float64", 2, softcap=1.5, sink="float64",
        alibi="float64:BH", relative="float64:BH", window=(3, 1),
    )  # fmt: skip
    call = make(case)
    for name in ("attn_mask", "key_padding_mask"):
        call.tensors[name].nan_to_num_(neginf=-1.0)
    names, inputs = list(call.tensors), [x.detach().requires_grad_() for x in call.tensors.values()]
    assert "sink" in names and "relative_bias" in names

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        given_tensors = dict(zip(names, tensors, strict=True))
        heads = [given_tensors.pop(n) for n in ("query", "key", "value")]
        return tuple(dense(*heads, {**given_tensors, **call.rest})[:3])

    assert gradcheck(function, inputs)
