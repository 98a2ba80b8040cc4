"""Calls of at most eight tokens, which a kernel of their own computes (include/flashmoe/gpu/few.cuh)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import flashmoe
import pytest
import torch
from layers import ACTIVATIONS, DTYPES, Problem, call, capture, check, context_of, random_problem, run_and_check

pytestmark = pytest.mark.gpu

FEW = 8
USUAL = {"hidden": 320, "intermediate": 192, "experts": 24, "top_k": 5}


@pytest.mark.parametrize("ids", [None, "int64"], ids=["router", "given"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_tokens(dtype, activation, ids):
    """And one more, which the general kernel computes, in turn in one context: neither disturbs the other."""
    problem = random_problem(41, FEW + 1, dtype=dtype, activation=activation, ids=ids, biases=True, skew=3.0, **USUAL)
    with context_of(problem) as context:
        for tokens in (1, 2, FEW + 1, 3, 4, 5, FEW + 1, FEW + 1, 6, 7, 8, 1):
            part = first_tokens(problem, tokens)
            check(part, *call(context, part))


def first_tokens(problem: Problem, n: int, begin: int = 0) -> Problem:
    names = ("x", "topk_ids", "topk_weights")
    rows = {name: getattr(problem, name) for name in names if getattr(problem, name) is not None}
    return replace(problem, **{name: tensor[begin : begin + n] for name, tensor in rows.items()})


SHAPES = {
    "Qwen3-30B-A3B": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    "K 32 of E 1024": {"hidden": 128, "intermediate": 64, "experts": 1024, "top_k": 32},
    "more columns than one pass holds": {"hidden": 16384, "intermediate": 64, "experts": 40, "top_k": 32},
    "long rows": {"hidden": 4096, "intermediate": 14336, "experts": 2, "top_k": 2},
    "smallest": {"hidden": 8, "intermediate": 8, "experts": 1, "top_k": 1},
    "odd sizes": {"hidden": 1032, "intermediate": 1368, "experts": 7, "top_k": 3},
    "all tokens to the same experts": {"skew": 50.0, **USUAL},
    "four thread blocks": {"processors": 4, **USUAL},
}


@pytest.mark.parametrize("capacity_factor", [None, 0.3, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, capacity_factor):
    sizes = dict(SHAPES[shape])
    processors = sizes.pop("processors", None)
    problem = random_problem(42, FEW, capacity_factor=capacity_factor, **sizes)
    run_and_check(problem, processors=processors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_bits_do_not_depend_on_the_others(dtype):
    problem = random_problem(43, FEW, dtype=dtype, skew=3.0, **USUAL)
    with context_of(problem) as context:
        together, _ = call(context, problem)
        for token in range(FEW):
            alone, _ = call(context, first_tokens(problem, 1, token))
            assert torch.equal(alone[0], together[token]), token
        for _ in range(100):
            assert torch.equal(call(context, problem)[0], together)


def nan_in_x(problem: Problem) -> None:
    problem.x[5, 7] = math.nan


def id_out_of_range(problem: Problem) -> None:
    problem.topk_ids[6, 1] = USUAL["experts"]


def id_twice(problem: Problem) -> None:
    problem.topk_ids[7, 3] = problem.topk_ids[7, 0]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nan_in_x, "router: expected finite logits, got NaN or infinity for token 5 of rank 0"),
        (id_out_of_range, r"topk_ids: expected ids in \[0, E=24\), got 24 for token 6 "),
        (id_twice, r"topk_ids: expected distinct experts per token, got expert \d+ twice for token 7 "),
    ],
)
def test_faults(spoil: Callable[[Problem], None], message: str):
    problem = random_problem(44, FEW, ids=None if spoil is nan_in_x else "int32", **USUAL)
    good = random_problem(45, FEW, **USUAL)
    spoil(problem)
    with context_of(problem) as context:
        check(good, *call(context, good))
        flashmoe.moe(context, **problem.arguments())
        with pytest.raises(flashmoe.InvalidArgument, match=message):
            context.synchronize()
    run_and_check(good)


def test_replayed_graph():
    problem = random_problem(46, 3, **USUAL)
    with context_of(problem) as context:
        graph, y = capture(context, problem)
        for turn in range(3):
            problem.x.copy_(random_problem(47 + turn, 3, **USUAL).x)
            y.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(call(context, problem)[0], y)


def test_traced_call():
    problem = random_problem(50, 2, **USUAL)
    with context_of(problem) as context:
        plain, _ = call(context, problem)
        y, report = call(context, problem, trace=True)
        assert torch.equal(y, plain)
        for kind in ("gate", "dispatch", "gemm0", "wait", "gemm1"):
            spans = [event for event in report.events if event.kind == kind]
            assert len(spans) == context.processors, kind
            assert all(0 < span.start_ns <= span.end_ns for span in spans)
