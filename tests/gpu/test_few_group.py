"""Contexts for few tokens among several ranks, whose calls have a kernel of their own (sm90/decode/group.cuh)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import few_ranks as on_rank
import pytest
from flashmoe.launch import RankPool
from ranks import everywhere, pool_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

USUAL = {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4}
MOST = 24
"""The most tokens of a rank: three token blocks. With four ranks, experts have up to 12 rows on average."""

SHAPES = {
    "usual": USUAL,
    "Qwen3": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    "odd sizes": {"hidden": 136, "intermediate": 72, "experts": 33, "top_k": 5, "biases": True},
    "given ids": {**USUAL, "ids": "int64"},
    "weights on the input": {**USUAL, "weights_on_input": True},
    "GELU": {**USUAL, "activation": "gelu"},
    "one expert a token": {**USUAL, "top_k": 1},
    "DeepSeek-V3's router": {**USUAL, "score": "sigmoid", "groups": 4, "top_groups": 2},
    "all tokens to the same experts": {**USUAL, "skew": 50.0},
}


@pytest.fixture(scope="module", params=(2, 4), ids=["2ranks", "4ranks"])
def pool(request) -> Iterator[RankPool]:
    with pool_of(request.param) as made:
        yield made


def uneven(pool: RankPool) -> list[list[int]]:
    """The numbers of all ranks' tokens in several calls. The last two calls have the same numbers as the first."""
    n, most = pool.ranks, MOST
    made = [[1] * n, [most] * n, [0] * n, [8] * n, [9] * n]
    made += [[most if p == q else 0 for p in range(n)] for q in range(n)]
    return [*made, [1, 0, most, 9][:n], [0, 17, 8, 2][:n], [1] * n, [1] * n]


@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_the_general_kernels(pool, name):
    assert everywhere(pool, on_rank.compare, SHAPES[name], MOST, uneven(pool)) == [0] * pool.ranks


def test_the_kernel_is_that_of_few_tokens(pool):
    for done in everywhere(pool, on_rank.operations, USUAL, MOST):
        assert len(done) == 3 and all("flashmoe_few" in name for name in done), done


def test_the_most_tokens(pool):
    spec = {"hidden": 256, "intermediate": 128, "experts": 256, "top_k": 8}
    most = 2048 // 8 // pool.ranks  # 2048 choices: as many rows as a thread block has room for
    calls = [[most] * pool.ranks, [1] * pool.ranks, [most] * pool.ranks]
    assert everywhere(pool, on_rank.compare, spec, most, calls) == [0] * pool.ranks


@pytest.mark.parametrize("owner", [0, 1])
def test_all_experts_on_one_rank(pool, owner):
    placement = [owner] * USUAL["experts"]
    assert everywhere(pool, on_rank.compare, USUAL, 16, uneven_within(pool, 16), placement) == [0] * pool.ranks


def test_copies(pool):
    """The first expert has one copy, the second two, and so on up to a copy on every rank, then one again."""
    n = pool.ranks
    placement = [[(expert // n + i) % n for i in range(1 + expert % n)] for expert in range(USUAL["experts"])]
    assert everywhere(pool, on_rank.compare, USUAL, 16, uneven_within(pool, 16), placement) == [0] * n


def uneven_within(pool: RankPool, most: int) -> list[list[int]]:
    return [[min(tokens, most) for tokens in call] for call in uneven(pool)]


def test_a_thousand_calls(pool):
    draw = random.Random(5)
    calls = [[draw.choice((0, 1, 2, 8, 9, MOST)) for _ in range(pool.ranks)] for _ in range(1000)]
    assert everywhere(pool, on_rank.compare, USUAL, MOST, calls, None, True) == [0] * pool.ranks


def test_a_promise_in_a_context_for_many_tokens(pool):
    for off, kernels in everywhere(pool, on_rank.promised, USUAL, MOST, 200):
        assert off == 0
        assert len(kernels) == 1 and "flashmoe_few" in kernels[0], kernels


@pytest.mark.parametrize("alike", [True, False], ids=["on all ranks alike", "each by itself"])
def test_among_calls_of_the_general_kernel(pool, alike):
    assert everywhere(pool, on_rank.mixed, USUAL, MOST, 200, alike) == [0] * pool.ranks


def test_graphs(pool):
    assert everywhere(pool, on_rank.replay, USUAL, MOST) == [0] * pool.ranks


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_stalls_is_named(pool, who):
    for rank, told in enumerate(everywhere(pool, on_rank.stall, USUAL, MOST, who, 2.0)):
        assert told.startswith(f"PeerTimeout: rank {who} holds up call 3: ")
        if rank != who:  # when rank `who` gets its own error, it has begun the call
            assert "it has not begun call 3 (it is at 2)" in told


def test_ranks_that_disagree(pool):
    for told in everywhere(pool, on_rank.disagree, USUAL, MOST):
        assert told.startswith("GroupError: ranks disagree on call 1: ")
        assert "top_k K: rank" in told
