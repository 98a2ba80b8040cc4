"""What sanitizer.py runs under NVIDIA's sanitizers: small calls of every kind of tile, few thread blocks.

`sanitized.py KIND CALLS`: on one GPU, one of KINDS or of OTHERS, so many calls of each shape.
`sanitized.py WAY CALLS RANK RANKS NAME`: as a rank of a group, one of WAYS or, in contexts of few tokens, of FEW.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import few_fp8_ranks
import flashmoe
import flashmoe.slices
import problems
import quantised_on_gpu
import torch
import training
from bounds import expected_result
from flashmoe.placement import Placement, contiguous, hybrid, local_experts
from layers import Problem, call, check, context_of, random_problem
from leaves import gradients_of
from ranks import WAYS, device_of, joined, share_of, with_experts

KINDS = {
    "bfloat16": {"dtype": "bfloat16", "activation": "swiglu"},
    "float32": {"dtype": "float32", "activation": "gelu"},
    "exact": {"dtype": "float32", "activation": "swiglu", "exact": True},
    "transposed": {"dtype": "float16", "activation": "swiglu", "transposed": True},
    "interleaved": {
        "dtype": "bfloat16",
        "activation": "clamped_swiglu",
        "limit": 0.75,
        "up_offset": 1.0,
        "transposed": True,
        "interleaved": True,
    },
}
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
OF_GROUPS = [(kind, shape) for shape in SHAPES for kind in ("bfloat16", "float32")]
OF_GROUPS += [(kind, SHAPES[-1]) for kind in ("transposed", "interleaved")]
COPIED = {"tokens": 90, "hidden": 136, "intermediate": 72, "experts": 3, "top_k": 2, "shared": 2}
SLICED = {"tokens": 150, "hidden": 72, "intermediate": 64, "experts": 2, "top_k": 1, "ids": "int32"}
LARGEST = {
    "max_tokens": 300,
    "hidden": 136,
    "intermediate": 72,
    "experts": 5,
    "top_k": 2,
    "dtype": "float32",
    "shared_intermediate": 144,
}


SMALL = {"hidden": 144, "intermediate": 80, "experts": 3, "top_k": 2, "dtype": "bfloat16"}
"""H and I of quantised layers: the second block of H has 16 columns."""
OF_FP8 = (
    {"tokens": [6]},
    {"tokens": [90], "biases": (True, True, True), "capacity_factor": 0.7},
    {"tokens": [300], "fused": False, "shared": 1, "shared_gate": True},
)
OF_FEW = (
    {"tokens": [9, 2], "experts": 24, "biases": (True, True, True)},
    {"tokens": [0, 20], "experts": 30, "top_k": 3, "fused": False},
)
"""Of two ranks; at most 1.5 and 4 rows an expert."""
OF_MXFP4 = ({"tokens": [1]}, {"tokens": [20], "biases": (True, True, True)})
TRAINED = (
    {"tokens": [90], "biases": (True, True, True), "capacity_factor": 0.7},
    {"tokens": [300], "fused": False, "hidden": 72, "intermediate": 40},
    {"tokens": [7], "activation": "gelu"},
)


def alone(kind: str, calls: int) -> None:
    for turn, shape in enumerate(SHAPES):
        problem = random_problem(turn, **KINDS[kind], **shape)
        # No timeout: under a sanitizer, progress is a matter of patience.
        with context_of(problem, processors=4, timeout=0.0) as context:
            for _ in range(calls):
                y, report = call(context, problem)
                check(problem, y, report)
        print(f"sanitized {kind} {shape}", flush=True)


def fp8(calls: int) -> None:
    for turn, shape in enumerate(OF_FP8):
        quantised_calls("fp8", problems.quantised(problems.random_problem(turn, **SMALL | shape)), calls, shape)


def mxfp4(calls: int) -> None:
    for turn, shape in enumerate(OF_MXFP4):
        layer = SMALL | {"hidden": 96, "intermediate": 64} | shape
        quantised_calls("mxfp4", problems.in_mxfp4(problems.random_problem(turn, **layer)), calls, shape)


def quantised_calls(kind: str, problem: problems.Problem, calls: int, shape: dict[str, object]) -> None:
    with quantised_on_gpu.context_of(problem, processors=4, timeout=0.0) as context:
        for _ in range(calls):
            outcome = problems.Outcome(*quantised_on_gpu.call(context, problem))
            problems.check(problem, [outcome], tensor_cores=True)
    print(f"sanitized {kind} {shape}", flush=True)


def backward(calls: int) -> None:
    """A call that keeps, and its backward pass."""
    for turn, shape in enumerate(TRAINED):
        problem, grads = training.trainable(turn, **SMALL | {"scale": 1.0} | shape)
        limits = problem.limits() | {"return_mode": "direct", "processors": 4, "timeout": 0.0}
        with flashmoe.Context(engine="cuda", **limits) as context:
            for _ in range(calls):
                training.check(problem, grads, [gradients_of(context, problem, grads[0])], engine="cuda")
        print(f"sanitized backward {shape}", flush=True)


OTHERS = {"fp8": fp8, "mxfp4": mxfp4, "backward": backward}
"""Kinds of layers that tests describe otherwise."""
FEW = ("few", "few_fp8")


def few_in_group(kind: str, calls: int, rank: int, ranks: int, name: str) -> None:
    """Calls of contexts of few tokens, of 16-bit layers or with experts in FP8."""
    for turn, shape in enumerate(OF_FEW):
        problem = problems.random_problem(turn, **SMALL | shape)
        if kind == "few_fp8":
            problem = problems.quantised(problem)
        own = {name: each[rank:] for name in few_fp8_ranks.OF_TOKENS if (each := getattr(problem, name)) is not None}
        local = few_fp8_ranks.OnGpu(rank, problem)
        limits = {"processors": 4, "timeout": 300.0}  # see in_group()
        with few_fp8_ranks.joined_for(rank, ranks, f"{name}-{turn}", problem, **limits) as context:
            for _ in range(calls):
                y = local.call(context)
                context.synchronize()
                outcome = problems.Outcome(quantised_on_gpu.on_host(y), context.last_call)
                problems.check(replace(problem, **own), [outcome], tensor_cores=True)
        print(f"sanitized {kind} {shape}", flush=True)


def in_group(way: str, calls: int, rank: int, ranks: int, name: str) -> None:
    # A timeout, since a peer may have been ended; a long one, since NVSHMEM takes half a minute under memcheck.
    limits = {**LARGEST, **WAYS[way], "processors": 4, "timeout": 300.0}
    with joined(rank, ranks, name, **limits) as context:
        for turn, (kind, shape) in enumerate(OF_GROUPS):
            problem = problem_of(turn, kind, shape, rank, ranks)
            call_and_check(context, problem, rank, contiguous(problem.experts, ranks), calls)
            print(f"sanitized {way} {kind} {shape}", flush=True)
        problem = problem_of(0, "bfloat16", COPIED, rank, ranks)
        everywhere_or_on_one = [list(range(ranks)) if e % 2 else [e % ranks] for e in range(problem.experts)]
        call_and_check(context, problem, rank, everywhere_or_on_one, calls)
        print(f"sanitized {way} copies {COPIED}", flush=True)
        if way != "direct":  # which returns no slices
            call_in_slices(context, problem_of(1, "bfloat16", SLICED, rank, ranks), rank, ranks, calls)
            print(f"sanitized {way} slices {SLICED}", flush=True)


def problem_of(seed: int, kind: str, shape: dict[str, object], rank: int, ranks: int) -> Problem:
    """A rank's part of a problem whose tokens are the first rank's, but for a few."""
    whole = random_problem(seed, **KINDS[kind], device=f"cuda:{device_of(rank)}", **shape)
    few = shape["tokens"] // 8
    return share_of(whole, rank, [shape["tokens"] - few * (ranks - 1)] + [few] * (ranks - 1))


def call_and_check(context: flashmoe.Context, problem: Problem, rank: int, placement: Placement, calls: int) -> None:
    local = with_experts(problem, local_experts(placement, rank))
    for _ in range(calls):
        y, report = call(context, local, placement=placement)
        check(problem, y, report)


def call_in_slices(context: flashmoe.Context, problem: Problem, rank: int, ranks: int, calls: int) -> None:
    """Each rank has a slice of every expert. Expected is what as many experts give that are chosen together."""
    parts = flashmoe.slices.cut(ranks, problem.gate_up_proj, problem.down_proj)
    placement = hybrid(problem.experts, ranks, ranks)
    sliced = replace(problem, **parts, options={**problem.options, "slices": ranks})
    local = with_experts(sliced, local_experts(placement, rank))
    ids = problem.topk_ids[..., None] * ranks + torch.arange(ranks, device=problem.x.device)
    weights = problem.topk_weights.repeat_interleave(ranks, dim=1)
    chosen = {"top_k": ids[0].numel(), "topk_ids": ids.flatten(1), "topk_weights": weights}
    expected = expected_result(problem.x, sliced.weights(), **chosen)
    for _ in range(calls):
        y, _ = call(context, local, placement=placement)
        error = float((y.double() - expected.y).norm())
        assert error <= expected.bound, f"slices: error {error:.3e}, {expected.bound=:.3e}"


def main(what: str, calls: str, *of_group: str) -> None:
    torch.zeros(1, device="cuda")  # else memcheck minds that FlashMoE asks whether a context is current
    if of_group:
        rank, ranks, name = of_group
        (few_in_group if what in FEW else in_group)(what, int(calls), int(rank), int(ranks), name)
    elif what in OTHERS:
        OTHERS[what](int(calls))
    else:
        alone(what, int(calls))
    torch.cuda.synchronize()
    print(f"flashmoe {flashmoe.__version__}: all calls are right")


if __name__ == "__main__":
    main(*sys.argv[1:])
