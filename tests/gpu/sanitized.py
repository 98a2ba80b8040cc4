"""What test_sanitizer.py runs under NVIDIA's sanitizers: small calls of every kind of tile, few thread blocks.

`sanitized.py KIND`: on one GPU, one of KINDS. `sanitized.py WAY RANK RANKS NAME`: as a rank of a group, one of WAYS.
"""

from __future__ import annotations

import sys

import flashmoe
import torch
from flashmoe.placement import contiguous, local_experts
from layers import call, check, context_of, random_problem
from ranks import WAYS, device_of, joined, share_of, with_experts

KINDS = {
    "bfloat16": {"dtype": "bfloat16", "activation": "swiglu"},
    "float32": {"dtype": "float32", "activation": "gelu"},
    "exact": {"dtype": "float32", "activation": "swiglu", "exact": True},
    "transposed": {"dtype": "float16", "activation": "swiglu", "transposed": True},
}
OF_GROUPS = ("bfloat16", "float32")
"""Of all shapes; transposed weights too, but of the last alone, which has a shared expert and few tokens."""
SHAPES = (
    {"tokens": 8, "hidden": 136, "intermediate": 72, "experts": 5, "top_k": 2, "ids": "int32", "capacity_factor": 0.7},
    {"tokens": 5, "hidden": 72, "intermediate": 40, "experts": 3, "top_k": 2},
    {"tokens": 90, "hidden": 136, "intermediate": 72, "experts": 4, "top_k": 2, "biases": True},
    {"tokens": 90, "hidden": 64, "intermediate": 72, "experts": 4, "top_k": 2, "ids": "int64", "capacity_factor": 0.7},
    {"tokens": 300, "hidden": 64, "intermediate": 64, "experts": 2, "top_k": 1, "skew": 50.0},
    {"tokens": 300, "hidden": 72, "intermediate": 64, "experts": 2, "top_k": 2},
    {"tokens": 90, "hidden": 72, "intermediate": 40, "experts": 3, "top_k": 1, "shared": 2, "shared_gate": True},
    {"tokens": 6, "hidden": 72, "intermediate": 40, "experts": 3, "top_k": 1, "shared": 2, "shared_gate": True},
)
LARGEST = {
    "max_tokens": 300,
    "hidden": 136,
    "intermediate": 72,
    "experts": 5,
    "top_k": 2,
    "dtype": "float32",
    "shared_intermediate": 144,
}
TWICE = 2
"""A context's second call finds what its first has left behind."""


def alone(kind: str) -> None:
    for turn, shape in enumerate(SHAPES):
        problem = random_problem(turn, **KINDS[kind], **shape)
        # No timeout: under a sanitizer, progress is a matter of patience.
        with context_of(problem, processors=4, timeout=0.0) as context:
            for _ in range(TWICE):
                y, report = call(context, problem)
                check(problem, y, report)
        print(f"sanitized {kind} {shape}", flush=True)


def in_group(way: str, rank: int, ranks: int, name: str) -> None:
    """Tokens are the first rank's, but for a few."""
    # A timeout, since a peer may have been ended; a long one, since NVSHMEM takes half a minute under memcheck.
    limits = {**LARGEST, **WAYS[way], "processors": 4, "timeout": 300.0}
    with joined(rank, ranks, name, **limits) as context:
        for turn, shape in enumerate(SHAPES):
            for kind in (*OF_GROUPS, "transposed") if shape is SHAPES[-1] else OF_GROUPS:
                whole = random_problem(turn, **KINDS[kind], device=f"cuda:{device_of(rank)}", **shape)
                few = shape["tokens"] // 8
                tokens = [shape["tokens"] - few * (ranks - 1)] + [few] * (ranks - 1)
                problem = share_of(whole, rank, tokens)
                owners = contiguous(problem.experts, ranks)
                local = with_experts(problem, local_experts(owners, rank))
                for _ in range(TWICE):
                    y, report = call(context, local, placement=owners)
                    check(problem, y, report)
                print(f"sanitized {way} {kind} {shape}", flush=True)


def main(what: str, *of_group: str) -> None:
    if of_group:
        rank, ranks, name = of_group
        in_group(what, int(rank), int(ranks), name)
    else:
        alone(what)
    torch.cuda.synchronize()
    print(f"flashmoe {flashmoe.__version__}: all calls are right")


if __name__ == "__main__":
    main(*sys.argv[1:])
