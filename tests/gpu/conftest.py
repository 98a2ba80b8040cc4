"""The tests that need a GPU: skipped by name where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from flashmoe import jit
from flashmoe.errors import FlashMoEError
from seeds import SEED
from told import Told

HERE = Path(__file__).resolve().parent


def missing() -> str | None:
    """What keeps the tests from running; None: nothing does."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"no CUDA device of compute capability 9.0, but {torch.cuda.get_device_name()}"
    try:
        jit.find_nvcc()
    except FlashMoEError as error:
        return str(error)
    return None


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get("FLASHMOE_TOLD"):
        config.pluginmanager.register(Told(Path(path), os.environ.get("FLASHMOE_PLACE")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    if here and (reason := missing()):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> str:
    return f"FLASHMOE_SEED={SEED}"


@pytest.fixture(scope="session", autouse=True)
def exact_references() -> None:
    """No TF32 in PyTorch's own products: they are what is compared with."""
    torch.backends.cuda.matmul.allow_tf32 = False
