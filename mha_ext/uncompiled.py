"""Methods that compilers leave alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch

__all__ = ["outside_graphs"]

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(method: Callable[P, R]) -> Callable[P, R]:
    """A method that ``torch.compile`` calls as it is, breaking the graph there.

    For methods of an object whose Python numbers change with every call: compiled code would be specialised on them
    and made anew each time.
    """
    outside = torch.compiler.disable(method)  # type: ignore[no-untyped-call]

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return cast(R, outside(*args, **kwargs))
        return method(*args, **kwargs)  # without what the other one costs

    return call
