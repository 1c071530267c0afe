"""What a peer is, and what peers share: leaves, and masks merged into one."""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import Inputs

Results = tuple[Tensor, Tensor | None]

_HELD = ("ATEN_CPU_CAPABILITY", "MHA_EXT_CPU_CAPABILITY")  # variables that hold PyTorch and us to an instruction set


def _as_it_is(found: Any) -> Results:
    return found


@dataclass(frozen=True)
class Runner:
    """One peer's way to run one case.

    Attributes:
        forward: returns the output, or the output and the weights when the case wants them; or what `read` makes these
            of.
        leaves: the tensors whose gradients the backward pass computes, by name.
        read: turns what `forward` returned into tensors of PyTorch; never timed.
        threads: what a call of PyTorch is given; 0 for all that there are.
    """

    forward: Callable[[], Any]
    leaves: dict[str, Tensor]
    read: Callable[[Any], Results] = _as_it_is
    threads: int = 0


class Peer(ABC):
    """A way to compute attention ("core"), a layer of it ("layer") or a variant of it ("variant").

    Attributes:
        worker: the process that it runs in; peers of one name share it.
        same_result: what it computes is checked against ours.
    """

    name: str
    level: str
    by_default = True
    worker = "torch"
    same_result = True

    def missing(self) -> str | None:
        """Returns why the peer cannot run here at all, or None."""
        return None

    def unsupported(self, case: Case) -> str | None:
        """Returns why the peer cannot do a case of its level, or None."""
        return None

    @abstractmethod
    def build(self, case: Case, inputs: Inputs) -> Runner:
        """Prepares a case. Called under the case's own dtype and never timed."""


class ForeignPeer(Peer):
    """Attention of another library: inference in some dtypes, float32 by default, without dropout.

    Attributes:
        modules: what has to be importable.
        dtypes: what it is measured in.
    """

    modules: tuple[str, ...]
    dtypes: tuple[str, ...] = ("fp32",)

    def missing(self) -> str | None:
        """Looks for the library without importing it, and at what it could not be held to."""
        absent = [name for name in self.modules if importlib.util.find_spec(name) is None]
        if absent:
            return f"{' and '.join(absent)} not installed: pip install -r requirements/peers.txt"
        held = [name for name in _HELD if name in os.environ]
        return f"it cannot be held to the instruction set that {held[0]} asks for" if held else None

    def unsupported(self, case: Case) -> str | None:
        """Leaves out everything but plain inference."""
        if case.task != "forward":
            return "measured in inference only"
        if case.dtype not in self.dtypes:
            return f"measured in {' and '.join(self.dtypes)} only"
        if case.dropout and case.level == "core":
            return "has no dropout in inference"
        return None


def leaf(tensor: Tensor) -> Tensor:
    """Returns a copy whose gradient is wanted."""
    return tensor.clone().requires_grad_()


def core_leaves(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Returns copies of query, key and value, and of a mask that is trained, by name."""
    names = ("query", "key", "value")
    leaves = {name: leaf(tensor) for name, tensor in zip(names, inputs.arguments, strict=True)}
    if case.mask == "bias" and inputs.mask is not None:
        leaves["mask"] = leaf(inputs.mask)
    return leaves


def future(case: Case) -> Tensor:
    """(T, S) mask of the pairs that a causal mask forbids."""
    return torch.ones(case.length, case.keys, dtype=torch.bool).triu(1)


def merged_mask(case: Case, inputs: Inputs, mask: Tensor | None) -> tuple[Tensor | None, bool]:
    """Returns one mask for everything where a function takes only one, and whether it is told that it is causal."""
    if case.causal and mask is None and inputs.padding is None:
        return None, True
    allowed = None if inputs.padding is None else ~inputs.padding[:, None, None, :]
    if case.causal:
        allowed = ~future(case) if allowed is None else allowed & ~future(case)
    if mask is None or allowed is None:
        return (allowed if mask is None else mask), False
    if mask.dtype == torch.bool:
        return mask & allowed, False
    return mask.masked_fill(~allowed, float("-inf")), False


def added_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns a mask as a floating one that is added, with four axes."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
    return mask.view((1,) * (4 - mask.dim()) + mask.shape)
