"""Groups of several GPUs: every rank is a process with a GPU of its own. Skipped by name where there are too few."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise

import pytest
import ranks as on_rank
import torch
from flashmoe.launch import RankFailed, RankPool
from flashmoe.memory import plan_memory
from layers import SEED

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CALLS = int(os.environ.get("FLASHMOE_CALLS") or 10_000)
CALLS_SECONDS = 120 + CALLS / 400
"""For contexts, layers and references, then 2.5 ms a call."""
GROUPS = (2, 4)


@pytest.fixture(scope="module", params=GROUPS, ids=[f"{n} GPUs" for n in GROUPS])
def pool(request) -> Iterator[RankPool]:
    """Processes that stay from test to test."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"{request.param} GPUs needed, {torch.cuda.device_count()} here")
    with RankPool(request.param) as made:
        yield made


def everywhere(pool: RankPool, fn, *arguments, timeout: float = 120.0) -> list:
    return pool.call(fn, [arguments] * pool.ranks, timeout=timeout)


SHAPES = {
    "paper": {"hidden": 2048, "intermediate": 1024, "experts": 64, "top_k": 2, "activation": "gelu"},
    "Qwen3": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    "few experts": {"hidden": 1024, "intermediate": 1024, "experts": 8, "top_k": 2},
    "odd sizes": {"hidden": 136, "intermediate": 72, "experts": 13, "top_k": 5, "biases": True},
    "given ids": {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4, "ids": "int64"},
    "float32": {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4, "dtype": "float32"},
    "float16": {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4, "dtype": "float16"},
    "K = 1": {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 1},
    "drops": {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 2, "ids": "int32", "capacity_factor": 0.7},
    "one expert a rank": {"hidden": 512, "intermediate": 256, "experts": 4, "top_k": 2},
}


@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_those_of_one_gpu(pool, name):
    spec = {"seed": SEED % 1000, **SHAPES[name]}
    assert everywhere(pool, on_rank.compare, spec, [1024] * pool.ranks, 3) == [0] * pool.ranks


def test_memory_is_what_the_plan_says(pool):
    for processors, *sizes in everywhere(pool, on_rank.memory):
        limits = {**on_rank.LIMITS, "ranks": pool.ranks, "return_mode": "direct", "processors": processors}
        plan = plan_memory(engine="cuda", **limits)
        assert sizes == [plan.heap_bytes, plan.workspace_bytes]


@pytest.mark.parametrize("skew", [0.0, 50.0])
@pytest.mark.parametrize("top_k", [1, 4])
def test_memory_for_what_a_capacity_keeps(pool, top_k, skew):
    spec = {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": top_k, "ids": "int32", "skew": skew}
    assert all(everywhere(pool, on_rank.bounded, spec | {"capacity_factor": 1.0}, [1500] * pool.ranks))


TOKENS = {
    "one rank without": [700, 0, 300, 1],
    "all but one without": [0, 2000, 0, 0],
    "none": [0, 0, 0, 0],
    "few each": [1, 3, 8, 2],
    "very uneven": [2048, 9, 33, 500],
}


@pytest.mark.parametrize("case", TOKENS)
def test_uneven_tokens(pool, case):
    spec = {"seed": 3, "hidden": 1024, "intermediate": 512, "experts": 32, "top_k": 4}
    assert everywhere(pool, on_rank.compare, spec, TOKENS[case][: pool.ranks], 5) == [0] * pool.ranks


@pytest.mark.parametrize("owner", [0, 1])
def test_all_experts_on_one_rank(pool, owner):
    spec = {"seed": 4, "hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4, "placement": [owner] * 16}
    assert everywhere(pool, on_rank.compare, spec, [500] * pool.ranks, 5) == [0] * pool.ranks


def test_scattered_placement(pool):
    placement = [(7 * expert + 1) % pool.ranks for expert in range(24)]
    spec = {"seed": 5, "hidden": 512, "intermediate": 256, "experts": 24, "top_k": 4, "placement": placement}
    assert everywhere(pool, on_rank.compare, spec, [500] * pool.ranks, 5) == [0] * pool.ranks


def test_skewed_routing(pool):
    spec = {"seed": 6, "hidden": 1024, "intermediate": 512, "experts": 64, "top_k": 4, "skew": 50.0}
    assert everywhere(pool, on_rank.compare, spec, [2048] * pool.ranks, 5) == [0] * pool.ranks


def test_a_hundred_calls_give_the_same_bits(pool):
    spec = {"seed": 8, **SHAPES["Qwen3"]}
    assert everywhere(pool, on_rank.compare, spec, [1500] * pool.ranks, 100) == [0] * pool.ranks


@pytest.mark.timeout(CALLS_SECONDS + 60)
def test_many_calls_of_changing_size(pool):
    """FLASHMOE_CALLS of them, every hundredth verified; see `ranks.many_calls` for what is drawn."""
    assert everywhere(pool, on_rank.many_calls, SEED, CALLS, 100, timeout=CALLS_SECONDS) == [0] * pool.ranks


@pytest.mark.parametrize("mode", on_rank.RETURN_MODES)
def test_calls_on_successive_layers_overlap(pool, mode, tmp_path):
    """A rank begins the next layer while another is in this one, and no bit differs from layers in lockstep."""
    forwards = 32
    results = everywhere(pool, on_rank.overlapping_layers, mode, forwards, tmp_path / "meetings")
    differing, in_lockstep, at_once = zip(*results, strict=True)
    assert differing == (0,) * pool.ranks
    # Half of the calls are of layers in which tokens stay, so that they can; in lockstep none may.
    assert overlapping(at_once) >= forwards / 2
    assert overlapping(in_lockstep) == 0


def overlapping(times_by_rank: tuple[on_rank.Times, ...]) -> int:
    """How many calls a rank had ended, and begun the next one, 0.2 ms before another rank's ended: by clocks that agree
    far better than that."""
    calls = list(zip(*times_by_rank, strict=True))
    ahead = [max(ends for _, ends in this) - min(begins for begins, _ in then) for this, then in pairwise(calls)]
    return sum(nanoseconds > 200_000 for nanoseconds in ahead)


@pytest.mark.parametrize("mode", on_rank.RETURN_MODES)
def test_graphs(pool, mode):
    assert everywhere(pool, on_rank.replay, mode) == [0] * pool.ranks


def test_ranks_that_disagree(pool):
    for told in everywhere(pool, on_rank.disagree):
        assert told.startswith("GroupError: ranks disagree on call 1: ")
        assert "top_k K: rank" in told


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_stalls_is_named(pool, who):
    for rank, (told, seconds) in enumerate(everywhere(pool, on_rank.stall, who, 2.0)):
        assert told.startswith(f"PeerTimeout: rank {who} holds up call 2: ")
        if rank != who:  # by the time that it is told itself, it has begun
            assert "it has not begun call 2 (it is at 1)" in told and 1.0 < seconds < 5.0


def test_a_rank_that_dies_is_named(pool, tmp_path):
    with RankPool(pool.ranks) as mortal, pytest.raises(RankFailed) as failed:
        everywhere(mortal, on_rank.die, 1, 2.0, tmp_path)
    assert set(failed.value.errors) == {1}
    for rank in {*range(pool.ranks)} - {1}:
        told = (tmp_path / str(rank)).read_text()
        assert told.startswith("PeerTimeout: rank 1 holds up call 2: its process "), told
