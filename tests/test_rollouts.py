"""examples/rollouts.py: on the CPU engine, rollouts in batches of several sizes have the bits of a training pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

PROGRAM = Path(__file__).resolve().parents[1] / "examples" / "rollouts.py"


def test_rollouts_have_the_bits_of_training():
    sizes = ("--prompts", "9", "--new", "5", "--batches", "1", "4", "9")
    ran = subprocess.run([sys.executable, str(PROGRAM), *sizes], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = [line.partition(":") for line in ran.stdout.splitlines()]
    assert [what for what, _, _ in told] == ["batches of 1", "batches of 4", "batches of 9", "training"]
    assert all(said.startswith(" the same bits, mean log-probability -") for _, _, said in told), ran.stdout
