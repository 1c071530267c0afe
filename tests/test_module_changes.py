"""A module that is moved to another dtype, walked over, optimised, averaged, changed by assignment: as the original."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import EMBED, SHARED_HEADS, VARIANTS, assert_agree, inputs_for, make, pair, same_states, sequence
from tolerances import assert_within, double_limit
from torch import nn

# -------------------------------------------------------------------------------------------------- moved and optimised
MOVES: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "float": (lambda m: m.float(), torch.float32),
    "double": (lambda m: m.float().double(), torch.float64),
    "to dtype": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "to memory format": (lambda m: m.to(memory_format=torch.channels_last), torch.float64),
    "to tensor": (lambda m: m.to(torch.empty(0, dtype=torch.float32)), torch.float32),
    "type": (lambda m: m.type(torch.float16), torch.float16),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("options", [*VARIANTS, SHARED_HEADS[1]], ids=str)
def test_moved_parameters_are_those_of_the_moved_state(name: str, options: dict[str, Any]) -> None:
    """A moved module answers as one made in that dtype from the moved state, with and without weights."""
    move, dtype = MOVES[name]
    module = make(**options)
    moved = move(copy.deepcopy(module))
    twin = make(**{**options, "dtype": dtype})
    twin.load_state_dict({n: x.float().to(dtype) if name == "double" else x for n, x in module.state_dict().items()})
    assert all(p.dtype == dtype for p in moved.parameters()) and same_states(moved, twin)
    inputs = [x.to(dtype) for x in inputs_for(module)]
    for need_weights in (True, False):
        got, want = moved(*inputs, need_weights=need_weights), twin(*inputs, need_weights=need_weights)
        assert got[0].dtype == dtype and torch.equal(got[0], want[0])
        assert not need_weights or torch.equal(got[1], want[1])


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_what_walks_over_modules_and_parameters(options: dict[str, Any]) -> None:
    """``apply``, ``train``, ``eval``, ``requires_grad_``, ``zero_grad`` and flat vectors of parameters."""
    ours, theirs = pair(**options)
    seen: list[list[str]] = []
    for module in (ours, theirs):
        seen.append([])
        module.apply(lambda m: seen[-1].append(type(m).__name__))
        module.eval()
        assert not module.training and not module.out_proj.training and module.train().out_proj.training
        flat = nn.utils.parameters_to_vector(module.parameters())
        nn.utils.vector_to_parameters(flat * 2, module.parameters())
    assert seen[0] == seen[1] and same_states(ours, theirs)
    inputs = inputs_for(ours)
    assert_agree(ours, theirs, inputs)
    ours(*inputs)[0].sum().backward()
    assert all(p.grad is not None for p in ours.parameters())
    ours.zero_grad()
    assert all(p.grad is None for p in ours.parameters())
    assert not ours.requires_grad_(False)(*inputs)[0].requires_grad


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_optimiser_states_load_by_index(options: dict[str, Any]) -> None:
    """A training that began with the original goes on with ours: states are told apart by the parameters' order."""
    ours, theirs = pair(**options)
    inputs = inputs_for(ours)

    def steps(module: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimiser.zero_grad()
            module(*inputs)[0].square().sum().backward()
            optimiser.step()

    before = torch.optim.Adam(theirs.parameters(), 1e-2)
    steps(theirs, before)
    after = torch.optim.Adam(ours.parameters(), 1.0)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    ours.load_state_dict(theirs.state_dict())
    steps(ours, after)
    steps(theirs, before)
    for (name, got), want in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_within(got, want, 1e3 * double_limit(want, 100), name)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_averaged_model(options: dict[str, Any]) -> None:
    module = make(**options)
    averaged = torch.optim.swa_utils.AveragedModel(module)
    states = []
    for _ in range(2):
        states.append(copy.deepcopy(module.state_dict()))
        averaged.update_parameters(module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(3.0)
    mean = make(**options)
    mean.load_state_dict({n: (x + states[1][n]) / 2 for n, x in states[0].items()})
    inputs = inputs_for(module)
    want = mean(*inputs)[0]
    assert_within(averaged(*inputs)[0], want, double_limit(want, EMBED))


def test_data_parallel_without_a_device_calls_the_module() -> None:
    ours, theirs = pair()
    x = sequence(2, 5)
    assert_agree(nn.DataParallel(ours).module, nn.DataParallel(theirs).module, (x, x, x))
    want = ours(x, x, x)
    assert all(torch.equal(a, b) for a, b in zip(nn.DataParallel(ours)(x, x, x), want, strict=True))


# ------------------------------------------------------------------------------------------------ changed by assignment
def test_merge_masks_is_the_original_s() -> None:
    ours, theirs = pair()
    x, attn_mask, padding = sequence(2, 5), torch.rand(5, 5) > 0.5, torch.rand(2, 5) > 0.5
    for a, b in itertools.product((None, attn_mask), (None, padding)):
        (got, kind), (want, want_kind) = ours.merge_masks(a, b, x), theirs.merge_masks(a, b, x)
        assert kind == want_kind and (got is want is None or torch.equal(got, want))


ASSIGNED: dict[str, Callable[[Any], None]] = {
    "batch_first": lambda m: setattr(m, "batch_first", False),
    "fewer heads": lambda m: setattr(m, "num_heads", 2),
    "more heads": lambda m: setattr(m, "num_heads", EMBED),
    "add_zero_attn": lambda m: setattr(m, "add_zero_attn", True),
    "packed weight": lambda m: setattr(m, "in_proj_weight", nn.Parameter(sequence(1, 3 * EMBED, seed=8)[0])),
    "no bias": lambda m: setattr(m, "in_proj_bias", None),
    "no output bias": lambda m: setattr(m.out_proj, "bias", None),
    "output weight": lambda m: setattr(m.out_proj, "weight", nn.Parameter(sequence(1, EMBED, seed=8)[0])),
    "output": lambda m: setattr(m, "out_proj", nn.Linear(EMBED, EMBED, bias=False, dtype=torch.float64)),
}


def append_keys(module: Any) -> None:
    module.bias_k = nn.Parameter(sequence(1, 1, seed=6))
    module.bias_v = nn.Parameter(sequence(1, 1, seed=7))


def separate_weights(module: Any) -> None:
    weights = module.in_proj_weight.detach().chunk(3)
    for name, weight in zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), weights, strict=True):
        setattr(module, name, nn.Parameter(2 * weight))
    module._qkv_same_embed_dim = False


@pytest.mark.parametrize(
    "change", [*ASSIGNED.values(), append_keys, separate_weights], ids=[*ASSIGNED, "bias_kv", "flag"]
)
def test_assigned_attributes_act_as_in_the_original(change: Callable[[Any], None]) -> None:
    ours, theirs = pair()
    x, memory = sequence(5, 5), sequence(5, 5, seed=2)
    for module in (ours, theirs):
        torch.manual_seed(9)
        change(module)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    for inputs in ((x, x, x), (x, memory, memory), (x, memory, x)):
        assert_agree(ours, theirs, inputs)
    assert_agree(copy.deepcopy(ours), theirs, (x, x, x))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_heads", 3, r"in_proj_weight must have a multiple of 9 rows \(num_heads 3, num_kv_heads 3\), got"),
        ("bias_k", nn.Parameter(torch.zeros(1, 1, EMBED)), "bias_v must be a tensor because bias_k is given, got None"),
        ("bias_v", nn.Parameter(torch.zeros(1, 1, EMBED)), "bias_k must be a tensor because bias_v is given, got None"),
        ("dropout", 1.5, r"dropout must be in \[0, 1\), got 1.5"),
    ],
)
def test_assigned_attributes_that_do_not_fit_are_refused(
    name: str, value: Any, message: str, need_weights: bool
) -> None:
    module, x = make(), sequence(2, 5)
    setattr(module, name, value)
    with pytest.raises(ValueError, match=f"^MultiheadAttention: {message}"):
        module(x, x, x, need_weights=need_weights)
