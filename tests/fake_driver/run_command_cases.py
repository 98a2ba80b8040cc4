"""`flashmoe run --engine cuda`: what it does in a rank's process."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import OnGpu
from fake_group import on_ranks, pretend
from flashmoe import models
from flashmoe.cli import device as cli_device
from flashmoe.cli import run, workload
from flashmoe.launch import RankFailed
from flashmoe.trace import PHASES


def run_on_rank(rank, ranks, name, environment, cubin, free, *arguments):
    """`run.call_on_rank`, with tensors that claim to be on the rank's GPU, which has `free` bytes free."""
    current = []
    pretend(current, cubin, environment)
    torch.cuda.set_device = current.append
    torch.cuda.mem_get_info = lambda: (free, free)
    cli_device.to_device = lambda array: torch.zeros(array.shape, dtype=torch.bfloat16).as_subclass(OnGpu)
    return run.call_on_rank(rank, ranks, name, *arguments)


def run_command(monkeypatch, cubin, ranks, free):
    """Results and reports of `flashmoe run` for a small random layer."""
    request = workload.Request(ranks, 40, None, "direct", "cuda")
    work = workload.random_workload(models.scaled(models.find("olmoe"), 0.02), request, 0, 0.0)
    monkeypatch.setattr(run, "run_ranks", lambda n, fn, each: on_ranks(run_on_rank, [(cubin, free, *a) for a in each]))
    return run._call(work)


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_command(monkeypatch, cubin, ranks):
    results, reports = run_command(monkeypatch, cubin, ranks, 1 << 40)
    for y, report in zip(results, reports, strict=True):
        assert y.shape == (40, 40) and y.dtype == "bfloat16"
        assert (report.tokens, report.topk_ids.shape) == (40, (40, 8))
        assert len(report.events) == 132 * len(PHASES)
    assert len(reports) == ranks


def test_run_command_on_a_gpu_without_room(monkeypatch, cubin):
    with pytest.raises(RankFailed, match=r"all 2 ranks: HeapError: .* of what is free on the GPU, got .*--scale"):
        run_command(monkeypatch, cubin, 2, 1 << 10)
