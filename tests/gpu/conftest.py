"""Settings of the tests that need a GPU. On a machine without a suitable GPU they are skipped, with a reason."""

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
    """What this machine lacks to run the tests; None: nothing."""
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
    """Turns TF32 off in PyTorch's own products, because tests compare the engine's results with them."""
    torch.backends.cuda.matmul.allow_tf32 = False
