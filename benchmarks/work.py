"""A case and a runner turned into the work that is timed, and the check that all peers compute the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import Inputs, make_inputs
from benchmarks.peers import Peer, Runner

# Largest difference of two peers, relative to the largest magnitude of the result: some tens of roundings.
TOLERANCES = {"fp64": 1e-12, "fp32": 2e-5, "fp16": 1e-2, "bf16": 6e-2}


def timed_work(case: Case, runner: Runner, inputs: Inputs) -> Callable[[], object]:
    """Returns the function whose time is the result of a case."""
    work = _work(case, runner, inputs)
    if runner.threads == 0:
        return work

    def on_few_threads() -> object:
        threads = torch.get_num_threads()
        torch.set_num_threads(runner.threads)
        try:
            return work()
        finally:
            torch.set_num_threads(threads)

    return on_few_threads


def _work(case: Case, runner: Runner, inputs: Inputs) -> Callable[[], object]:
    leaves = list(runner.leaves.values())

    if not case.needs_gradients:

        def forward() -> object:
            with torch.no_grad():
                return runner.forward()

        return forward

    if case.task == "backward":
        output = runner.forward()[0]
        return lambda: torch.autograd.grad(output, leaves, inputs.grad_output, retain_graph=True)

    return lambda: torch.autograd.grad(runner.forward()[0], leaves, inputs.grad_output)


def results(case: Case, peer: Peer) -> dict[str, Tensor]:
    """Runs a peer once, without dropout, and returns everything that the case asks for: output, weights, gradients."""
    case = case.without_dropout()
    inputs = make_inputs(case)
    runner = peer.build(case, inputs)
    if case.task == "forward":
        with torch.no_grad():
            output, weights = runner.read(runner.forward())
        gradients: tuple[Tensor, ...] = ()
    else:
        output, weights = runner.forward()
        gradients = torch.autograd.grad(output, list(runner.leaves.values()), inputs.grad_output)
    found = {"output": output.detach()}
    if weights is not None:
        found["weights"] = weights.detach()
    return found | {f"gradient of {name}": grad for name, grad in zip(runner.leaves, gradients, strict=False)}


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[str, float]:
    """Returns the name of the result that differs most, and by how much relative to its largest magnitude."""
    worst = ("", 0.0)
    for name in ours.keys() | theirs.keys():
        if name not in ours or name not in theirs:
            return name, float("inf")
        expected = theirs[name].double()
        scale = expected.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        difference = float((ours[name].double() - expected).abs().max() / scale)
        if not difference <= worst[1]:  # a NaN is the worst of all
            worst = (name, difference)
    return worst
