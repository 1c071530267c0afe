"""What the documents show runs as it stands, and they link to what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    (path.name, number, match.group(1))
    for path in DOCUMENTS
    for number, match in enumerate(re.finditer(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S))
]


@pytest.mark.parametrize(("document", "number", "code"), BLOCKS, ids=[f"{name}-{number}" for name, number, _ in BLOCKS])
def test_examples_run(document: str, number: int, code: str) -> None:
    torch.manual_seed(0)
    exec(compile(code, f"{document}, example {number}", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_are_there(path: Path) -> None:
    text = path.read_text()
    named = re.findall(r"\]\(([\w./-]+)\)", text) + re.findall(
        r"`((?:csrc|tests|examples|benchmarks|docs)/[\w./-]+)`", text
    )
    assert named
    missing = [name for name in named if not any((base / name).exists() for base in (path.parent, ROOT))]
    assert not missing
