"""The program that sanitizer.py runs under NVIDIA's compute-sanitizer: small calls with every kind of tile, with four
thread blocks.

`sanitized.py KIND CALLS`: on one GPU, a kind of KINDS or OTHERS; CALLS calls of each shape.
`sanitized.py WAY CALLS RANK RANKS NAME`: as rank RANK of the group NAME of RANKS ranks, a way of WAYS, or one of FEW
(then in contexts for few tokens); CALLS calls of each shape.
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
"""Sizes of layers that are quantised or trained. Scales are for blocks of 128 columns: the second block of H has 16."""
OF_FP8 = (
    {"tokens": [6]},
    {"tokens": [90], "biases": (True, True, True), "capacity_factor": 0.7},
    {"tokens": [300], "fused": False, "shared": 1, "shared_gate": True},
)
OF_FEW = (
    {"tokens": [9, 2], "experts": 24, "biases": (True, True, True)},
    {"tokens": [0, 20], "experts": 30, "top_k": 3, "fused": False},
)
"""Layers of two ranks in contexts for few tokens. With the most tokens on both ranks, experts have on average 1.5 rows
in the first layer, and 4 in the second."""
OF_MXFP4 = ({"tokens": [1]}, {"tokens": [20], "biases": (True, True, True)})
TRAINED = (
    {"tokens": [90], "biases": (True, True, True), "capacity_factor": 0.7},
    {"tokens": [300], "fused": False, "hidden": 72, "intermediate": 40},
    {"tokens": [7], "activation": "gelu"},
)


def alone(kind: str, calls: int) -> None:
    for turn, shape in enumerate(SHAPES):
        problem = random_problem(turn, **KINDS[kind], **shape)
        # No timeout, because a sanitizer makes kernels very slow.
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
    """Makes forward passes that keep, each followed by its backward pass, and checks the gradients."""
    for turn, shape in enumerate(TRAINED):
        problem, grads = training.trainable(turn, **SMALL | {"scale": 1.0} | shape)
        limits = problem.limits() | {"return_mode": "direct", "processors": 4, "timeout": 0.0}
        with flashmoe.Context(engine="cuda", **limits) as context:
            for _ in range(calls):
                training.check(problem, grads, [gradients_of(context, problem, grads[0])], engine="cuda")
        print(f"sanitized backward {shape}", flush=True)


OTHERS = {"fp8": fp8, "mxfp4": mxfp4, "backward": backward}
"""The kinds of layers that are not options of `layers.random_problem`, each with the function that makes its calls."""
FEW = ("few", "few_fp8")


def few_in_group(kind: str, calls: int, rank: int, ranks: int, name: str) -> None:
    """Makes and checks calls in contexts for few tokens. kind: "few": layers of 16 bits; "few_fp8": experts in FP8."""
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
    # There is a timeout because a peer may have been killed. It is long because NVSHMEM takes half a minute
    # under memcheck.
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
        if way != "direct":  # experts in slices need the reduced return
            call_in_slices(context, problem_of(1, "bfloat16", SLICED, rank, ranks), rank, ranks, calls)
            print(f"sanitized {way} slices {SLICED}", flush=True)


def problem_of(seed: int, kind: str, shape: dict[str, object], rank: int, ranks: int) -> Problem:
    """A rank's part of a problem. An eighth of the tokens is on each rank except the first, which has the others."""
    whole = random_problem(seed, **KINDS[kind], device=f"cuda:{device_of(rank)}", **shape)
    few = shape["tokens"] // 8
    return share_of(whole, rank, [shape["tokens"] - few * (ranks - 1)] + [few] * (ranks - 1))


def call_and_check(context: flashmoe.Context, problem: Problem, rank: int, placement: Placement, calls: int) -> None:
    local = with_experts(problem, local_experts(placement, rank))
    for _ in range(calls):
        y, report = call(context, local, placement=placement)
        check(problem, y, report)


def call_in_slices(context: flashmoe.Context, problem: Problem, rank: int, ranks: int, calls: int) -> None:
    """Makes and checks calls in which each rank has a slice of every expert. In the reference, slices are experts of
    their own, and a token chooses all slices of an expert together."""
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
    torch.zeros(1, device="cuda")  # makes a CUDA context; otherwise memcheck reports FlashMoE's query for one
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
