"""`flashmoe run --engine cuda`: the command starts a process for each GPU, and checks what they compute."""

from __future__ import annotations

import json

import pytest
import torch
from flashmoe.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LAYERS = {
    "shipped": [],
    "shipped, float16": ["--tokens", "501", "--dtype", "float16"],
    "random": ["--model", "qwen3-30b-a3b", "--scale", "0.25", "--tokens", "300", "--skew", "1", "--seed", "3"],
    "random, judged by a sample": ["--model", "mixtral-8x7b", "--tokens", "256"],
}


@pytest.fixture(params=["one GPU", pytest.param("all GPUs", marks=pytest.mark.own_gpus)])
def ranks(request) -> int:
    if request.param == "one GPU":
        return 1
    here = torch.cuda.device_count()
    if here < 2:
        pytest.skip(f"2 GPUs needed, {here} here")
    return min(4, here)


@pytest.mark.parametrize("name", LAYERS)
def test_run(tmp_path, capsys, ranks, name):
    options = ["--engine", "cuda", "--ranks", str(ranks), *LAYERS[name]]
    assert main(["run", *options, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "PASS" in printed and "cuda engine" in printed
    assert ("those of as many experts as" in printed) == ("sample" in name)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [record for record in records if record["ph"] == "X"]
    assert {span["pid"] for span in spans} == set(range(ranks))
    assert {"gate", "gemm0", "gemm1"} <= {span["name"] for span in spans}


def test_auto_takes_the_gpus(tmp_path, capsys, ranks):
    assert main(["run", "--ranks", str(ranks), "--out", str(tmp_path)]) == 0
    assert "cuda engine" in capsys.readouterr().out


def test_more_ranks_than_gpus(tmp_path, capsys):
    ranks = torch.cuda.device_count() + 1
    assert main(["run", "--engine", "cuda", "--ranks", str(ranks), "--out", str(tmp_path)]) == 2
    assert f"for each of {ranks} ranks, found {ranks - 1}" in capsys.readouterr().err
