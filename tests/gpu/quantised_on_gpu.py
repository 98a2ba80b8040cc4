"""Calls of layers with quantised experts on the CUDA engine. Problems, their quantisation and the check are those of
the CPU engine's tests (tests/problems.py), with what tensor cores add to the bound. Outputs of `call` begin as NaN."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import torch
from flashmoe.report import CallReport
from hypothesis import strategies as st
from layers import PATIENCE, poisoned_outputs
from problems import ACTIVATIONS, Outcome, Problem, check
from ranks import device_of, joined


def on_gpu(array: Any, device: str = "cuda") -> Any:
    """A NumPy array as a tensor on the device; anything else is returned as it is."""
    if not isinstance(array, np.ndarray):
        return array
    types = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    array = np.ascontiguousarray(array)
    if array.dtype.name not in types:
        return torch.from_numpy(array).to(device)
    words = array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8)
    return torch.from_numpy(words).view(types[array.dtype.name]).to(device)


def on_host(y: torch.Tensor) -> np.ndarray:
    if y.dtype == torch.bfloat16:
        return y.view(torch.uint16).cpu().numpy().view(ml_dtypes.bfloat16)
    return y.cpu().numpy()


def call(context: flashmoe.Context, problem: Problem, rank: int = 0) -> tuple[np.ndarray, CallReport]:
    arguments = {name: on_gpu(each, f"cuda:{context.device}") for name, each in problem.arguments(rank).items()}
    with poisoned_outputs():
        y = flashmoe.moe(context, **arguments)
    context.synchronize()
    return on_host(y), context.last_call


def context_of(problem: Problem, **changes: Any) -> flashmoe.Context:
    return flashmoe.Context(**problem.limits() | {"engine": "cuda", "timeout": PATIENCE} | changes)


def in_group(rank: int, ranks: int, name: str, problem: Problem, return_mode: str) -> tuple[np.ndarray, CallReport]:
    """y and the report of this rank's call in a new group. A second call must give the same bits."""
    torch.cuda.set_device(device_of(rank))
    limits = {name: each for name, each in problem.limits().items() if name not in ("ranks", "engine")}
    with joined(rank, ranks, name, **limits | {"return_mode": return_mode}) as context:
        y, report = call(context, problem, rank)
        again, _ = call(context, problem, rank)
    np.testing.assert_array_equal(y, again)
    return y, report


def run_and_check(problem: Problem, *, shared_in_slices: bool = False, **changes: Any) -> np.ndarray:
    """Makes the call twice in a context of its own, checks the first result, and that the second has the same bits.
    Returns the first y. `shared_in_slices`: for the check, that the kernel for a few tokens rounds the rows of the
    shared expert's slices one by one."""
    with context_of(problem, **changes) as context:
        y, report = call(context, problem)
        again, _ = call(context, problem)
    check(problem, [Outcome(y, report)], tensor_cores=True, shared_in_slices=shared_in_slices)
    np.testing.assert_array_equal(y, again)
    return y


def first_tokens(problem: Problem, n: int, begin: int = 0) -> Problem:
    """The problem with n of its tokens, from `begin` on."""
    names = ("x", "x_scale", "topk_ids", "topk_weights")
    rows = {name: getattr(problem, name) for name in names if getattr(problem, name) is not None}
    return replace(problem, **{name: [each[begin : begin + n] for each in arrays] for name, arrays in rows.items()})


def check_that_bits_are_a_tokens_own(problem: Problem) -> None:
    """Checks for a problem of 64 tokens that a token's bits do not depend on the other tokens of a call. They may
    differ only between calls of up to eight tokens and calls of more. Repeated calls give the same bits."""
    with context_of(problem) as context:
        together, _ = call(context, problem)
        apart = np.concatenate([call(context, first_tokens(problem, 1, token))[0] for token in range(64)])
        for begin in (0, 3, 55):
            for tokens in (7, 8, 9, 40):
                part, _ = call(context, first_tokens(problem, tokens, begin))
                expected = together if len(part) > 8 else apart
                np.testing.assert_array_equal(part, expected[begin : begin + len(part)])
        arguments = {name: on_gpu(each) for name, each in problem.arguments(0).items()}
        for _ in range(100):
            y = flashmoe.moe(context, **arguments)
        context.synchronize()
        np.testing.assert_array_equal(on_host(y), together)


def check_what_is_no_number(problem: Problem) -> None:
    """Checks that NaN and infinity in x reach only the result of their own token. There, an infinity must give NaN with
    experts in FP8; in MXFP4 it may also give infinity."""
    tokens = len(problem.x[0])
    expected = run_and_check(problem)
    x = problem.x[0].copy()
    x[3, 5], x[7, 100], x[11] = math.nan, math.inf, 0.0
    with context_of(problem) as context:
        y, _ = call(context, replace(problem, x=[x]))
    numbers = y.astype(np.float32)
    assert np.isnan(numbers[3]).all() and (numbers[11] == 0.0).all()
    of_infinity = np.isnan(numbers[7]) if problem.weight_dtype == "float8_e4m3fn" else ~np.isfinite(numbers[7])
    assert of_infinity.all()
    others = np.setdiff1d(np.arange(tokens), [3, 7, 11])
    np.testing.assert_array_equal(y[others], expected[others])


def check_that_scales_of_other_blocks_are_noticed(problem: Problem) -> None:
    """Checks that the bound is narrow enough to notice scales in the wrong order: if the scales of either matrix are
    reversed along either axis, the error of a call must be more than twice the bound."""
    tensor_cores = problem.weight_dtype == "float8_e4m3fn"
    with context_of(problem) as context:
        y, report = call(context, problem)
        outcome = Outcome(y, report)
        check(problem, [outcome], tensor_cores=tensor_cores)
        for name in ("gate_up_scale", "down_scale"):
            for axis in (1, 2):
                spoiled = np.flip(getattr(problem, name), axis).copy()
                other, _ = call(context, replace(problem, **{name: spoiled}))
                error = np.linalg.norm(other.astype(np.float64) - outcome.reference.y)
                assert error > 2 * outcome.allowed.bound, (name, axis)


def check_a_captured_call(problem: Problem) -> None:
    """Checks that the replays of a captured call have the bits of a plain call."""
    with context_of(problem) as context:
        y, _ = call(context, problem)
        arguments = {name: on_gpu(each) for name, each in problem.arguments(0).items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = flashmoe.moe(context, **arguments)
        for _ in range(3):
            captured.fill_(math.nan)
            graph.replay()
            context.synchronize()
            np.testing.assert_array_equal(on_host(captured), y)


def random_layer(
    draw: st.DrawFn, size: st.SearchStrategy[int], experts: int, top_k: int, tokens: int
) -> dict[str, Any]:
    """Arguments of `random_problem` for a drawn layer. `size`: what H and I are drawn from."""
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "tokens": [tokens],
        "hidden": draw(size),
        "intermediate": draw(size),
        "experts": experts,
        "top_k": top_k,
        "dtype": draw(st.sampled_from(["bfloat16", "bfloat16", "float16"])),
        "fused": draw(st.booleans()),
        "skew": draw(st.sampled_from([0.0, 3.0, 50.0])),
        "scale": draw(st.sampled_from([1.0, 0.03, 8.0])),
        "biases": draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "capacity_factor": draw(st.none() | st.floats(0.05, 3.0)),
    }


def with_shared(draw: st.DrawFn, problem: dict[str, Any]) -> dict[str, Any]:
    """The arguments with drawn values of `weights_on_input` and `shared`. A layer with a shared expert gets no
    biases of experts."""
    problem = problem | {"weights_on_input": draw(st.booleans()), "shared": draw(st.sampled_from([0, 0, 1]))}
    return problem | ({"biases": (problem["biases"][0], False, False)} if problem["shared"] else {})


def layer_and_quantisation(draw: st.DrawFn, experts: int, top_k: int, tokens: int) -> tuple[dict, dict]:
    """The arguments of `random_problem` and of `quantised` for a random layer."""
    size = st.integers(1, 40).map(lambda n: 16 * n) | st.sampled_from([128, 256, 384])
    problem = random_layer(draw, size, experts, top_k, tokens)
    how = {"scales": draw(st.sampled_from(["block", "block", "row", "tensor"]))}
    how["x"] = not problem["fused"] and problem["dtype"] == "bfloat16" and draw(st.booleans())
    return problem, how
