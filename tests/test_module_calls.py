"""One call of a module: what it leaves alone, how what it returns lies in memory, what autograd notices and gives."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from layer_cases import (
    EMBED,
    MODES,
    SHARED_HEADS,
    VARIANTS,
    inputs_for,
    last_hidden,
    make,
    mode,
    pair,
    sequence,
)
from tolerances import assert_within, double_limit
from torch import Tensor, nn

ALL = [*VARIANTS, *SHARED_HEADS]


# --------------------------------------------------------------------------------------------------- inputs and outputs
@pytest.mark.parametrize("options", ALL, ids=str)
def test_inputs_masks_and_parameters_are_left_alone(options: dict[str, Any]) -> None:
    """No bit and no version of them changes, and nothing that comes back, gradients included, shares memory with them
    or with another result."""
    module = make(**options)
    masks = {"attn_mask": torch.randn(5, 7, dtype=torch.float64), "key_padding_mask": last_hidden(2, 7)}
    for shared, need_weights in itertools.product((0, 1), (True, False)):
        if shared and module.kdim != module.vdim:
            continue
        inputs = [x.requires_grad_() for x in dict.fromkeys(inputs_for(module, shared))]
        given = [*inputs, *masks.values(), *module.parameters()]
        before = [(x.detach().clone(), x._version) for x in given]
        results = module(*inputs, *inputs[-1:] * shared, need_weights=need_weights, **masks)
        returned = [x for x in results if x is not None]
        sent = [torch.ones_like(x) for x in returned]
        grads = torch.autograd.grad(returned, [x for x in given if x.requires_grad], sent)
        assert all(
            torch.equal(x, old) and x._version == version for x, (old, version) in zip(given, before, strict=True)
        )
        everything = [*given, *returned, *sent, *grads]
        places = {x.untyped_storage().data_ptr() for x in everything}
        assert len(places) == len(everything)


@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.parametrize("batched", [True, False])
def test_results_are_contiguous(options: dict[str, Any], batched: bool) -> None:
    """In every mode, under autocast too, and for inputs that are not."""
    module = make(**{**options, "dtype": torch.float32})
    inputs = [x.float() if batched else x.float().select(0 if module.batch_first else 1, 0) for x in inputs_for(module)]
    apart = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    for name, (need, average), autocast in itertools.product(
        MODES, ((False, True), (True, True), (True, False)), (True, False)
    ):
        for given in (inputs, apart):
            with mode(module, name), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                results = module(*given, need_weights=need, average_attn_weights=average)
            assert all(x.is_contiguous() for x in results if x is not None)


@pytest.mark.parametrize("shape", [(EMBED,), (1, 2, 5, EMBED), (2, 3, 2, 5, EMBED)], ids=str)
def test_other_numbers_of_axes_are_refused(shape: tuple[int, ...]) -> None:
    """The original refuses extra leading axes; which of them would be the batch of a mask is not clear."""
    module, x = make(), torch.zeros(shape, dtype=torch.float64)
    message = rf"^MultiheadAttention: query must be 2-D \(unbatched\) or 3-D \(batched\), got {len(shape)}-D"
    with pytest.raises(ValueError, match=message):
        module(x, x, x)


def aliased() -> Iterator[tuple[Tensor, tuple[Tensor, Tensor, Tensor]]]:
    """A leaf and three inputs that are it, its views, or partly one another."""
    base = sequence(2, 5, 3 * EMBED).requires_grad_()
    yield base, base.chunk(3, -1)  # type: ignore[misc]
    base = sequence(2, 9).requires_grad_()
    yield base, (base[:, :7], base[:, 2:], base[:, 2:])
    yield base, (base[:, :5], base, base)
    yield base, (base, base[:], base)
    yield base, (base, base, base[:])
    yield base, (base, base[:], base[:])
    yield base, (base.flip(1), base, base.flip(1))
    base = sequence(1, 5).requires_grad_()
    expanded = base.expand(3, 5, EMBED)
    yield base, (expanded, expanded, expanded)
    yield base, (expanded, sequence(3, 5), expanded)
    base = sequence(1, 1).requires_grad_()
    yield base, (sequence(2, 5), base.expand(2, 6, EMBED), base.expand(2, 6, EMBED))
    base = sequence(5, 2).requires_grad_()
    yield base, (base.transpose(0, 1), base.transpose(0, 1), base.transpose(0, 1))


@pytest.mark.parametrize("need_weights", [True, False])
def test_inputs_that_are_views_of_one_another(need_weights: bool) -> None:
    ours, theirs = pair()
    for index, (base, inputs) in enumerate(aliased()):
        want = theirs(*inputs)[0]
        out = ours(*inputs, need_weights=need_weights)[0]
        assert_within(out, want, double_limit(want, EMBED), f"output {index}")
        sources = [base, *ours.parameters()], [base, *theirs.parameters()]
        grads = [torch.autograd.grad(x.square().sum(), s) for x, s in zip((out, want), sources, strict=True)]
        for got, expected in zip(*grads, strict=True):
            assert_within(got, expected, double_limit(expected, 100), f"gradient {index}")


# ------------------------------------------------------------------------------------------------ what autograd notices
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", ALL, ids=str)
def test_changes_between_forward_and_backward_are_noticed(options: dict[str, Any], need_weights: bool) -> None:
    """What is changed in place before the backward pass needs it raises, wherever the original raises; where nothing is
    raised, the gradients are those from before the change."""
    module = make(**options)
    original = make(nn.MultiheadAttention, **options) if "num_kv_heads" not in options else None
    names = [*dict(module.named_parameters()), "query", "key", "value", "attn_mask"]

    def backward(layer: nn.Module, change: str | None) -> list[Tensor] | None:
        layer = copy.deepcopy(layer)
        leaves = [x.clone().requires_grad_() for x in inputs_for(layer)]
        inputs = [x * 1 for x in leaves]
        mask = torch.zeros(5, 7, dtype=torch.float64)
        out = layer(*inputs, attn_mask=mask, need_weights=need_weights)[0]
        tensors = {**dict(layer.named_parameters()), **dict(zip(("query", "key", "value"), inputs, strict=True))}
        tensors["attn_mask"] = mask
        with torch.no_grad():
            if change is not None:
                tensors[change].mul_(1.5).add_(0.1)
        try:
            return list(torch.autograd.grad(out.square().sum(), [*leaves, *layer.parameters()]))
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error) or "has been modified inplace" in str(error)
            return None

    want = backward(module, None)
    for name in names:
        got = backward(module, name)
        if got is None:
            continue
        assert original is None or backward(original, name) is not None, name
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", ALL, ids=str)
def test_a_step_between_forward_and_backward_is_noticed(options: dict[str, Any], need_weights: bool) -> None:
    module = make(**options)
    optimiser = torch.optim.SGD(module.parameters(), 1e-3)
    inputs = inputs_for(module)
    first = module(*inputs, need_weights=need_weights)[0].sum()
    second = module(*inputs, need_weights=need_weights)[0].sum()
    first.backward()
    optimiser.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    module(*inputs, need_weights=need_weights)[0].sum().backward()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", ALL, ids=str)
def test_gradients_only_where_they_are_asked_for(options: dict[str, Any], need_weights: bool) -> None:
    """Each parameter and input alone, all but each, and none: the rest keep None."""
    module = make(**options)
    leaves = [x.clone() for x in inputs_for(module)]
    owners = [*leaves, *module.parameters()]

    def grads(wanted: set[int]) -> list[Tensor | None]:
        for index, owner in enumerate(owners):
            owner.requires_grad_(index in wanted).grad = None
        out = module(*leaves, need_weights=need_weights)[0]
        assert out.requires_grad == bool(wanted)
        if wanted:
            out.square().sum().backward()
        return [owner.grad for owner in owners]

    every = set(range(len(owners)))
    full = grads(every)
    for wanted in (*({i} for i in every), *(every - {i} for i in every), set()):
        for index, (got, want) in enumerate(zip(grads(wanted), full, strict=True)):
            assert (got is None) == (index not in wanted)
            if got is not None:
                assert_within(got, want, double_limit(want, 100), f"{index} of {wanted}")
