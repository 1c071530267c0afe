"""An attention layer compiled ahead of time by AOTInductor and run from C++, where no Python runs.

One command exports and compiles the layer, builds main.cpp beside this file, runs it on a batch and a length that the
export had not seen, and compares: ``python examples/aot_inductor/run.py``. It needs the C++ compiler that built the
extension, and a Python with a shared library (the extension is a Python module too, so its library names Python's).
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import cpp_extension

import mha_ext
from mha_ext import _C


class SelfAttention(nn.Module):
    """Causal self-attention, the output only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, T, E)`` to ``(B, T, E)``."""
        out: Tensor = self.layer(x, x, x, need_weights=False, is_causal=True)[0]
        return out


def package(model: nn.Module, folder: Path) -> Path:
    """Export a model of one ``(B, T, E)`` tensor for every batch and length, and compile it."""
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=1024)}
    example = torch.randn(3, 8, next(model.parameters()).shape[-1])
    with torch.no_grad():
        program = torch.export.export(model.eval(), (example,), dynamic_shapes=(sizes,))
        return Path(torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2")))


def build(folder: Path) -> Path:
    """Compile main.cpp against PyTorch's libraries and Python's."""
    python = sysconfig.get_config_vars()
    if not python.get("Py_ENABLE_SHARED"):
        raise SystemExit("this Python has no shared library, whose symbols the extension's library needs")
    folders = [*cpp_extension.library_paths(), python["LIBDIR"]]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", str(Path(__file__).with_name("main.cpp"))]
    command += [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    command += ["-o", str(folder / "main"), "-Wl,--no-as-needed"]
    command += [flag for path in folders for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    command += ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", f"-lpython{python['LDVERSION']}", "-ldl"]
    subprocess.run(command, check=True)
    return folder / "main"


def run(program: Path, model: Path, x: Tensor, folder: Path) -> Tensor:
    """What the C++ program makes of a float32 ``(B, T, E)``."""
    x.numpy().tofile(folder / "input")
    files = [_C.__file__, str(model), str(folder / "input"), str(folder / "output")]
    subprocess.run([str(program), *files, *map(str, x.shape)], check=True)
    return torch.from_numpy(np.fromfile(folder / "output", dtype=np.float32)).view(x.shape)


def main() -> None:
    """Export, compile, build, run, compare."""
    torch.manual_seed(0)
    model = SelfAttention(mha_ext.MultiheadAttention(64, 4, batch_first=True)).eval()
    x = torch.randn(5, 100, 64)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = run(build(folder), package(model, folder), x, folder)
    with torch.no_grad():
        difference = (out - model(x)).abs().max().item()
    print(f"from C++: {tuple(out.shape)}, largest difference to Python {difference:.1e}")
    if difference > 1e-6:
        raise SystemExit("the two differ")


if __name__ == "__main__":
    main()
