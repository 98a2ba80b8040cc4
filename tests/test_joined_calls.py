"""Joined calls on the CPU engine: rows are added as they are computed (include/flashmoe/actors/joiner.h)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from problems import DTYPES, Problem, check, random_problem

TILE = (8, 16)
SIZES = {"hidden": 72, "intermediate": 24, "experts": 6}
COLUMNS = 5  # blocks of 16 columns, in H
PROCESSORS = 3


def combined(problem: Problem) -> Problem:
    """The same call with a capacity that drops nothing: such calls are not joined."""
    return replace(problem, options={**problem.options, "capacity_factor": float(SIZES["experts"])})


def one_call(ranks, problem: Problem, **how):
    (outcome,) = ranks.call(problem, problem.limits() | {"processors": PROCESSORS}, tile=TILE, **how)
    check(problem, [outcome])
    return outcome


@pytest.mark.parametrize("fused", [True, False], ids=["router", "given"])
@pytest.mark.parametrize("tokens", [1, 57, 900])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_and_bit_for_bit_what_combine_gives(ranks, dtype, top_k, tokens, fused):
    options = {"return_mode": "direct", "capacity_factor": None}
    problem = random_problem(61, [tokens], dtype=dtype, top_k=top_k, fused=fused, skew=2.0, **SIZES, **options)
    expected = one_call(ranks, combined(problem)).y.tobytes()
    for perturb in (0, 1, 2):
        assert one_call(ranks, problem, perturb=[perturb]).y.tobytes() == expected


@pytest.mark.parametrize("top_k", [1, 2])
def test_reports_and_traces(ranks, top_k):
    """A report counts token blocks as combined. With two rows a token, a trace has a span per token and block of
    columns."""
    tokens = 301
    options = {"return_mode": "direct", "capacity_factor": None, "trace": True}
    problem = random_problem(62, [tokens], dtype="float32", top_k=top_k, fused=False, **SIZES, **options)
    report = one_call(ranks, problem).report
    block = 32  # tokens: the largest token block of which each processor gets two
    assert report.tasks["combine"] == -(-tokens // block)
    spans = Counter((event.index, event.column) for event in report.events if event.kind == "combine")
    late = {
        (b, column): min(block, tokens - b * block) for b in range(-(-tokens // block)) for column in range(COLUMNS)
    }
    assert spans == Counter(late if top_k == 2 else {})
