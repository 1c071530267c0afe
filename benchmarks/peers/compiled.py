"""What ``torch.compile`` makes of attention written out, and of the layer written by hand.

A function is compiled anew for every case, whole (``fullgraph``) and for fixed sizes. Compilation that gives up, or
that finds a fused attention in what was written out, would be measured under a wrong name: one call is traced and
looked at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.profiler import profile

from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.peers.base import Peer, Runner, core_leaves, merged_mask
from benchmarks.peers.torch_layer import HandWrittenLayer

_COMPILED = "CompiledFxGraph"  # in the name of what runs instead of Python
_FUSED = "scaled_dot_product"


def traced_names(case: Case, runner: Runner) -> list[str]:
    """Returns the names of everything that PyTorch's profiler sees in one call of a runner that has run before."""
    with torch.set_grad_enabled(case.task != "forward"), profile() as trace:
        runner.forward()
    return [event.name for event in trace.function_events]


def check_compiled(case: Case, runner: Runner, fused: bool) -> Runner:
    """Returns the runner if a call runs compiled code, with PyTorch's fused attention in it or without.

    Raises:
        RuntimeError: it does not.
    """
    with torch.set_grad_enabled(case.task != "forward"):
        runner.forward()
    names = traced_names(case, runner)
    if not any(_COMPILED in name for name in names):
        raise RuntimeError("torch.compile: the call must run compiled code, got eager operators")
    if any(_FUSED in name for name in names) != fused:
        raise RuntimeError(f"torch.compile: the attention must {'' if fused else 'not '}be PyTorch's fused one")
    return runner


def compile_anew(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles anew, after eight versions of one function PyTorch would give up; for a backward that is run again."""
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, fullgraph=True, dynamic=False)


def missing_compiler() -> str | None:
    """Returns why compiled code cannot be made here, or None; it is C++."""
    compiler = os.environ.get("CXX", "g++").split()[0]
    return None if shutil.which(compiler) else f"{compiler} is missing, which compiles what torch.compile writes"


class Compiled(Peer):
    """What code that ``torch.compile`` writes has in common."""

    by_default = False
    worker = "torch.compile"

    def missing(self) -> str | None:
        """Looks for a compiler."""
        return missing_compiler()


class CompiledAttention(Compiled):
    """``softmax(query · keyᵀ) · value`` written out and compiled, not fused into one function."""

    name = "compiled softmax"
    level = "core"

    def unsupported(self, case: Case) -> str | None:
        """Measures time alone, of heads that are not grouped."""
        if case.kv_heads:
            return "has no grouped heads"
        if case.mask == "bias" and case.causal:
            return "one mask only: a causal mask cannot be merged beforehand into one that is trained"
        return "compiling takes memory of its own" if case.task == "memory" else None

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Writes the softmax as exponentials over their sum, which no pattern turns into PyTorch's fused function."""
        leaves = core_leaves(case, inputs)
        mask, causal = merged_mask(case, inputs, leaves.get("mask", inputs.mask))
        if causal:
            mask = torch.ones(case.length, case.keys, dtype=torch.bool).tril()
        scale = case.head_dim**-0.5

        def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            scores = (query * scale) @ key.mT
            if mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, float("-inf"))
            elif mask is not None:
                scores = scores + mask
            powers = (scores - scores.amax(-1, keepdim=True).detach()).exp()
            weights = powers / powers.sum(-1, keepdim=True)
            return (F.dropout(weights, case.dropout) if case.dropout else weights) @ value

        compiled = compile_anew(attention)

        def forward() -> tuple[Tensor, None]:
            return compiled(leaves["query"], leaves["key"], leaves["value"], mask), None

        return check_compiled(case, Runner(forward, leaves), fused=False)


class CompiledLayer(Compiled, HandWrittenLayer):
    """The layer written by hand, compiled."""

    name = "compiled linear+sdpa+linear"

    def unsupported(self, case: Case) -> str | None:
        """Measures time alone."""
        return "compiling takes memory of its own" if case.task == "memory" else super().unsupported(case)

    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Compiles all three steps as one function."""
        runner = super().build(case, inputs)
        compiled = compile_anew(runner.forward)
        return check_compiled(case, Runner(compiled, runner.leaves), fused=not case.dropout)
