"""Tests in vLLM, and in `training/` in frameworks that train. `make test-integrations` sets these up. If the
framework of a file is not installed, the file is skipped, and the reason says so."""

from __future__ import annotations

import os
from pathlib import Path

import evidence
import pytest
import torch
from flashmoe.bench.origin import cpu_model, head, result_path

HERE = Path(__file__).resolve().parent


def pytest_collection_finish(session: pytest.Session) -> None:
    """Records the run, if FLASHMOE_EVIDENCE names a folder for the record."""
    folder = os.environ.get("FLASHMOE_EVIDENCE")
    if not folder or session.config.option.collectonly or not any(item.path.parent == HERE for item in session.items):
        return
    import transformers
    import vllm

    origin = {
        "device": f"{cpu_model()} x0",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": head(),
        "command": "make test-integrations",
    }
    path = Path(folder) / result_path("integrations", cpu_model(), 0).name
    session.config.pluginmanager.register(evidence.Evidence(evidence.INTEGRATIONS, path, origin))
