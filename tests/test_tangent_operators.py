"""The operators of derivatives along tangents, where the transforms that call them do not reach: limits, refusals."""

from __future__ import annotations

import pytest
import torch
from cases import ops
from torch import Tensor
from torch.func import grad, jvp


def test_a_tiny_softcap_has_finite_second_derivatives() -> None:
    """Scores are 0 then, and so is whatever moves them; the slope's own derivative used to overflow on its way."""
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))

    def gradient(q: Tensor) -> Tensor:
        return grad(lambda q: ops.attention(q, key, value, softcap=1e-20)[0].square().sum())(q)

    assert not jvp(gradient, (query,), (query,))[1].any()


@pytest.mark.parametrize(
    ("mask", "tangent", "words"),
    [
        (
            torch.ones(5, 5),
            torch.ones(5, 5).double(),
            "the tangent of attn_mask must have the dtype of attn_mask, Float",
        ),
        (torch.ones(5, 5).bool(), torch.ones(5, 5), "the tangent of attn_mask must have the dtype of attn_mask, Bool"),
        (None, torch.ones(5, 5), "attn_mask must be given for a tangent of it to be given"),
        (
            torch.ones(5, 5),
            torch.ones(5, 4),
            r"the tangent of attn_mask must have shape .*, got \[1, 1, 5, 4\]",
        ),
    ],
)
def test_a_tangent_that_does_not_fit_is_refused(mask: Tensor | None, tangent: Tensor, words: str) -> None:
    query = torch.randn(1, 2, 5, 4)
    masks = (None if mask is None else mask[None, None], None, None)
    out, lse = ops.attention(query, query, query)
    numbers = {"dropout_p": 0.0, "causal": 0, "scale": None, "num_appended_keys": 0}
    tangents = (None, None, None, tangent[None, None], None, None, None)
    with pytest.raises((ValueError, TypeError), match=words):
        ops.attention_jvp(query, query, query, *masks, out, lse, *tangents, **numbers)
