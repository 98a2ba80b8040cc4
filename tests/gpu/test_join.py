"""Calls whose rows are joined as soon as they are computed, without Combine (include/flashmoe/actors/joiner.h)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from layers import DTYPES, Problem, call, check, context_of, random_problem

pytestmark = pytest.mark.gpu

SHAPES = {
    "full tiles": {"tokens": 1024, "hidden": 512, "intermediate": 256, "experts": 4, "top_k": 2},
    "full tiles and small ones": {"tokens": 700, "hidden": 264, "intermediate": 136, "experts": 5, "top_k": 2},
    "all tokens to the same experts": {
        "tokens": 1100, "hidden": 256, "intermediate": 64, "experts": 8, "top_k": 2, "skew": 50.0,
    },
    "unequal experts": {"tokens": 2500, "hidden": 1032, "intermediate": 72, "experts": 16, "top_k": 2, "skew": 4.0},
    "many more rows than the queue holds": {
        "tokens": 6000, "hidden": 2048, "intermediate": 64, "experts": 2, "top_k": 2,
    },
    "one row a token": {"tokens": 900, "hidden": 520, "intermediate": 128, "experts": 6, "top_k": 1},
    "one row a token, few tokens": {"tokens": 9, "hidden": 136, "intermediate": 64, "experts": 6, "top_k": 1},
}  # fmt: skip


def combined(problem: Problem) -> Problem:
    """The same call with a capacity that drops nothing: such calls are not joined."""
    return replace(problem, options={**problem.options, "capacity_factor": float(problem.experts)})


@pytest.mark.parametrize("ids", [None, "int32"], ids=["router", "given"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_right_and_bit_for_bit_what_combine_gives(shape, dtype, ids):
    sizes = dict(SHAPES[shape])
    problem = random_problem(61, sizes.pop("tokens"), dtype=dtype, ids=ids, biases=True, **sizes)
    with context_of(problem) as context:
        y, report = call(context, problem)
        check(problem, y, report)
        assert torch.equal(call(context, combined(problem))[0], y)


def test_calls_leave_nothing_behind():
    """A thousand calls with different numbers of tokens, some of them not joined. Each must leave the words that count
    the stored rows of tokens at zero."""
    whole = random_problem(62, 1500, hidden=520, intermediate=128, experts=4, top_k=2, ids="int32")
    parts = []
    for tokens in (1500, 600, 1499, 20, 777, 1024):
        rows = {name: getattr(whole, name)[:tokens] for name in ("x", "topk_ids", "topk_weights")}
        parts.append(replace(whole, **rows))
    with context_of(whole) as context:
        expected = [call(context, part)[0] for part in parts]
        for part, y in zip(parts, expected, strict=True):
            check(part, *call(context, part))
            assert torch.equal(call(context, combined(part))[0], y)
        for turn in range(1000):
            i = turn * 5 % len(parts)
            assert torch.equal(call(context, parts[i])[0], expected[i]), f"call {turn}, {len(parts[i].x)} tokens"


@pytest.mark.parametrize("processors", [2, 4])
def test_few_thread_blocks(processors):
    """Each thread block has many tasks. If there are two, the second one forms all tiles."""
    problem = random_problem(63, 2000, hidden=512, intermediate=128, experts=3, top_k=2, skew=2.0)
    with context_of(problem, processors=processors) as context:
        check(problem, *call(context, problem))


def test_trace_has_joins():
    problem = random_problem(64, 2000, hidden=512, intermediate=128, experts=4, top_k=2)
    with context_of(problem) as context:
        plain, _ = call(context, problem)
        y, report = call(context, problem, trace=True)
        assert torch.equal(y, plain)
        counts = Counter(event.kind for event in report.events)
        assert counts["combine"] > 0
        assert all(event.column < 2 for event in report.events if event.kind == "combine")
