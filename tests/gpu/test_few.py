"""Calls of one rank by the kernel for a few tokens (include/flashmoe/sm90/decode/alone.cuh)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import flashmoe
import pytest
import torch
from layers import ACTIVATIONS, DTYPES, Problem, call, capture, check, context_of, random_problem, run_and_check

pytestmark = pytest.mark.gpu

USUAL = {"hidden": 320, "intermediate": 192, "experts": 24, "top_k": 5}
SPANS = ("gate", "dispatch", "gemm0", "gemm1", "wait", "combine", "return")
MOST = {"float32": 8, "bfloat16": 230, "float16": 230}
"""The most tokens for which the kernel for a few tokens computes the usual layer, by type. With 16-bit types, experts
then have almost 48 rows on average, the most that this kernel allows."""


@pytest.mark.parametrize("ids", [None, "int64"], ids=["router", "given"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_tokens(dtype, activation, ids):
    """Calls by the kernel for a few tokens, and calls with one token too many for it, which the general kernel
    computes, in one context: neither kernel disturbs the other."""
    most = MOST[dtype]
    problem = random_problem(41, most + 1, dtype=dtype, activation=activation, ids=ids, biases=True, skew=3.0, **USUAL)
    with context_of(problem) as context:
        for tokens in (1, 2, most + 1, 3, 4, 5, most + 1, most + 1, 7, 8, 9, 16, 17, 65, most, 1):
            part = first_tokens(problem, min(tokens, most + 1))
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


@pytest.mark.parametrize("tokens", [8, 63])
@pytest.mark.parametrize("capacity_factor", [None, 0.3, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, capacity_factor, tokens):
    sizes = dict(SHAPES[shape])
    processors = sizes.pop("processors", None)
    tokens = min(tokens, 16 * sizes["experts"] // sizes["top_k"])
    problem = random_problem(42, tokens, capacity_factor=capacity_factor, **sizes)
    run_and_check(problem, processors=processors)


@pytest.mark.parametrize("ids", [None, "int32"], ids=["router", "given"])
def test_more_choices_than_one_warp_sorts(ids):
    """The call has more choices than one warp sorts, and some expert has more rows than a warp multiplies at a time."""
    sizes = {"hidden": 256, "intermediate": 64, "experts": 128, "top_k": 8}
    run_and_check(random_problem(51, 256, ids=ids, skew=2.5, capacity_factor=2.0, **sizes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_bits_do_not_depend_on_the_others(dtype):
    problem = random_problem(43, MOST[dtype], dtype=dtype, skew=3.0, **USUAL)
    with context_of(problem) as context:
        together, _ = call(context, problem)
        apart = torch.cat([call(context, first_tokens(problem, 1, token))[0] for token in range(MOST[dtype])])
        assert torch.equal(apart, together)
        for begin in (0, 3, 7, max(MOST[dtype] - 9, 0)):
            for tokens in (7, 8, 9, 40):
                part, _ = call(context, first_tokens(problem, tokens, begin))
                assert torch.equal(part, together[begin : begin + len(part)]), (begin, tokens)
        for _ in range(100):
            assert torch.equal(call(context, problem)[0], together)


def nan_in_x(problem: Problem) -> None:
    problem.x[5, 7] = math.nan


def id_out_of_range(problem: Problem) -> None:
    problem.topk_ids[6, 1] = USUAL["experts"]


def id_twice(problem: Problem) -> None:
    problem.topk_ids[7, 3] = problem.topk_ids[7, 0]


@pytest.mark.parametrize("tokens", [8, 100])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            nan_in_x,
            "router: expected logits .* with strict, got NaN or infinity for token 5 of rank 0",
        ),
        (id_out_of_range, r"topk_ids: expected ids in \[0, E=24\), or -1 for none, got 24 for token 6 of rank 0"),
        (id_twice, r"topk_ids: expected distinct experts per token, got expert \d+ twice for token 7 of rank 0"),
    ],
)
def test_faults(spoil: Callable[[Problem], None], message: str, tokens: int):
    """Bad rows are faults: rows with wrong ids always, rows whose logits are not finite only if the call is strict."""
    problem = random_problem(44, tokens, ids=None if spoil is nan_in_x else "int32", **USUAL)
    good = random_problem(45, tokens, **USUAL)
    spoil(problem)
    if spoil is nan_in_x:
        problem.options["strict"] = True
    with context_of(problem) as context:
        check(good, *call(context, good))
        flashmoe.moe(context, **problem.arguments())
        with pytest.raises(flashmoe.BadRow, match=message):
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
        spans = {kind: [event for event in report.events if event.kind == kind] for kind in SPANS}
        assert all(0 < event.start_ns <= event.end_ns for event in report.events)
        for kind in ("gate", "dispatch", "combine", "return"):
            assert len(spans[kind]) == context.processors, kind
        chosen = len(set(report.topk_ids.flat))  # the number of experts that any token has chosen
        assert len(spans["gemm0"]) == chosen * math.ceil(USUAL["intermediate"] / 64)
        assert len(spans["gemm1"]) == chosen * math.ceil(USUAL["hidden"] / 128)
        # Each task has a wait before it, and each processor also waits for the word that there are no more tasks.
        assert len(spans["wait"]) == len(spans["gemm0"]) + len(spans["gemm1"]) + context.processors
