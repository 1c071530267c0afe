"""Every instruction set this machine has, forced by name, over one compact grid; and the choice of one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from cases import DTYPES, Case, build, check, run
from switches import cpu_capability, threads

import mha_ext

CAPABILITIES = mha_ext.available_cpu_capabilities()
GRID = [
    Case(1, 2, 2, 1, 1, 1, 1),
    Case(2, 4, 2, 17, 33, 8, 5, causal=1),
    Case(1, 2, 1, 65, 130, 64, 64, causal=2, mask="bool:B1TS"),
    Case(1, 2, 2, 130, 66, 24, 40, mask="float32:1HTS", padding="bool"),
    Case(2, 2, 2, 15, 257, 33, 7, padding="float32", causal=1, appended=2),
    Case(1, 4, 1, 48, 63, 128, 96, dropout_p=0.3),
    Case(2, 2, 2, 31, 64, 160, 256, layout="columns"),
    Case(1, 3, 3, 33, 65, 17, 80, mask="bool:BHTS", layout="stepped", dropout_p=0.1),
    Case(2, 2, 2, 16, 48, 3, 2, layout="offset", scale=-1.5),
    Case(2, 4, 2, 3, 530, 24, 40, mask="float32:B1TS", padding="bool", causal=2, dropout_p=0.2),
]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(capability: str, dtype: torch.dtype, case: Case) -> None:
    with cpu_capability(capability):
        assert mha_ext.cpu_capability() == capability
        check(build(Case(**{**case.__dict__, "dtype": dtype})))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_behind_masks_and_empty_rows(capability: str, dtype: torch.dtype) -> None:
    problem = build(Case(2, 2, 2, 40, 70, 16, dtype=dtype, mask="bool:B1TS", causal=1))
    problem.attn_mask[..., 20:25] = False
    with cpu_capability(capability):
        clean = run(problem)
        problem.key[:, :, 20:25], problem.value[:, :, 20:25] = float("nan"), float("inf")
        dirty = run(problem)
    for a, b in zip([*clean[:2], *clean[2].values()], [*dirty[:2], *dirty[2].values()], strict=True):
        assert torch.equal(a, b)
    assert not clean[0][:, :, 1].any()


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001])
def test_a_nan_of_any_bits_stays_one(capability: str, dtype: torch.dtype, bits: int) -> None:
    problem = build(Case(1, 2, 2, 40, 70, 16, dtype=dtype, mask="float32:11TS"))
    problem.attn_mask[0, 0, 3, 5] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    with cpu_capability(capability):
        out, lse, grads = run(problem)
    row_three = torch.arange(40) == 3
    for rows in (out, lse[..., None], grads["query"]):
        assert torch.equal(rows.isnan().all(-1), row_three.expand(rows.shape[:-1]))
        assert not rows[:, :, ~row_three].isnan().any()


def large_numbers() -> dict[str, tuple[list[torch.Tensor], float]]:
    """Query, key, value and the gradient of the output, with a scale: numbers far from 1 whose results are finite."""
    torch.manual_seed(0)
    late = [torch.ones(1, 1, 32, 32), torch.zeros(1, 1, 128, 32), torch.zeros(1, 1, 128, 32), torch.ones(1, 1, 32, 32)]
    late[1][:, :, 100], late[2][:, :, 100], late[3] = 7.9 / 32, 1e36, late[3] * 1e-37
    keys = torch.randn(1, 1, 64, 64).sign() * (1 + torch.rand(1, 1, 64, 64)) * 1e-37  # subnormal ones may be zeros
    queries = [torch.full((1, 1, 32, 64), 1e37), keys, torch.randn(1, 1, 64, 64), torch.randn(1, 1, 32, 64) * 6]
    return {"value behind a late maximum": (late, 1.0), "query": (queries, 0.125)}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", large_numbers())
def test_large_numbers_with_finite_results_stay_finite(capability: str, name: str) -> None:
    numbers, scale = large_numbers()[name]
    halves = [x.bfloat16() for x in numbers]
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        query, key, value = (x.to(dtype).requires_grad_() for x in halves[:3])
        if dtype == torch.float64:
            out = torch.softmax(scale * query @ key.mT, -1) @ value
        else:
            with cpu_capability(capability):
                out = torch.ops.mha_ext.attention(query, key, value, scale=scale)[0]
        with cpu_capability(capability):
            grads = torch.autograd.grad(out, (query, key, value), halves[3].to(dtype))
        results.append([out.detach().double(), *(grad.double() for grad in grads)])
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7 * float(want.abs().max()))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_dropout_mask_is_the_same_everywhere(capability: str) -> None:
    zeros, value = torch.zeros(1, 2, 70, 4), torch.eye(70).expand(1, 2, 70, 70)
    kept = []
    for name in ("default", capability):
        with cpu_capability(name):
            out = torch.ops.mha_ext.attention(zeros, zeros, value, dropout_seed=torch.tensor([9]), dropout_p=0.4)[0]
            kept.append(out != 0)
    assert torch.equal(*kept)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_thread_count_changes_no_bit(capability: str) -> None:
    problem = build(Case(1, 2, 1, 200, 170, 24, 24, mask="float32:11TS", causal=1, dropout_p=0.2))
    results = []
    with cpu_capability(capability):
        for count in (1, 2):
            with threads(count):
                out, lse, grads = run(problem)
                results.append([out, lse, *grads.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_grid(capability: str, dtype: torch.dtype) -> None:
    with cpu_capability(capability):
        for i, dim in enumerate((1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 33, 40, 63, 64, 65, 80, 96, 128, 129, 160, 256)):
            for queries, keys in ((1, 257), (33, 65), (129, 31)):
                check(build(Case(1, 2, 1, queries, keys, dim, dim + i % 3, dtype, "float32:11TS", "bool", i % 3)))


def test_the_portable_path_is_always_there_and_comes_first() -> None:
    assert CAPABILITIES[0] == "default" and len(set(CAPABILITIES)) == len(CAPABILITIES)
    assert mha_ext.cpu_capability() in CAPABILITIES


@pytest.mark.skipif("emulated" in mha_ext.build_info(), reason="this build offers what it emulates anywhere")
def test_what_the_processor_lists_is_offered() -> None:
    with open("/proc/cpuinfo") as f:
        flags = next((line for line in f if line.startswith("flags")), "").split()
    assert ("avx2" in CAPABILITIES) == ({"avx2", "fma", "f16c"} <= set(flags))
    assert ("avx512" in CAPABILITIES) == ({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"} <= set(flags))
    assert ("avx512_bf16" in CAPABILITIES) == ("avx512" in CAPABILITIES and "avx512_bf16" in flags)
    has_amx = {"amx_tile", "amx_bf16"} <= set(flags) and may_use_tiles()
    assert ("amx" in CAPABILITIES) == ("avx512" in CAPABILITIES and has_amx)


def may_use_tiles() -> bool:
    """Whether Linux gives this process AMX: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), on x86-64."""
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


@pytest.mark.parametrize("name", ["sse9", "", "AVX2 "])
def test_unknown_names_are_refused_and_change_nothing(name: str) -> None:
    before = mha_ext.cpu_capability()
    with pytest.raises(ValueError, match=r"set_cpu_capability: name must .*default.*, got"):
        mha_ext.set_cpu_capability(name)
    assert mha_ext.cpu_capability() == before


def started_with(value: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "MHA_EXT_CPU_CAPABILITY"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if value is not None:
        environment["MHA_EXT_CPU_CAPABILITY"] = value
    code = "import mha_ext; print(mha_ext.cpu_capability())"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=os.sep,  # away from the checkout, whose build need not be the one that is tested
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_environment_chooses_at_start_and_the_best_is_the_default() -> None:
    assert started_with(None).stdout.strip() == CAPABILITIES[-1]
    for name in CAPABILITIES:
        assert started_with(name).stdout.strip() == name


def test_an_unknown_name_in_the_environment_is_said() -> None:
    result = started_with("sse9")
    assert "MHA_EXT_CPU_CAPABILITY" in result.stderr and "sse9" in result.stderr
