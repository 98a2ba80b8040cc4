"""What test_sanitizer.py runs under NVIDIA's sanitizers: small calls of every kind of tile, few thread blocks."""

from __future__ import annotations

import sys

import flashmoe
import torch
from layers import call, check, context_of, random_problem

SHAPES = (
    {"tokens": 8, "hidden": 136, "intermediate": 72, "experts": 5, "top_k": 2, "ids": "int32", "capacity_factor": 0.7},
    {"tokens": 5, "hidden": 72, "intermediate": 40, "experts": 3, "top_k": 2},
    {"tokens": 90, "hidden": 136, "intermediate": 72, "experts": 4, "top_k": 2, "biases": True},
    {"tokens": 90, "hidden": 64, "intermediate": 72, "experts": 4, "top_k": 2, "ids": "int64", "capacity_factor": 0.7},
    {"tokens": 300, "hidden": 64, "intermediate": 64, "experts": 2, "top_k": 1, "skew": 50.0},
    {"tokens": 300, "hidden": 72, "intermediate": 64, "experts": 2, "top_k": 2},
)


def main() -> None:
    for turn, shape in enumerate(SHAPES):
        for dtype, activation in (("bfloat16", "swiglu"), ("float32", "gelu")):
            problem = random_problem(turn, dtype=dtype, activation=activation, **shape)
            # No timeout: under a sanitizer, progress is a matter of patience.
            with context_of(problem, processors=4, timeout=0.0) as context:
                for _ in range(2):
                    y, report = call(context, problem)
                    check(problem, y, report)
        print(f"sanitized {shape}", flush=True)
    torch.cuda.synchronize()
    print(f"flashmoe {flashmoe.__version__}: all calls are right")


if __name__ == "__main__":
    sys.exit(main())
