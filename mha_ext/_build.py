"""What the compiled extension was built for, and why it does not load."""

from __future__ import annotations

import json
from pathlib import Path

import torch

__all__ = ["built_for", "load_failure"]


def built_for() -> str | None:
    """The torch version that the extension was compiled against, or None where no record says."""
    record = Path(__file__).with_name("_build_info.json")
    version: str | None = json.loads(record.read_text())["torch"] if record.exists() else None
    return version


def load_failure(built_for: str | None, error: ImportError | None = None) -> ImportError:
    """The reason why the extension does not load, with what it was built for, what is running, and what to do."""
    running = torch.__version__
    source = Path(__file__).parents[1]
    if built_for is None and (source / "setup.py").exists():
        what = f"{source} is a source folder without the compiled extension (an installed mha_ext is found elsewhere)"
    elif built_for is None:
        what = f"the compiled extension mha_ext._C is missing (running torch {running})"
    elif built_for != running:
        what = f"the compiled extension mha_ext._C was built for torch {built_for}, but torch {running} is running"
    else:
        what = f"the compiled extension mha_ext._C, built for torch {built_for}, does not load with torch {running}"
    remedy = "rebuild it: make build in a checkout, or pip install --no-build-isolation --force-reinstall --no-deps ."
    if error is None:
        return ImportError(f"{what}; {remedy}")
    return ImportError(f"{what}; {remedy} ({error})", name=error.name, path=error.path)
