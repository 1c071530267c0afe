"""Blocks as vision and language models write them around ``nn.MultiheadAttention``: converted, they give the same.

Written here after the structure of torchvision's ViT (Dosovitskiy et al. 2020), DETR (Carion et al. 2020) and CLIP
(Radford et al. 2021); and a whole ``nn.Transformer`` that learns to copy.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_cases import EMBED, HEADS, last_hidden, sequence
from switches import threads
from tolerances import assert_within, double_limit, growth, peer_limit, roundoff
from torch import Tensor, nn
from tracing import Operators
from transformer_cases import MODES, running

import mha_ext
from mha_ext.demo.converted import Copier, learn


class VisionBlock(nn.Module):
    """Norm first, batch first, one tensor for query, key and value, no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(EMBED, eps=1e-6) for _ in range(2))
        self.self_attention = nn.MultiheadAttention(EMBED, HEADS, dropout=0.0, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(EMBED, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, EMBED))

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.ln_1(tokens)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        tokens = tokens + y
        return tokens + self.mlp(self.ln_2(tokens))


class DetectionEncoderLayer(nn.Module):
    """Time first; positions are added to queries and keys and not to values; padding, and weights that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(EMBED, HEADS, dropout=0.0)
        self.linear1, self.linear2 = nn.Linear(EMBED, 32), nn.Linear(32, EMBED)
        self.norm1, self.norm2 = nn.LayerNorm(EMBED), nn.LayerNorm(EMBED)

    def forward(self, source: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        placed = source + positions
        found = self.self_attn(placed, placed, value=source, attn_mask=None, key_padding_mask=hidden)[0]
        source = self.norm1(source + found)
        return self.norm2(source + self.linear2(self.linear1(source).relu()))


class DetectionDecoderLayer(nn.Module):
    """Learned queries look at themselves and at the image."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.multihead_attn = (nn.MultiheadAttention(EMBED, HEADS, dropout=0.0) for _ in range(2))
        self.norm1, self.norm2 = nn.LayerNorm(EMBED), nn.LayerNorm(EMBED)
        self.query_positions = nn.Parameter(0.5 * sequence(7, 1, seed=8))

    def forward(self, memory: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        slots = torch.zeros_like(self.query_positions).expand(-1, memory.shape[1], -1)
        placed = slots + self.query_positions
        slots = self.norm1(slots + self.self_attn(placed, placed, value=slots)[0])
        found, weights = self.multihead_attn(
            query=slots + self.query_positions, key=memory + positions, value=memory, key_padding_mask=hidden
        )
        assert weights.shape == (memory.shape[1], 7, memory.shape[0])
        return self.norm2(slots + found)


class LanguageBlock(nn.Module):
    """Time first, norm first, a causal mask of floats that is cast to the dtype of the input."""

    attn_mask: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(EMBED, HEADS)
        self.ln_1, self.ln_2 = nn.LayerNorm(EMBED), nn.LayerNorm(EMBED)
        self.mlp = nn.Sequential(nn.Linear(EMBED, 4 * EMBED), nn.SiLU(), nn.Linear(4 * EMBED, EMBED))
        self.register_buffer("attn_mask", torch.full((length, length), -torch.inf).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.attn_mask.to(dtype=x.dtype, device=x.device)
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


def sources() -> tuple[Tensor, Tensor, Tensor]:
    """Time first, as DETR has it: (T, B, E), and padding (B, T)."""
    return sequence(6, 3), sequence(6, 3, seed=2), last_hidden(3, 6)


BLOCKS: dict[str, tuple[Any, Any]] = {
    "ViT": (VisionBlock, lambda: (sequence(2, 17),)),
    "DETR encoder": (DetectionEncoderLayer, sources),
    "DETR decoder": (DetectionDecoderLayer, sources),
    "CLIP": (lambda: LanguageBlock(9), lambda: (sequence(9, 2),)),
}


def pair(make: Any) -> tuple[Any, Any]:
    """A float64 block, and a converted copy."""
    torch.manual_seed(0)
    block = make().double()
    return block, mha_ext.convert(block, inplace=False)


def results(block: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients by floating inputs and parameters."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = block(*leaves)
    wrt = [x for x in (*leaves, *block.parameters()) if x.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), wrt)]


@pytest.mark.parametrize(("make", "inputs"), BLOCKS.values(), ids=BLOCKS)
def test_blocks_give_what_they_gave(make: Any, inputs: Any) -> None:
    """Against the original in training, where it is right, in every mode; gradients too."""
    original, converted = pair(make)
    count = sum(isinstance(module, nn.MultiheadAttention) for module in original.modules())
    want = results(original, inputs())
    for name in MODES:
        with running(converted, name), Operators() as ran:
            out = converted(*inputs())
        assert ran.ours == count and not ran.theirs
        assert_within(out, want[0], double_limit(want[0], 100), name)
    for got, exact in zip(results(converted, inputs()), want, strict=True):
        assert_within(got, exact, double_limit(exact, 100))


@pytest.mark.parametrize(("make", "inputs"), BLOCKS.values(), ids=BLOCKS)
def test_blocks_in_bfloat16_are_no_less_exact(make: Any, inputs: Any) -> None:
    original, converted = pair(make)
    exact = original(*inputs()).detach()
    inputs = [x.bfloat16() if x.is_floating_point() else x for x in inputs()]
    theirs = original.bfloat16()(*inputs)
    assert_within(converted.bfloat16()(*inputs), exact, peer_limit(theirs, exact, torch.bfloat16))


@threads(1)
def test_a_converted_transformer_learns_as_the_original() -> None:
    """Training amplifies rounding. How much, the original tells: it learns again from parameters that are off by one
    rounding. Ours may be off by the roundings of ``double_limit``, amplified as much."""
    steps = 60
    torch.manual_seed(0)
    start = Copier().double()
    original, nudged, converted = (copy.deepcopy(start) for _ in range(3))
    with torch.no_grad():
        for parameter in nudged.parameters():
            parameter *= 1 + roundoff(torch.float64) * 2 * torch.sign(torch.randn_like(parameter))
    mha_ext.convert(converted)
    want, other = (torch.tensor(learn(model, steps, 3), dtype=torch.float64) for model in (original, nudged))
    with Operators() as ran:
        got = torch.tensor(learn(converted, steps, 3), dtype=torch.float64)
    assert ran.ours == 3 * steps and not ran.theirs
    assert want[-5:].mean() < 0.5 * want[0]
    amplified = (other - want).abs().max() / roundoff(torch.float64)
    assert_within(got, want, 1000 * growth(100, torch.float64) * amplified)
