"""The machine code of the AMX kernels, run by the processor or, where it has no AMX, by catching each instruction
(tests/amx/traps.cpp): the same bits as from the instructions' emulation in C++, which other tests of a build with
-DMHA_EXT_EMULATE_AMX hold against float64.
"""

from __future__ import annotations

import runpy
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
KERNELS = "csrc/cpu/kernels/amx.cpp"
EMULATED = ["-DMHA_EXT_EMULATE_AMX", "-Dwith_amx=with_emulated_amx"]

pytestmark = pytest.mark.skipif(KERNELS not in BUILD["isa_sources"](), reason="needs a compiler with AMX, for x86")


def processor_flags() -> set[str]:
    text = Path("/proc/cpuinfo").read_text()
    return set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


def compile_object(source: Path, target: Path, flags: list[str]) -> Path:
    command = [*BUILD["compiler"](), "-std=c++20", "-O1", f"-I{ROOT / 'csrc'}", *flags, "-c", str(source)]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


@pytest.mark.skipif("avx2" not in processor_flags(), reason="needs AVX2")
def test_instructions_do_what_their_emulation_does(tmp_path: Path) -> None:
    kernel_flags = [flag for flag in BUILD["KERNEL_FLAGS"] if flag != "-O3"] + BUILD["ISA_FLAGS"][KERNELS]
    if "avx512bw" not in processor_flags():
        kernel_flags += ["-DMHA_EXT_EMULATE_AVX512", "-mno-avx512f", "-Wno-psabi"]
    jobs = [
        (ROOT / KERNELS, "instructions.o", kernel_flags),
        (ROOT / KERNELS, "emulated.o", kernel_flags + EMULATED),
        (ROOT / "csrc/cpu/amx_support.cpp", "support.o", ["-DMHA_EXT_AMX"]),
        (ROOT / "tests/amx/traps.cpp", "traps.o", ["-mfma"]),
        (ROOT / "tests/amx/program.cpp", "program.o", []),
    ]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda job: compile_object(job[0], tmp_path / job[1], job[2]), jobs))
    program = tmp_path / "program"
    subprocess.run([*BUILD["compiler"](), *map(str, objects), "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    expected = "run by the processor" if "amx_bf16" in processor_flags() else "caught"
    assert expected in result.stdout
