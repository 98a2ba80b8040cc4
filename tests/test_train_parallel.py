"""The example that trains a model on several ranks, beside one process with eager experts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from shipped import FOLDER, loaded, windows
from transformers import PreTrainedTokenizerFast

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_parallel.py"
RANKS, STEPS, WINDOW = 4, 31, 64


def eager_losses(ids: torch.Tensor) -> list[float]:
    """Of one process that reads all ranks' windows."""
    model = loaded(dtype=torch.float32).train()
    model.set_experts_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        first = torch.randint(len(ids) - WINDOW, (RANKS,), generator=generator)
        batch = torch.stack([ids[each : each + WINDOW] for each in first])
        loss = model(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_one_process(tmp_path):
    """At every tenth step within 1e-3, and they fall."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"))
    text = tokenizer.decode(torch.cat(windows()))
    (tmp_path / "text").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(EXAMPLE), str(FOLDER), str(tmp_path / "text"), str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [line.partition(": ") for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [name for name, _, _ in lines] == [f"step {step}" for step in range(STEPS)]
    found = [float(loss) for _, _, loss in lines]
    expected = eager_losses(torch.tensor(tokenizer(text).input_ids))
    assert max(abs(a - b) for a, b in zip(found[::10], expected[::10], strict=True)) <= 1e-3
    assert sum(found[-10:]) < sum(found[:10])
