"""What test_sanitizer.py runs under NVIDIA's sanitizers: small calls of every kind of tile, few thread blocks.

As a rank of a group: `sanitized.py RANK RANKS NAME`.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import flashmoe
import torch
from flashmoe.placement import contiguous, local_experts
from layers import call, check, context_of, random_problem
from ranks import WAYS, device_of, joined, share_of, with_experts

KINDS = (("bfloat16", "swiglu"), ("float32", "gelu"))
ALONE = [
    *({"dtype": dtype, "activation": activation} for dtype, activation in KINDS),
    {"dtype": "float32", "activation": "swiglu", "exact": True},
]
SHAPES = (
    {"tokens": 8, "hidden": 136, "intermediate": 72, "experts": 5, "top_k": 2, "ids": "int32", "capacity_factor": 0.7},
    {"tokens": 5, "hidden": 72, "intermediate": 40, "experts": 3, "top_k": 2},
    {"tokens": 90, "hidden": 136, "intermediate": 72, "experts": 4, "top_k": 2, "biases": True},
    {"tokens": 90, "hidden": 64, "intermediate": 72, "experts": 4, "top_k": 2, "ids": "int64", "capacity_factor": 0.7},
    {"tokens": 300, "hidden": 64, "intermediate": 64, "experts": 2, "top_k": 1, "skew": 50.0},
    {"tokens": 300, "hidden": 72, "intermediate": 64, "experts": 2, "top_k": 2},
)
LARGEST = {"max_tokens": 300, "hidden": 136, "intermediate": 72, "experts": 5, "top_k": 2, "dtype": "float32"}
TWICE = 2
"""A context's second call finds what its first has left behind."""


def alone() -> None:
    for turn, shape in enumerate(SHAPES):
        for kind in ALONE:
            problem = random_problem(turn, **kind, **shape)
            # No timeout: under a sanitizer, progress is a matter of patience.
            with context_of(problem, processors=4, timeout=0.0) as context:
                for _ in range(TWICE):
                    y, report = call(context, problem)
                    check(problem, y, report)
        print(f"sanitized {shape}", flush=True)


def in_group(rank: int, ranks: int, name: str) -> None:
    """Tokens are the first rank's, but for a few."""
    with ExitStack() as stack:
        for way, settings in WAYS.items():
            # A timeout, since a peer may have been ended; a long one, since NVSHMEM takes half a minute under memcheck.
            limits = {**LARGEST, **settings, "processors": 4, "timeout": 300.0}
            context = stack.enter_context(joined(rank, ranks, f"{name}-{way}", **limits))
            for turn, shape in enumerate(SHAPES):
                for dtype, activation in KINDS:
                    kind = {"dtype": dtype, "activation": activation, "device": f"cuda:{device_of(rank)}"}
                    whole = random_problem(turn, **kind, **shape)
                    few = shape["tokens"] // 8
                    tokens = [shape["tokens"] - few * (ranks - 1)] + [few] * (ranks - 1)
                    problem = share_of(whole, rank, tokens)
                    owners = contiguous(problem.experts, ranks)
                    local = with_experts(problem, local_experts(owners, rank))
                    for _ in range(TWICE):
                        y, report = call(context, local, placement=owners)
                        check(problem, y, report)
                print(f"sanitized {way} {shape}", flush=True)


def main() -> None:
    if len(sys.argv) == 1:
        alone()
    else:
        in_group(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    torch.cuda.synchronize()
    print(f"flashmoe {flashmoe.__version__}: all calls are right")


if __name__ == "__main__":
    sys.exit(main())
