"""Tests in frameworks that train. `make test-integrations` sets these up in an environment of their own. If the
framework of a file is not installed, the file is skipped, and the reason says so."""

from __future__ import annotations

import os
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import evidence
import pytest
import torch
from flashmoe.bench.origin import cpu_model, head, result_path
from flashmoe.launch import RankPool
from gloo import Gloo

HERE = Path(__file__).resolve().parent
FRAMEWORKS = ("megatron-core", "torchtitan", "trl", "transformers", "accelerate")


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture
def on_ranks(pool, tmp_path):
    """Calls ``fn(rank, *args)`` on two ranks of torch.distributed, and returns what each rank returned."""
    return partial(Gloo(pool, tmp_path), 2)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Records the run, if FLASHMOE_TRAINING_EVIDENCE names a folder for the record."""
    folder = os.environ.get("FLASHMOE_TRAINING_EVIDENCE")
    if not folder or session.config.option.collectonly or not any(HERE in item.path.parents for item in session.items):
        return
    origin = {
        "device": f"{cpu_model()} x0",
        **{name: _release(name) for name in FRAMEWORKS},
        "torch": torch.__version__,
        "commit": head(),
        "command": "make test-integrations",
    }
    path = Path(folder) / result_path("integrations_training", cpu_model(), 0).name
    session.config.pluginmanager.register(evidence.Evidence(evidence.TRAINING, path, origin))


def _release(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
