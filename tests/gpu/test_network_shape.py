"""Groups whose ranks share mapped memory, and are told that they are on several machines: a row crosses to a machine
once, by way of a relay, and one sum comes back from each machine. So the GPU's kernel runs the protocol that a network
needs.

Ranks may share a GPU (FLASHMOE_SHARE_GPUS). With too few GPUs, tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import network_ranks as on_rank
import numpy as np
import pytest
from flashmoe.contexts.memory import plan_memory
from flashmoe.launch import RankPool
from flashmoe.placement import contiguous
from problems import Outcome, check, quantised, random_problem
from ranks import RETURN_MODES, pool_of
from seeds import SEED

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SPREADS = {2: [[0, 1]], 3: [[0, 0, 1], [0, 1, 1]], 4: [[0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 2, 3]]}
"""For each number of ranks, lists with the machine of each rank."""


@pytest.fixture(scope="module", params=SPREADS, ids=[f"{ranks}ranks" for ranks in SPREADS])
def pool(request) -> Iterator[RankPool]:
    """The processes of the ranks. All tests of this file with this number of ranks use them."""
    with pool_of(request.param) as made:
        yield made


def each_spread(pool: RankPool, fn, *arguments: Any) -> Iterator[tuple[list[int], list[Any]]]:
    """Every spread of this number of ranks, and what `fn` returns on the ranks."""
    for spread in SPREADS[pool.ranks]:
        yield spread, pool.call(fn, [(spread, *arguments)] * pool.ranks, timeout=120.0)


def first_spread(pool: RankPool, fn, *arguments: Any) -> list[Any]:
    return pool.call(fn, [(SPREADS[pool.ranks][0], *arguments)] * pool.ranks, timeout=120.0)


SHAPES = {
    "bfloat16": {"hidden": 1024, "intermediate": 512, "experts": 32, "top_k": 8},
    "float16": {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4, "dtype": "float16"},
    "float32": {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4, "dtype": "float32"},
    "odd sizes": {"hidden": 136, "intermediate": 72, "experts": 13, "top_k": 5, "biases": True},
    "K = 1": {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 1},
    "drops": {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 2, "ids": "int32", "capacity_factor": 0.7},
    "shared expert": {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4, "shared": 1, "shared_gate": True},
}


@pytest.mark.parametrize("name", SHAPES)
def test_bits(pool, name):
    """With `direct`, each of three calls gives the bits of one GPU. With `reduced`, each call gives the bits of sums by
    rank that are then added up by machine."""
    spec = {"seed": SEED % 1000, **SHAPES[name]}
    for spread, off in each_spread(pool, on_rank.compare, spec, [500] * pool.ranks, 3):
        assert off == [0] * pool.ranks, spread


TOKENS = {
    "one rank without": [500, 0, 300, 1],
    "all but one without": [0, 600, 0, 0],
    "none": [0, 0, 0, 0],
    "few each": [1, 3, 8, 2],
    "very uneven": [600, 9, 33, 250],
}


@pytest.mark.parametrize("case", TOKENS)
def test_uneven_tokens(pool, case):
    spec = {"seed": 3, "hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4}
    for spread, off in each_spread(pool, on_rank.compare, spec, TOKENS[case][: pool.ranks], 4):
        assert off == [0] * pool.ranks, spread


@pytest.mark.parametrize("return_mode", RETURN_MODES)
def test_experts_in_fp8(pool, return_mode):
    """Results are compared with the float64 reference, so there are few tokens. H and I are no multiples of 128, the
    columns of a scale."""
    sizes = {"hidden": 272, "intermediate": 144, "experts": 12, "top_k": 4, "dtype": "bfloat16"}
    problem = quantised(random_problem(3, [140, 9, 0, 33][: pool.ranks], **sizes, return_mode=return_mode))
    for _, results in each_spread(pool, on_rank.in_fp8, problem, return_mode):
        check(problem, [Outcome(y, report) for y, report in results], tensor_cores=True)


@pytest.mark.parametrize("owner", ["first", "last"])
def test_all_experts_on_one_rank(pool, owner):
    """The other ranks owe no rows, and must signal that."""
    holds = 0 if owner == "first" else pool.ranks - 1
    spec = {"seed": 4, "hidden": 512, "intermediate": 256, "experts": 8, "top_k": 4, "placement": [holds] * 8}
    for spread, off in each_spread(pool, on_rank.compare, spec, TOKENS["one rank without"][: pool.ranks], 4):
        assert off == [0] * pool.ranks, spread


def test_all_tokens_to_one_expert(pool):
    for spread, off in each_spread(pool, on_rank.all_to_one_expert, [400, 0, 600, 77][: pool.ranks]):
        assert off == [0] * pool.ranks, spread


def test_memory_that_holds_other_numbers(pool):
    for spread, off in each_spread(pool, on_rank.after_poison, [70, 9, 0, 333][: pool.ranks]):
        assert off == [0] * pool.ranks, spread


def test_many_calls(pool):
    """A thousand calls, so that each field of a relay is written again and again."""
    for spread, off in each_spread(pool, on_rank.many_calls, SEED, 1000):
        assert off == [0] * pool.ranks, spread


def tokens_on(owners: np.ndarray, ranks: list[int]) -> int:
    """How many tokens need any of `ranks`. `owners` [T, K]: the rank of each choice's expert."""
    return int(np.isin(owners, ranks).any(axis=1).sum())


def test_reports_count_what_crosses(pool):
    """The expected counts come from the routing of all ranks. A row goes to each rank of its own machine that needs it,
    and once to each other machine, where a relay passes it on. With `reduced`, another machine returns one sum."""
    spec = {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4, "ids": "int32", "capacity_factor": 0.7}
    owner = np.array([*contiguous(16, pool.ranks), -1])  # the last: a dropped choice, whose id is -1, has no owner
    for machines, told in each_spread(pool, on_rank.reports, spec, TOKENS["very uneven"][: pool.ranks]):
        where = on_rank.Spread(machines)
        for mode, of_mode in zip(RETURN_MODES, zip(*told, strict=True), strict=True):
            owners = [owner[np.array(report["topk_ids"], dtype=int)].reshape(-1, 4) for report in of_mode]
            for rank, report in enumerate(of_mode):
                own_machine = where.ranks[where.of[rank]]
                others = [q for q in own_machine if q != rank]
                sent = sum(tokens_on(owners[rank], [q]) for q in others)
                sent += sum(tokens_on(owners[rank], there) for there in where.ranks.values() if there != own_machine)
                back = 0
                for source in {*range(pool.ranks)} - {rank}:
                    stands_for = source not in own_machine and where.relay(source, where.of[rank]) == rank
                    if stands_for:
                        sent += sum(tokens_on(owners[source], [q]) for q in others)
                    if mode == "direct":
                        back += int((owners[source] == rank).sum())
                    elif source in own_machine:
                        back += tokens_on(owners[source], [rank])
                    elif stands_for:
                        back += tokens_on(owners[source], own_machine)
                assert (report["rows_sent"], report["return_rows_sent"]) == (sent, back), (machines, mode, rank)


@pytest.mark.parametrize("mode", RETURN_MODES)
def test_memory_is_what_the_plan_says(pool, mode):
    for spread, told in each_spread(pool, on_rank.memory, mode):
        for processors, *sizes in told:
            limits = {**on_rank.LIMITS, "ranks": pool.ranks, "processors": processors, "return_mode": mode}
            plan = plan_memory(engine="cuda", machines=spread, **limits)
            assert sizes == [plan.heap_bytes, plan.workspace_bytes]


def test_graphs(pool):
    assert first_spread(pool, on_rank.replay) == [0] * pool.ranks


def test_a_rank_that_stalls_is_named(pool):
    """Ranks that wait for a relay, which itself waits for the stalled rank's rows, name the stalled rank as well."""
    who = pool.ranks - 1
    for rank, told in enumerate(first_spread(pool, on_rank.stall, who, 2.0)):
        assert told.startswith(f"PeerTimeout: rank {who} holds up call 2: "), (rank, told)


def test_there_are_no_gradients(pool):
    for told in first_spread(pool, on_rank.without_gradients):
        assert "no backward pass of ranks of several machines" in told
