"""Builds the extension module ``mha_ext._C``; everything else about the project is in pyproject.toml.

Sources that use an instruction set beyond the baseline are compiled with their own flags (``ISA_FLAGS``), all others
with torch's flags. ``MHA_EXT_CXXFLAGS`` adds flags to every compilation and to the link.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"mha_ext needs setuptools 77 or newer, found {setuptools.__version__}: pip install -U setuptools")
try:
    import torch
    from torch.utils import cpp_extension
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(
        "mha_ext is compiled against the PyTorch it will run with, and this build environment has none. "
        "Install torch first (pip install torch==2.13.0), then: pip install --no-build-isolation ."
    )
from setuptools.modified import newer_group

ROOT = Path(__file__).resolve().parent
KERNELS = "csrc/cpu/kernels"
BUILD_INFO = "mha_ext/_build_info.json"  # what the extension was built for, readable when it does not load
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
# One line per instruction set: source -> flags. The x86 sources are left out on other processors.
ISA_FLAGS = {
    f"{KERNELS}/scalar.cpp": [],
    f"{KERNELS}/avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    f"{KERNELS}/avx512.cpp": AVX512_FLAGS,
    f"{KERNELS}/avx512_bf16.cpp": [*AVX512_FLAGS, "-mavx512bf16"],
    f"{KERNELS}/amx.cpp": [*AVX512_FLAGS, "-mamx-tile", "-mamx-bf16"],
}
# What the assembler, which may be older than the compiler, has to take as well.
PROBES = {f"{KERNELS}/amx.cpp": '__asm__("tdpbf16ps %tmm2, %tmm1, %tmm0");'}
KERNEL_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fno-exceptions",
    "-fPIC",
    "-fvisibility=hidden",
]
# Without -fopenmp at::parallel_for silently runs on one thread.
CXX_FLAGS = ["-std=c++20", "-O2", "-g0", "-fopenmp", "-fvisibility=hidden"] + (["-DMHA_EXT_X86"] if IS_X86 else [])
WARNINGS = ["-Wall", "-Wextra"]


@cache
def isa_sources() -> list[str]:
    """The instruction-set sources of this processor family that the compiler has the instructions for."""
    sources = [f"{KERNELS}/scalar.cpp"]
    for source, needed in ISA_FLAGS.items() if IS_X86 else ():
        if source in sources:
            continue
        if compiles(needed, PROBES.get(source, "")):
            sources.append(source)
        else:
            flags = " ".join(needed)
            print(f"mha_ext: {' '.join(compiler())} does not take {flags}: built without {source}", file=sys.stderr)
    return sources


def compiles(flags: list[str], text: str) -> bool:
    """Whether the compiler takes the flags, and with them a text."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*compiler(), *flags, "-x", "c++", "-c", "-", "-o", str(Path(folder, "probe.o"))]
        return subprocess.run(command, input=text.encode(), stderr=subprocess.DEVNULL, check=False).returncode == 0


class BuildExtension(cpp_extension.BuildExtension):
    """Compiles each instruction-set source with its own flags, hands over the objects, records what was built for."""

    def build_extensions(self) -> None:
        """Build the kernels' objects, then the extension that links them."""
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            self.extensions[0].extra_objects = list(pool.map(self.compile_kernel, isa_sources()))
        super().build_extensions()
        info = {"torch": torch.__version__, "python": platform.python_version(), "compiler": " ".join(compiler())}
        Path(self.build_lib, BUILD_INFO).write_text(json.dumps(info) + "\n")

    def compile_kernel(self, source: str) -> str:
        """Compile one instruction-set source unless its object is newer than it, the kernels' headers and this file."""
        target = Path(self.build_temp, source).with_suffix(".o")
        headers = [str(path) for path in (ROOT / KERNELS).glob("*.h")]
        if newer_group([source, *headers, __file__], str(target)):
            target.parent.mkdir(parents=True, exist_ok=True)
            flags = [*KERNEL_FLAGS, *ISA_FLAGS[source], *WARNINGS, *extra_flags()]
            self.spawn([*compiler(), *flags, "-c", source, "-o", str(target)])
        return str(target)

    def copy_extensions_to_source(self) -> None:
        """Copy the build record next to the extension as well (in-place and editable builds)."""
        super().copy_extensions_to_source()
        self.copy_file(str(Path(self.build_lib, BUILD_INFO)), str(ROOT / BUILD_INFO))


def compiler() -> list[str]:
    """The command of the C++ compiler, the one that torch's build takes too."""
    return shlex.split(os.environ.get("CXX", "g++"))


def isa_macros() -> list[str]:
    """MHA_EXT_AVX2 for avx2.cpp and so on: which instruction sets are linked."""
    return [f"-DMHA_EXT_{Path(source).stem.upper()}" for source in isa_sources() if source != f"{KERNELS}/scalar.cpp"]


def extra_flags() -> list[str]:
    """Flags that the caller adds (warnings as errors, sanitizers)."""
    return shlex.split(os.environ.get("MHA_EXT_CXXFLAGS", ""))


def extension() -> setuptools.Extension:
    """The extension module, its headers among the dependencies; torch's own are system headers (no warnings)."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file())
    system_includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    return cpp_extension.CppExtension(
        "mha_ext._C",
        [name for name in files if name.endswith(".cpp") and name not in ISA_FLAGS],
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=[*CXX_FLAGS, *isa_macros(), *WARNINGS, *system_includes, *extra_flags()],
        extra_link_args=["-fopenmp", "-Wl,-z,now", *extra_flags()],
        depends=[*files, "setup.py"],
    )


if __name__ == "__main__":
    os.environ.setdefault("CXX", "g++")
    # torch looks for ninja on PATH, where that of an environment that is not activated is missing.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    os.chdir(ROOT)
    setuptools.setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExtension})
