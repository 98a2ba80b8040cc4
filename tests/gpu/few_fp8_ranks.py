"""Functions that tests/gpu/test_few_group_fp8.py runs in the processes of a group, one rank in each process.

Most contexts have so few `max_tokens` that the kernel for a few tokens makes their calls. In such a context, a token's
row has the same bits in every call, whatever the number of tokens. The functions here compare the bits of later calls
with those of the first call. The test's own process compares the first call with the float64 reference."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any, NamedTuple

import flashmoe
import numpy as np
import torch
from flashmoe.report import CallReport
from layers import gpu_operations, poisoned_outputs
from problems import Problem
from quantised_on_gpu import on_gpu, on_host
from ranks import device_of, joined

MANY = 2048
"""`max_tokens` of a context whose calls all use the general kernel, because it has too many for the other kernel."""

OF_TOKENS = ("x", "x_scale", "topk_ids", "topk_weights")
"""The arguments that have a row for each of a rank's tokens."""
SHARED = ("shared_gate_up", "shared_down", "shared_gate_up_scale", "shared_down_scale")


class Rows(NamedTuple):
    """A rank's results."""

    y: np.ndarray
    report: CallReport
    differing: int = 0
    """The number of later calls in which any row has other bits than in `y`."""


def first_tokens(problem: Problem, tokens: list[int]) -> Problem:
    """The problem with only the first tokens of each rank: `tokens` has their number by rank."""
    given = {name: getattr(problem, name) for name in OF_TOKENS if getattr(problem, name) is not None}
    return replace(
        problem, **{name: [a[:n] for a, n in zip(each, tokens, strict=True)] for name, each in given.items()}
    )


def without_shared(problem: Problem) -> Problem:
    return replace(problem, **dict.fromkeys(SHARED))


def joined_for(rank: int, ranks: int, name: str, problem: Problem, **changes: Any) -> flashmoe.Context:
    limits = {key: each for key, each in problem.limits().items() if key not in ("ranks", "engine")}
    return joined(rank, ranks, name, **limits | {"return_mode": "direct"} | changes)


class OnGpu:
    """A rank's part of a problem, in the GPU's memory."""

    def __init__(self, rank: int, problem: Problem):
        torch.cuda.set_device(device_of(rank))
        self.arguments = {
            name: on_gpu(each, f"cuda:{device_of(rank)}") for name, each in problem.arguments(rank).items()
        }

    def call(self, context: flashmoe.Context, tokens: int | None = None) -> torch.Tensor:
        """A call with the first `tokens` tokens of the rank; None: with all of them."""
        cut = {name: self.arguments[name][:tokens] for name in OF_TOKENS if self.arguments.get(name) is not None}
        return flashmoe.moe(context, **self.arguments | cut)


def prefixes(rank: int, ranks: int, name: str, problem: Problem, calls: list[list[int]], late: bool = False) -> Rows:
    """A call with all tokens, and then the `calls`, which give the number of each rank's tokens; the host does not wait
    between these. Outputs begin as NaN. late: in about one call of 16, a rank's GPU is delayed first."""
    local = OnGpu(rank, problem)
    draw = random.Random(f"rank {rank}")
    with joined_for(rank, ranks, f"{name}-few", problem) as context, poisoned_outputs():
        y = local.call(context)
        context.synchronize()
        report = context.last_call
        later = []
        for tokens in calls:
            if late and draw.randrange(16) == 0:
                torch.cuda._sleep(draw.randrange(1_000_000))
            later.append(local.call(context, tokens[rank]))
        context.synchronize()
    return Rows(on_host(y), report, sum(not torch.equal(each, y[: len(each)]) for each in later))


def by_general_kernel(rank: int, ranks: int, name: str, problem: Problem) -> Rows:
    """The rows of a call by the general kernel, in a context for `MANY` tokens."""
    local = OnGpu(rank, problem)
    with joined_for(rank, ranks, f"{name}-many", problem, max_tokens=MANY) as context, poisoned_outputs():
        y = local.call(context)
        context.synchronize()
        return Rows(on_host(y), context.last_call)


def operations(rank: int, ranks: int, name: str, problem: Problem) -> list[str]:
    """The names of the GPU's operations in three calls of a context for few tokens."""
    local = OnGpu(rank, problem)
    with joined_for(rank, ranks, name, problem) as context:
        local.call(context)
        context.synchronize()

        def run() -> None:
            for _ in range(3):
                local.call(context)
            context.synchronize()

        gpu_operations(run)
        return gpu_operations(run)


def mixed(rank: int, ranks: int, name: str, problem: Problem, calls: list[list[int]]) -> list[Rows]:
    """Calls of two layers in turn in one context for few tokens: the problem's layer, and the same layer without its
    shared expert. The general kernel makes the calls with the shared expert. Returns for each of the two layers the
    rows of all tokens, and how many later calls have other bits."""
    layers = [OnGpu(rank, each) for each in (problem, without_shared(problem))]
    with joined_for(rank, ranks, name, problem) as context, poisoned_outputs():
        whole = []
        for layer in layers:
            y = layer.call(context)
            context.synchronize()
            whole.append((y, context.last_call))
        later = [[(layer.call(context, tokens[rank])) for layer in layers] for tokens in calls]
        context.synchronize()
    rows = []
    for i, (y, report) in enumerate(whole):
        off = sum(not torch.equal(both[i], y[: len(both[i])]) for both in later)
        rows.append(Rows(on_host(y), report, off))
    return rows


def met(rank: int, ranks: int, name: str, problem: Problem, calls: int) -> list[Rows]:
    """Calls with all tokens in which ranks use different kernels. In call i, the ranks for which rank + i is even have
    the shared expert and so use the general kernel; the other ranks have no shared expert."""
    layers = [OnGpu(rank, each) for each in (problem, without_shared(problem))]
    found = []
    with joined_for(rank, ranks, name, problem) as context, poisoned_outputs():
        for i in range(calls):
            y = layers[(rank + i) % 2].call(context)
            context.synchronize()
            found.append(Rows(on_host(y), context.last_call))
    return found


def replay(rank: int, ranks: int, name: str, problem: Problem) -> Rows:
    """Captures a call and replays it three times, on an output filled with NaN; counts the replays with other bits."""
    local = OnGpu(rank, problem)
    with joined_for(rank, ranks, name, problem) as context:
        y = local.call(context)
        context.synchronize()
        report = context.last_call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = local.call(context)
        off = 0
        for _ in range(3):
            captured.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            off += not torch.equal(captured, y)
    return Rows(on_host(y), report, off)


def no_number(rank: int, ranks: int, name: str, problem: Problem, token: int) -> np.ndarray:
    """y of a call in which number `token` of rank 1's tokens has a NaN."""
    if rank == 1:
        problem.x[1][token, 5] = math.nan
    local = OnGpu(rank, problem)
    with joined_for(rank, ranks, name, problem) as context, poisoned_outputs():
        y = local.call(context)
        context.synchronize()
        return on_host(y)
