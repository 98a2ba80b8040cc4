"""Both engines on the same inputs: their results differ by at most the sum of their bounds."""

from __future__ import annotations

import flashmoe
import numpy as np
import pytest
import torch
from bounds import Expected, expected_result
from flashmoe.tolerance import UNIT_ROUNDOFF, router_error
from layers import ACTIVATIONS, DTYPES, PATIENCE, Problem, call, check, context_of, is_certain, random_problem

pytestmark = pytest.mark.gpu


def on_cpu(problem: Problem) -> dict:
    return {name: each.cpu() if isinstance(each, torch.Tensor) else each for name, each in problem.arguments().items()}


def cpu_weight_slack(problem: Problem, expected: Expected) -> np.ndarray | float:
    """[T, K]: how much the CPU engine's combine weights may differ from the reference's; 0 if the weights are given."""
    if problem.router is None:
        return 0.0
    given = (problem.x, problem.router, problem.router_bias)
    operands = [None if each is None else each.double().cpu().numpy() for each in given]
    routing = expected.topk_ids.cpu().numpy(), expected.weights.cpu().numpy()
    _, variance = router_error(*operands, *routing, renormalize=problem.options.get("renormalize", True))
    return 8.0 * np.sqrt(variance)


@pytest.mark.parametrize("ids", [None, "int32", "int64"], ids=["router", "int32", "int64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_engines_agree(dtype, activation, ids):
    problem = random_problem(
        21,
        130,
        hidden=96,
        intermediate=80,
        experts=12,
        top_k=3,
        dtype=dtype,
        ids=ids,
        activation=activation,
        biases=True,
    )
    if ids is None:  # tokens with nearly equal logits are left out, because the two engines may choose other experts
        problem.x = problem.x[is_certain(problem)].contiguous()
        assert len(problem.x) > 60
    with context_of(problem) as context:
        y, report = call(context, problem)
        expected = check(problem, y, report)
    sizes = {"experts": 12, "top_k": 3, "dtype": dtype, "timeout": PATIENCE, "engine": "cpu"}
    with flashmoe.Context(max_tokens=len(problem.x), hidden=96, intermediate=80, **sizes) as context:
        other = flashmoe.moe(context, **on_cpu(problem))
        theirs = context.last_call
    np.testing.assert_array_equal(report.topk_ids, theirs.topk_ids)
    slack = expected.weight_slack.cpu().numpy() + cpu_weight_slack(problem, expected)
    assert (np.abs(report.topk_weights.astype(np.float64) - theirs.topk_weights) <= slack).all()
    # The bound holds for the CPU engine too: it does not truncate operands, and the bound allows for its roundings.
    error = float((y.double().cpu() - other.double()).norm())
    assert error <= 2.0 * expected.bound


def test_the_bound_is_as_sharp_as_it_says():
    """Tests the bound: a result that lacks one expert of one token is outside it."""
    problem = random_problem(22, 700, hidden=256, intermediate=192, experts=16, top_k=4, ids="int32")
    problem.topk_weights[123, 2] = 1.0
    expected = expected_result(
        problem.x, problem.weights(), top_k=4, topk_ids=problem.topk_ids, topk_weights=problem.topk_weights
    )
    assert expected.bound < 2.0 * UNIT_ROUNDOFF["bfloat16"] * expected.scale
    without = problem.topk_weights.clone()
    without[123, 2] = 0.0
    damaged = expected_result(problem.x, problem.weights(), top_k=4, topk_ids=problem.topk_ids, topk_weights=without)
    assert float((damaged.y - expected.y).norm()) > expected.bound
