"""PyTorch's own scaled_dot_product_attention on our kernels: which calls they take, and that the results are right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_cases import COMPOSITION, OURS, PLAIN, TAKEN, Call, call, noise, ran, seen, truth
from cases import generator
from tolerances import assert_within, double_limit, peer_limit
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import mha_ext

pytestmark = pytest.mark.usefixtures("nothing_stays_active")


@pytest.mark.parametrize("name", TAKEN)
def test_calls_run_the_kernels_and_are_right(name: str) -> None:
    wanted = TAKEN[name].to(torch.float64)
    want, before = truth(wanted), wanted()
    with mha_ext.activate():
        names = ran(wanted)
        got = wanted.results()
    assert OURS in names and COMPOSITION not in names
    assert (got[0].shape, got[0].stride()) == (before.shape, before.stride())
    for have, exact in zip(got, want, strict=True):
        assert_within(have, exact, double_limit(exact, 13 * 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "float mask", "bool mask", "wide values", "3-D"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """Within twice the error of PyTorch's composition in the same dtype."""
    rounded = TAKEN[name].to(dtype)
    want, peer = truth(rounded), None
    with sdpa_kernel(SDPBackend.MATH):
        peer = rounded.results()
    with mha_ext.activate():
        assert OURS in ran(rounded)
        got = rounded.results()
    for have, exact, other in zip(got, want, peer, strict=True):
        assert have.dtype == dtype
        assert_within(have, exact, peer_limit(other, exact, dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_float32_mask_goes_with_every_dtype(dtype: torch.dtype) -> None:
    mask = noise(1, 4, 9, 13).float().requires_grad_()
    wanted = PLAIN.to(dtype)._replace(options={"attn_mask": mask})
    want = truth(wanted)
    with mha_ext.activate():
        assert OURS in ran(wanted)
        out, *grads = wanted.results()
    assert out.dtype == dtype and grads[3].dtype == torch.float32
    # bfloat16: one rounding of inputs to the last product and of the output, each 2^-8, on sums of 13 terms
    assert_within(out, want[0], 2**-7 * 13**0.5 if dtype == torch.bfloat16 else double_limit(want[0], 13 * 8))
    assert_within(
        grads[3], want[4], 2**-7 * 13**0.5 if dtype == torch.bfloat16 else 2**-24 * float(want[4].abs().max())
    )


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context: Callable[[], Any]) -> None:
    """In inference mode only PyTorch's flash attention can be replaced; the bits of the result show by whom."""
    want = truth(TAKEN["causal"])[0]
    ours = mha_ext.functional.scaled_dot_product_attention(*PLAIN[:3], is_causal=True)
    three = TAKEN["3-D"]
    with mha_ext.activate(), context():
        wanted = Call(*(x.clone() for x in PLAIN[:3]), {"is_causal": True})
        assert_within(wanted(), want, double_limit(want, 13 * 8))
        assert torch.equal(wanted(), ours)
        out = Call(*(x.clone() for x in three[:3]), three.options)()
    assert_within(out, truth(three)[0], double_limit(out, 13 * 8))


COMPOSED = {
    "dropout": Call(*TAKEN["layer's strides"][:3], {"dropout_p": 0.25}),
    **{name: TAKEN[name] for name in ("float mask with gradient", "wide values", "3-D", "odd strides")},
}


@pytest.mark.parametrize("name", COMPOSED)
def test_outputs_of_compositions_may_be_viewed_and_written(name: str) -> None:
    """As PyTorch's may: they are contiguous, and no backward pass reads them."""
    wanted = COMPOSED[name].to(torch.float64)
    with mha_ext.activate():
        torch.manual_seed(3)
        out = wanted()
        want = torch.autograd.grad(out.sum(), wanted.leaves())
        torch.manual_seed(3)
        written = wanted()
        written.view(-1, written.shape[-1]).mul_(3.0)
    for have, exact in zip(torch.autograd.grad(written.sum() / 3, wanted.leaves()), want, strict=True):
        assert_within(have, exact, double_limit(exact, 13 * 8))


def test_dropout_is_the_kernels_own() -> None:
    """The same seed drops the same pairs as in our function, and the kept weights are scaled."""
    options = {"dropout_p": 0.25}
    with mha_ext.activate():
        assert COMPOSITION not in ran(PLAIN._replace(options=options))
        torch.manual_seed(7)
        got = PLAIN._replace(options=options).to(torch.float64).results()
    torch.manual_seed(7)
    query, key, value = (x.clone().requires_grad_() for x in PLAIN[:3])
    out, weights = mha_ext.functional.scaled_dot_product_attention(
        query, key, value, **options, return_weights="per_head"
    )
    assert_within(got[0], out.detach(), double_limit(out.detach(), 13))
    full = torch.softmax(query @ key.mT / 8**0.5, -1)
    kept = weights != 0
    assert 0.65 < kept.double().mean() < 0.85  # 936 draws at 0.75: 7 standard deviations
    assert_within(weights, torch.where(kept, full / 0.75, 0.0), double_limit(full, 8))
    grad_out = torch.randn(out.shape, generator=generator(9), dtype=torch.float64)
    want = torch.autograd.grad((torch.where(kept, full / 0.75, 0.0) @ value), (query, key, value), grad_out)
    for have, exact in zip(got[1:], want, strict=True):
        assert_within(have, exact, double_limit(exact, 13 * 8))


def test_hidden_values_reach_nothing() -> None:
    """What PyTorch's own road lets through: NaN behind a mask, and a query that sees nothing."""
    query, key, value = (x.clone() for x in PLAIN[:3])
    mask = torch.ones(9, 13, dtype=torch.bool)
    mask[:, 5:], mask[3] = False, False
    want = truth(Call(query, key[:, :, :5], value[:, :, :5], {}))
    key[:, :, 5:], value[:, :, 5:] = torch.nan, torch.inf
    with mha_ext.activate():
        got = Call(query, key, value, {"attn_mask": mask}).to(torch.float64).results()
    rows = [i for i in range(9) if i != 3]
    assert_within(got[0][:, :, rows], want[0][:, :, rows], double_limit(want[0], 13 * 8))
    assert not got[0][:, :, 3].any()
    assert all(bool(x.isfinite().all()) for x in got) and not got[2][:, :, 5:].any()


def test_pytorchs_modules_run_the_kernels() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True, dtype=torch.float64)
    x = noise(2, 7, 16)
    with mha_ext.activate():
        assert OURS in ran(lambda: layer(x).sum().backward())
        attention = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
        assert OURS in ran(lambda: attention(x, x, x, need_weights=False))


def test_autocast() -> None:
    single = PLAIN.to(torch.float32)
    with mha_ext.activate(), torch.autocast("cpu", torch.bfloat16):
        assert OURS in ran(single)
        out = single()
    assert out.dtype == torch.bfloat16
    want = truth(Call(*(x.to(torch.bfloat16) for x in single[:3]), {}))[0]
    assert_within(out, want, 4 * 2**-9 * float(want.detach().abs().max()))  # one rounding of the output, and sums


def test_derivatives_of_every_kind() -> None:
    """Double backward, forward mode and transforms, of which PyTorch's flash attention has none."""
    small = call((1, 2, 3, 2), (1, 2, 4, 2), (1, 2, 4, 2))
    leaves = tuple(x.clone().requires_grad_() for x in small[:3])

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    with mha_ext.activate():
        assert torch.autograd.gradcheck(causal, leaves, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(causal, leaves)
        batch = tuple(torch.stack([x.detach(), 2 * x.detach()]) for x in leaves)
        mapped = torch.vmap(causal)(*batch)
        for i in range(2):
            assert_within(mapped[i], causal(*(x[i] for x in batch)), double_limit(mapped, 8))
        grad = torch.func.grad(lambda q: causal(q, *leaves[1:]).sin().sum())(leaves[0].detach())
    (want,) = torch.autograd.grad(causal(*leaves).sin().sum(), leaves[0])
    assert_within(grad, want, double_limit(want, 8))


def test_a_mask_beside_the_causal_flag() -> None:
    """PyTorch's flash attention applies both, its composition refuses them: nothing of that changes."""
    mask = seen(9, 13)
    want = truth(PLAIN._replace(options={"attn_mask": mask.tril()}))
    with mha_ext.activate():
        got = PLAIN._replace(options={"attn_mask": mask, "is_causal": True}).to(torch.float64).results()
    for have, exact in zip(got, want, strict=True):
        assert_within(have, exact, double_limit(exact, 13 * 8))


@pytest.mark.parametrize("first", [True, False])
def test_switching_between_forward_and_backward(first: bool) -> None:
    """Either kernel's output and log-sum-exp serve the other's backward, also for a query that sees nothing."""
    mask = seen(2, 1, 9, 13)
    mask[0, 0, 2] = False
    wanted = Call(*PLAIN[:3], {"attn_mask": mask}).to(torch.float64)
    exact = truth(wanted)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    grad_out = torch.randn(exact[0].shape, generator=generator(9), dtype=torch.float64)
    with mha_ext.activate() if first else nullcontext():
        out, _ = operator(*wanted[:3], attn_mask=bias)
    if not first:
        mha_ext.activate()
    got = torch.autograd.grad(out, wanted[:3], grad_out)
    for have, want in zip((out, *got), exact, strict=True):
        assert_within(have, want, double_limit(want, 13 * 8))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_programs_follow_the_switch(backend: str) -> None:
    """They hold PyTorch's operator; NaN behind a mask tells who computes it."""
    query, key, value = (x.clone() for x in PLAIN[:3])
    mask = torch.ones(9, 13, dtype=torch.bool)
    mask[:, 5:] = False
    value[:, :, 5:] = torch.nan
    compiled = torch.compile(lambda: F.scaled_dot_product_attention(query, key, value, mask), backend=backend)
    want = truth(Call(query, key[:, :, :5], value[:, :, :5], {}))[0]
    with mha_ext.activate():
        assert_within(compiled(), want, double_limit(want, 13 * 8))
    assert compiled().isnan().any()


def test_exported_programs_come_apart_as_before() -> None:
    class Program(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*tensors, is_causal=True)

    def operators() -> list[str]:
        graph = torch.export.export(Program(), tuple(PLAIN[:3])).run_decompositions().graph
        return [str(node.target) for node in graph.nodes]

    before = operators()
    with mha_ext.activate():
        assert operators() == before


def test_traced_programs_follow_the_switch() -> None:
    traced = torch.jit.trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), PLAIN[:3])
    assert OURS not in ran(lambda: traced(*PLAIN[:3]))
    with mha_ext.activate():
        assert OURS in ran(lambda: traced(*PLAIN[:3]))
