"""Settings of the process that a test changes for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import mha_ext


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for a while; one for what the tests compute themselves, which is too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def cpu_capability(name: str) -> Iterator[None]:
    before = mha_ext.cpu_capability()
    mha_ext.set_cpu_capability(name)
    try:
        yield
    finally:
        mha_ext.set_cpu_capability(before)
