"""A process for tests/test_guard_pages.py: calls on guarded memory, each named on a line of its own before it starts.

``python guarded_worker.py <capability> <number> <group> ...``: of ``GROUPS``, or one of the deliberate ``FAULTS``,
or "every fault"; ``number`` is how many random cases the group "random" draws.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from cases import DTYPES, HEAD_DIMS, LAYOUTS, SIZES, Case, build, ops
from guarded import END, PLAIN, START, guard_allocations, guarded
from torch import Tensor

import mha_ext
from mha_ext import _ops

# Tails in every direction, one row, one key; every kind of mask; more queries than a block and keys than a tile.
MANY = [
    Case(1, 1, 1, 16, 1, 1, 1),
    Case(2, 4, 2, 17, 33, 2, 3, causal=1, layout="packed"),
    Case(1, 2, 1, 65, 130, 63, 65, causal=2, mask="bool:B1TS", layout="bthd"),
    Case(1, 2, 2, 31, 31, 3, 1, padding="bool", layout="packed"),
    Case(1, 2, 2, 33, 47, 33, 17, mask="float32:1HTS", padding="float32", appended=1),
    Case(2, 2, 2, 47, 65, 15, 31, mask="bool:BHTS", dropout_p=0.2, layout="bthd"),
    Case(1, 4, 1, 130, 63, 17, 15, mask="bool:11TS", causal=1),
    Case(1, 2, 2, 64, 64, 31, 33, mask="own:B1TS", layout="columns"),
    Case(1, 3, 3, 32, 257, 65, 63, padding="own", layout="tbhd"),
    Case(1, 2, 2, 129, 129, 64, 64, causal=1, layout="packed"),
    Case(1, 2, 2, 48, 95, 128, 129, mask="bool:1H1S", layout="bthd"),
    Case(1, 1, 1, 20, 70, 7, 5, mask="bool:11T1", layout="stepped"),
    Case(1, 1, 1, 32, 32, 32, 32),
    Case(1, 2, 2, 64, 160, 96, 128, layout="packed"),
]
FEW = [
    Case(1, 1, 1, 1, 1, 1, 1),
    Case(2, 4, 2, 1, 601, 17, 15, mask="bool:B11S"),
    Case(1, 4, 1, 2, 129, 63, 65, layout="bthd"),
    Case(1, 2, 2, 3, 33, 33, 31, mask="float32:1HTS", causal=2, layout="packed"),
    Case(1, 2, 1, 4, 1031, 65, 63, padding="bool", causal=2),
    Case(2, 6, 2, 5, 7, 3, 2, mask="bool:BHTS", causal=1, layout="packed"),
    Case(1, 3, 1, 6, 515, 15, 17, padding="own", dropout_p=0.3, appended=2, layout="tbhd"),
    Case(1, 2, 2, 7, 2, 31, 33, mask="own:11TS", layout="columns"),
    Case(1, 8, 1, 1, 1025, 64, 64, layout="bthd"),
    Case(1, 1, 1, 3, 1, 2, 129),
]
# Rows, inputs, heads, their size, outputs.
LAYERS = [
    (1, 7, 1, 3, 5),
    (3, 16, 2, 17, 33),
    (6, 33, 3, 5, 1),
    (9, 65, 4, 16, 63),
    (32, 32, 2, 15, 31),
    (97, 24, 4, 8, 24),
]
PRODUCTS = list(itertools.product((1, 2, 3, 7, 8, 9, 17, 31, 33), ((1, 1), (3, 15), (17, 33), (65, 31), (64, 96))))
Named = Iterator[tuple[str, Callable[[str], list[Tensor]]]]


def in_dtype(case: Case, dtype: torch.dtype) -> Case:
    """The case in a dtype, which masks called "own" have as well."""
    name = str(dtype).removeprefix("torch.")
    return replace(
        case, dtype=dtype, mask=case.mask.replace("own", name), padding=name if case.padding == "own" else case.padding
    )


def keep(x: Tensor | None, side: str) -> Tensor | None:
    return x if x is None or side == PLAIN else guarded(x, side)


# ------------------------------------------------------------------------------------------------------------- groups
def attention_results(case: Case, side: str) -> list[Tensor]:
    """Forward, and backward from an output that is guarded too."""
    problem = build(case)
    tensors = [keep(x, side) for x in problem.tensors]
    out, lse = ops.attention(*tensors, **problem.options)
    sent = [keep(x, side) for x in (problem.grad_out, problem.grad_lse)]
    wanted = [True, True, True, *(x is not None and x.is_floating_point() for x in tensors[3:5]), False, False]
    found = [keep(out, side), keep(lse, side)]
    grads = ops.attention_backward(*sent, *tensors, *found, **problem.options, output_mask=wanted)
    return [out, lse, *(g for g, w in zip(grads, wanted, strict=True) if w)]


def weights_results(case: Case, side: str) -> list[Tensor]:
    """Weights averaged and per head, and their gradients."""
    problem = build(case)
    tensors = [keep(x, side) for x in problem.tensors]
    results = []
    for average in (True, False):
        out, lse, weights = ops.attention_with_weights(*tensors, **problem.options, average=average)
        sent = keep(torch.linspace(-1, 1, weights.numel(), dtype=weights.dtype).view_as(weights), side)
        wanted = [True, True, *(x is not None and x.is_floating_point() for x in tensors[3:5]), False, False]
        rest = (*tensors[:2], *tensors[3:], keep(lse, side))
        grads = ops.attention_weights_backward(sent, *rest, **problem.options, average=average, output_mask=wanted)
        results += [out, lse, weights, *(g for g, w in zip(grads, wanted, strict=True) if w)]
    return results


def layer_results(sizes: tuple[int, ...], shared: int, dtype: torch.dtype, side: str) -> list[Tensor]:
    """The layer as one operator, forward, and backward from a state that is guarded too."""
    rows, width, heads, dim, width_out = sizes
    first, second, third = (keep(torch.randn(2, rows, width).to(dtype), side) for _ in range(3))
    inputs = (first, first if shared == 2 else second, (third, second, first)[shared])
    shapes = ((3 * heads * dim, width), (3 * heads * dim,), (width_out, heads * dim), (width_out,))
    parameters = [keep(torch.randn(shape).to(dtype), side) for shape in shapes]
    masks = keep(torch.rand(1, 1, rows, rows) > 0.3, side), keep(torch.rand(2, rows) > 0.7, side), None
    options = {"num_heads": heads, "num_kv_heads": heads, "shared_inputs": shared, "batch_first": True, "causal": 1}
    out, *state = ops.multi_head_attention(*inputs, *parameters, *masks, **options)
    sent = keep(torch.randn(out.shape).to(dtype), side)
    options |= {"dropout_p": 0.0, "scale": None, "output_mask": [True] * 7 + [False] * 2}
    state = [keep(x, side) for x in state]
    grads = ops.multi_head_attention_backward(sent, *inputs, *parameters, *masks, *state, **options)
    return [out, *(g for g in grads if g is not None)]


def module_results(sizes: tuple[int, ...], batch_first: bool, dtype: torch.dtype, side: str) -> list[Tensor]:
    """The module in training and inference, its weights wanted or not, with all its parameters guarded."""
    rows, _, heads, dim, width = sizes
    layer = mha_ext.MultiheadAttention(
        width * heads, heads, head_dim=dim, add_bias_kv=rows % 2 == 0, batch_first=batch_first, dtype=dtype
    )
    for owner in (layer, layer.out_proj):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, torch.nn.Parameter(keep(parameter.detach(), side)))
    shape = (2, rows, width * heads) if batch_first else (rows, 2, width * heads)
    x, sent = (keep(torch.randn(shape).to(dtype), side) for _ in range(2))
    masks = {
        "attn_mask": keep(torch.rand(rows, rows) > 0.7, side),
        "key_padding_mask": keep(torch.rand(2, rows) > 0.7, side),
    }
    results = []
    for need_weights in (False, True):
        leaf = x.detach().requires_grad_()
        out, weights = layer(leaf, leaf, leaf, need_weights=need_weights, is_causal=True, **masks)
        results += [out, *torch.autograd.grad(out, [leaf, *layer.parameters()], sent)]
        with torch.no_grad():
            out, weights = layer(x, x, x, need_weights=need_weights, average_attn_weights=rows % 2 == 0)
        results += [out] if weights is None else [out, weights]
    return results


def product_results(rows: int, widths: tuple[int, int], dtype: torch.dtype, side: str) -> list[Tensor]:
    """A linear map by a product of our own, where there is one for these sizes and this dtype."""
    given = [keep(torch.randn(shape).to(dtype), side) for shape in ((rows, widths[0]), widths[::-1], widths[1:])]
    results = [_ops.linear_directly(*given), _ops.linear_directly(*given[:2], None)]
    return [x for x in results if x is not None]


def random_case(rng: random.Random) -> Case:
    queries, keys = (
        rng.choice((rng.randint(1, 9), rng.choice(SIZES))),
        rng.choice((rng.randint(1, 9), *SIZES, 515, 1025)),
    )
    letters = "".join(rng.choice((letter, "1")) for letter in "BHTS")
    return Case(
        rng.randint(1, 2), 4, rng.choice((1, 2, 4)), queries, keys + 2, rng.choice(HEAD_DIMS), rng.choice(HEAD_DIMS),
        mask=rng.choice(("none", f"bool:{letters}", f"own:{letters}")), padding=rng.choice(("none", "bool", "own")),
        causal=rng.randint(0, 2), appended=rng.choice((0, 0, 2)), dropout_p=rng.choice((0.0, 0.3)),
        layout=rng.choice(list(LAYOUTS)),
    )  # fmt: skip


def attentions(cases: list[Case]) -> Named:
    for case in cases:
        yield str(case), partial(attention_results, case)
        if case.keys * case.T < 20000:
            yield f"with weights {case}", partial(weights_results, case)


def in_dtypes(cases: list[Case]) -> Iterator[Case]:
    return (in_dtype(case, dtype) for case, dtype in itertools.product(cases, DTYPES))


def layers(every: bool) -> Named:
    """Each size and dtype with one way of sharing inputs and one order of axes, or with all."""
    for n, (sizes, dtype) in enumerate(itertools.product(LAYERS, DTYPES)):
        turn = n + n // len(DTYPES)
        for shared in (0, 1, 2) if every else (turn % 3,):
            yield f"layer {sizes} shared={shared} {dtype}", partial(layer_results, sizes, shared, dtype)
        for first in (True, False) if every else (turn % 2 == 0,):
            yield f"module {sizes} batch_first={first} {dtype}", partial(module_results, sizes, first, dtype)


def products() -> Named:
    for (rows, widths), dtype in itertools.product(PRODUCTS, DTYPES):
        yield f"product {rows} x {widths} {dtype}", partial(product_results, rows, widths, dtype)


GROUPS: dict[str, Callable[[int], Named]] = {
    "many": lambda _: attentions(list(in_dtypes(MANY))),
    "few": lambda _: attentions(list(in_dtypes(FEW))),
    "layers": lambda _: layers(every=False),
    "all layers": lambda _: layers(every=True),
    "products": lambda _: products(),
    "random": lambda n: attentions(list(in_dtypes([random_case(random.Random(seed)) for seed in range(n)]))),
}


# ------------------------------------------------------------------------------------------------------------- faults
def read(x: Tensor, byte: int) -> None:
    ctypes.string_at(x.data_ptr() + byte, 1)


def write(x: Tensor, byte: int) -> None:
    ctypes.memset(x.data_ptr() + byte, 1, 1)


def read_freed() -> None:
    address = torch.ones(3, 5).data_ptr()
    ctypes.string_at(address, 1)


# A tensor of torch's own that has 60 bytes ends 4 bytes before the page.
FAULTS: dict[str, Callable[[], None]] = {
    "read past the end": lambda: read(guarded(torch.ones(3, 5), END), 60),
    "read before the start": lambda: read(guarded(torch.ones(3, 5), START), -1),
    "write to an input": lambda: write(guarded(torch.ones(3, 5), END), 0),
    "read past an allocation": lambda: read(torch.ones(3, 5), 64),
    "write past an allocation": lambda: write(torch.ones(3, 5), 60),
    "write before an allocation": lambda: write(torch.ones(3, 5), -1),
    "read what was freed": read_freed,
    "read what was not written": lambda: compare([torch.empty(3)], [torch.zeros(3)]),
}


# --------------------------------------------------------------------------------------------------------------- main
def compare(found: list[Tensor], wanted: list[Tensor], to_the_bit: bool = True) -> None:
    """What lies between the numbers, or is left in fresh memory, reaches nothing."""
    for ours, want in zip(found, wanted, strict=True):
        assert torch.equal(ours.isnan(), want.isnan()), "NaN comes from between the numbers or from fresh memory"
        same = torch.equal(ours.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0))
        assert same or not to_the_bit, "the result depends on where its numbers lie"


def fault(name: str) -> None:
    print(name, flush=True)
    guard_allocations(END)
    FAULTS[name]()


def every_fault() -> None:
    """Each in a process of its own, and how that ended: minus a signal, or the exit status."""
    for name in FAULTS:
        child = os.fork()
        if child == 0:
            try:
                fault(name)
            except AssertionError:
                os._exit(3)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def main(capability: str, number: int, *groups: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # faults leave no files
    mha_ext.set_cpu_capability(capability)
    if groups == ("every fault",):
        every_fault()
        return
    for group in groups:
        if group in FAULTS:
            fault(group)
            continue
        for name, call in GROUPS[group](number):
            results = []
            for side, threads in ((END, 1), (START, 2), (PLAIN, 2)):  # last, where an access would do harm unseen
                print(f"{capability} {side} {name}", flush=True)
                torch.set_num_threads(threads)
                torch.manual_seed(0)
                guard_allocations(side)
                results.append(call(side))
                guard_allocations(PLAIN)
            for found in results[:2]:
                compare(found, results[2], "layers" not in group)  # which a library computes in part


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
