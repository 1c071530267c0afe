"""torch.export of the functions, strict and not: one program for any batch, lengths and number of documents.

A size that a function took for a constant is PyTorch's own error, as every size that may differ is marked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import LOWER_RIGHT, UPPER_LEFT
from document_truth import each_alone
from layer_cases import sequence
from tolerances import assert_within, double_limit
from torch import Tensor, nn
from torch.export import Dim
from variant_cases import Call, Variant, exact
from variant_cases import make as make_call

from mha_ext import functional

SIZES, OTHERS = {"B": 3, "T": 5, "S": 7}, {"B": 2, "T": 9, "S": 10}  # no size of heads among them, nor T + S - 1
FIXED = Variant(H=4, H_kv=2, D=8, D_v=6, dtype=torch.float64, **SIZES)
CALLS: dict[str, dict[str, Any]] = {
    "masks": {"mask": "float64:BHTS", "padding": "bool", "causal": LOWER_RIGHT},
    "variants": {"window": (3, 1), "softcap": 0.7, "sink": "float64", "relative": "float64:1H", "alibi": "float64:BH"},
    "documents": {"segments": "batch", "causal": UPPER_LEFT},
    "prefixes": {"prefix": "batch", "causal": UPPER_LEFT},
    "ranges": {"key_range": "BT", "mask": "bool:B1TS"},
    "shared bounds": {"segments": "pair", "key_range": "T", "padding": "float64", "layout": "tbhd"},
}


class Function(nn.Module):
    """The function with fixed options; everything that is a tensor is an input."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def forward(self, tensors: dict[str, Any]) -> Any:
        return functional.scaled_dot_product_attention(**tensors, **self.options, return_lse=True)


def split(call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a program is given, and what is fixed in it."""
    tensors: dict[str, Any] = {n: x.detach() for n, x in call.tensors.items()}
    tensors |= {n: x for n, x in call.rest.items() if isinstance(x, (Tensor, tuple)) and n != "window"}
    return tensors, {n: x for n, x in call.rest.items() if n not in tensors}


def open_sizes(x: Any) -> Any:
    """Which sizes may differ: those of the batch, the sequences and the distances."""
    if isinstance(x, tuple):
        return tuple(open_sizes(one) for one in x)
    sizes = {*SIZES.values(), SIZES["T"] + SIZES["S"] - 1}
    return {axis: Dim.DYNAMIC for axis, size in enumerate(x.shape) if size in sizes}


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CALLS)
def test_attention(name: str, strict: bool) -> None:
    case = replace(FIXED, **CALLS[name])
    tensors, options = split(make_call(case))
    sizes = ({n: open_sizes(x) for n, x in tensors.items()},)
    program = torch.export.export(Function(options), (tensors,), dynamic_shapes=sizes, strict=strict).module()
    other = make_call(replace(case, **OTHERS), seed=1)
    answer = exact(other)[1]
    for got, want in zip(program(split(other)[0]), (answer.out, answer.lse), strict=True):
        assert_within(got, want, double_limit(want, case.D))


class Packed(nn.Module):
    """Documents in one sequence; without a longest length it is the packed one, a size of the program."""

    def __init__(self, longest: int | None) -> None:
        super().__init__()
        self.longest = longest

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        longest = x.shape[0] if self.longest is None else self.longest
        out = functional.varlen_attention(x, x, x, starts, starts, longest, longest, is_causal=True)
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("longest", [None, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
def test_packed_sequences(longest: int | None, strict: bool) -> None:
    """Any number of documents from two on: PyTorch compiles a size of one apart, here the only document's."""
    x, starts = sequence(1, 9 * 2, 8).view(9, 2, 8), torch.tensor([0, 3, 9], dtype=torch.int32)
    sizes = ({0: Dim.DYNAMIC}, {0: Dim("starts", min=3)})
    program = torch.export.export(Packed(longest), (x, starts), dynamic_shapes=sizes, strict=strict).module()
    x, starts = sequence(1, 11 * 2, 8, seed=2).view(11, 2, 8), torch.tensor([0, 2, 2, 7, 11], dtype=torch.int32)
    want = each_alone(x.transpose(0, 1), starts.diff().tolist()).transpose(0, 1)
    assert_within(program(x, starts), want, double_limit(want, 8))
