"""What only values show to be wrong: the error names the token, the context is broken, and a new one works."""

from __future__ import annotations

import math

import flashmoe
import pytest
import torch
from layers import DTYPES, Problem, check, context_of, random_problem, run_and_check
from layers import call as good_call

pytestmark = pytest.mark.gpu

USUAL = {"hidden": 128, "intermediate": 64, "experts": 24, "top_k": 3}


def with_logit(value: float, dtype: str = "bfloat16") -> Problem:
    problem = random_problem(1, 1700, dtype=dtype, **USUAL)
    problem.x[1234, 77] = value
    return problem


def with_ids(changes: dict[tuple[int, int], int], ids: str) -> Problem:
    problem = random_problem(2, 1700, ids=ids, **USUAL)
    for place, expert in changes.items():
        problem.topk_ids[place] = expert
    return problem


NOT_FINITE = r"router: expected finite logits, got NaN or infinity for token 1234 of rank 0"


def faults() -> dict[str, tuple[Problem, str]]:
    """By name: a call, and what is said of it."""
    range_of = "topk_ids: expected ids in \\[0, E=24\\), got {} for token 1001 "
    return {
        "NaN": (with_logit(math.nan), NOT_FINITE),
        "infinity": (with_logit(math.inf), NOT_FINITE),
        "float32 NaN": (with_logit(math.nan, "float32"), NOT_FINITE),
        "id E": (with_ids({(1001, 2): 24}, "int32"), range_of.format(24)),
        "id -1": (with_ids({(1001, 0): -1}, "int32"), range_of.format(-1)),
        "id of 64 bits": (with_ids({(1001, 1): 2**40 + 3}, "int64"), range_of.format(-1)),
        "the same expert twice": (
            with_ids({(1699, 0): 5, (1699, 1): 7, (1699, 2): 5}, "int64"),
            "topk_ids: expected distinct experts per token, got expert 5 twice for token 1699 ",
        ),
    }


FAULTS = ("NaN", "infinity", "float32 NaN", "id E", "id -1", "id of 64 bits", "the same expert twice")


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_raised_where_the_host_waits(fault):
    problem, message = faults()[fault]
    with context_of(problem) as context:
        flashmoe.moe(context, **problem.arguments())  # does not wait, so it cannot know
        with pytest.raises(flashmoe.InvalidArgument, match=message):
            context.synchronize()
        for refused in (
            context.synchronize,
            lambda: context.last_call,
            lambda: flashmoe.moe(context, **problem.arguments()),
        ):
            with pytest.raises(flashmoe.GroupError, match="an earlier call failed"):
                refused()
    run_and_check(random_problem(3, 1700, dtype=problem.dtype, **USUAL))  # in a new context


@pytest.mark.parametrize("fault", ["NaN", "id E"])
def test_fault_is_raised_by_the_next_call_and_by_the_report(fault):
    problem, message = faults()[fault]
    with context_of(problem) as context:
        flashmoe.moe(context, **problem.arguments())
        torch.cuda.synchronize()
        with pytest.raises(flashmoe.InvalidArgument, match=message):
            flashmoe.moe(context, **problem.arguments())
    with context_of(problem) as context:
        flashmoe.moe(context, **problem.arguments())
        with pytest.raises(flashmoe.InvalidArgument, match=message):
            _ = context.last_call


@pytest.mark.parametrize("dtype", DTYPES)
def test_fault_in_the_thousandth_call(dtype):
    problem = random_problem(4, 300, dtype=dtype, **USUAL)
    with context_of(problem) as context:
        for _ in range(999):
            flashmoe.moe(context, **problem.arguments())
        check(problem, *good_call(context, problem))
        problem.x[42] = math.nan
        flashmoe.moe(context, **problem.arguments())
        with pytest.raises(flashmoe.InvalidArgument, match="token 42 of rank 0"):
            context.synchronize()


def test_calls_behind_a_failed_one_do_nothing():
    """Queued before the host can know, with fewer tokens; and replayed."""
    good, bad = random_problem(8, 300, **USUAL), with_logit(math.nan)
    with context_of(bad) as context:
        check(good, *good_call(context, good))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = flashmoe.moe(context, **good.arguments())
        y.fill_(7.0)
        torch.cuda._sleep(50_000_000)
        flashmoe.moe(context, **bad.arguments())
        flashmoe.moe(context, **good.arguments())
        graph.replay()
        graph.replay()
        with pytest.raises(flashmoe.InvalidArgument, match=NOT_FINITE):
            context.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert (y == 7.0).all()


def test_every_token_is_wrong():
    """Every block finds a fault: one is reported, and all leave."""
    problem = random_problem(5, 3000, **USUAL)
    problem.router.fill_(math.nan)
    with context_of(problem) as context:
        flashmoe.moe(context, **problem.arguments())
        with pytest.raises(flashmoe.InvalidArgument, match=r"NaN or infinity for token \d+ of rank 0"):
            context.synchronize()


def test_a_broken_context_leaves_others_alone():
    good, bad = random_problem(6, 200, **USUAL), with_logit(math.nan)
    with context_of(good) as healthy, context_of(bad) as broken:
        flashmoe.moe(broken, **bad.arguments())
        y, report = good_call(healthy, good)
        check(good, y, report)
        with pytest.raises(flashmoe.InvalidArgument):
            broken.synchronize()
        assert torch.equal(good_call(healthy, good)[0], y)


def test_nan_in_a_weight_is_no_fault():
    """It is arithmetic: it shows in what it touches, and nowhere else."""
    problem = random_problem(7, 200, ids="int32", **USUAL)
    with context_of(problem) as context:
        before, _ = good_call(context, problem)
        problem.down_proj[9, 17, 0] = math.nan
        y = flashmoe.moe(context, **problem.arguments())
        context.synchronize()
    touched = (problem.topk_ids == 9).any(dim=1)
    assert touched.any() and not touched.all()
    assert y[touched][:, 17].isnan().all()
    y[:, 17], before[:, 17] = 0.0, 0.0
    assert torch.equal(y, before)
