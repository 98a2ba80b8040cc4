"""examples/train_parallel.py, which trains a model in one process or in several, and the benchmark and the picture of
its losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RANKS, STEPS = 4, 11


def run(*command: str | Path) -> None:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_losses_are_those_of_eager_experts(tmp_path):
    """With one rank and with several, losses differ by at most 1e-3, at every tenth step, from those of Transformers'
    eager experts in one process, and they fall."""
    file, picture = tmp_path / "curves.json", tmp_path / "curves.png"
    run(BENCHMARKS / "training_curves.py", "--steps", str(STEPS), "--ranks", str(RANKS), "--out", file)
    result = json.loads(file.read_text())
    curves, largest = result["losses"], result["largest_difference"]
    ours = ["flashmoe, 1 rank", f"flashmoe, {RANKS} ranks"]
    assert list(curves) == ["eager", *ours] and list(largest) == ours
    for name, losses in curves.items():
        assert len(losses) == STEPS and sum(losses[-3:]) < sum(losses[:3]), name
    for name in ours:
        apart = [abs(a - b) for a, b in zip(curves[name], curves["eager"], strict=True)]
        assert max(apart[0], apart[10]) <= 1e-3, name
        assert largest[name] == {"every_tenth_step": max(apart[0], apart[10]), "every_step": max(apart)}
    run(BENCHMARKS / "draw_training_curves.py", file, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
