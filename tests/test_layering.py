"""The shape of the project: who may include or import whom, how long things get, what kernel objects export."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "csrc" / "cpu" / "kernels"
SOURCES = sorted(path for pattern in ("*.h", "*.cpp") for path in (ROOT / "csrc").rglob(pattern))
PACKAGE = sorted((ROOT / "mha_ext").rglob("*.py"))
OTHER_PYTHON = sorted(path for folder in ("tests", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py"))
BUILD = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")

MAX_FILE_LINES, MAX_MEDIAN_LINES, MAX_FUNCTION_LINES, MAX_DEFINES_PER_1000 = 400, 150, 60, 3

# What of the files outside csrc/cpu those inside it may include.
SHARED_HEADERS = {"attention.h", "checks.h", "composite.h", "layer.h", "layout.h", "signatures.h"}
# What of csrc/cpu the files outside it may include.
CPU_DOORS = {
    "cpu/dispatch.h",
    "cpu/backward_into.h",
    "cpu/forward_into.h",
    "cpu/layer_with_weights.h",
    "cpu/products.h",
}
KERNEL_SYSTEM_HEADERS = {"stdint.h", "stddef.h", "immintrin.h"}

# The way down through the package: each imports only from those after it. Other modules must just not go in circles.
SPINE = ["generate", "demo", "__init__", "grouping", "convert", "distributed", "module", "functional", "_ops", "_C"]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def includes(path: Path) -> tuple[list[Path], list[str]]:
    """The project's own files and the names of the foreign headers that a file includes."""
    own, foreign = [], []
    for bracket, name in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), re.MULTILINE):
        candidates = [folder / name for folder in (path.parent, ROOT / "csrc") if (folder / name).exists()]
        if bracket == '"' and candidates:
            own.append(candidates[0].resolve())
        else:
            foreign.append(name)
    return own, foreign


def module_name(path: Path) -> str:
    """The first part of a file's place in the package: demo for everything in mha_ext/demo."""
    return path.relative_to(ROOT / "mha_ext").with_suffix("").parts[0]


def package_imports() -> dict[str, set[str]]:
    """For each module of the package, the modules of the package that it imports."""
    graph: dict[str, set[str]] = {module_name(path): set() for path in PACKAGE}
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(filter(None, ["mha_ext" if node.level else "", node.module]))
                names = [f"{base}.{alias.name}" for alias in node.names]
            else:
                continue
            used = {name.split(".")[1] for name in names if name.startswith("mha_ext.")}
            graph[module_name(path)] |= used & (graph.keys() | {"_C"})
    return {name: used - {name} for name, used in graph.items()}


def without_leaves(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """What remains of a graph when nodes that point at nothing left are taken away: its circles."""
    while leaves := {name for name, used in graph.items() if not used & graph.keys()}:
        graph = {name: used for name, used in graph.items() if name not in leaves}
    return graph


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*")), ids=lambda path: path.name)
def test_kernels_are_walled_off(path: Path) -> None:
    own, foreign = includes(path)
    assert all(header.parent == KERNELS for header in own)
    assert set(foreign) <= KERNEL_SYSTEM_HEADERS
    assert not re.search(r"\b(std|at|c10|torch)::", re.sub(r"//.*", "", path.read_text()))


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parent != KERNELS], ids=relative)
def test_cpp_arrows_only_go_down(path: Path) -> None:
    inside = path.is_relative_to(ROOT / "csrc" / "cpu")
    for header in includes(path)[0]:
        name = header.relative_to(ROOT / "csrc").as_posix()
        if inside:
            assert name.startswith("cpu/") or name in SHARED_HEADERS
        else:
            assert not name.startswith("cpu/") or name in CPU_DOORS


def test_includes_have_no_circle() -> None:
    assert not without_leaves({relative(path): {relative(header) for header in includes(path)[0]} for path in SOURCES})


def test_python_arrows_only_go_down() -> None:
    graph = package_imports()
    assert not without_leaves(graph)
    for level, name in enumerate(SPINE):
        assert not graph.get(name, set()) & set(SPINE[:level]), name
    for name in graph.keys() - set(SPINE):
        assert not graph[name] & {"generate", "demo", "module"}, name
        assert name == "activation" or "_C" not in graph[name], name
    assert not graph["reference"], "the tests' oracle must not use what it judges"


def test_only_ops_py_uses_the_operators() -> None:
    users = [relative(path) for path in PACKAGE if re.search(r"\bops\.mha_ext\b", path.read_text())]
    assert users == ["mha_ext/_ops.py"]


@pytest.mark.parametrize("path", SOURCES + PACKAGE + OTHER_PYTHON + [ROOT / "setup.py"], ids=relative)
def test_files_stay_short(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= MAX_FILE_LINES


@pytest.mark.parametrize("files", [SOURCES, PACKAGE], ids=["csrc", "mha_ext"])
def test_most_files_are_shorter(files: list[Path]) -> None:
    assert statistics.median(len(path.read_text().splitlines()) for path in files) <= MAX_MEDIAN_LINES


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_cpp_functions_stay_short(path: Path) -> None:
    """A block that opens on a line with a parenthesis (a function, or something inside one), by its indentation."""
    lines = path.read_text().splitlines()
    for start, line in enumerate(lines):
        if not line.endswith("{") or "(" not in line or line.startswith("TORCH_LIBRARY"):
            continue
        depth = len(line) - len(line.lstrip())
        end = next(i for i in range(start + 1, len(lines)) if re.match(rf" {{0,{depth}}}}}", lines[i]))
        assert end - start <= MAX_FUNCTION_LINES, f"{path.name}:{start + 1}: {line.strip()}"


@pytest.mark.parametrize("path", PACKAGE + OTHER_PYTHON + [ROOT / "setup.py"], ids=relative)
def test_python_functions_stay_short(path: Path) -> None:
    """Lines of code of each function, without its docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            length = (node.end_lineno or 0) - first.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path.name}:{node.lineno}: {node.name}"


def test_macros_are_rare() -> None:
    text = "".join(path.read_text() for path in SOURCES)
    defines = len(re.findall(r"^\s*#\s*define\b", text, re.MULTILINE))
    assert defines <= MAX_DEFINES_PER_1000 * max(1.0, text.count("\n") / 1000)


def assert_no_weak_symbols(target: Path) -> None:
    """The linker may keep any copy of a weak symbol: one compiled for AVX-512 would then run on a CPU without it."""
    listing = subprocess.run(["nm", str(target)], check=True, capture_output=True, text=True).stdout
    symbols = [line.split()[-2:] for line in listing.splitlines()]
    assert symbols
    assert [name for kind, name in symbols if kind not in "bBdDrRtTU"] == []


@pytest.mark.parametrize("source", BUILD["isa_sources"]())
def test_built_kernels_have_no_weak_symbols(source: str) -> None:
    built = sorted((ROOT / "build").glob(f"temp.*/{source.removesuffix('.cpp')}.o"))
    if not built or shutil.which("nm") is None:
        pytest.skip("needs nm and the objects that make build leaves")
    for target in built:
        assert_no_weak_symbols(target)


@pytest.mark.long
@pytest.mark.parametrize("source", BUILD["isa_sources"]())
def test_unoptimized_kernels_have_no_weak_symbols(source: str, tmp_path: Path) -> None:
    """At -O0 nothing is inlined away, so that every function that could leak does."""
    target = tmp_path / "kernel.o"
    flags = [*BUILD["KERNEL_FLAGS"], *BUILD["ISA_FLAGS"][source], "-O0"]
    subprocess.run([*BUILD["compiler"](), *flags, "-c", str(ROOT / source), "-o", str(target)], check=True)
    assert_no_weak_symbols(target)


@pytest.mark.parametrize(("refused", "left_out"), [("avx512bf16", "avx512_bf16.cpp"), ("amx-tile", "amx.cpp")])
def test_a_compiler_without_an_instruction_set_builds_the_others(
    refused: str, left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "g++"
    old.write_text(f'#!/bin/sh\ncase " $* " in *{refused}*) exit 1 ;; esac\nexec g++ "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    all_sources = BUILD["isa_sources"]()
    sources = BUILD["isa_sources"].__wrapped__()
    assert sources == [source for source in all_sources if not source.endswith(left_out)]
    message = capsys.readouterr().err
    assert (len(sources) < len(all_sources)) == (left_out in message and "does not take" in message)


@pytest.mark.skipif("amx.cpp" not in str(BUILD["isa_sources"]()), reason="needs a compiler and assembler with AMX")
def test_an_assembler_without_amx_is_noticed() -> None:
    flags = BUILD["ISA_FLAGS"]["csrc/cpu/kernels/amx.cpp"]
    assert BUILD["compiles"](flags, BUILD["PROBES"]["csrc/cpu/kernels/amx.cpp"])
    assert not BUILD["compiles"](flags, '__asm__("no_such_instruction %tmm2, %tmm1, %tmm0");')
