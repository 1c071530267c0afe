"""What ``FlopCounterMode`` counts: every operator, by hand and against PyTorch's layer on its math path.

The convention: two operations a multiply-add of a matrix product; what hides pairs (masks, causal order, windows,
ranges) does not lessen the count; a backward pass counts the scores that it computes again, which PyTorch's math path
keeps instead: one product Q Kᵀ more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import EMBED, HEADS, SHARED_HEADS, VARIANTS, causal_mask, inputs_for, last_hidden, make, pair
from operator_cases import CALLS, attention_calls, existing_operators, ops
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from mha_ext.functional import scaled_dot_product_attention, varlen_attention

B, H, G, T, S, D, DV = 2, 4, 2, 5, 7, 8, 6  # of operator_cases.BASE
PRODUCT = 2 * B * H * T * S  # one product with the scores, per column of the other factor


def count(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def counted(operator: str, family: str, index: int = 0) -> int:
    args, kwargs = CALLS[operator][family]()[index]
    return count(lambda: getattr(ops, operator)(*args, **kwargs))


def trained(module: Any, inputs: tuple[Tensor, ...], **options: Any) -> Callable[[], None]:
    """Forward and backward with gradients of everything."""
    leaves = {id(x): x.detach().requires_grad_() for x in inputs}

    def step() -> None:
        module(*[leaves[id(x)] for x in inputs], **options)[0].sum().backward()

    return step


def test_every_operator_has_a_formula() -> None:
    assert {name for name in existing_operators() if getattr(ops, name) not in flop_registry} == set()


# --------------------------------------------------------------------------------------------------- operators by hand
@pytest.mark.parametrize(
    ("operator", "index", "columns"),
    [
        ("attention", 0, D + DV),
        ("attention_with_weights", 0, D + DV),
        ("attention_with_weights", 1, D + DV),
        ("attention_for_backward", 0, D + DV),
        ("attention_for_backward", 2, D + DV),
        ("attention_backward", 0, 3 * D + 2 * DV),
        ("attention_weights_backward", 0, 3 * D),
        ("attention_jvp", 0, 3 * D + 2 * DV),
        ("attention_jvp", 1, 2 * D + DV),
        ("attention_backward_jvp", 0, (3 + 4) * D + (3 + 2 + 2) * DV),
        ("attention_backward_jvp", 1, (2 + 2 + 1) * D + (1 + 1 + 1) * DV),
    ],
)
def test_operators_by_hand(operator: str, index: int, columns: int) -> None:
    """In columns of the factor beside the scores: the products of each formula, written out."""
    assert counted(operator, "plain", index) == PRODUCT * columns


@pytest.mark.parametrize("operator", ["attention_backward", "attention_weights_backward"])
def test_gradients_that_nobody_wants_are_not_counted(operator: str) -> None:
    first, *rest, _ = CALLS[operator]["each gradient alone"]()
    totals = [count(lambda c=c: getattr(ops, operator)(*c.args, **c.kwargs)) for c in (first, *rest)]
    again = PRODUCT * (D + DV if operator == "attention_backward" else D)
    assert totals[0] == again + sum(total - again for total in totals[1:])


def test_pages_by_hand() -> None:
    """3 rows of 6 heads on a table with room for 4 pages of 16 keys, 8 and 11 numbers wide."""
    assert counted("paged_attention", "pages, three queries") == 2 * 3 * 6 * 3 * 64 * (8 + 11)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_layer_by_hand(shared: int) -> None:
    """4 heads on 2 of 3 numbers in a layer of width 12, a batch of 2."""
    keys = 5 if shared == 2 else 7
    projections = 2 * 2 * (5 * 12 * 12 + 2 * keys * 12 * 6 + 5 * 12 * 12)
    product = 2 * 2 * 4 * 5 * keys * 3
    family = f"shared {shared}, batch first"
    assert counted("multi_head_attention", family) == projections + 2 * product
    assert counted("multi_head_attention_backward", family) == 2 * projections + 5 * product


@pytest.mark.parametrize(
    ("operator", "families"),
    [
        (
            "attention",
            (
                "mask bool:11TS", "mask float32:BHTS", "padding", "causal", "causal from the end", "dropout", "window",
                "causal window", "range", "bias", "sink", "softcap", "all", "own heads", "double", "bfloat16",
                "appended keys",
            ),
        ),
        ("attention_backward", ("mask bool:11TS", "padding", "causal", "dropout", "window", "range", "sink", "all")),
        ("attention_jvp", ("mask bool:11TS", "padding", "causal", "dropout", "window", "range", "softcap")),
        ("attention_backward_jvp", ("mask bool:11TS", "padding", "causal", "dropout", "window", "range", "softcap")),
        ("attention_weights_backward", ("mask bool:11TS", "padding", "causal", "dropout", "window", "all")),
    ],
)  # fmt: skip
def test_masks_order_and_windows_do_not_change_the_count(operator: str, families: tuple[str, ...]) -> None:
    counts = {family: counted(operator, family) for family in families}
    want = counted(operator, "plain")
    assert {family: n for family, n in counts.items() if n != want and family != "bfloat16"} == {}


# ------------------------------------------------------------------------------------------ against PyTorch's math path
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("options", "shared"),
    [(o, n) for o in VARIANTS for n in (0, 1, 2) if n == 0 or not {"kdim", "vdim"} & o.keys()],  # one width to share
    ids=str,
)
def test_layer_counts_as_the_original_on_its_math_path(
    options: dict[str, Any], shared: int, need_weights: bool
) -> None:
    """Forward the same; with backward one product Q Kᵀ more, over appended keys too."""
    ours, theirs = pair(**options)
    inputs = inputs_for(ours, shared)
    keys = (5 if shared == 2 else 7) + options.get("add_bias_kv", False) + options.get("add_zero_attn", False)
    with sdpa_kernel(SDPBackend.MATH):
        with torch.no_grad():
            want = count(lambda: theirs(*inputs, need_weights=need_weights))
            got = count(lambda: ours(*inputs, need_weights=need_weights))
        want_trained = count(trained(theirs, inputs, need_weights=need_weights))
    assert got == want
    again = 2 * 2 * 5 * keys * EMBED
    assert count(trained(ours, inputs, need_weights=need_weights)) == want_trained + again


@pytest.mark.parametrize("options", SHARED_HEADS, ids=str)
def test_grouped_layers_by_hand(options: dict[str, Any]) -> None:
    """The scores of all query heads, projections of the heads that there are."""
    module = make(**options)
    head_dim, kv_heads = options.get("head_dim", EMBED // HEADS), options["num_kv_heads"]
    kdim, vdim = options.get("kdim", EMBED), options.get("vdim", EMBED)
    wide = HEADS * head_dim
    projections = 2 * 2 * (2 * 5 * EMBED * wide + 7 * kv_heads * head_dim * (kdim + vdim))
    product = 2 * 2 * 5 * (7 + options.get("add_bias_kv", False)) * wide
    inputs = inputs_for(module)
    assert count(lambda: module(*inputs, need_weights=False)) == projections + 2 * product
    assert count(trained(module, inputs, need_weights=False)) == 3 * projections + 7 * product


@pytest.mark.parametrize("need_weights", [True, False])
def test_masks_of_a_layer_do_not_change_the_count(need_weights: bool) -> None:
    module = make()
    inputs = inputs_for(module, 2)
    masks: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"attn_mask": causal_mask(5)},
        {"attn_mask": causal_mask(5, dtype=torch.float64), "key_padding_mask": last_hidden(2, 5)},
    ]
    counts = {count(trained(module, inputs, need_weights=need_weights, **m)) for m in masks}
    assert len(counts) == 1 and counts.pop() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_count_as_float32(dtype: torch.dtype) -> None:
    counts = set()
    for kind in (torch.float32, dtype):
        module = make(dtype=kind)
        inputs = tuple(x.to(kind) for x in inputs_for(module, 1))
        counts.add(count(trained(module, inputs, need_weights=False)))
    assert len(counts) == 1


def test_functions_by_hand() -> None:
    q, k, v = torch.randn(B, H, T, D), torch.randn(B, G, S, D), torch.randn(B, G, S, DV)
    assert count(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)) == PRODUCT * (D + DV)
    options: dict[str, Any] = {"is_causal": True, "window": (2, 0), "return_weights": "mean", "enable_gqa": True}
    assert count(lambda: scaled_dot_product_attention(q, k, v, **options)) == PRODUCT * (D + DV)
    x, starts = torch.randn(12, H, D), torch.tensor([0, 5, 12])
    # Packed: the pairs of all tokens, as the one call has them; sequences are a range of keys for each query.
    assert count(lambda: varlen_attention(x, x, x, starts, starts, 7, 7)) == 2 * H * 12 * 12 * 2 * D


# ----------------------------------------------------------------------------------------------- graphs and no data
def test_meta_tensors_and_traced_graphs_count_the_same() -> None:
    module = make()
    inputs = inputs_for(module, 1)
    want = count(trained(module, inputs, need_weights=False))
    moved = make(device="meta")
    on_meta = {id(x): x.to("meta") for x in inputs}
    assert count(trained(moved, tuple(on_meta[id(x)] for x in inputs), need_weights=False)) == want

    def gradients(*leaves: Tensor) -> tuple[Tensor, ...]:
        out = module(leaves[0], leaves[1], leaves[1], need_weights=False)[0]
        return torch.autograd.grad(out.sum(), (*leaves, *module.parameters()))

    leaves = [x.detach().requires_grad_() for x in inputs[:2]]
    graph = make_fx(gradients, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*leaves)
    with torch.no_grad():  # a graph that holds a backward pass would be differentiated again
        assert count(lambda: graph(*leaves)) == want


@pytest.mark.parametrize("need_weights", [True, False])
def test_compiled_graphs_count_the_same(need_weights: bool) -> None:
    """The forward graph that a backend of ``torch.compile`` is given."""
    module, graphs = make().requires_grad_(False), []
    inputs = inputs_for(module, 1)

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append((graph, examples))
        return graph.forward

    torch.compile(lambda *given: module(*given, need_weights=need_weights)[0], backend=backend, fullgraph=True)(*inputs)
    want = count(lambda: module(*inputs, need_weights=need_weights))
    ((graph, examples),) = graphs
    with torch.no_grad():
        assert count(lambda: graph(*examples)) == want


def test_long_sequences_are_counted_on_the_meta_device() -> None:
    q, k = (torch.empty(1, 1, 10**6, 8, device="meta") for _ in range(2))
    assert count(lambda: ops.attention(q, k, k, causal=1)) == 2 * 10**12 * 16


def test_second_order_is_more_than_first() -> None:
    """Every tangent adds products, none takes one away."""
    every, few = attention_calls("attention_backward_jvp", "plain")
    counts = [count(lambda c=c: ops.attention_backward_jvp(*c.args, **c.kwargs)) for c in (few, every)]
    assert counted("attention_backward", "plain") < counts[1] and counts[0] < counts[1]
