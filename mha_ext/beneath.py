"""Classes made while a program runs, for modules whose own class is not the one that is to be swapped.

A user's subclass gets a class put beneath it: ``class Sub(Sub, Ours)``, where ``super()`` in Sub finds Ours. A module
that ``torch.nn.utils.parametrize`` works on has a class of its own, which is made again over another base.
"""

from __future__ import annotations

import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

__all__ = ["full_name", "obstacle", "over", "parametrized_base", "put_beneath", "taken_from"]

_TAKEN_FROM = "_mha_ext_taken_from"
_COMBINED: weakref.WeakSet[type[nn.Module]] = weakref.WeakSet()  # without those that failed while they were made
_LOCK = threading.Lock()


def full_name(cls: type[Any]) -> str:
    """Where a class is defined, and what it is called there."""
    return f"{cls.__module__}.{cls.__qualname__}"


def parametrized_base(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module had before it was parametrized, or None if it is not."""
    cls = type(module)
    base = cls.__bases__[0]
    return base if parametrize.is_parametrized(module) and cls.__name__ == f"Parametrized{base.__name__}" else None


def over(parametrized: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """The class of a parametrized module made again over another base."""
    body = {name: value for name, value in vars(parametrized).items() if name not in ("__dict__", "__weakref__")}
    again: type[nn.Module] = types.new_class(parametrized.__name__, (base,), {}, lambda new: new.update(body))
    return again


def taken_from(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The subclass that ``put_beneath`` made a class from, or None for any other class."""
    base: type[nn.Module] | None = vars(cls).get(_TAKEN_FROM)
    return base


def put_beneath(subclass: type[nn.Module], ours: type[nn.Module]) -> type[nn.Module]:
    """A class that is like ``subclass`` and inherits from ``ours`` before what ``subclass`` inherits from.

    There is one for each pair; its instances are copied and pickled by naming the pair.

    Raises:
        TypeError: the two cannot be combined.
    """
    with _LOCK:
        for known in subclass.__subclasses__():
            if known in _COMBINED and known.__bases__ == (subclass, ours):
                return known
        combined = _combine(subclass, ours)
        _COMBINED.add(combined)
        return combined


def _combine(subclass: type[nn.Module], ours: type[nn.Module]) -> type[nn.Module]:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = super(combined, self).__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        function, arguments, *rest = reduced
        called = [subclass if part is combined else part for part in (function, *arguments)]
        return (_rebuild, (subclass, ours, *called), *rest)

    def fill(body: dict[str, Any]) -> None:
        same = {name: getattr(subclass, name) for name in ("__module__", "__qualname__", "__doc__")}
        body.update(same, __reduce_ex__=__reduce_ex__, **{_TAKEN_FROM: subclass})

    combined: type[nn.Module] = types.new_class(subclass.__name__, (subclass, ours), {}, fill)
    return combined


def _rebuild(subclass: type[nn.Module], ours: type[nn.Module], function: Callable[..., Any], *arguments: Any) -> Any:
    """Call what makes an unpickled object, the combined class in place of the subclass."""
    combined = put_beneath(subclass, ours)
    function, *arguments_ = (combined if part is subclass else part for part in (function, *arguments))
    return function(*arguments_)


def obstacle(subclass: type[nn.Module], original: type[nn.Module], ours: type[nn.Module]) -> str | None:
    """Why ``subclass`` would not do with ``ours`` in place of ``original``, or None if it would.

    Its ``forward`` has to be inherited or to call ``super().forward``, and what it defines must not stand in for what
    our class needs.
    """
    needed = {member for member in vars(ours) if not hasattr(original, member) and member.startswith("_")}
    for cls in _between(subclass, original):
        forward = vars(cls).get("forward")
        if forward is not None and not _calls_super(forward):
            return "its own forward does not call super().forward"
        clash = sorted(needed & vars(cls).keys())
        if clash:
            return f"it defines {clash[0]}, which mha_ext's class needs"
    return None


def _between(subclass: type[nn.Module], original: type[nn.Module]) -> Iterator[type[Any]]:
    """The classes that come before the original when a name is looked up."""
    for cls in subclass.__mro__:
        if cls is original:
            return
        yield cls


def _calls_super(forward: object) -> bool:
    code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
    if code is None or "forward" not in code.co_names:
        return False
    return "__class__" in code.co_freevars or "super" in code.co_names
