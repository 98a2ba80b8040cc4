"""Layers with quantised experts on the CUDA engine: problems, their quantisation and the check are those of the CPU
engine's tests (tests/problems.py), with what tensor cores add to the bound. Every output begins as NaN."""

from __future__ import annotations

from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import torch
from flashmoe.report import CallReport
from hypothesis import strategies as st
from layers import PATIENCE, poisoned_outputs
from problems import ACTIVATIONS, Outcome, Problem, check


def on_gpu(array: Any, device: str = "cuda") -> Any:
    """An array of NumPy's as a tensor; what is none stays as it is."""
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


def run_and_check(problem: Problem, *, shared_in_slices: bool = False, **changes: Any) -> np.ndarray:
    """Twice: the bits are the same. The first output."""
    with context_of(problem, **changes) as context:
        y, report = call(context, problem)
        again, _ = call(context, problem)
    check(problem, [Outcome(y, report)], tensor_cores=True, shared_in_slices=shared_in_slices)
    np.testing.assert_array_equal(y, again)
    return y


def layer_and_quantisation(draw: st.DrawFn, experts: int, top_k: int, tokens: int) -> tuple[dict, dict]:
    """The arguments of `random_problem` and of `quantised` for a random layer."""
    size = st.integers(1, 40).map(lambda n: 16 * n) | st.sampled_from([128, 256, 384])
    problem: dict[str, Any] = {
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
    how = {"scales": draw(st.sampled_from(["block", "block", "row", "tensor"]))}
    how["x"] = not problem["fused"] and problem["dtype"] == "bfloat16" and draw(st.booleans())
    return problem, how
