"""Memory of second derivatives and of forward mode: it grows with the length, for attention and for the layer.

Measured as in ``test_memory.py``. One head, so that a single tensor over all pairs is a twelfth or less of what
compositions over all pairs hold at once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_memory import MIB, measured

PROBLEMS = """
torch.set_num_threads(1)

def penalty(leaves, function):
    def step():
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        sum(g.square().sum() for g in first).backward()
    return step

def forward(leaves, function):
    inputs = tuple(x.detach() for x in leaves)
    return lambda: torch.func.jvp(function, inputs, inputs)

def hessian_vector(leaves, function):
    inputs = tuple(x.detach() for x in leaves)
    gradient = torch.func.grad(lambda *x: function(*x).square().sum(), tuple(range(len(inputs))))
    return lambda: torch.func.jvp(gradient, inputs, inputs)

def mapped(leaves, function):
    inputs = tuple(x.detach() for x in leaves)
    gradient = torch.func.grad(lambda *x: function(*x).square().sum(), tuple(range(len(inputs))))
    axes = (0, *[None] * (len(inputs) - 1))
    return lambda: torch.vmap(gradient, axes)(torch.stack([inputs[0], inputs[0].sin()]), *inputs[1:])

def kept_graphs(leaves, function):
    # As torch.func.grad keeps them: nobody asks for third derivatives.
    inputs = tuple(range(len(leaves)))
    def gradient(*x):
        return torch.func.grad(lambda *x: function(*x).square().sum(), inputs)(*x)
    def along(*x):
        return torch.func.jvp(function, x, x)[1].square().sum()
    def run():
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in first), leaves, create_graph=True)
        detached = tuple(x.detach() for x in leaves)
        torch.func.grad(lambda *x: sum(g.square().sum() for g in gradient(*x)), inputs)(*detached)
        torch.func.grad(along, inputs)(*detached)
        torch.func.jvp(lambda x: gradient(x, *leaves[1:])[0], detached[:1], detached[:1])
    return run

def attending(kind, length):
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    learned = {
        "mask": lambda: {"attn_mask": torch.zeros(1, 1, 1, length), "key_padding_mask": torch.zeros(1, length)},
        "relative bias": lambda: {"relative_bias": torch.zeros(1, 2 * length - 1)},
        "sink": lambda: {"sink": torch.zeros(1)},
    }.get(kind, dict)()
    options = {
        "causal": {"is_causal": True},
        "dropout": {"dropout_p": 0.1},
        "softcap": {"softcap": 5.0, "window": (length // 2, None)},
    }.get(kind, {})
    names, biases = list(learned), [x.requires_grad_() for x in learned.values()]
    def function(q, k, v, *more):
        return attention(q, k, v, **dict(zip(names, more)), **options)
    return [q, k, v, *biases], function

def layer(kind, length):
    options = {
        "masks": {},
        "variants": {"qk_norm": True, "rope": True, "sink": True, "softcap": 9.0, "window": (length // 2, 0)},
        "appended": {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.1},
    }[kind]
    layer = mha_ext.MultiheadAttention(16, 1, batch_first=True, **options)
    x, padding = torch.randn(1, length, 16, requires_grad=True), (torch.arange(length) > length - 9)[None]
    names, parameters = zip(*layer.named_parameters())
    masks = {"key_padding_mask": padding, "is_causal": True, "need_weights": False}
    def function(x, *given):
        return torch.func.functional_call(layer, dict(zip(names, given)), (x, x, x), masks)[0]
    return [x, *parameters], function
"""
LENGTH = 1800  # one tensor over all pairs is 12.4 MiB, and compositions over all pairs hold a dozen or more of them
LIMIT = 80 * MIB


@pytest.mark.parametrize(
    ("derivative", "what", "kinds"),
    [
        ("kept_graphs", "layer", ["masks"]),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("penalty", "attending", ["mask"]),
                ("penalty", "layer", ["variants"]),
                ("mapped", "attending", ["causal", "mask", "sink"]),
                ("forward", "attending", ["mask"]),
                ("mapped", "attending", ["softcap", "relative bias"]),
                ("mapped", "layer", ["masks", "variants"]),
                ("kept_graphs", "attending", ["causal", "mask", "sink"]),
                ("kept_graphs", "layer", ["variants"]),
                ("penalty", "attending", ["causal", "dropout", "softcap", "relative bias", "sink"]),
                ("penalty", "layer", ["masks", "appended"]),
                ("forward", "layer", ["variants"]),
                ("forward", "attending", ["causal", "dropout", "softcap", "relative bias", "sink"]),
                ("hessian_vector", "attending", ["mask", "sink"]),
                ("hessian_vector", "layer", ["masks", "variants"]),
            )
        ),
    ],
    ids=str,
)
def test_no_tensor_over_all_pairs(
    derivative: str, what: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several in one process, whose allocator gives back at once what is freed."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    loop = f"""
for kind in {kinds}:
    {derivative}(*{what}(kind, 64))()
    print(extra({derivative}(*{what}(kind, {LENGTH}))))
"""
    found = dict(zip(kinds, measured(PROBLEMS + loop), strict=True))
    assert max(found.values()) < LIMIT, {n: f"{x / MIB:.0f} MiB" for n, x in found.items()}


@pytest.mark.long
@pytest.mark.parametrize("derivative", ["penalty", "forward"])
def test_growth_is_linear(derivative: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    loop = f"""
{derivative}(*attending('causal', 64))()
for length in (2000, 4000):
    print(extra({derivative}(*attending('causal', length))))
"""
    first, second = measured(PROBLEMS + loop)
    assert second < 2 * first + 4 * MIB, f"{first / MIB:.0f} then {second / MIB:.0f} MiB"


@pytest.mark.long
def test_gradient_penalty_at_length_8192() -> None:
    """The example trains: its loss falls, and it takes less than 1 GiB beside what was there before."""
    program = Path(__file__).parent.parent / "examples" / "gradient_penalty.py"
    result = subprocess.run(
        [sys.executable, str(program), "--steps", "3"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", result.stdout)]
    (peak,) = re.findall(r"memory (\d+) MiB", result.stdout)
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2], result.stdout
    assert int(peak) < 1024, result.stdout
