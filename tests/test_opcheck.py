"""``torch.library.opcheck`` for every operator in every family of cases: schemas, fake tensors, autograd, AOT dispatch.

Schema: nothing is written to or returned as it came. Fake tensors: sizes, strides and dtypes are the kernel's.
Autograd: where gradients are needed, the autograd key has a kernel. AOT dispatch with symbolic sizes: the traced
forward and backward give what the eager ones do.
"""

from __future__ import annotations

import pytest
import torch
from operator_cases import CALLS, existing_operators, needing_gradients

from mha_ext import _ops

# Calls that are known to fail, "operator: family". To stay empty.
KNOWN_FAILURES: frozenset[str] = frozenset()
# What autograd calls on its own behalf, or what has no derivatives: checked without leaves. What differentiates the
# second is a composition, whose graph with symbolic sizes takes long to trace: one family shows it.
WITHOUT_LEAVES = {
    "attention_backward",
    "attention_backward_jvp",
    "attention_for_backward",
    "attention_jvp",
    "attention_weights_backward",
    "multi_head_attention_backward",
    "paged_attention",
}
CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")
DEFAULT = ("plain", "bfloat16", "all", "shared 2, length first", "without biases", "pages", "pages, sink and cap")
PAIRS = [(operator, family) for operator, families in CALLS.items() for family in families]


def test_every_operator_has_cases() -> None:
    assert existing_operators() == set(CALLS) and all(CALLS.values())


def test_no_failure_is_known() -> None:
    assert not KNOWN_FAILURES


@pytest.mark.parametrize(
    ("operator", "family"),
    [pytest.param(*p, marks=[] if p[1] in DEFAULT else pytest.mark.long) for p in PAIRS],
)
def test_opcheck(operator: str, family: str) -> None:
    """All checks of the first call, and of the others those that trace nothing."""
    overload = getattr(_ops.operators, operator).default
    for index, call in enumerate(CALLS[operator][family]()):
        leaves = operator not in WITHOUT_LEAVES
        args, kwargs = (needing_gradients(call.args), needing_gradients(call.kwargs)) if leaves else call
        checks = {"test_utils": CHEAP} if index else {}
        results = torch.library.opcheck(overload, args, kwargs, **checks)
        assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.long
def test_opcheck_of_the_composition_with_gradients() -> None:
    call = CALLS["attention_for_backward"]["plain"]()[2]
    torch.library.opcheck(
        _ops.operators.attention_for_backward.default, needing_gradients(call.args), needing_gradients(call.kwargs)
    )
