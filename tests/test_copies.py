"""Experts that several ranks hold, on the CPU engine: to which rank tokens go, and that results stay right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flashmoe
import numpy as np
import pytest
from flashmoe.checkpoint import shipped_layer
from flashmoe.errors import InvalidArgument
from flashmoe.launch import RankFailed, RankPool
from flashmoe.placement import (
    as_placed,
    balanced,
    contiguous,
    flat,
    from_flat,
    local_experts,
    most_local,
    owners,
    rank_loads,
    roomy,
)
from layer_options import EXPERTS, WITH_SHARED
from problems import DTYPES, PATIENCE, Problem, Ranks, check, random_problem

SIZES = {"hidden": 48, "intermediate": 24, "experts": 12, "top_k": 4}
TOKENS = [65, 0, 7, 33]
COPIES = [[0, 2], 1, [3, 1, 0], 2, 3, [0, 1, 2, 3], 2, [1], [3, 2], 0, 1, [2, 0]]
LAYERS: dict[str, dict[str, Any]] = {
    **EXPERTS,
    **{f"shared: {name}": {"experts": 16, **layer} for name, layer in WITH_SHARED.items()},
    "biases": {"biases": (True, True, True)},
    "given routing": {"fused": False},
    "a capacity": {"capacity_factor": 0.6, "skew": 3.0},
}
ONE_HOLDER = [each if isinstance(each, int) else each[0] for each in COPIES]


def results_of(outcomes: list[Any]) -> list[bytes]:
    return [
        each.tobytes()
        for outcome in outcomes
        for each in (outcome.y, outcome.report.topk_ids, outcome.report.topk_weights)
    ]


# ---- Calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers(ranks: Ranks, layer: dict[str, Any], return_mode: str):
    sizes = SIZES | {"return_mode": return_mode} | layer
    placement = [COPIES[expert % len(COPIES)] for expert in range(sizes["experts"])]
    problem = random_problem(3, TOKENS, **sizes, placement=placement)
    check(problem, ranks.call(problem, tile=(16, 8)))


@pytest.mark.parametrize("capacity_factor", [None, 0.7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_direct_gives_the_bits_of_one_holder(ranks: Ranks, dtype: str, capacity_factor: float | None):
    """Results have the same bits with copies as with one rank for each expert, whether a placement gives that rank as a
    number or as a list."""
    options = {"dtype": dtype, "return_mode": "direct", "capacity_factor": capacity_factor}
    problem = random_problem(4, TOKENS, **SIZES, **options)
    everywhere = [[3, 2, 1, 0]] * SIZES["experts"]
    placements = [None, ONE_HOLDER, [[each] for each in ONE_HOLDER], COPIES, everywhere]
    results = [ranks.call(replace(problem, placement=each)) for each in placements]
    check(problem, results[0])
    assert len({tuple(results_of(each)) for each in results}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduced_gives_the_same_bits_whatever_the_schedule(ranks: Ranks, dtype: str):
    problem = random_problem(5, TOKENS, **SIZES, dtype=dtype, return_mode="reduced", placement=COPIES)
    runs = ranks.calls([problem] * 50, perturb=list(range(50)), tile=(8, 16))
    check(problem, runs[0])
    assert len({tuple(results_of(each)) for each in runs}) == 1


def test_a_token_has_the_same_bits_wherever_it_is_in_its_batch(ranks: Ranks):
    """A batch has the same bits in one call as in two calls with its parts, also with reduced returns, because a copy
    is chosen by the token's rank, not by its number."""
    whole = random_problem(6, [40, 40, 40, 40], **SIZES, return_mode="reduced", placement=COPIES)
    halves = [replace(whole, x=[x[part] for x in whole.x]) for part in (slice(13), slice(13, None))]
    together = ranks.call(whole)
    apart = [ranks.call(half) for half in halves]
    for rank, outcome in enumerate(together):
        assert outcome.y.tobytes() == b"".join(half[rank].y.tobytes() for half in apart)


def test_another_placement_in_each_call_of_a_context(ranks: Ranks):
    rng = np.random.default_rng(7)
    limits = random_problem(8, TOKENS, **SIZES).limits() | {
        "placement": [0] * SIZES["experts"]
    }  # room for any placement
    problems = []
    for seed in range(30):
        entries = [rng.permutation(4)[: rng.integers(1, 5)].tolist() for _ in range(SIZES["experts"])]
        mode = ("direct", "reduced")[seed % 2]
        problems.append(random_problem(seed, TOKENS, **SIZES, placement=entries, return_mode=mode))
    for problem, outcomes in zip(problems, ranks.calls(problems, limits), strict=True):
        check(problem, outcomes)


def test_a_copy_of_all_experts_on_every_rank_sends_nothing(ranks: Ranks):
    problem = random_problem(9, TOKENS, **SIZES, placement=[[0, 1, 2, 3]] * SIZES["experts"])
    outcomes = ranks.call(problem)
    check(problem, outcomes)
    assert all(outcome.report.rows_sent == outcome.report.return_rows_sent == 0 for outcome in outcomes)


# ---- Refusals ------------------------------------------------------------------------------------------------

REFUSED = {
    "a rank that is not": ([0, [1, 2], 0], r"placement: expected ranks in \[0, 2\), got 2 for expert 1"),
    "rank -1": ([0, [1, -1], 0], r"placement: expected ranks in \[0, 1024\), got -1 for expert 1"),
    "no holder": ([0, [], 1], "placement: expected a rank for every expert, got none for expert 1"),
    "two on a rank": ([0, 1, [1, 0, 1]], "placement: expected an expert on a rank once, got expert 2 on 1 twice"),
    "words": ([0, "ab", 1], r"placement: expected rank numbers, one or more for each expert, got \[0, 'ab', 1\]"),
    "too few": ([0, [1, 0]], "placement: expected one rank or more for each of E=3 experts, got 2"),
}


@pytest.mark.parametrize(("placement", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_placements(placement: Any, message: str):
    sizes = {"max_tokens": 4, "hidden": 8, "intermediate": 8, "experts": 3, "top_k": 1}
    with pytest.raises(InvalidArgument, match=message):
        flashmoe.Context(rank=0, ranks=2, name="refused", **sizes, placement=placement)


def test_more_experts_on_a_rank_than_the_context_has_room_for(ranks: Ranks):
    problem = random_problem(10, TOKENS, **SIZES)  # at most 3 of the 12 experts on a rank
    most = most_local(problem.owners(), 4)
    expected = f"all 4 ranks: LimitExceeded: placement: expected at most {most} experts on a rank, .*, got {most + 1}"
    with pytest.raises(RankFailed, match=expected):
        ranks.call(replace(problem, placement=[[0, 3], *problem.owners()[1:]]), problem.limits())


def test_ranks_that_place_copies_differently(ranks: Ranks):
    problem = random_problem(11, [5, 5], **SIZES)
    placement = [[0, 1], *problem.owners()[1:]]
    assert problem.owners()[0] == 0
    other = [[1, 0], *placement[1:]]
    with (
        RankPool(2) as pool,
        pytest.raises(RankFailed, match=r"GroupError: .*placement: rank . and rank . place the experts differently"),
    ):
        pool.call(_call_with, [(problem, each) for each in (placement, other)], timeout=6 * PATIENCE)


def _call_with(rank: int, ranks: int, name: str, problem: Problem, placement: list[Any]) -> None:
    placed = replace(problem, placement=placement)
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **placed.limits()) as context:
        flashmoe.moe(context, **placed.arguments(rank) | {"placement": placement})


# ---- Placements by load --------------------------------------------------------------------------------------


def test_owners_are_as_the_page_says():
    problem = Problem([np.zeros((1, 1))] * 4, np.zeros((12, 1, 1)), np.zeros((12, 1, 1)), placement=COPIES)
    for rank in range(4):
        assert list(owners(COPIES, rank)) == problem.destinations(rank)
        assert local_experts(COPIES, rank) == problem.held_by(rank)


def test_one_list_of_a_placement():
    assert flat(COPIES)[:6] == [0, ~2, 1, 3, ~1, ~0]
    assert as_placed(from_flat(flat(COPIES))) == as_placed(COPIES)
    assert as_placed(np.array([[0, 1], [1, 0]])) == ((0, 1), (1, 0))
    assert as_placed(np.array([[2], [1]])) == (2, 1) == as_placed(iter((2, [1])))


@pytest.mark.parametrize("copies", [0, 1, 5, 16])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_balanced_placements_hold_every_expert_and_fill_the_ranks_alike(count: int, copies: int):
    copies = min(copies, 16 * (count - 1))
    for seed in range(20):
        load = np.random.default_rng(seed).pareto(1.0, 16)
        placement = balanced(load, count, copies)
        assert placement == balanced(load.tolist(), count, copies)
        entries = [(each,) if isinstance(each, int) else each for each in placement]
        assert all(0 <= rank < count for entry in entries for rank in entry)
        assert all(len(set(entry)) == len(entry) >= 1 for entry in entries)
        assert sum(map(len, entries)) <= 16 + copies
        held = [len(local_experts(placement, rank)) for rank in range(count)]
        assert max(held) - min(held) <= 1
        assert rank_loads(placement, load, count).sum() == pytest.approx(load.sum())
        assert rank_loads(placement, load, count).max() <= rank_loads(contiguous(16, count), load, count).max() + 1e-9


def test_the_busiest_expert_is_what_gets_copies():
    placement = balanced([100, 1, 1, 1, 1, 1, 1, 1], 4, 3)
    assert sorted(placement[0]) == [0, 1, 2, 3]
    assert rank_loads(placement, [100, 1, 1, 1, 1, 1, 1, 1], 4).max() <= 27


def test_a_roomy_placement_is_as_large_as_any_balanced_one():
    for experts, count, copies in ((16, 8, 2), (16, 1, 0), (3, 4, 9), (32, 4, 5), (7, 3, 0), (5, 2, 5)):
        most = most_local(roomy(experts, count, copies), count)
        assert len(roomy(experts, count, copies)) == experts and most == -(-(experts + copies) // count)
        for seed in range(10):
            load = np.random.default_rng(seed).pareto(1.0, experts)
            assert most_local(balanced(load, count, copies), count) <= most


@pytest.mark.parametrize("copies", [0, 1, 2, 5])
def test_copies_that_would_make_ranks_less_alike_are_left_out(copies: int):
    """If loads are nearly even, copies would make the fullest rank fuller, so `balanced` leaves them out."""
    for count in (2, 4, 8):
        for seed in range(20):
            load = 100.0 + np.random.default_rng(seed).integers(0, 8, 16)
            fullest = rank_loads(balanced(load, count, copies), load, count).max()
            assert fullest <= rank_loads(contiguous(16, count), load, count).max()
            assert fullest <= rank_loads(balanced(load, count, 0), load, count).max()


@pytest.mark.parametrize("load", [[], [[1, 2], [3, 4]], [1, -1], [1, float("nan")], ["a", 2], None], ids=str)
def test_refused_loads(load: Any):
    with pytest.raises(InvalidArgument, match=r"load: expected \[E\] numbers from 0 on"):
        balanced(load, 2)


def test_refused_copies():
    with pytest.raises(InvalidArgument, match="copies: "):
        balanced([1, 2], 2, 3)


# ---- The shipped layer, whose routing is real ----------------------------------------------------------------

RANKS, HALF = 8, 1024


@pytest.fixture(scope="module")
def passage() -> tuple[Any, np.ndarray, np.ndarray]:
    """The shipped layer, the hidden states of a passage, and the ids of the experts that they choose, [2048, 4]."""
    layer, states = shipped_layer()
    sizes = {"hidden": layer.hidden, "intermediate": layer.intermediate, "experts": layer.experts, "top_k": layer.top_k}
    with flashmoe.Context(max_tokens=len(states), **sizes, dtype=layer.dtype.name) as context:
        flashmoe.moe(context, states, **layer.tensors(), **layer.rule())
        return layer, states, context.last_call.topk_ids


def rows_computed(ranks: Ranks, layer: Any, states: np.ndarray, placement: Any) -> np.ndarray:
    """How many rows each rank computes in a call whose tokens, `states`, are spread evenly over the ranks."""
    problem = Problem(
        x=np.split(states, RANKS),
        gate_up_proj=layer.gate_up_proj,
        down_proj=layer.down_proj,
        router=layer.router,
        top_k=layer.top_k,
        placement=list(placement),
        options={name: each for name, each in layer.rule().items() if name != "top_k"},
    )
    limits = problem.limits() | {"processors": 1}
    return np.array([outcome.report.tile_rows for outcome in ranks.call(problem, limits)])


def test_balanced_placements_of_the_shipped_layer(ranks: Ranks, passage: tuple[Any, np.ndarray, np.ndarray]):
    """A placement is made from the first half of a passage, with two copies (an eighth of the experts). It evens out
    what ranks compute of that half, and less well of the other half, from which it was not made."""
    layer, states, ids = passage
    load = np.bincount(ids[:HALF].ravel(), minlength=layer.experts)
    placement = balanced(load, RANKS, layer.experts // 8)
    halves = states[:HALF], states[HALF:]
    before = [rows_computed(ranks, layer, half, contiguous(layer.experts, RANKS)) for half in halves]
    after = [rows_computed(ranks, layer, half, placement) for half in halves]
    assert all(rows.sum() == HALF * layer.top_k for rows in before + after)
    for rows, half in zip(after, np.split(ids, 2), strict=True):
        by_source = [np.bincount(each.ravel(), minlength=layer.experts) for each in np.split(half, RANKS)]
        np.testing.assert_array_equal(rows, rank_loads(placement, by_source, RANKS))
    assert min(rows.max() / rows.mean() for rows in before) > 1.8
    assert after[0].max() / after[0].mean() <= 1.06
    assert after[1].max() / after[1].mean() <= 1.20
