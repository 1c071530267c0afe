"""How compilers treat a cache, whose Python numbers change with every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

__all__ = ["outside_graphs", "outside_graphs_unless_followed", "with_open_numbers"]

P = ParamSpec("P")
R = TypeVar("R")

_REASON = (
    "KVCache: what is done here depends on numbers that a graph does not have; compile without fullgraph=True. Traced "
    "are append (without lengths), key_value, positions and key_range, without page_size"
)


def with_open_numbers(function: Callable[P, R]) -> Callable[P, R]:
    """A function in which ``torch.compile`` takes numbers that have changed once for variable, wherever they are kept.

    By itself it does so unless they are reached through a module, whose numbers it takes for constants: a model that
    keeps its caches would be compiled anew for every token.
    """
    traced = torch._dynamo.patch_dynamo_config(allow_unspec_int_on_nn_module=True)(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():  # which makes constants of numbers
            return traced(*args, **kwargs)
        return function(*args, **kwargs)  # without what the other one costs

    return call


def outside_graphs(method: Callable[P, R]) -> Callable[P, R]:
    """A method of a cache that ``torch.compile`` calls as it is, breaking the graph there."""
    outside = torch.compiler.disable(method, reason=_REASON)  # type: ignore[no-untyped-call]

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return cast(R, outside(*args, **kwargs))
        return method(*args, **kwargs)

    return call


def outside_graphs_unless_followed(method: Callable[P, R]) -> Callable[P, R]:
    """The same, but traced where all it does follows from the lengths of rows, which a graph has as open numbers."""
    outside, inside = outside_graphs(method), with_open_numbers(method)

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_exporting():
            _refuse_other_cache(*args)
        if torch.compiler.is_compiling():
            return (inside if _followed(*args, **kwargs) else outside)(*args, **kwargs)
        return method(*args, **kwargs)

    return call


def _refuse_other_cache(cache: Any, *_: object) -> None:
    """A program has no state of Python's: at every call it would write where the cache ended when it was exported."""
    if not cache._rows.made_in_export:
        raise NotImplementedError(
            "KVCache: kv_cache must be made inside of what torch.export exports, got one made before: its length would "
            "be a constant of the program (pass past keys and values in and out instead)"
        )


def _followed(cache: Any, *arguments: object, lengths: object = None, **_: object) -> bool:
    """Whether no tensor's numbers and no pages matter in a call; ``lengths`` are the third argument of its `append`."""
    given = lengths is not None or (len(arguments) > 2 and arguments[2] is not None)
    return cache.page_size is None and not given
