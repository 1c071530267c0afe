"""Peak memory, each measurement in a process of its own: it grows with T, not with T squared.

The extra is the highest resident size during a call less that before it, read from the kernel after resetting its
mark. Both threads have run once before on a small problem, so that thread stacks and libraries' own buffers are
counted out.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap

import pytest

MIB = 1024

PRELUDE = """
import torch
import mha_ext
from mha_ext.functional import scaled_dot_product_attention as attention
torch.set_num_threads(2)

def status(name):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(name))

def extra(call):
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before
"""


def measured(code: str) -> list[int]:
    """Numbers (KiB) that a program prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "2"}
    program = PRELUDE + textwrap.dedent(code)
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return [int(word) for word in result.stdout.split()]


ATTENTION = """
def problem(length, **options):
    value_dim, kv_heads = {"values": (80, 8), "groups": (64, 2)}.get(KIND, (64, 8))
    q = torch.randn(1, 8, length, 64, requires_grad=True)
    k = torch.randn(1, kv_heads, length, 64, requires_grad=True)
    v = torch.randn(1, kv_heads, length, value_dim, requires_grad=True)
    grad = torch.randn(1, length, 8, value_dim).transpose(1, 2)
    padding = (torch.arange(length) > length - 100)[None]
    kinds = {
        "causal": lambda: {"is_causal": True},
        "mask": lambda: {"attn_mask": torch.ones(length, length, dtype=torch.bool).tril_(3),
                         "key_padding_mask": padding},
        "padding": lambda: {"key_padding_mask": padding, "is_causal": True},
        "bias": lambda: {"attn_mask": torch.zeros(length, length)},
        "learned": lambda: {"attn_mask": torch.zeros(1, 8, 1, length, requires_grad=True)},
        "dropout": lambda: {"dropout_p": 0.1},
        "groups": lambda: {"enable_gqa": True},
    }
    options = kinds.get(KIND, dict)()
    def both():
        attention(q, k, v, **options).backward(grad)
    return both
problem(64)()
for length in LENGTHS:
    print(extra(problem(length)))
"""


@pytest.mark.parametrize(
    "kind", ["plain", "causal", "mask", "padding", "bias", "learned", "dropout", "values", "groups"]
)
def test_forward_and_backward_at_length_4096(kind: str) -> None:
    """H = 8, D = 64, float32: the output, three gradients and scratch. With as many key/value heads and values as wide
    that is 32 MiB and scratch; one score matrix a head alone would be 64 MiB."""
    (peak,) = measured(f"KIND, LENGTHS = {kind!r}, [4096]\n" + ATTENTION)
    assert peak < 48 * MIB, f"{peak / MIB:.0f} MiB"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "causal", "dropout"])
def test_forward_and_backward_at_length_16384(kind: str) -> None:
    """Four times the limit for a quarter of the length; one score matrix of one head would be 1024 MiB."""
    (peak,) = measured(f"KIND, LENGTHS = {kind!r}, [16384]\n" + ATTENTION)
    assert peak < 4 * 48 * MIB, f"{peak / MIB:.0f} MiB"


@pytest.mark.parametrize("shape", ["length, length", "8, length, length", "2, 1, 1, length", "1, 1, length, length"])
def test_gradient_of_a_float_mask_costs_as_much_as_the_mask(shape: str) -> None:
    """B = 2, H = 8, T = 1500: beside a mask that is not trained, the gradient and a few MiB of scratch. The scores'
    gradients of all heads would be 137 MiB, of one sample's 69 MiB, which (H, T, S) has itself."""
    trained, fixed = measured(f"""
        def problem(length, trained):
            q, k, v = (torch.randn(2, 8, length, 32, requires_grad=True) for _ in range(3))
            mask = torch.randn({shape}, requires_grad=trained)
            grad = torch.randn(2, 8, length, 32)
            return lambda: attention(q, k, v, mask).backward(grad)
        problem(64, True)()
        print(extra(problem(1500, True)), extra(problem(1500, False)))
    """)
    sizes = eval(shape, {"length": 1500})
    gradient = 4 * math.prod(sizes) / 1024
    assert trained < fixed + 1.1 * gradient + 4 * MIB, f"{trained / MIB:.0f} against {fixed / MIB:.0f} MiB"


@pytest.mark.parametrize("kind", ["plain", "causal", "dropout", "learned"])
def test_growth_is_linear(kind: str) -> None:
    """Doubling the length at most about doubles the extra; quadratic memory would make it fourfold."""
    first, second = measured(f"KIND, LENGTHS = {kind!r}, [2048, 4096]\n" + ATTENTION)
    assert second < 2.5 * first + 4 * MIB, f"{first / MIB:.0f} then {second / MIB:.0f} MiB"


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_dtypes_hold_no_score_matrix_either(dtype: str) -> None:
    (peak,) = measured(f"""
        def problem(length):
            q, k, v = (torch.randn(1, 4, length, 32).to(torch.{dtype}).requires_grad_() for _ in range(3))
            return lambda: attention(q, k, v, is_causal=True).sum().backward()
        problem(64)()
        print(extra(problem(4096)))
    """)
    assert peak < 48 * MIB, f"{peak / MIB:.0f} MiB"


@pytest.mark.parametrize("need_weights", [False, True])
def test_layer(need_weights: bool) -> None:
    """Training step of a layer, T = 3000, H = 8, causal with padding: without weights linear, with averaged ones a few
    times the (T, S) matrix returned (34 MiB), never one a head (275 MiB)."""
    (peak,) = measured(f"""
        layer = mha_ext.MultiheadAttention(64, 8, dropout=0.1, batch_first=True)
        def problem(length):
            x = torch.randn(1, length, 64)
            padding = (torch.arange(length) > length - 10)[None]
            def step():
                out, weights = layer(x, x, x, key_padding_mask=padding, is_causal=True, need_weights={need_weights})
                loss = out.sum() if weights is None else out.sum() + weights.diagonal(dim1=1, dim2=2).sum()
                loss.backward()
            return step
        problem(64)()
        print(extra(problem(3000)))
    """)
    limit = 4 * 3000 * 3000 * 4 / 1024 + 48 * MIB if need_weights else 48 * MIB
    assert peak < limit, f"{peak / MIB:.0f} MiB"


@pytest.mark.parametrize(("average", "training"), [(True, False), (True, True), (False, False)])
def test_weights_cost_what_is_returned(average: bool, training: bool) -> None:
    """T = 2048, H = 8: the averaged weights take 16 MiB, those of each head 128, and nothing of their size is held
    besides."""
    plain, with_weights = measured(f"""
        layer = mha_ext.MultiheadAttention(64, 8, batch_first=True)
        def problem(length, need_weights):
            x = torch.randn(1, length, 64)
            def call():
                out = layer(x, x, x, need_weights=need_weights, average_attn_weights={average})
                if {training}:
                    out[0].sum().backward()
                return out
            return call
        with torch.set_grad_enabled({training}):
            problem(64, True)(), problem(64, False)()
            print(extra(problem(2048, False)), extra(problem(2048, True)))
    """)
    output, weights = 2048 * 64 * 4 / 1024, 2048 * 2048 * 4 / 1024 * (1 if average else 8)
    assert with_weights - plain < 1.2 * (output + weights), f"{plain} then {with_weights} KiB"


def test_masks_are_never_merged_or_expanded() -> None:
    """N = 8, H = 8, L = 1000: a bool mask with padding; merged per head they would be 61 MiB of bytes, 244 MiB of
    floats."""
    (peak,) = measured("""
        layer = mha_ext.MultiheadAttention(64, 8, batch_first=True).eval()
        def problem(batch, length):
            x = torch.randn(batch, length, 64)
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
            padding = (torch.arange(length) > length - 100).expand(batch, length)
            return lambda: layer(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)
        with torch.no_grad():
            problem(1, 50)()
            print(extra(problem(8, 1000)))
    """)
    assert peak < 40 * MIB, f"{peak / MIB:.0f} MiB"


def test_nothing_is_kept_when_no_gradient_is_needed_and_nothing_leaks() -> None:
    """Three hundred calls forward and backward leave the resident size where it was."""
    before, after = measured("""
        torch.set_num_threads(1)
        q = torch.randn(2, 4, 40, 16, requires_grad=True)
        layer = mha_ext.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        x = torch.randn(2, 40, 16)
        def calls(count):
            for _ in range(count):
                attention(q, q, q, is_causal=True, dropout_p=0.1).sum().backward()
                layer(x, x, x)[0].sum().backward()
                layer(x, x, x, need_weights=False)[0].sum().backward()
        calls(60)
        print(status("VmRSS"))
        calls(300)
        print(status("VmRSS"))
    """)
    assert after < before + 4 * MIB, f"{before} then {after} KiB"


def test_strided_inputs_are_not_copied_whole() -> None:
    """Heads of a packed projection, T = 4096: reading the views must not add three copies of 8 MiB."""
    packed, plain = measured("""
        def problem(length, packed):
            buffer = torch.randn(1, length, 3, 8, 64)
            q, k, v = buffer.permute(2, 0, 3, 1, 4)
            if not packed:
                q, k, v = (x.contiguous() for x in (q, k, v))
            return lambda: attention(q, k, v)
        with torch.no_grad():
            problem(64, True)()
            print(extra(problem(4096, True)), extra(problem(4096, False)))
    """)
    assert packed < plain + 8 * MIB, f"{packed / MIB:.0f} against {plain / MIB:.0f} MiB"
