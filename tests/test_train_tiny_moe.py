"""examples/train_tiny_moe.py, which trained the shipped model, here with this package's experts and for a few steps."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from shipped import FOLDER, windows
from tokenizers import Tokenizer

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_tiny_moe.py"


def test_it_trains_with_these_experts(tmp_path):
    """Training begins with random weights, so the first losses are about those of a guess among all tokens."""
    passage = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).decode(torch.cat(windows()).tolist())
    corpus, log, output = tmp_path / "text", tmp_path / "log.json", tmp_path / "model"
    corpus.write_text(50 * passage, encoding="utf-8")  # the test text, a twentieth of the corpus, needs 2048 tokens
    command = [sys.executable, SCRIPT, corpus, "--experts", "flashmoe", "--log", log, "--output", output]
    command += ["--steps", "4", "--evaluate-every", "2", "--batch", "1", "--context", "256"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    logged = json.loads(log.read_text())
    assert logged["device"] == "cpu" and logged["settings"]["experts"] == "flashmoe"
    assert [entry["step"] for entry in logged["history"]] == [2, 4]
    guess = math.log(1024)
    assert all(abs(entry["train_loss"] - guess) < 0.5 for entry in logged["history"]), logged["history"]
    settings = "tokenizer_config.json"
    assert json.loads((output / settings).read_text()) == json.loads((FOLDER / settings).read_text())
    trained = Tokenizer.from_file(str(output / "tokenizer.json"))
    ids = {name: trained.token_to_id(f"<|{text}|>") for name, text in (("eos", "endoftext"), ("pad", "pad"))}
    config = json.loads((output / "config.json").read_text())
    assert {name: config[f"{name}_token_id"] for name in ids} == ids and max(ids.values()) < config["vocab_size"]
    assert (output / "model.safetensors").stat().st_size == logged["final"]["bytes"]["model.safetensors"]
