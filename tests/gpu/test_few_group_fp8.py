"""Contexts for few tokens among several ranks with experts in FP8, whose calls have a kernel of their own
(sm90/decode/group.cuh). Rows are within the derived bound of the reference, and a token's row has the same bits in all
calls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import few_fp8_ranks as on_rank
import numpy as np
import pytest
from few_fp8_ranks import Rows, first_tokens, without_shared
from flashmoe.launch import RankPool
from problems import Outcome, Problem, check, quantised, random_problem
from ranks import everywhere, pool_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

USUAL: dict[str, Any] = {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4, "dtype": "bfloat16"}
MOST = 24
"""The most tokens of a rank: three token blocks. With four ranks, experts have up to 12 rows on average."""

LAYERS: dict[str, dict[str, Any]] = {
    "usual": {},
    "odd sizes": {"hidden": 272, "intermediate": 144, "experts": 33, "top_k": 5, "biases": (True, True, True)},
    "smallest": {"hidden": 16, "intermediate": 16},
    "given ids": {"fused": False},
    "weights on the input": {"weights_on_input": True},
    "no gate": {"activation": "silu"},
    "float16": {"dtype": "float16"},
    "one expert a token": {"top_k": 1},
    "DeepSeek-V3's router": {
        "hidden": 7168,
        "intermediate": 16,
        "experts": 64,
        "top_k": 8,
        "score": "sigmoid",
        "groups": 8,
        "top_groups": 4,
        "choice_bias": True,
        "routed_scale": 2.5,
    },
    "all tokens to the same experts": {"skew": 50.0},
    "interleaved": {"interleaved": True},
}


@pytest.fixture(scope="module", params=(2, 4), ids=["2ranks", "4ranks"])
def pool(request) -> Iterator[RankPool]:
    with pool_of(request.param) as made:
        yield made


def layer(pool: RankPool, options: dict[str, Any], scales: str = "block", x: bool = False, most: int = MOST) -> Problem:
    return quantised(random_problem(71, [most] * pool.ranks, **USUAL | options), scales, x=x)


def uneven(pool: RankPool, most: int = MOST) -> list[list[int]]:
    """The numbers of all ranks' tokens in several calls. The last two calls have the same numbers as the first."""
    n = pool.ranks
    made = [[1] * n, [most] * n, [0] * n, [8] * n, [9] * n]
    made += [[most if p == q else 0 for p in range(n)] for q in range(n)]
    made += [[1, 0, most, 9][:n], [0, 17, 8, 2][:n], [1] * n, [1] * n]
    return [[min(tokens, most) for tokens in call] for call in made]


def confirm(problem: Problem, results: list[Rows]) -> None:
    """Checks that rows are within the bound of the reference, and that no later call's rows differ."""
    check(problem, [Outcome(rows.y, rows.report) for rows in results], tensor_cores=True)
    assert [rows.differing for rows in results] == [0] * len(results)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(pool, name):
    problem = layer(pool, LAYERS[name])
    confirm(problem, everywhere(pool, on_rank.prefixes, problem, uneven(pool)))


@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize("name", ["usual", "odd sizes"])
def test_scales_of_rows_and_of_matrices(pool, name, scales):
    problem = layer(pool, LAYERS[name], scales)
    confirm(problem, everywhere(pool, on_rank.prefixes, problem, uneven(pool)))


def test_x_may_come_quantised_which_changes_no_bit(pool):
    options = LAYERS["odd sizes"] | {"fused": False}
    results = [
        everywhere(pool, on_rank.prefixes, problem := layer(pool, options, x=x), uneven(pool)) for x in (False, True)
    ]
    confirm(problem, results[1])
    for plain, given in zip(*results, strict=True):
        np.testing.assert_array_equal(plain.y, given.y)


def test_the_kernel_is_that_of_few_tokens(pool):
    for done in everywhere(pool, on_rank.operations, layer(pool, {})):
        assert len(done) == 3 and all("flashmoe_few" in name for name in done), done


def test_the_most_tokens(pool):
    most = 2048 // 8 // pool.ranks  # 2048 choices: as many rows as a thread block has room for
    problem = layer(pool, {"hidden": 256, "intermediate": 128, "experts": 256, "top_k": 8}, most=most)
    calls = [[most] * pool.ranks, [1] * pool.ranks, [most] * pool.ranks]
    confirm(problem, everywhere(pool, on_rank.prefixes, problem, calls))


def test_as_many_numbers_as_a_models_layer_has(pool):
    problem = layer(pool, {"hidden": 2048, "intermediate": 768, "experts": 8, "top_k": 2}, most=5)
    confirm(problem, everywhere(pool, on_rank.prefixes, problem, uneven(pool, 5)))


@pytest.mark.parametrize("owner", [0, 1])
def test_all_experts_on_one_rank(pool, owner):
    problem = layer(pool, {"placement": [owner] * USUAL["experts"]}, most=16)
    confirm(problem, everywhere(pool, on_rank.prefixes, problem, uneven(pool, 16)))


def test_where_an_expert_is_changes_no_bit(pool):
    """The first expert has one copy, the second two, and so on up to a copy on every rank, then one again."""
    n = pool.ranks
    placement = [[(expert // n + i) % n for i in range(1 + expert % n)] for expert in range(USUAL["experts"])]
    elsewhere = layer(pool, {"placement": placement}, most=16)
    results = everywhere(pool, on_rank.prefixes, elsewhere, uneven(pool, 16))
    confirm(elsewhere, results)
    usual = everywhere(pool, on_rank.prefixes, layer(pool, {}, most=16), [])
    for there, here in zip(results, usual, strict=True):
        np.testing.assert_array_equal(there.y, here.y)


def test_hundreds_of_calls(pool):
    draw = random.Random(5)
    calls = [[draw.choice((0, 1, 2, 8, 9, MOST)) for _ in range(pool.ranks)] for _ in range(500)]
    problem = layer(pool, {})
    confirm(problem, everywhere(pool, on_rank.prefixes, problem, calls, True))


def test_the_general_kernels_rows_are_as_near(pool):
    problem = layer(pool, {})
    confirm(problem, everywhere(pool, on_rank.by_general_kernel, problem))


def test_among_calls_of_the_general_kernel(pool):
    draw = random.Random(7)
    calls = [[draw.choice((0, 1, 3, 9, MOST)) for _ in range(pool.ranks)] for _ in range(100)]
    problem = layer(pool, {"shared": 1})
    results = everywhere(pool, on_rank.mixed, problem, calls)
    for i, each in enumerate((problem, without_shared(problem))):
        confirm(each, [of_rank[i] for of_rank in results])


def test_beside_the_general_kernel_in_one_call(pool):
    """Ranks with a shared expert run the general kernel, the others the kernel for a few tokens. Both kernels send rows
    and scales in the same layout."""
    problem = layer(pool, {"shared": 1})
    layers = (problem, without_shared(problem))
    for rank, calls in enumerate(everywhere(pool, on_rank.met, problem, 8)):
        for rows, first in zip(calls[2:], calls, strict=False):
            np.testing.assert_array_equal(rows.y, first.y)
        for i, rows in enumerate(calls[:2]):
            own = replace(layers[(rank + i) % 2], x=[problem.x[rank]])  # as on a rank alone: `direct` gives the same
            check(own, [Outcome(rows.y, rows.report)], tensor_cores=True)


def test_uneven_first_calls(pool):
    """The first call of a context, before which nothing was written to the context's memory. One rank has no tokens."""
    tokens = [0, 5, 1, 24][: pool.ranks]
    problem = first_tokens(layer(pool, {}), tokens)
    confirm(problem, everywhere(pool, on_rank.prefixes, problem, []))


def test_graphs(pool):
    problem = layer(pool, {})
    confirm(problem, everywhere(pool, on_rank.replay, problem))


def test_what_is_no_number_reaches_its_own_token_alone(pool):
    problem = layer(pool, {"fused": False})
    expected = everywhere(pool, on_rank.prefixes, problem, [])
    for rank, y in enumerate(everywhere(pool, on_rank.no_number, problem, 3)):
        others = np.setdiff1d(np.arange(MOST), [3] if rank == 1 else [])
        np.testing.assert_array_equal(y[others], expected[rank].y[others])
        if rank == 1:
            assert np.isnan(y[3].astype(np.float32)).all()
