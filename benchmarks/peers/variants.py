"""Attention with what PyTorch's function lacks: ours, and the ways in which its users write the same today.

Masks that do not change from call to call are made beforehand, in the peer's favour. What is trained (a sink) and what
belongs to every call (repeating keys, padding a packed batch and taking the padding off again) is inside the time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mha_ext
from benchmarks.cases import Case, packed_lengths
from benchmarks.inputs import Inputs
from benchmarks.peers.base import Peer, Runner, core_leaves, leaf
from benchmarks.peers.compiled import Compiled, check_compiled, compile_anew

_CAP = 20.0
_NAMES = ("query", "key", "value")


def _slopes(case: Case) -> Tensor:
    """ALiBi's geometric slopes, (H,), not trained."""
    return torch.tensor([2.0 ** (-8.0 * (head + 1) / case.heads) for head in range(case.heads)])


def _leaves(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    leaves = core_leaves(case, inputs)
    if case.variant == "sink":
        leaves["sink"] = leaf(torch.linspace(-1.0, 1.0, case.heads))
    return leaves


def _allowed(case: Case) -> Tensor | None:
    """(T, S) bool mask of the causal order or the window, True = may attend."""
    ones = torch.ones(case.length, case.keys, dtype=torch.bool)
    if case.window:
        return ones.tril() & ones.triu(1 - case.window)
    return ones.tril() if case.causal else None


def _as_bias(allowed: Tensor | None, case: Case, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(case.length, case.keys, dtype=dtype)
    return zeros if allowed is None else zeros.masked_fill(~allowed, float("-inf"))


def _heads(leaves: dict[str, Tensor]) -> list[Tensor]:
    return [leaves[name] for name in _NAMES]


def _starts(case: Case) -> Tensor:
    return torch.tensor([0, *accumulate(packed_lengths(case))], dtype=torch.int32)


class _VariantPeer(Peer):
    level = "variant"
    variants: tuple[str, ...]

    def unsupported(self, case: Case) -> str | None:
        """Each of them is a way to some of the variants."""
        return None if case.variant in self.variants else f"is a way to write {' and '.join(self.variants)} alone"


class OurVariant(_VariantPeer):
    """``mha_ext.functional``, told what is wanted by its keyword."""

    name = "mha_ext"

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Hands over the variant's own keyword."""
        leaves = _leaves(case, inputs)
        if case.variant == "packed":
            starts = _starts(case)

            def packed() -> tuple[Tensor, None]:
                output = mha_ext.functional.varlen_attention(
                    *_heads(leaves), starts, starts, case.length, case.length, is_causal=case.causal
                )
                assert isinstance(output, Tensor)
                return output, None

            return Runner(packed, leaves)
        options: dict[str, Any] = {
            "grouped": {"enable_gqa": True},
            "decode": {"enable_gqa": True},
            "window": {"window": (case.window - 1, 0)},
            "alibi": {"alibi_slopes": _slopes(case)},
            "softcap": {"softcap": _CAP},
            "sink": {"sink": leaves.get("sink")},
        }[case.variant]
        return _ours(leaves, is_causal=case.causal, **options)


def _ours(leaves: dict[str, Tensor], **options: Any) -> Runner:
    def forward() -> tuple[Tensor, None]:
        return mha_ext.functional.scaled_dot_product_attention(*_heads(leaves), **options), None

    return Runner(forward, leaves)


class OurMaskedVariant(_VariantPeer):
    """Ours, given a bool mask in place of a window."""

    name = "mha_ext, a mask"
    variants = ("window",)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Makes the mask beforehand."""
        return _ours(_leaves(case, inputs), attn_mask=_allowed(case))


def _repeated(case: Case, heads: list[Tensor]) -> list[Tensor]:
    """Query, and key and value with as many heads."""
    query, *others = heads
    return [query, *(x.repeat_interleave(case.heads // case.kv_heads, 1) for x in others)]


class OurRepeatedVariant(_VariantPeer):
    """Ours on keys and values that are repeated for every query head."""

    name = "mha_ext, repeated keys"
    variants = ("grouped",)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Repeats them in every call."""
        leaves = _leaves(case, inputs)

        def forward() -> tuple[Tensor, None]:
            repeated = _repeated(case, _heads(leaves))
            return mha_ext.functional.scaled_dot_product_attention(*repeated, is_causal=case.causal), None

        return Runner(forward, leaves)


class MaskedAttention(_VariantPeer):
    """``F.scaled_dot_product_attention`` with a mask, or with ``enable_gqa``.

    A sink is one more key of zeros with a value of zeros, whose column of the mask is the sink.
    """

    name = "F.sdpa"
    variants = ("grouped", "decode", "window", "alibi", "sink")

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Makes the mask beforehand, but for a sink, which is trained."""
        leaves = _leaves(case, inputs)
        if case.variant == "sink":
            return Runner(lambda: (self._with_sink(case, leaves), None), leaves)
        options: dict[str, Any] = {"is_causal": case.causal, "enable_gqa": True}
        if case.variant == "window":
            options = {"attn_mask": _allowed(case)}
        elif case.variant == "alibi":
            distance = (torch.arange(case.length)[:, None] - torch.arange(case.keys)).abs()
            bias = _as_bias(_allowed(case), case, torch.float32) - _slopes(case)[:, None, None] * distance
            options = {"attn_mask": bias.to(leaves["query"].dtype)[None]}

        def forward() -> tuple[Tensor, None]:
            return F.scaled_dot_product_attention(*_heads(leaves), **options), None

        return Runner(forward, leaves)

    @staticmethod
    def _with_sink(case: Case, leaves: dict[str, Tensor]) -> Tensor:
        query, *others = _heads(leaves)
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in others)
        bias = _as_bias(_allowed(case), case, query.dtype).expand(case.heads, -1, -1)
        column = leaves["sink"].to(query.dtype)[:, None, None].expand(-1, case.length, 1)
        return F.scaled_dot_product_attention(query, key, value, torch.cat([bias, column], 2)[None])


class RepeatedAttention(_VariantPeer):
    """``F.scaled_dot_product_attention`` on keys and values that are repeated for every query head."""

    name = "F.sdpa, repeated keys"
    variants = ("grouped",)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Repeats them in every call."""
        leaves = _leaves(case, inputs)

        def forward() -> tuple[Tensor, None]:
            return F.scaled_dot_product_attention(*_repeated(case, _heads(leaves)), is_causal=case.causal), None

        return Runner(forward, leaves)


def _folded(case: Case, query: Tensor) -> Tensor:
    """The heads of a group as queries of one head: (B, H_kv, H / H_kv * T, D)."""
    kv_heads = case.kv_heads or case.heads
    return query.reshape(case.batch, kv_heads, case.heads // kv_heads * case.length, case.head_dim)


class FoldedAttention(_VariantPeer):
    """``F.scaled_dot_product_attention`` with the heads of a group folded into the queries: each key is read once."""

    name = "F.sdpa, folded"
    variants = ("decode",)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Views only."""
        leaves = _leaves(case, inputs)

        def forward() -> tuple[Tensor, None]:
            query, key, value = _heads(leaves)
            return F.scaled_dot_product_attention(_folded(case, query), key, value).view_as(query), None

        return Runner(forward, leaves)


class GroupedProducts(_VariantPeer):
    """Two products and a softmax of PyTorch with the heads of a group folded into the rows."""

    name = "grouped products"
    variants = ("decode",)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Scales query, which is the smallest of them."""
        leaves = _leaves(case, inputs)

        def forward() -> tuple[Tensor, None]:
            query, key, value = _heads(leaves)
            weights = (_folded(case, query * case.head_dim**-0.5) @ key.mT).softmax(-1)
            return (weights @ value).view_as(query), None

        return Runner(forward, leaves)


class PaddedAttention(_VariantPeer):
    """``F.scaled_dot_product_attention`` on a padded batch with a mask."""

    name = "F.sdpa, padded"
    variants = ("packed",)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Makes the mask beforehand; padding and taking it off again are part of the work."""
        leaves, lengths = _leaves(case, inputs), torch.tensor(packed_lengths(case))
        used = torch.arange(case.length) < lengths[:, None]
        allowed = _allowed(case)
        mask = used[:, None, None, :] if allowed is None else used[:, None, None, :] & allowed

        def forward() -> tuple[Tensor, None]:
            padded = []
            for x in _heads(leaves):
                rows = x.new_zeros(case.batch, case.length, *x.shape[1:])
                rows[used] = x
                padded.append(rows.transpose(1, 2))
            return F.scaled_dot_product_attention(*padded, mask).transpose(1, 2)[used], None

        return Runner(forward, leaves)


class LoopOfAttention(_VariantPeer):
    """``F.scaled_dot_product_attention`` on one sequence after the other."""

    name = "F.sdpa, loop"
    variants = ("packed",)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Cuts views and joins the outputs."""
        leaves, lengths = _leaves(case, inputs), packed_lengths(case)

        def forward() -> tuple[Tensor, None]:
            parts = (x.transpose(0, 1)[None].split(lengths, 2) for x in _heads(leaves))
            found = [F.scaled_dot_product_attention(*one, is_causal=case.causal) for one in zip(*parts, strict=True)]
            return torch.cat(found, 2)[0].transpose(0, 1), None

        return Runner(forward, leaves)


class ComposedAttention(_VariantPeer):
    """Products, tanh and softmax of PyTorch, one after the other."""

    name = "composed"
    variants = ("softcap", "sink")

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Makes the mask beforehand."""
        leaves = _leaves(case, inputs)
        bias = _as_bias(_allowed(case), case, leaves["query"].dtype)

        def forward() -> tuple[Tensor, None]:
            query, key, value = _heads(leaves)
            scores = (query * case.head_dim**-0.5) @ key.mT
            if case.variant == "softcap":
                return (_CAP * torch.tanh(scores / _CAP) + bias).softmax(-1) @ value, None
            sinks = leaves["sink"].to(query.dtype)[:, None, None].expand(case.batch, -1, case.length, 1)
            return torch.cat([scores + bias, sinks], -1).softmax(-1)[..., :-1] @ value, None

        return Runner(forward, leaves)


class CompiledFlexAttention(_VariantPeer, Compiled):
    """``torch.nn.attention.flex_attention``, compiled: a function of every score, and a mask of blocks."""

    name = "compiled flex_attention"
    variants = ("grouped", "window", "alibi", "softcap")

    def unsupported(self, case: Case) -> str | None:
        """It only infers on a CPU."""
        if case.task != "forward":
            return "has no backward pass on a CPU"
        return super().unsupported(case)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Makes the mask of blocks beforehand."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        arguments, slopes = inputs.arguments, _slopes(case)

        def seen(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i - j < case.window) if case.window else j <= i

        def capped(score: Tensor, *_: Tensor) -> Tensor:
            return _CAP * torch.tanh(score / _CAP)

        def sloped(score: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - slopes[h] * (i - j).abs()

        change: Callable[..., Tensor] | None = {"softcap": capped, "alibi": sloped}.get(case.variant)
        block_mask = None
        if case.window or case.causal:
            block_mask = create_block_mask(seen, None, None, case.length, case.keys, device="cpu")
        compiled = compile_anew(flex_attention)

        def forward() -> tuple[Tensor, None]:
            return compiled(*arguments, change, block_mask, enable_gqa=case.kv_heads > 0), None

        return check_compiled(case, Runner(forward, {}), fused=False)
