"""What is raised for a wrong argument: ValueError or TypeError, and what PyTorch's attention raises for it as well.

``torch.nn.MultiheadAttention`` refuses one and the same mistake with an AssertionError, a RuntimeError or a ValueError,
as the road that a call takes has it: a mask of a wrong shape is an AssertionError in training and a RuntimeError in its
inference fast path. Code that catches one of them there must catch the same mistake here, so each class is all of them.
"""

from __future__ import annotations

from typing import NoReturn

__all__ = ["InvalidTypeError", "InvalidValueError", "UnsupportedLayoutError", "pass_on"]

_OPERATORS = ("attention", "attention_with_weights", "multi_head_attention")


class InvalidValueError(ValueError, AssertionError, RuntimeError):
    """A size, shape, device or number does not fit.

    A ValueError; also what PyTorch raises for it: AssertionError from its module and functions in Python, RuntimeError
    from its operators and its inference fast path.

    Example:
        >>> import torch
        >>> from mha_ext import MultiheadAttention
        >>> try:
        ...     MultiheadAttention(10, 3)
        ... except AssertionError as error:  # as for torch.nn.MultiheadAttention
        ...     print(isinstance(error, ValueError))
        True
    """


class InvalidTypeError(TypeError, AssertionError, RuntimeError):
    """A dtype or a kind of argument does not fit.

    A TypeError; also what PyTorch raises for it: AssertionError for masks of integers, RuntimeError for dtypes that
    differ.
    """


class UnsupportedLayoutError(InvalidTypeError, NotImplementedError, ValueError):
    """A nested or sparse tensor is given where only a dense one is taken.

    A TypeError; also what PyTorch raises for it, by function and layout: NotImplementedError, RuntimeError, ValueError
    or AssertionError.
    """


def pass_on(error: ValueError | TypeError, function: str) -> NoReturn:
    """Raise an operator's refusal, ``<operator>: <argument> must ...``, as one of the classes; other errors unchanged.

    Args:
        error: what the call of the operator raised.
        function: the name to put in the operator's place.

    Raises:
        InvalidValueError: the operator raised a ValueError.
        InvalidTypeError: it raised a TypeError.
    """
    operator, colon, refusal = str(error).partition(": ")
    if not (colon and operator in _OPERATORS):
        raise error
    kind = InvalidTypeError if isinstance(error, TypeError) else InvalidValueError
    raise kind(f"{function}: {refusal}") from None
