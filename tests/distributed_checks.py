"""What ``test_distributed`` runs in two processes: the same call cut over both, against the call in one.

Every process computes the whole answer by itself as well. A function takes the mesh of both processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from layer_cases import last_hidden, make, sequence
from module_variant_cases import KEYWORDS, variant
from tolerances import assert_within, double_limit
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor

from mha_ext import functional

ops = torch.ops.mha_ext
BATCH, HEADS, QUERIES = Shard(0), Shard(1), Shard(2)
Tensors = dict[str, Tensor]
Call = Callable[[Tensors], tuple[Tensor, ...]]


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(got: Any, want: Any, what: str = "") -> None:
    """Equal to the rounding of float64 sums in another order."""
    assert (got is None) == (want is None), what
    if want is not None:
        want = whole(want)
        assert_within(whole(got), want, double_limit(want, 1000), what)


def equal(got: Any, want: Any, what: str = "") -> None:
    assert (got is None and want is None) or torch.equal(whole(got), want), what


# -------------------------------------------------------------------------------------------------------- data parallel
def gradients_of_parts(mesh: DeviceMesh, module: nn.Module, twin: nn.Module, **options: Any) -> None:
    """Each process takes its half of a batch; the mean of both gradients is that of the whole batch."""
    x, hidden = sequence(4, 5), last_hidden(4, 5)
    rows = slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2)
    for need_weights in (False, True):
        for m in (module, twin):
            m.zero_grad()
        out = module(x[rows], x[rows], x[rows], key_padding_mask=hidden[rows], need_weights=need_weights, **options)[0]
        want = twin(x, x, x, key_padding_mask=hidden, need_weights=need_weights, **options)[0]
        same(out, want[rows])
        out.square().mean().backward()
        want.square().mean().backward()
        names = [n for n, _ in twin.named_parameters()]
        for name, a, b in zip(names, module.parameters(), twin.parameters(), strict=True):
            assert b.grad is not None
            same(a.grad, b.grad, name)


def distributed_data_parallel(mesh: DeviceMesh) -> None:
    for options in ({}, {"add_bias_kv": True, "bias": False}, {"num_kv_heads": 2}):
        module = make(**options)
        twin = copy.deepcopy(module)
        gradients_of_parts(mesh, nn.parallel.DistributedDataParallel(module), twin, is_causal=True)


def fully_sharded(mesh: DeviceMesh) -> None:
    """FSDP2 of the whole module, of the output projection alone, and of one inside the other."""
    for parts in (("",), ("out_proj",), ("out_proj", "")):
        module = make()
        twin = copy.deepcopy(module)
        for name in parts:
            fully_shard(module.get_submodule(name), mesh=mesh)
        assert isinstance(module.out_proj.weight, DTensor)
        if "" not in parts:  # the rest of the gradients are for somebody else to average
            averaged_by_hand(mesh, module)
        gradients_of_parts(mesh, module, twin, is_causal=True)


def averaged_by_hand(mesh: DeviceMesh, module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):

        def average(grad: Tensor) -> Tensor:
            parts = DTensor.from_local(grad, mesh, [Partial("avg")], run_check=False)
            return parts.redistribute(placements=[Replicate()]).to_local()

        parameter.register_hook(average)


def variants_fully_sharded(mesh: DeviceMesh) -> None:
    for keywords in KEYWORDS.values():
        module = variant(keywords)
        twin = copy.deepcopy(module)
        fully_shard(module, mesh=mesh)
        gradients_of_parts(mesh, module, twin)


# ------------------------------------------------------------------------------------------------------------ operators
def heads(h: int = 4, g: int = 2, t: int = 6, s: int = 7, dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    sizes = {"query": (2, h, t, 8), "key": (2, g, s, 8), "value": (2, g, s, 5)}
    return {n: torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for n, x in sizes.items()}


def compare(
    mesh: DeviceMesh, call: Call, tensors: Tensors, layouts: dict[str, Placement], check: Any = same
) -> tuple[list[Any], list[Any]]:
    """Results and gradients of a call on DTensors against the call on plain ones.

    Returns:
        The results of the call on DTensors, and its gradients.
    """

    def run(given: Tensors) -> tuple[list[Any], list[Any]]:
        leaves = {n: x.detach().requires_grad_(x.is_floating_point()) for n, x in given.items()}
        results = call(leaves)
        wanted = [x for x in leaves.values() if x.requires_grad]
        loss = sum(whole(x).double().square().sum() for x in results)
        return list(results), list(torch.autograd.grad(loss, wanted, allow_unused=True))

    cut = {n: distribute_tensor(x, mesh, [layouts.get(n, Replicate())]) for n, x in tensors.items()}
    got, want = run(cut), run(tensors)
    for a, b in zip(got[0] + got[1], want[0] + want[1], strict=True):
        check(a, b, str(layouts))
    return got


def attend(**options: Any) -> Call:
    def call(x: Tensors) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = ops.attention(**x, **options)
        return out

    return call


ROWS = {"query": BATCH, "key": BATCH, "value": BATCH}
BY_HEAD = {"query": HEADS, "key": HEADS, "value": HEADS}
BY_QUERY = {"query": QUERIES}


def placements(tensors: list[Any]) -> list[Placement]:
    return [x.placements[0] for x in tensors]


def attention_stays_cut(mesh: DeviceMesh) -> None:
    """What is cut along samples or heads stays so in results and gradients, and is equal to the bit; queries that are
    cut leave parts of sums for keys and values."""
    for layouts, axis in ((ROWS, BATCH), (BY_HEAD, HEADS)):
        for options in ({}, {"causal": 1}, {"causal": 2, "window_left": 2, "softcap": 3.0}):
            results, grads = compare(mesh, attend(**options), heads(), layouts, equal)
            assert placements(results + grads) == [axis] * 5
    results, grads = compare(mesh, attend(), heads(), BY_QUERY)
    assert placements(results + grads) == [QUERIES, QUERIES, QUERIES, Partial(), Partial()]
    one_key_head = {"query": HEADS}
    results, grads = compare(mesh, attend(causal=1), heads(g=1), one_key_head)
    assert placements(results + grads) == [HEADS, HEADS, HEADS, Partial(), Partial()]


def what_cannot_be_cut_is_gathered(mesh: DeviceMesh) -> None:
    """Queries under a causal order, heads that do not divide, dropout; partial sums are summed first."""
    for options in ({"causal": 1}, {"window_left": 1}, {"causal": 2}):
        results, _ = compare(mesh, attend(**options), heads(), BY_QUERY)
        assert results[0].placements[0] != QUERIES
    results, _ = compare(mesh, attend(), heads(h=6, g=3), {**BY_HEAD, "key": Replicate(), "value": Replicate()})
    assert results[0].placements[0] != HEADS
    seed = {"dropout_seed": torch.tensor([5])}
    for layouts in (ROWS, BY_HEAD, BY_QUERY):
        results, _ = compare(mesh, attend(dropout_p=0.5), {**heads(), **seed}, layouts, equal)
        assert results[0].placements[0] == Replicate()
    parts = {n: DTensor.from_local(x, mesh, [Partial()]) for n, x in heads().items()}
    same(ops.attention(**parts)[0], ops.attention(*(2 * x for x in heads().values()))[0])


def one_of_the_results_alone(mesh: DeviceMesh) -> None:
    """No gradient arrives for the other: it stays None, and is not made up."""
    for index in (0, 1):
        for layouts in (ROWS, BY_HEAD, BY_QUERY):
            compare(mesh, lambda x, index=index: (ops.attention(**x)[index],), heads(), layouts)


def masks_and_variants(mesh: DeviceMesh) -> None:
    """Masks that vary or not, cut or whole, with gradients; what goes by keyword lies as the rest needs it."""
    random = torch.Generator().manual_seed(4)
    extra: list[tuple[Tensors, dict[str, Placement]]] = [
        ({"attn_mask": torch.randn(2, 4, 6, 7, generator=random, dtype=torch.float64)}, {"attn_mask": Replicate()}),
        ({"attn_mask": torch.randn(1, 1, 6, 7, generator=random, dtype=torch.float64)}, {}),
        ({"attn_mask": torch.rand(1, 4, 1, 7, generator=random) < 0.7}, {"attn_mask": HEADS}),
        ({"key_padding_mask": last_hidden(2, 7)}, {"key_padding_mask": BATCH}),
        ({"key_padding_mask": torch.randn(2, 7, generator=random, dtype=torch.float64)}, {}),
    ]
    for tensors, own in extra:
        for layouts in (ROWS, BY_HEAD, BY_QUERY):
            compare(mesh, attend(), {**heads(), **tensors}, {**layouts, **own})
    sink = {"sink": torch.rand(4, generator=random, dtype=torch.float64)}
    compare(mesh, attend(), {**heads(), **sink}, {**BY_HEAD, "sink": Shard(0)})
    for layouts in (ROWS, BY_QUERY, BY_HEAD):
        compare(mesh, attend(), {**heads(), **sink}, layouts)
    bias = {"relative_bias": torch.rand(1, 4, 12, generator=random, dtype=torch.float64)}
    compare(mesh, attend(), {**heads(), **bias}, {**BY_HEAD, "relative_bias": HEADS})
    for layouts in (ROWS, BY_QUERY):
        compare(mesh, attend(), {**heads(), **bias}, layouts)
    bounds = torch.stack([torch.zeros(2, 6), torch.randint(1, 7, (2, 6), generator=random)]).int()
    for layouts, axis in ((ROWS, Shard(1)), (BY_QUERY, Shard(2)), (BY_HEAD, Replicate())):
        compare(mesh, attend(), {**heads(), "key_range": bounds}, {**layouts, "key_range": axis})


def weights_of_attention(mesh: DeviceMesh) -> None:
    """With gradients through them; a mean over heads gathers heads."""
    for average in (False, True):
        for layouts, axis in ((ROWS, BATCH), (BY_HEAD, HEADS), (BY_QUERY, QUERIES)):

            def call(x: Tensors, average: bool = average) -> tuple[Tensor, ...]:
                results: tuple[Tensor, ...] = ops.attention_with_weights(**x, average=average)
                return results

            results, _ = compare(mesh, call, heads(), layouts)
            assert (results[0].placements[0] == axis) == (not average or axis != HEADS)
            compare(mesh, lambda x, call=call: call(x)[2:], heads(), layouts)


def half_types(mesh: DeviceMesh) -> None:
    """bfloat16 keeps what rounding took from the output, cut as the output is."""
    for layouts in (ROWS, BY_HEAD):
        compare(mesh, attend(causal=1), heads(dtype=torch.bfloat16), layouts, equal)
    cut = [distribute_tensor(x, mesh, [HEADS]) for x in heads(dtype=torch.bfloat16).values()]
    out, lse, _, rounding = ops.attention_for_backward(*cut)
    assert placements([out, lse, rounding]) == [HEADS] * 3


def second_order(mesh: DeviceMesh) -> None:
    """Gradients of gradients, and the operator behind forward mode."""
    for layouts in (ROWS, BY_HEAD, BY_QUERY):

        def penalty(x: Tensors) -> tuple[Tensor, ...]:
            out = ops.attention(**x)[0]
            wanted = [x[n] for n in ("query", "key", "value")]
            return torch.autograd.grad(out.square().sum(), wanted, create_graph=True)

        compare(mesh, penalty, heads(), layouts)

        def moved(x: Tensors) -> tuple[Tensor, ...]:  # PyTorch makes no dual numbers of DTensors
            out, lse = ops.attention(**x)
            three = (x["query"], x["key"], x["value"])
            numbers = {"dropout_p": 0.0, "causal": 0, "scale": None, "num_appended_keys": 0}
            masks = (None, None, None)
            results: tuple[Tensor, ...] = ops.attention_jvp(*three, *masks, out, lse, *three, *masks, None, **numbers)
            return results

        cut = {n: distribute_tensor(x, mesh, [layouts.get(n, Replicate())]) for n, x in heads().items()}
        for got, want in zip(moved(cut), moved(heads()), strict=True):
            same(got, want)


def meshes_of_two_axes(mesh: DeviceMesh) -> None:
    grid = init_device_mesh("cpu", (1, 2))
    tensors = heads()
    cut = {n: distribute_tensor(x, grid, [BATCH, HEADS]) for n, x in tensors.items()}
    out, lse = ops.attention(**cut, causal=1)
    assert out.placements == lse.placements == (BATCH, HEADS)
    equal(out, ops.attention(**tensors, causal=1)[0])


def function_on_dtensors(mesh: DeviceMesh) -> None:
    for layouts, axis in ((ROWS, BATCH), (BY_HEAD, HEADS)):

        def call(x: Tensors) -> tuple[Tensor, ...]:
            return functional.scaled_dot_product_attention(**x, is_causal=True, enable_gqa=True, return_lse=True)

        results, _ = compare(mesh, call, heads(), layouts, equal)
        assert placements(results) == [axis, axis]


def layer_on_dtensors(mesh: DeviceMesh) -> None:
    """A layer with whole parameters and samples that are cut, as one operator and in pieces."""
    x = sequence(2, 5)
    for options in (
        {},
        {"num_kv_heads": 2, "bias": False},
        {"batch_first": False},
        {"kdim": 16, "add_zero_attn": True},
    ):
        for need_weights in (False, True):
            module = make(**options)
            twin = copy.deepcopy(module)
            distribute_module(module, mesh)
            axis = BATCH if module.batch_first else Shard(1)
            given = x if module.batch_first else x.transpose(0, 1)
            leaf, leaf_twin = given.clone().requires_grad_(), given.clone().requires_grad_()
            cut = distribute_tensor(leaf, mesh, [axis])
            out = module(cut, cut, cut, need_weights=need_weights, is_causal=True)[0]
            want = twin(leaf_twin, leaf_twin, leaf_twin, need_weights=need_weights, is_causal=True)[0]
            assert out.placements == (axis,)
            same(out, want)
            out.full_tensor().square().sum().backward()
            want.square().sum().backward()
            for (name, a), b in zip(module.named_parameters(), twin.parameters(), strict=True):
                same(a.grad, b.grad, name)


def errors(mesh: DeviceMesh) -> None:
    tensors = {**heads(), "sink": torch.ones(4, dtype=torch.float64)}
    cut = {n: distribute_tensor(x, mesh, [BY_HEAD.get(n, Shard(0))]) for n, x in tensors.items()}
    cut["sink"] = DTensor.from_local(tensors["sink"], mesh, [Partial()])
    try:
        ops.attention(**cut)
    except RuntimeError as error:
        assert "tensors by keyword must lie as one way to run the call needs them" in str(error)
        assert "sink" in str(error)
    else:
        raise AssertionError("a sink in parts of a sum was taken")
