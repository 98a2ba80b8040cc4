"""The ends of every range: no tokens, one of everything, more ranks than experts, exact ties, drops."""

from dataclasses import replace

import numpy as np
import pytest
from problems import ACTIVATIONS, DTYPES, Problem, check, random_problem

USUAL = {"hidden": 20, "intermediate": 12, "experts": 6, "top_k": 2}

EDGES = {
    "no tokens on any rank": ([0, 0, 0], {}),
    "no tokens on one rank": ([31, 0, 12], {}),
    "tokens on one rank only": ([0, 0, 50, 0], {}),
    "one token": ([1], {}),
    "one token in the group": ([0, 1, 0], {}),
    "one token per rank": ([1] * 8, {}),
    "ranks without experts": ([20, 20, 20], {"placement": [2, 2, 0, 0, 2, 0]}),
    "all experts on the last rank": ([20, 20, 20], {"placement": [2] * 6}),
    "more ranks than experts": ([9] * 8, {"experts": 3}),
    "one expert, one rank": ([40], {"experts": 1, "top_k": 1}),
    "one expert, four ranks": ([40, 3, 0, 7], {"experts": 1, "top_k": 1}),
    "every expert for every token": ([30, 20], {"top_k": 6}),
    "64 experts for every token": ([30, 20, 10], {"experts": 64, "top_k": 64}),
    "all tokens to the same expert": ([200, 100, 0], {"top_k": 1, "skew": 50.0}),
    "experts without tokens": ([3, 2], {"experts": 48}),
    "hidden size 1": ([50, 40], {"hidden": 1}),
    "intermediate size 1": ([50, 40], {"intermediate": 1}),
    "both sizes 1": ([5, 4], {"hidden": 1, "intermediate": 1}),
    "given weights that sum to anything": ([50, 40], {"fused": False}),
    "probabilities not renormalized": ([50, 40], {"renormalize": False}),
    "one expert, probability 1": ([50, 40], {"experts": 1, "top_k": 1, "renormalize": False}),
    "capacity below one token": ([50, 40], {"capacity_factor": 1e-6}),
    "a capacity too small for a float": (
        [9, 7, 0],
        {"experts": 48, "top_k": 1, "capacity_factor": 5e-324, "skew": 50.0},
    ),
    "capacity of all": ([50, 40], {"capacity_factor": 1e6, "skew": 50.0}),
    "capacity that is a whole number": (
        [20, 40],
        {"experts": 2, "top_k": 1, "capacity_factor": 0.1, "skew": 50.0},
    ),
    "capacity that is whole if T K is multiplied first": (
        [121],
        {"experts": 11, "top_k": 5, "capacity_factor": 0.2, "renormalize": False},
    ),
    "capacity dropping most": ([50, 40, 0], {"capacity_factor": 0.5, "skew": 50.0}),
    "many tokens, hence a sharp bound": ([2000, 1500], {}),
    "larger sizes": ([300, 200], {"hidden": 515, "intermediate": 387, "experts": 5, "top_k": 3}),
    "sizes of powers of two": ([256, 256], {"hidden": 256, "intermediate": 512, "experts": 8}),
}


@pytest.mark.parametrize("return_mode", ["direct", "reduced", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edge", EDGES)
def test_edge(ranks, edge, dtype, return_mode):
    tokens, changes = EDGES[edge]
    problem = random_problem(len(edge), tokens, dtype=dtype, return_mode=return_mode, **USUAL | changes)
    check(problem, ranks.call(problem))


@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float32_error_is_below_one_millionth(ranks, activation, return_mode):
    problem = random_problem(
        1, [120, 80, 0, 100], hidden=384, intermediate=256, experts=8, top_k=4, skew=3.0,
        biases=(True, True, True), activation=activation, return_mode=return_mode,
    )  # fmt: skip
    outcomes = ranks.call(problem)
    check(problem, outcomes)
    for outcome in outcomes:
        exact = outcome.reference.y
        assert np.linalg.norm(outcome.y - exact) <= 1e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
def test_given_ids_of_either_width(ranks, ids_dtype):
    problem = random_problem(2, [30, 7], fused=False, **USUAL)
    problem = replace(problem, topk_ids=[ids.astype(ids_dtype) for ids in problem.topk_ids])
    outcomes = ranks.call(problem)
    check(problem, outcomes)
    assert all(outcome.report.topk_ids.dtype == np.int32 for outcome in outcomes)


def test_given_weights_of_zero_and_one(ranks):
    problem = random_problem(3, [30, 7], fused=False, **USUAL)
    weights = [np.indices(of_rank.shape)[1].astype(np.float32) for of_rank in problem.topk_weights]
    problem = replace(problem, topk_weights=weights)
    check(problem, ranks.call(problem))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_choose_the_lower_ids(ranks, dtype):
    """Inputs are small integers, so that float32 logits are exact: many logits of a token are equal, and exactly so."""
    problem = random_problem(4, [64, 31], dtype=dtype, **USUAL | {"experts": 12, "top_k": 5})
    rng = np.random.default_rng(4)
    problem.router = rng.integers(-1, 2, problem.router.shape).astype(DTYPES[dtype])
    problem.x = [rng.integers(-1, 2, x.shape).astype(DTYPES[dtype]) for x in problem.x]
    problem.x[0][5] = 0  # all logits of this token are equal
    outcomes = ranks.call(problem)
    for x, outcome in zip(problem.x, outcomes, strict=True):
        logits = x.astype(int) @ problem.router.astype(int).T
        np.testing.assert_array_equal(outcome.report.topk_ids, np.argsort(-logits, axis=1, kind="stable")[:, :5])
    assert outcomes[0].report.topk_ids[5].tolist() == [0, 1, 2, 3, 4]


def test_capacity_keeps_the_first_tokens(ranks):
    """The expected values are worked out by hand. Two ranks have 4 and 2 tokens, and each token chooses two of three
    experts. So the capacity, ceil(0.75 T K / E), is 2 rows of the first rank and 1 row of the second."""
    ids = [np.array([[0, 1], [1, 0], [0, 2], [1, 2]], np.int32), np.array([[2, 0], [2, 1]], np.int32)]
    one = np.ones((3, 1, 1), np.float32)
    problem = Problem(
        x=[np.ones((4, 1), np.float32), np.ones((2, 1), np.float32)],
        gate_up_proj=one,
        down_proj=one * np.array([1.0, 10.0, 100.0], np.float32)[:, None, None],
        topk_ids=ids,
        topk_weights=[np.ones((4, 2), np.float32), np.ones((2, 2), np.float32)],
        options={"activation": "relu", "capacity_factor": 0.75},
    )
    first, second = ranks.call(problem)
    assert first.report.topk_ids.tolist() == [[0, 1], [1, 0], [-1, 2], [-1, 2]]
    assert second.report.topk_ids.tolist() == [[2, 0], [-1, 1]]
    assert (first.report.dropped, second.report.dropped) == (2, 1)
    assert first.y.tolist() == [[11.0], [11.0], [100.0], [100.0]]
    assert second.y.tolist() == [[101.0], [10.0]]


def test_no_rows_and_many_rows_in_turn(ranks):
    """One context makes 60 calls: without tokens, with the most tokens, or with tokens on some ranks only. From call to
    call, the sizes of the layer change. Each call's results are checked."""
    tokens = [[0, 0, 0], [300, 300, 300], [0, 0, 1], [0, 300, 0], [0, 0, 0], [1, 0, 300]]
    sizes = [{"hidden": 96, "intermediate": 80, "experts": 24, "top_k": 8}, USUAL, USUAL | {"hidden": 3}]
    problems = [
        random_problem(turn, tokens[turn % 6], return_mode=("direct", "reduced")[turn % 2], **sizes[turn % 3])
        for turn in range(60)
    ]
    limits = problems[0].limits() | {"max_tokens": 300}
    for problem, outcomes in zip(problems, ranks.calls(problems, limits), strict=True):
        check(problem, outcomes)
