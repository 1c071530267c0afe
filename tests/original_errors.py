"""Situations that PyTorch's attention refuses, as data: what is wrong, what it raises, and what has to be said here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

A, R = AssertionError, RuntimeError
# What PyTorch raises by accident, without a check of its own: nobody can mean to catch that.
ACCIDENTS = (AttributeError, IndexError, KeyError, NotImplementedError, ZeroDivisionError)
E, H, B, T, S = 12, 4, 2, 5, 7


@dataclass(frozen=True)
class Situation:
    """A call with something wrong, the types that PyTorch raises on its various roads, and what the message here says.

    The message is ``<function>: <argument> must <expectation> (hint), got <given>``, all of them regular expressions.
    """

    argument: str
    expectation: str
    given: str
    theirs: tuple[type[Exception], ...]
    changes: dict[str, Any]
    kind: type[Exception] = ValueError
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        wrong = ", ".join(f"{name} {described(x)}" for name, x in {**self.options, **self.changes}.items())
        return re.sub(r"[^\w,. ()-]+", "", wrong)

    def message(self, function: str) -> str:
        return rf"{function}: {self.argument} must {self.expectation}.*, got {self.given}"


def described(x: Any) -> str:
    """A short name of a wrong argument."""
    if not isinstance(x, Tensor):
        return repr(x)
    if x.is_nested:
        return f"nested {x.layout}"
    return " ".join(map(str, (tuple(x.shape), x.dtype, x.layout, x.device)))


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def outcome(call: Callable[[], object]) -> Exception | None:
    """What a call raises, if anything."""
    try:
        call()
    except Exception as error:
        return error
    return None


def assert_refused(call: Callable[[], object], situation: Situation, function: str, theirs: Exception | None) -> None:
    """Ours raises the situation's kind and what PyTorch raised, and says what was expected and what was given."""
    ours = outcome(call)
    assert isinstance(ours, situation.kind), f"{type(ours).__name__}: {ours}"
    assert re.match(situation.message(function), str(ours)), f"{ours}\nis not\n{situation.message(function)}"
    if theirs is not None and not isinstance(theirs, ACCIDENTS):
        assert isinstance(ours, type(theirs)), f"{type(ours).__mro__} is no {type(theirs).__name__}: {theirs}"
