"""Bool masks made of blocks: whole tiles hidden, shown, or mixed, in a mask that several heads share."""

from __future__ import annotations

import pytest
import torch
from cases import Case, build, check
from switches import cpu_capability

import mha_ext

CASES = [
    Case(2, 4, 2, 200, 330, 8, mask="bool:11TS"),
    Case(2, 4, 4, 130, 257, 8, mask="bool:B1TS", causal=1),
    Case(4, 2, 2, 97, 130, 8, mask="bool:1HTS", padding="bool"),
    Case(2, 2, 1, 300, 200, 8, mask="bool:11TS", appended=2),
]


@pytest.mark.parametrize("capability", mha_ext.available_cpu_capabilities())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_that_are_hidden_shown_or_mixed(
    case: Case, transposed: bool, dtype: torch.dtype, capability: str
) -> None:
    problem = build(Case(**{**case.__dict__, "dtype": dtype}))
    mixed = problem.attn_mask
    g = torch.Generator().manual_seed(1)
    for top in range(0, mixed.shape[2], 64):
        for left in range(0, mixed.shape[3], 64):
            block = mixed[:, :, top : top + 64, left : left + 64]
            kind = int(torch.randint(3, (1,), generator=g))
            if kind < 2:
                block.fill_(bool(kind))
    problem.attn_mask = mixed.mT.contiguous().mT if transposed else mixed
    with cpu_capability(capability):
        check(problem)


@pytest.mark.parametrize("capability", mha_ext.available_cpu_capabilities())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "length"), [((0, 0), 130), ((5, 40), 200), ((100, 20), 333)])
@pytest.mark.parametrize("first_keys", [0, 10])
def test_a_mask_of_one_head_gives_the_bits_of_a_shared_one(
    window: tuple[int, int], length: int, first_keys: int, causal: bool, dtype: torch.dtype, capability: str
) -> None:
    """A map is made for a mask that several heads share; leaving pairs out by it changes no sum.

    With some first keys that all see, there are sums to rescale where a tile's first keys are left out.
    """
    torch.manual_seed(0)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = (distance <= window[0]) & (distance >= -window[1]) | (torch.arange(length) < first_keys)
    query, key, value = (torch.randn(1, 4, length, 24, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, 4, length, 24, dtype=dtype)

    def results(heads: slice) -> list[torch.Tensor]:
        parts = [x[:, heads] for x in (query, key, value)]
        out = mha_ext.functional.scaled_dot_product_attention(*parts, mask, is_causal=causal)
        return [out, *torch.autograd.grad(out, parts, grad[:, heads])]

    with cpu_capability(capability):
        together = results(slice(4))
        alone = [torch.cat(parts, 1) for parts in zip(*(results(slice(i, i + 1)) for i in range(4)), strict=True)]
    for found, want in zip(alone, together, strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("capability", mha_ext.available_cpu_capabilities())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("keys", [99, 129])
def test_appended_keys_behind_a_tile_that_the_map_hides(keys: int, dtype: torch.dtype, capability: str) -> None:
    """The tile cannot be left out, as the appended key is in it: the map's word does not stand in for the mask's."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, dtype=dtype, generator=g) for n in (40, keys + 1, keys + 1))
    nothing_visible = torch.zeros(1, 1, 40, keys, dtype=torch.bool)
    with cpu_capability(capability):
        out, lse = torch.ops.mha_ext.attention(q, k, v, nothing_visible, num_appended_keys=1)
    scores = (q.double() * k[:, :, -1:].double()).sum(-1) / 8**0.5
    torch.testing.assert_close(out, v[:, :, -1:].expand_as(out), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capability", mha_ext.available_cpu_capabilities())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_part_of_the_batch_gives_the_same_bits(dtype: torch.dtype, capability: str) -> None:
    """The mask serves two heads in all of the batch and one in a part of it, where it has no map."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, n, 20, dtype=dtype, generator=g) for n in (70, 300, 300))
    blocks = torch.rand(5, 19, generator=g) < 0.3
    mask = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)[None, None, :70, :300].contiguous()
    with cpu_capability(capability):
        whole, part = (torch.ops.mha_ext.attention(q[i:], k[i:], v[i:], mask)[0] for i in (0, 1))
    assert torch.equal(whole[1:], part)
