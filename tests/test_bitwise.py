"""The same call gives the same bits: whatever the schedule, the number of ranks, or the calls before it."""

from dataclasses import replace

import numpy as np
import pytest
from problems import DEFAULT_TILE, DTYPES, check, random_problem

SIZES = {"hidden": 72, "intermediate": 88, "experts": 12, "top_k": 3, "scale": 1.0}
SMALL_TILES = (8, 16)


def bits(outcomes):
    """What the ranks got, as bytes: outputs, and the routing they report."""
    return [
        array.tobytes()
        for outcome in outcomes
        for array in (outcome.y, outcome.report.topk_ids, outcome.report.topk_weights)
    ]


@pytest.mark.parametrize("tile", [DEFAULT_TILE, SMALL_TILES], ids=["default tiles", "small tiles"])
@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fifty_disturbed_schedules(ranks, dtype, return_mode, tile):
    problem = random_problem(1, [130, 61, 0, 97], dtype=dtype, return_mode=return_mode, **SIZES)
    runs = ranks.calls([problem] * 50, perturb=list(range(50)), tile=tile)
    check(problem, runs[0])
    assert len({tuple(bits(outcomes)) for outcomes in runs}) == 1


def split(problem, cuts):
    """The problem with the same tokens in the same order, cut at `cuts` into the tokens of each rank."""
    return replace(problem, x=np.split(np.concatenate(problem.x), cuts), options={"return_mode": "direct"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_direct_return_does_not_depend_on_the_number_of_ranks(ranks, dtype):
    whole = random_problem(2, [208], dtype=dtype, **SIZES)
    divisions = [[], [104], [52, 104, 156], list(range(26, 208, 26)), [0, 150, 150, 151, 152, 200, 208]]
    results = set()
    for cuts in divisions:
        problem = split(whole, cuts)
        outcomes = ranks.call(problem)
        check(problem, outcomes)
        y, ids, weights = (
            np.concatenate(arrays).tobytes()
            for arrays in zip(*((o.y, o.report.topk_ids, o.report.topk_weights) for o in outcomes), strict=True)
        )
        results.add((y, ids, weights))
    assert len(results) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_bits_do_not_depend_on_the_others(ranks, dtype):
    whole = random_problem(7, [208], dtype=dtype, **SIZES)
    (expected,) = ranks.call(whole)
    for tokens in (1, 2, 7, 8, 9, 16, 17, 64, 127, 128, 129):
        (outcome,) = ranks.call(replace(whole, x=[whole.x[0][:tokens]]))
        assert outcome.y.tobytes() == expected.y[:tokens].tobytes(), tokens


@pytest.mark.parametrize("dtype", DTYPES)
def test_direct_return_does_not_depend_on_the_placement(ranks, dtype):
    problem = random_problem(3, [50, 70, 90], dtype=dtype, return_mode="direct", **SIZES)
    placements = [None, [2] * 12, [2, 1, 0] * 4, [0, 2] * 6]
    results = [ranks.call(replace(problem, placement=placement)) for placement in placements]
    assert len({tuple(bits(outcomes)) for outcomes in results}) == 1


@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_second_and_thousandth_call_repeat_the_first(ranks, dtype, return_mode):
    problem = random_problem(4, [40, 33, 0], dtype=dtype, return_mode=return_mode, **SIZES)
    others = [
        random_problem(5, tokens, dtype=dtype, hidden=24, intermediate=10, experts=7, top_k=2)
        for tokens in ([9, 0, 17], [0, 0, 0], [1, 30, 2])
    ]
    calls = [problem, problem, *(others[i % 3] for i in range(997)), problem]
    runs = ranks.calls(calls, problem.limits())
    assert len(runs) == 1000
    check(problem, runs[0])
    assert bits(runs[0]) == bits(runs[1]) == bits(runs[999])
