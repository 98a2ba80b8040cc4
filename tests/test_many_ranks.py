"""128 ranks on the CPU engine: more ranks than a 64-bit word has bits. The ranks are threads of one process."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import flashmoe
import numpy as np
import pytest
from problems import PATIENCE, Outcome, Problem, check, random_problem
from test_slices import Sliced
from test_slices import check as check_sliced

RANKS = 128
SIZES = {"hidden": 8, "intermediate": 8, "experts": 40, "top_k": 5}
TOKENS = [(7 * rank) % 5 for rank in range(RANKS)]  # every fifth rank has none


def _calls(problems: list[Problem], limits: dict[str, Any]) -> list[list[Outcome]]:
    """Makes the calls one after the other in one group, of one processor a rank. The outcomes of each call, by rank."""
    name = f"test-{secrets.token_hex(6)}"
    outcomes: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        with flashmoe.Context(rank=rank, ranks=RANKS, name=name, **limits | {"processors": 1}) as context:
            outcomes[rank] = [
                Outcome(flashmoe.moe(context, **problem.arguments(rank)), context.last_call) for problem in problems
            ]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6 * PATIENCE)
    assert all(outcomes), "a rank raised, or did not end"
    return [list(of_call) for of_call in zip(*outcomes, strict=True)]


def _holders(rng: np.random.Generator, count: int) -> list[list[int]]:
    """For each of `count` experts, the one to three ranks that hold it. Many ranks hold no expert."""
    return [rng.permutation(RANKS)[: rng.integers(1, 4)].tolist() for _ in range(count)]


@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
def test_calls_of_many_ranks(return_mode: str):
    placement = _holders(np.random.default_rng(1), SIZES["experts"])
    problems = [
        random_problem(seed, TOKENS, **SIZES, return_mode=return_mode, placement=placement, **options)
        for seed, options in enumerate([{"biases": (True, True, True)}, {"capacity_factor": 0.6, "skew": 3.0}])
    ]
    results = _calls([*problems, problems[0]], problems[0].limits())
    for problem, outcomes in zip([*problems, problems[0]], results, strict=True):
        check(problem, outcomes)
    for first, again in zip(results[0], results[-1], strict=True):
        assert first.y.tobytes() == again.y.tobytes()


def test_slices_of_an_expert_on_many_ranks():
    """Every expert is cut into 16 slices on 16 ranks, so a token's row goes to 16 ranks for each of its experts."""
    whole = random_problem(3, TOKENS, hidden=8, intermediate=16, experts=8, top_k=3)
    sliced = Sliced.of(whole, 16, flashmoe.placement.hybrid(8, RANKS, 16))
    (outcomes,) = _calls([sliced], sliced.limits())
    check_sliced(whole, sliced, outcomes)
    for rank, outcome in enumerate(outcomes):
        ids = outcome.report.topk_ids  # expert e is on ranks 16 e .. 16 e + 15
        assert outcome.report.rows_sent == 16 * ids.size - (ids == rank // 16).sum()
