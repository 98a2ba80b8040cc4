"""Calls with wrong ids disturb no other contexts and no later calls, and a NaN in a weight is no fault. (Which rows
special values in x and ids spoil: test_special_values_gpu.py.)"""

from __future__ import annotations

import math

import flashmoe
import pytest
import torch
from layers import DTYPES, check, context_of, random_problem
from layers import call as good_call

pytestmark = pytest.mark.gpu

USUAL = {"hidden": 128, "intermediate": 64, "experts": 24, "top_k": 3}


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_ids_in_the_thousandth_call(dtype):
    problem = random_problem(4, 300, dtype=dtype, ids="int32", **USUAL)
    with context_of(problem) as context:
        for _ in range(999):
            flashmoe.moe(context, **problem.arguments())
        check(problem, *good_call(context, problem))
        problem.topk_ids[42, 1] = 24
        flashmoe.moe(context, **problem.arguments())
        with pytest.raises(flashmoe.InvalidArgument, match="got 24 for token 42 of rank 0"):
            context.synchronize()


def test_calls_behind_wrong_ids_are_made():
    """A call behind a call with wrong ids is made: it is a replay of a graph, has fewer tokens, and is launched before
    the host can know of the wrong ids."""
    good, bad = random_problem(8, 300, ids="int32", **USUAL), random_problem(8, 1700, ids="int32", **USUAL)
    bad.topk_ids[1234, 0] = -7
    with context_of(bad) as context:
        expected, _ = good_call(context, good)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = flashmoe.moe(context, **good.arguments())
        y.fill_(7.0)
        torch.cuda._sleep(50_000_000)
        flashmoe.moe(context, **bad.arguments())
        graph.replay()
        with pytest.raises(flashmoe.InvalidArgument, match="got -7 for token 1234 of rank 0"):
            context.synchronize()
        assert torch.equal(y, expected)
        context.synchronize()


def test_wrong_ids_leave_other_contexts_alone():
    good, bad = random_problem(6, 200, **USUAL), random_problem(7, 1700, ids="int32", **USUAL)
    bad.topk_ids[3] = 24
    with context_of(good) as healthy, context_of(bad) as other:
        flashmoe.moe(other, **bad.arguments())
        y, report = good_call(healthy, good)
        check(good, y, report)
        with pytest.raises(flashmoe.InvalidArgument):
            other.synchronize()
        assert torch.equal(good_call(healthy, good)[0], y)


def test_nan_in_a_weight_is_no_fault():
    """The NaN reaches the results that are computed with this weight, and no others."""
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
