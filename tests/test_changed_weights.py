"""A layer that has answered before answers by its weights as they are now, however they were changed: nothing of a
weight is kept between calls, packed or cast, and this is what would fail if something were."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tolerances import peer_limit
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import mha_ext

EMBED, HEADS = 64, 4


def in_place(layer: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        layer.in_proj_weight.mul_(-2)
        layer.out_proj.weight[3:, 5:].add_(0.25)


def through_data(layer: nn.MultiheadAttention) -> None:
    """Which moves no version counter."""
    layer.in_proj_weight.data.mul_(-2)
    layer.out_proj.weight.data[3:, 5:].add_(0.25)


def assigned_data(layer: nn.MultiheadAttention) -> None:
    layer.in_proj_weight.data = layer.in_proj_weight.data.flip(0).clone()
    layer.out_proj.bias.data = layer.out_proj.bias.data + 1


def assigned_parameter(layer: nn.MultiheadAttention) -> None:
    layer.in_proj_weight = nn.Parameter(layer.in_proj_weight.detach().flip(1).clone())


def by_numpy(layer: nn.MultiheadAttention) -> None:
    """The memory itself."""
    layer.out_proj.weight.detach().view(torch.int16).numpy()[:] ^= -(2**15)


def loaded(layer: nn.MultiheadAttention) -> None:
    layer.load_state_dict({name: value.flip(0) for name, value in layer.state_dict().items()})


def assigned_state(layer: nn.MultiheadAttention) -> None:
    layer.load_state_dict({name: value.flip(0).clone() for name, value in layer.state_dict().items()}, assign=True)


def optimizer_step(layer: nn.MultiheadAttention) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    x = torch.randn(2, 3, EMBED, dtype=layer.in_proj_weight.dtype)
    with torch.enable_grad():
        layer(x, x, x)[0].float().square().sum().backward()
    optimizer.step()


def parametrized(layer: nn.MultiheadAttention) -> None:
    parametrizations.weight_norm(layer.out_proj)
    with torch.no_grad():
        layer.out_proj.parametrizations.weight.original0.mul_(3)


def swapped_storage(layer: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        layer.in_proj_weight.set_(layer.in_proj_weight.detach().roll(7, 0).clone())


CHANGES = (in_place, through_data, assigned_data, assigned_parameter, by_numpy, loaded, assigned_state, optimizer_step,
           parametrized, swapped_storage)  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), *((dtype, cast) for dtype in (torch.bfloat16, torch.float16) for cast in (False, True))],
)
@pytest.mark.parametrize("rows", [1, 6, 40, 400])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_seen(
    change: Callable[[nn.MultiheadAttention], None], autocast: bool, rows: int, dtype: torch.dtype
) -> None:
    """Beside the original with the same weights in float64, and by far more than rounding from what it was before."""
    torch.manual_seed(0)
    layer = mha_ext.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float32 if autocast else dtype)
    x = torch.randn(1, rows, EMBED, dtype=layer.in_proj_weight.dtype)

    def answer() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype if autocast else torch.bfloat16, enabled=autocast):
            return layer(x, x, x, need_weights=False)[0]

    layer.eval()
    with torch.no_grad():
        layer.out_proj.bias.normal_()
    answers = [answer(), answer()]
    change(layer)
    plain = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    if "out_proj.weight" not in plain:
        plain = {name: plain[name] for name in plain if "parametrizations" not in name}
        plain["out_proj.weight"] = layer.out_proj.weight.detach().clone()
    original = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64)
    original.load_state_dict({name: value.double() for name, value in plain.items()})
    lowered = copy.deepcopy(original).to(dtype)
    want = original(x.double(), x.double(), x.double(), need_weights=False)[0].detach()
    peer = lowered(*[x.to(dtype)] * 3, need_weights=False)[0]
    limit = peer_limit(peer, want, dtype)
    now = answer().double()
    assert torch.equal(answers[0], answers[1])
    assert float((now - want).abs().max()) <= limit
    assert float((now - answers[1].double()).abs().max()) > 2 * limit
