"""Any call that the interface allows agrees with the reference, on every rank.

FLASHMOE_EXAMPLES sets the number of examples. They are new in each run; a failure prints how to repeat it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import ACTIVATIONS, DEFAULT_TILE, DTYPES, PATIENCE, check, random_problem

EXAMPLES = int(os.environ.get("FLASHMOE_EXAMPLES", "500"))
SHARED = {
    "max_tokens": 300, "hidden": 160, "intermediate": 160, "experts": 65, "top_k": 64, "dtype": "float32",
    "placement": [0] * 65, "processors": 2, "timeout": PATIENCE,
}  # fmt: skip
"""The limits of contexts that examples share. In these contexts one rank may hold all experts, so that every placement
fits. No example has 65 experts, so that none gets this placement by default."""


def at_random(examples: int) -> settings:
    """New examples in each run; a failure prints how to repeat it."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Case:
    """One example: the arguments of `random_problem`, and how to run it."""

    problem: dict
    fresh_processors: int
    """0: the call runs in a shared context. Otherwise in a context of its own, just large enough, with so many
    processors."""
    perturb: int
    tile: tuple[int, int]


@st.composite
def cases(draw) -> Case:
    ranks = draw(st.integers(1, 8), label="ranks")
    experts = draw(st.integers(1, 64), label="experts")
    size = st.one_of(st.integers(1, 96), st.integers(97, 160))
    rank = st.integers(0, ranks - 1)
    anywhere = st.lists(rank, min_size=experts, max_size=experts)
    holders = st.lists(rank, min_size=1, max_size=ranks, unique=True)
    copies = st.lists(rank | holders, min_size=experts, max_size=experts)
    problem = {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "tokens": draw(st.lists(st.integers(0, 300), min_size=ranks, max_size=ranks)),
        "hidden": draw(size),
        "intermediate": draw(size),
        "experts": experts,
        "top_k": draw(st.one_of(st.integers(1, min(4, experts)), st.integers(1, experts))),
        "dtype": draw(st.sampled_from(list(DTYPES))),
        "fused": draw(st.booleans()),
        "skew": draw(st.sampled_from([0.0, 3.0, 50.0])),
        "scale": draw(st.sampled_from([1.0, 0.03, 8.0])),
        "biases": draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        "placement": draw(st.none() | anywhere | copies),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "renormalize": draw(st.booleans()),
        "capacity_factor": draw(st.none() | st.floats(0.01, 4.0) | st.integers(1, 20).map(lambda n: n / 10)),
        "return_mode": draw(st.sampled_from(["direct", "reduced", "auto", None])),
    }
    return Case(
        problem,
        fresh_processors=draw(st.sampled_from([0] * 9 + [1, 2, 3])),
        perturb=draw(st.just(0) | st.integers(1, 2**31 - 1)),
        tile=draw(st.sampled_from([DEFAULT_TILE, (8, 16)]) | st.tuples(st.integers(4, 128), st.integers(4, 200))),
    )


@pytest.mark.timeout(0)
@at_random(EXAMPLES)
@given(case=cases())
def test_every_rank_agrees_with_the_reference(ranks, case):
    problem = random_problem(**case.problem)
    fresh = case.fresh_processors > 0
    limits = problem.limits() | {"processors": case.fresh_processors} if fresh else SHARED
    earlier = [] if fresh else _earlier.setdefault(problem.ranks, [])
    try:
        outcomes = ranks.call(problem, limits, keep=not fresh, perturb=[case.perturb], tile=case.tile)
        check(problem, outcomes)
    except Exception as error:
        error.add_note(f"The calls before it in the same context, the latest last: {earlier[-20:]}")
        _earlier.clear()  # after a failed call, `ranks` makes new contexts
        raise
    earlier.append(case)


_earlier: dict[int, list[Case]] = {}  # by number of ranks: what their shared context has computed
