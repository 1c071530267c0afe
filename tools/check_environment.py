"""Says in one line what a machine lacks to build mha_ext; runs on the bare system Python, before anything is installed.

Exits with 0 when everything is there. The C++ compiler is the environment variable CXX, or g++.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig

PROBE = "#include <omp.h>\n#include <concepts>\ntemplate <std::integral T> T twice(T x) { return 2 * x; }\n"


def python_problem() -> str | None:
    """Version, venv module and headers of the interpreter that runs this file."""
    version = "{}.{}".format(*sys.version_info[:2])
    if sys.version_info < (3, 10):  # noqa: UP036 -- this file runs on whatever python3 is there
        return f"Python 3.10 or newer is needed, found {version}: install one and run make PYTHON=/path/to/python3"
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        return f"Python's venv module is missing: install it (Debian, Ubuntu: apt install python{version}-venv)"
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return f"Python.h is missing: install Python's C headers (Debian, Ubuntu: apt install python{version}-dev)"
    return None


def compiler_problem() -> str | None:
    """Whether the C++ compiler exists and knows C++20 and OpenMP."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(command[0]) is None:
        return f"the C++ compiler {command[0]} is missing: install one (Debian, Ubuntu: apt install g++) or set CXX"
    probe = [*command, "-std=c++20", "-fopenmp", "-fsyntax-only", "-x", "c++", "-"]
    if subprocess.run(probe, input=PROBE.encode(), stderr=subprocess.DEVNULL, check=False).returncode:
        return f"{' '.join(command)} cannot compile C++20 with OpenMP: install g++ 11 or newer and set CXX to it"
    return None


if __name__ == "__main__":
    problems = [problem for problem in (python_problem(), compiler_problem()) if problem]
    if problems:
        sys.exit("\n".join(f"mha_ext cannot be built here: {problem}" for problem in problems))
