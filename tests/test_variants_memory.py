"""Peak memory of windows, biases, boundaries and packed sequences: that of plain attention, with gradients.

H = 8, T = 4096, D = 64 in float32 takes 32 MiB for the output, three gradients and scratch, as in ``test_memory.py``;
one head's scores would be 64 MiB, a bool matrix of pairs 16, which the limit leaves no room for.
"""

from __future__ import annotations

import pytest
from test_memory import MIB, measured

PROBLEM = """
from mha_ext.functional import varlen_attention
LENGTH = 4096

def problem(kind, length):
    if kind == "packed":
        return packed(length)
    q, k, v = (torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, length, 8, 64).transpose(1, 2)
    ids = torch.arange(length) // 700
    ends = torch.stack([torch.arange(length) - 100, torch.arange(length) + 1])
    causal = {"is_causal": True, "window": (600, None)}
    options = {
        "window": {"window": (256, 0)},
        "wide window": {"window": (length, 300)},
        "segments": {"segment_ids": ids},
        "prefix": {"is_causal": True, "prefix_length": 100},
        "range": {"key_range": ends},
        "softcap": {"softcap": 20.0, **causal},
        "sink": {"sink": torch.zeros(8, requires_grad=True), **causal},
        "alibi": {"alibi_slopes": torch.rand(8, requires_grad=True), **causal},
        "relative": {"relative_bias": torch.zeros(8, 2 * length - 1, requires_grad=True), **causal},
        "dropout": {"dropout_p": 0.1, **causal},
    }[kind]
    return lambda: attention(q, k, v, **options).backward(grad)

def packed(length):
    q, k, v = (torch.randn(length, 8, 64, requires_grad=True) for _ in range(3))
    starts, grad = torch.arange(0, length + 1, length // 8), torch.randn(length, 8, 64)
    longest = length // 8
    return lambda: varlen_attention(q, k, v, starts, starts, longest, longest, is_causal=True).backward(grad)
"""


FEW = ("window", "segments", "relative", "sink", "packed")
MANY = ("wide window", "prefix", "range", "softcap", "alibi", "dropout")


@pytest.mark.parametrize("kinds", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids="+".join)
def test_forward_and_backward_at_length_4096(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several in one process, whose allocator gives back at once what is freed: none lives on another's memory."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    loop = "problem('window', 64)()\nfor kind in KINDS:\n    print(extra(problem(kind, LENGTH)))\n"
    found = dict(zip(kinds, measured(PROBLEM + f"KINDS = {kinds}\n" + loop), strict=True))
    assert all(24 * MIB < x < 48 * MIB for x in found.values()), {n: f"{x / MIB:.0f} MiB" for n, x in found.items()}


def test_averaged_weights_take_what_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """T = 2048, H = 8: the mean over heads is 16 MiB, the weights of all heads would be 128."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    peaks = measured("""
        def problem(length, **options):
            q, k, v = (torch.randn(1, 8, length, 32) for _ in range(3))
            return lambda: attention(q, k, v, window=(256, 0), return_weights="mean", **options)
        problem(64)()
        print(extra(problem(2048, softcap=9.0, dropout_p=0.1)), extra(problem(2048, sink=torch.zeros(8))))
    """)
    assert len(peaks) == 2 and max(peaks) < 32 * MIB, [f"{peak / MIB:.0f} MiB" for peak in peaks]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["window", "segments", "relative"])
def test_growth_is_linear(kind: str) -> None:
    first, second = measured(
        PROBLEM + f"problem({kind!r}, 64)()\nfor n in (8192, 16384):\n    print(extra(problem({kind!r}, n)))\n"
    )
    assert second < 2.5 * first + 4 * MIB, f"{first / MIB:.0f} then {second / MIB:.0f} MiB"
