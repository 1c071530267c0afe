"""Small layers: the products of a few rows, and calls past torch.ops, which must not be seen in any result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import ops
from layer_cases import EMBED, HEADS
from switches import cpu_capability, threads
from tolerances import assert_within, growth, peer_limit, roundoff
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tracing import FUSED, WITH_WEIGHTS, Operators

import mha_ext
from mha_ext import MultiheadAttention, _ops


def random(*shape: int, dtype: torch.dtype, layout: str) -> Tensor:
    """Numbers that do not lie one beside the other where ``layout`` is ``"turned"``."""
    if layout == "turned":
        return torch.randn(*shape[::-1], 2, dtype=dtype)[..., 0].permute(*reversed(range(len(shape))))
    return torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize("capability", mha_ext.available_cpu_capabilities())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["rows", "turned"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("embed", [1, 5, 16, 43, 600])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 33, 128, 129])
def test_products_of_few_and_of_many_rows(
    capability: str, dtype: torch.dtype, layout: str, bias: bool, embed: int, rows: int
) -> None:
    """One query and one key: the weight is 1, and what is left of the layer are its products, with known errors."""
    torch.manual_seed(0)
    width, embed_out = 2 * 7, embed + 2
    x = torch.randn(rows, 1, embed, dtype=dtype)
    in_weight = random(3 * width, embed, dtype=dtype, layout=layout)
    out_weight = random(embed_out, width, dtype=dtype, layout=layout)
    in_bias = random(3 * width, dtype=dtype, layout=layout) if bias else None
    out_bias = random(embed_out, dtype=dtype, layout=layout) if bias else None
    with cpu_capability(capability), threads(1):
        out, packed, *_ = ops.multi_head_attention(
            x, x, x, in_weight, in_bias, out_weight, out_bias, num_heads=2, num_kv_heads=2, shared_inputs=2
        )

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The product in float64, and how far a sum of its length may be off."""
        x, weight = x.double(), weight.double()
        bias = torch.zeros((), dtype=torch.float64) if bias is None else bias.double()
        size = x.abs() @ weight.abs().mT + bias.abs()
        return x @ weight.mT + bias, (growth(weight.shape[1] + 1, dtype) + roundoff(dtype)) * size

    want, limit = product(x, in_weight, in_bias)
    assert_within(packed, want, limit, "projections")
    value, value_limit = want[..., 2 * width :], limit[..., 2 * width :]
    want, limit = product(value, out_weight, out_bias)
    # The attention itself multiplies by a weight of 1 that is rounded, and so is what it writes.
    carried = (value_limit + 8 * roundoff(dtype) * value.abs()) @ out_weight.double().abs().mT
    assert_within(out, want, limit + carried, "output")


def layer(**options: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    return MultiheadAttention(EMBED, HEADS, batch_first=True, **options).eval()


def arguments(attention: MultiheadAttention, *inputs: Tensor) -> list[Any]:
    parameters = [attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias]
    return [*inputs, *parameters, None, None, None, EMBED, HEADS, HEADS, True, 0.0, 0]


def inputs(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    x, key, value = torch.randn(2, 3, EMBED), torch.randn(2, 5, EMBED), torch.randn(2, 5, EMBED)
    return {"self": (x, x, x), "key is value": (x, key, key), "separate": (x, key, value)}[kind]


@pytest.mark.parametrize("kind", ["self", "key is value", "separate"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_direct_calls_give_the_operators_results(kind: str, is_causal: bool) -> None:
    attention, given = layer(), inputs(kind)
    shared = ["separate", "key is value", "self"].index(kind)
    given_arguments = [*arguments(attention, *given)[:-1], int(is_causal)]
    want = ops.multi_head_attention(
        *given_arguments[:10], num_heads=HEADS, num_kv_heads=HEADS, shared_inputs=shared, causal=int(is_causal)
    )[0]
    out = _ops.layer_directly(*given_arguments)
    with torch.no_grad():
        results = _ops.layer_with_weights_directly(*given_arguments, False)
    assert out is not None and results is not None
    assert torch.equal(out, want)
    assert torch.equal(attention(*given, need_weights=False, is_causal=is_causal)[0], want)
    peers = []
    for dtype in (torch.float32, torch.float64):  # by PyTorch's layer, which wants the causal mask
        peer = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=dtype)
        peer.load_state_dict(attention.state_dict())
        hidden = torch.ones(3, given[1].shape[1], dtype=torch.bool).triu(1) if is_causal else None
        peers.append(peer(*[x.to(dtype) for x in given], attn_mask=hidden, average_attn_weights=False))
    for name, found, rounded, exact in zip(("output", "weights"), results, *peers, strict=True):
        assert_within(found, exact, peer_limit(rounded, exact, torch.float32), name)
    grads = [torch.autograd.grad(result.sum(), attention.in_proj_weight)[0] for result in (out, want)]
    assert torch.equal(*grads)


class Sub(Tensor):
    pass


REFUSED: dict[str, tuple[int, Any]] = {
    "a subclass": (0, torch.randn(2, 3, EMBED).as_subclass(Sub)),
    "two axes": (0, torch.randn(3, EMBED)),
    "another width": (1, torch.randn(2, 3, EMBED + 1)),
    "another batch": (1, torch.randn(3, 3, EMBED)),
    "another dtype": (2, torch.randn(2, 3, EMBED).double()),
    "no tensor": (0, [1.0]),
    "sparse": (0, torch.randn(2, 3, EMBED).to_sparse()),
    "nested": (0, torch.nested.nested_tensor([torch.randn(3, EMBED)] * 2)),
    "no weight": (3, None),
    "integers for a mask": (7, torch.ones(1, 1, 3, 3, dtype=torch.int64)),
    "another embed_dim": (10, EMBED + 1),
    "no heads": (11, 0),
    "a float for a number": (11, float(HEADS)),
    "a number beyond int64": (11, 1 << 70),
    "heads that do not divide": (12, HEADS - 1),
    "no bool": (13, 1),
    "an int for a probability": (14, 0),
    "dropout without a seed": (14, 0.5),
    "another causal order": (15, 7),
}


@pytest.mark.parametrize("name", REFUSED)
def test_direct_calls_decline_what_does_not_fit(name: str) -> None:
    place, given = REFUSED[name]
    x = torch.randn(2, 3, EMBED)
    changed = arguments(layer(), x, x, x)
    assert _ops.layer_directly(*changed) is not None
    changed[place] = given
    assert _ops.layer_directly(*changed) is None
    assert _ops.layer_with_weights_directly(*changed, True) is None


def test_direct_calls_want_all_arguments() -> None:
    with pytest.raises(TypeError, match="there must be 16 arguments, got 1"):
        _ops.layer_directly(torch.randn(2, 3, EMBED))
    with pytest.raises(TypeError, match="there must be 17 arguments, got 1"):
        _ops.layer_with_weights_directly(torch.randn(2, 3, EMBED))


class Functions(TorchFunctionMode):
    """Notes every function that PyTorch's modes for functions see."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_operator() -> None:
    attention, x = layer(), torch.randn(2, 3, EMBED)
    with Functions() as functions:
        attention(x, x, x, need_weights=False)
    assert any("multi_head_attention" in name for name in functions.names)
    for need_weights, operator in ((False, FUSED), (True, WITH_WEIGHTS)):
        with torch.no_grad(), Operators() as operators:
            attention(x, x, x, need_weights=need_weights)
        assert operators.counts[operator] == 1


def test_a_module_that_was_changed_takes_the_long_way() -> None:
    """What the short way does not read must still be looked at: here a width that no longer fits."""
    attention, x = layer(), torch.randn(2, 3, EMBED)
    attention.embed_dim = EMBED + 1
    with pytest.raises(ValueError, match="query must have last size"):
        attention(x, x, x, need_weights=False)


def test_weights_have_gradients_past_torch_ops() -> None:
    attention = layer().double()
    x = torch.randn(1, 3, EMBED, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with nn.utils.stateless._reparametrize_module(attention, {"in_proj_weight": weight}):
            out, weights = attention(x, x, x)
        return out, weights

    weight = attention.in_proj_weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(call, (x, weight))
