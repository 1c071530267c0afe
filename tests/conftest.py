"""Fixtures and settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that spin stall each other when busy

import pytest
import torch
from hypothesis import settings

import mha_ext

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, metavar="N", help="run each N-th selected test (for slow builds)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = config.getoption("--every")
    config.hook.pytest_deselected(items=[item for index, item in enumerate(items) if index % every])
    items[:] = items[::every]


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same seed and leaves the global seed, dtype and thread count as they were."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture
def set_threads() -> Callable[[int], None]:
    """Sets torch's thread count for the rest of the test."""
    return torch.set_num_threads


@pytest.fixture
def nothing_stays_active() -> Iterator[None]:
    """Afterwards PyTorch's own attention is back, whatever the test activated."""
    yield
    mha_ext.deactivate()
    assert torch.nn.attention.current_flash_attention_impl() is None
