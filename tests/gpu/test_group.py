"""Groups of several GPUs: every rank is a process with a GPU of its own. With too few GPUs, tests are skipped.

With FLASHMOE_SHARE_GPUS=2 two ranks share a GPU: in turns of some milliseconds, or side by side under NVIDIA's MPS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import ranks as on_rank
import torch
from flashmoe.contexts.limits import TRANSPORTS
from flashmoe.contexts.memory import plan_memory
from flashmoe.launch import RankFailed, RankPool
from flashmoe.placement import contiguous
from layer_options import CLAMPED
from ranks import everywhere
from seeds import SEED

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CALLS = int(os.environ.get("FLASHMOE_CALLS") or 10_000)
CALLS_SECONDS = 120 + CALLS / 400
"""120 seconds for contexts, layers and references, and 2.5 ms for each call."""
GROUPS = (2, 4)


@pytest.fixture(scope="module", params=GROUPS, ids=[f"{n}ranks" for n in GROUPS])
def pool(request) -> Iterator[RankPool]:
    """The processes of the ranks. All tests of this file with this number of ranks use them."""
    with on_rank.pool_of(request.param) as made:
        yield made


@pytest.fixture(params=["mapped", "rdma"])
def ways(request) -> tuple[str, ...]:
    """The ways in which results come home. With "rdma", senders put although memory is mapped;
    results must have the bits of "reduced"."""
    return on_rank.RETURN_MODES if request.param == "mapped" else ("reduced", "rdma")


SHAPES = {
    "paper": {"hidden": 2048, "intermediate": 1024, "experts": 64, "top_k": 2, "activation": "gelu"},
    "Qwen3": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    "few experts": {"hidden": 1024, "intermediate": 1024, "experts": 8, "top_k": 2},
    "odd sizes": {"hidden": 136, "intermediate": 72, "experts": 13, "top_k": 5, "biases": True},
    "given ids": {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4, "ids": "int64"},
    "float32": {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4, "dtype": "float32"},
    "float16": {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4, "dtype": "float16"},
    "gpt-oss": {
        "hidden": 576,
        "intermediate": 360,
        "experts": 32,
        "top_k": 4,
        "biases": True,
        "transposed": True,
        "interleaved": True,
        **CLAMPED,
    },
    "Llama 4": {
        "hidden": 640,
        "intermediate": 256,
        "experts": 16,
        "top_k": 1,
        "dtype": "float16",
        "transposed": True,
        "weights_on_input": True,
        "score": "sigmoid",
        "renormalize": False,
    },
    "K = 1": {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 1},
    "drops": {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 2, "ids": "int32", "capacity_factor": 0.7},
    "shared expert": {
        "hidden": 512,
        "intermediate": 256,
        "experts": 32,
        "top_k": 4,
        "shared": 2,
        "shared_gate": True,
    },
    "one expert a rank": {"hidden": 512, "intermediate": 256, "experts": 4, "top_k": 2},
}


@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_those_of_one_gpu(pool, ways, name):
    spec = {"seed": SEED % 1000, **SHAPES[name]}
    assert everywhere(pool, on_rank.compare, ways, spec, [1024] * pool.ranks, 3) == [0] * pool.ranks


@pytest.mark.parametrize("way", on_rank.WAYS)
def test_memory_is_what_the_plan_says(pool, way):
    for processors, *sizes in everywhere(pool, on_rank.memory, way):
        limits = {**on_rank.LIMITS, "ranks": pool.ranks, "processors": processors, **on_rank.WAYS[way]}
        plan = plan_memory(engine="cuda", **limits)
        assert sizes == [plan.heap_bytes, plan.workspace_bytes]


@pytest.mark.parametrize("skew", [0.0, 50.0])
@pytest.mark.parametrize("top_k", [1, 4])
def test_memory_for_what_a_capacity_keeps(pool, top_k, skew):
    capacity = {"capacity_factor": 1.0}
    spec = {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": top_k, "ids": "int32", "skew": skew}
    assert all(everywhere(pool, on_rank.in_own_group, capacity, spec | capacity, [1500] * pool.ranks))


OBSERVED = {
    "router": {},
    "given": {"ids": "int64"},
    "shared": {"shared": 2, "shared_gate": True},
    "drops": {"ids": "int32", "capacity_factor": 0.5},
}


@pytest.mark.parametrize("case", OBSERVED)
def test_every_rank_counts_its_own_choices(pool, ways, case):
    """No rank has 1 to 8 tokens, because with so few a rank alone sums logits in another order than a group does."""
    spec = {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4, "skew": 3.0, **OBSERVED[case]}
    tokens = [700, 0, 300, 9][: pool.ranks]
    assert all(all(everywhere(pool, on_rank.observe, way, spec, tokens)) for way in ways)


ORDERS = [
    {"senders": 1, "gemm1_lists": 1},
    {"senders": 60, "gemm1_lists": 2, "own_first": 2},
    {"gemm1_lag": 1, "window": 1, "gemm1_lists": 2},
    {"gemm1_lag": 2**31, "raster": 1, "window": 2000, "own_first": 1024},
]


@pytest.mark.parametrize("profile", ORDERS, ids=str)
def test_order_changes_no_bit(pool, profile):
    """H is so large that results come home in several return groups."""
    spec = {"hidden": 2048, "intermediate": 256, "experts": 16, "top_k": 2}
    assert all(everywhere(pool, on_rank.in_own_group, {"profile": profile}, spec, [1500] * pool.ranks))


TOKENS = {
    "one rank without": [700, 0, 300, 1],
    "all but one without": [0, 2000, 0, 0],
    "none": [0, 0, 0, 0],
    "few each": [1, 3, 8, 2],
    "very uneven": [2048, 9, 33, 500],
}


@pytest.mark.parametrize("case", TOKENS)
def test_uneven_tokens(pool, ways, case):
    spec = {"seed": 3, "hidden": 1024, "intermediate": 512, "experts": 32, "top_k": 4}
    assert everywhere(pool, on_rank.compare, ways, spec, TOKENS[case][: pool.ranks], 5) == [0] * pool.ranks


def test_reports_count_what_crosses(pool, ways):
    """The expected counts are computed from the routing of all ranks."""
    spec = {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4, "ids": "int32", "capacity_factor": 0.7}
    told = everywhere(pool, on_rank.reports, ways, spec, TOKENS["very uneven"][: pool.ranks])
    owners = np.array([*contiguous(16, pool.ranks), -1])  # the last: a dropped choice, whose id is -1, has no owner
    for reports in zip(*told, strict=True):
        choices = [report["topk_ids"] for report in reports]
        for rank, report in enumerate(reports):
            here = [owners[ids] == rank for ids in choices]
            load = [sum(int((ids == e).sum()) for ids in choices) for e in np.flatnonzero(owners == rank)]
            back = [each.any(axis=1) if report["return_mode"] == "reduced" else each for each in here]
            assert report["tile_rows"] == sum(load)
            assert report["tiles"] == sum(-(-rows // 256) for rows in load)
            assert report["return_rows_sent"] == sum(int(back[p].sum()) for p in range(pool.ranks) if p != rank)


@pytest.mark.parametrize("owner", [0, 1])
def test_all_experts_on_one_rank(pool, ways, owner):
    spec = {"seed": 4, "hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4, "placement": [owner] * 16}
    assert everywhere(pool, on_rank.compare, ways, spec, [500] * pool.ranks, 5) == [0] * pool.ranks


def test_scattered_placement(pool, ways):
    placement = [(7 * expert + 1) % pool.ranks for expert in range(24)]
    spec = {"seed": 5, "hidden": 512, "intermediate": 256, "experts": 24, "top_k": 4, "placement": placement}
    assert everywhere(pool, on_rank.compare, ways, spec, [500] * pool.ranks, 5) == [0] * pool.ranks


def placement_with_copies(experts: int, ranks: int) -> list[list[int]]:
    """The first expert has one copy, the second two, and so on up to a copy on every rank, then one again. Ranks hold
    different numbers of experts."""
    return [[(expert // ranks + i) % ranks for i in range(1 + expert % ranks)] for expert in range(experts)]


@pytest.mark.parametrize("tokens", [500, 40, 1], ids="{} tokens".format)
def test_copies(pool, ways, tokens):
    """Results have the bits that a rank alone computes. With `direct` these do not depend on the placement; with
    `reduced` they depend on the copies to which tokens are sent."""
    placement = placement_with_copies(24, pool.ranks)
    spec = {"seed": 15, "hidden": 512, "intermediate": 256, "experts": 24, "top_k": 4, "placement": placement}
    uneven = [tokens * (1 + rank % 3) for rank in range(pool.ranks)]
    assert everywhere(pool, on_rank.compare, ways, spec, uneven, 5) == [0] * pool.ranks


@pytest.mark.parametrize("layer", [{"shared": 2, "shared_gate": True}, {"skew": 50.0}], ids=["shared expert", "skewed"])
def test_copies_of_other_layers(pool, ways, layer):
    placement = placement_with_copies(32, pool.ranks)
    spec = {"seed": 16, "hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4, "placement": placement, **layer}
    assert everywhere(pool, on_rank.compare, ways, spec, [300] * pool.ranks, 5) == [0] * pool.ranks


SLICED = {
    "a router": {},
    "biases": {"biases": True},
    "given routing": {"ids": "int64"},
    "float16, no gate": {"dtype": "float16", "activation": "gelu"},
    "interleaved, DeepSeek-V3's router": {"interleaved": True, "score": "sigmoid", "groups": 4, "top_groups": 2},
}


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("layer", SLICED.values(), ids=SLICED)
def test_slices(pool, layer, tensor):
    """A token has K = 2 experts, and all slices of both are its choices."""
    if pool.ranks % tensor:
        pytest.skip(f"{tensor} slices of an expert: as many ranks, or a multiple of them")
    spec = {"seed": 17, "hidden": 512, "intermediate": 256, "experts": 16, "top_k": 2, **layer}
    tokens = [300 + 40 * rank for rank in range(pool.ranks)]
    assert everywhere(pool, on_rank.compare_slices, ["reduced", "rdma"], spec, tokens, tensor) == [0] * pool.ranks


def test_skewed_routing(pool, ways):
    spec = {"seed": 6, "hidden": 1024, "intermediate": 512, "experts": 64, "top_k": 4, "skew": 50.0}
    assert everywhere(pool, on_rank.compare, ways, spec, [2048] * pool.ranks, 5) == [0] * pool.ranks


def test_a_hundred_calls_give_the_same_bits(pool, ways):
    spec = {"seed": 8, **SHAPES["Qwen3"]}
    assert everywhere(pool, on_rank.compare, ways, spec, [1500] * pool.ranks, 100) == [0] * pool.ranks


@pytest.mark.timeout(CALLS_SECONDS + 60)
def test_many_calls_of_changing_size(pool, ways):
    """Makes FLASHMOE_CALLS calls, and verifies one of each hundred. `ranks.many_calls` says what is drawn at random."""
    seconds = CALLS_SECONDS
    assert everywhere(pool, on_rank.many_calls, ways, SEED, CALLS, 100, timeout=seconds) == [0] * pool.ranks


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(5))
def test_clusters_that_stop_early_change_no_bit(pool, seed):
    """Of 240 calls of six random layers, 60 are verified: 15 for each number of clusters that stop early."""
    ways = tuple(on_rank.LINK_CLUSTERS)
    assert everywhere(pool, on_rank.many_calls, ways, seed, 240, 4, timeout=200.0) == [0] * pool.ranks


@pytest.mark.parametrize("way", on_rank.WAYS)
def test_calls_on_successive_layers_overlap(pool, way, tmp_path):
    """A rank begins the next layer while another rank is in this layer. No bit differs from layers in lockstep."""
    forwards = 32
    results = everywhere(pool, on_rank.overlapping_layers, way, forwards, tmp_path / "meetings")
    differing, in_lockstep, at_once = zip(*results, strict=True)
    assert differing == (0,) * pool.ranks
    # Calls must overlap at least once (how often depends on how long the layers take), and never in lockstep.
    assert overlapping(at_once) > 0
    assert overlapping(in_lockstep) == 0


def overlapping(times_by_rank: tuple[on_rank.Times, ...]) -> int:
    """In how many calls a rank began its next call more than 0.2 ms before another rank ended this one. The ranks'
    clocks differ by far less than 0.2 ms."""
    calls = list(zip(*times_by_rank, strict=True))
    ahead = [max(ends for _, ends in this) - min(begins for begins, _ in then) for this, then in pairwise(calls)]
    return sum(nanoseconds > 200_000 for nanoseconds in ahead)


@pytest.mark.parametrize("way", on_rank.WAYS)
def test_graphs(pool, way):
    assert everywhere(pool, on_rank.replay, way) == [0] * pool.ranks


@pytest.mark.parametrize("way", on_rank.WAYS)
def test_one_gpu_operation_a_call(pool, way):
    for done in everywhere(pool, on_rank.operations, way, 3):
        assert len(done) == 3 and all("flashmoe_moe" in name for name in done), done


def test_a_module_over_a_process_group(pool, tmp_path):
    """Eager and compiled, the module gives the bits of one GPU."""
    told = everywhere(pool, on_rank.module_over_process_group, tmp_path / "rendezvous")
    assert told == [(rank, pool.ranks, on_rank.device_of(rank), [True] * 3) for rank in range(pool.ranks)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_disagree(pool, transport):
    for told in everywhere(pool, on_rank.disagree, transport):
        assert told.startswith("GroupError: ranks disagree on call 1: ")
        assert "top_k K: rank" in told


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_stalls_is_named(pool, who, transport):
    for rank, told in enumerate(everywhere(pool, on_rank.stall, transport, who, 2.0)):
        assert told.startswith(f"PeerTimeout: rank {who} holds up call 2: ")
        if rank != who:  # when rank `who` gets its own error, it has begun the call
            assert "it has not begun call 2 (it is at 1)" in told


@pytest.mark.parametrize("max_tokens", [8, 300], ids=["few", "many"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_compiles_is_awaited(pool, who, max_tokens):
    """The others wait for three timeouts without an error. (A rank that does nothing is named: see the test above.)"""
    assert everywhere(pool, on_rank.compile_late, who, 2.0, max_tokens) == [""] * pool.ranks


@pytest.mark.own_gpus
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_dies_is_named(pool, tmp_path, transport):
    if pool.ranks > torch.cuda.device_count():
        pytest.skip("ranks share a GPU: under MPS a client that is killed can take all others with it")
    with RankPool(pool.ranks) as mortal, pytest.raises(RankFailed) as failed:
        everywhere(mortal, on_rank.die, transport, 1, 2.0, tmp_path)
    assert set(failed.value.errors) == {1}
    for rank in {*range(pool.ranks)} - {1}:
        told = (tmp_path / str(rank)).read_text()
        assert told.startswith("PeerTimeout: rank 1 holds up call 2: its process "), told
