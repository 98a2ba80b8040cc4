"""A context with a capacity factor has memory for the rows that calls keep, and refuses calls that could keep more."""

from __future__ import annotations

import math
import os
from typing import Any

import flashmoe
import numpy as np
import pytest
from flashmoe import _ffi
from flashmoe.calls import arguments
from flashmoe.contexts.limits import Room, checked_context
from flashmoe.errors import HeapError, InvalidArgument
from flashmoe.launch import RankFailed
from flashmoe.placement import checked, most_local
from flashmoe.spec import LayerSpec
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from problems import Outcome, Problem, check, random_problem

EXAMPLES = int(os.environ.get("FLASHMOE_EXAMPLES", "500")) // 5
TILE = (8, 16)
"""Rows and columns of a tile: so few that there are many tiles."""
SIZES = {"hidden": 24, "intermediate": 20, "experts": 8, "top_k": 2}


def limits_of(ranks: int, **limits: Any) -> dict[str, Any]:
    """A context's arguments."""
    return {"max_tokens": 64, "dtype": "float32", "processors": 2, **SIZES, **limits, "ranks": ranks}


def room_of(limits: dict[str, Any]) -> Room:
    """How large the calls of a context with these arguments may be, on rank 0."""
    unsaid = {"placement": None, "return_mode": "auto", "capacity_factor": None, "transport": "auto"}
    return Room.of(checked_context(engine="cpu", **unsaid | limits), 0)


def room(limits: dict[str, Any]) -> tuple[int, int]:
    """Tiles and rows that a context with these arguments has memory for, in tiles of the size `TILE`."""
    asked = room_of(limits).limits
    asked |= {"tile_rows": TILE[0], "gemm0_columns_per_task": TILE[1], "gemm1_columns_per_task": TILE[1]}
    shapes = {row["name"]: row["shape"] for row in _ffi.layout_fields("cpu", asked)}
    return shapes["tiles"][0], asked["ranks"] * _ffi.library().rows_of_rank(asked)


def within(limits: dict[str, Any], outcomes: list[Outcome]) -> None:
    """No rank used more tiles, or rows, than there is memory for."""
    tiles, rows = room(limits)
    for outcome in outcomes:
        assert outcome.report.tiles <= tiles and outcome.report.tile_rows <= rows


def run(ranks, problem: Problem, limits: dict[str, Any]) -> list[Outcome]:
    context = {name: value for name, value in limits.items() if name != "ranks"}
    outcomes = ranks.call(problem, context, tile=TILE)
    check(problem, outcomes)
    within(limits, outcomes)
    return outcomes


def every_expert_full(tokens: int, experts: int, top_k: int) -> np.ndarray:
    """Ids, int32 [T, K], that name the experts in turn, so that each gets the same number of tokens, or one more."""
    return ((np.arange(tokens)[:, None] * top_k + np.arange(top_k)) % experts).astype(np.int32)


@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
def test_the_room_is_used_to_the_last_row(ranks, return_mode):
    """Every expert gets as many rows as it may keep. With 64 tokens, K = 2 and E = 8, that is 16 rows of each rank;
    each of the 4 ranks has 2 experts."""
    problem = random_problem(1, [64] * 4, **SIZES, fused=False, capacity_factor=1.0, return_mode=return_mode)
    problem.topk_ids = [every_expert_full(64, 8, 2)] * 4
    limits = limits_of(4, capacity_factor=1.0)
    assert room(limits) == (4 * 2 * 16 // TILE[0] + 2, 4 * 2 * 16)
    outcomes = run(ranks, problem, limits)
    assert [outcome.report.tile_rows for outcome in outcomes] == [4 * 2 * 16] * 4
    assert [outcome.report.dropped for outcome in outcomes] == [0] * 4


@pytest.mark.parametrize("factor", [0.1, 1.0, 3.0])
def test_all_tokens_to_one_expert(ranks, factor):
    sizes = SIZES | {"top_k": 1}
    problem = random_problem(2, [64, 64, 10, 0], **sizes, fused=False, capacity_factor=factor)
    problem.topk_ids = [np.full((len(x), 1), 5, np.int32) for x in problem.x]
    run(ranks, problem, limits_of(4, capacity_factor=factor, top_k=1))


def test_calls_of_less_fit(ranks):
    """Calls fit that have fewer tokens, fewer experts per token or a smaller factor. So do calls with fewer experts, if
    no rank has a larger share of them."""
    limits = limits_of(4, capacity_factor=1.5)
    for tokens, experts, top_k, factor in ((64, 8, 2, 1.5), (5, 8, 2, 1.5), (64, 4, 2, 1.5), (64, 8, 1, 0.2)):
        changes = {"experts": experts, "top_k": top_k, "capacity_factor": factor}
        run(ranks, random_problem(3, [tokens] * 4, **SIZES | changes, skew=50.0, fused=False), limits)


@st.composite
def cases(draw) -> tuple[dict[str, Any], dict[str, Any]]:
    """A context's arguments, and a call within the context's limits, except that it may keep too many rows."""
    count = draw(st.integers(1, 4), label="ranks")
    experts = draw(st.integers(1, 24), label="experts")

    def placement(of: int) -> Any:
        return st.lists(st.integers(0, count - 1), min_size=of, max_size=of)

    top_k = draw(st.integers(1, experts))
    limits = limits_of(
        count,
        max_tokens=draw(st.integers(1, 100)),
        experts=experts,
        top_k=top_k,
        placement=draw(st.none() | st.just([0] * experts) | placement(experts)),
        capacity_factor=draw(st.integers(1, 15).map(lambda n: n / 10) | st.floats(0.01, 2.0), label="factor"),
    )
    fewer = draw(st.just(experts) | st.integers(1, experts), label="experts of the call")
    most = most_local(checked(limits["placement"], experts, count), count)
    dense = [expert // most for expert in range(fewer)]
    tokens = st.just(limits["max_tokens"]) | st.integers(0, limits["max_tokens"])
    call = {
        **SIZES,
        "seed": draw(st.integers(0, 2**32 - 1)),
        "tokens": draw(st.lists(tokens, min_size=count, max_size=count)),
        "experts": fewer,
        "top_k": draw(st.just(min(top_k, fewer)) | st.integers(1, min(top_k, fewer))),
        "capacity_factor": limits["capacity_factor"] * draw(st.sampled_from([1.0, 0.5])),
        "placement": list(checked(draw(st.none() | st.just(dense) | placement(fewer)), fewer, count)),
        "skew": draw(st.sampled_from([0.0, 3.0, 50.0])),
        "fused": False,
        "return_mode": draw(st.sampled_from(["direct", "reduced"])),
    }
    assume(most_local(call["placement"], count) <= most)
    return limits, call


def most_kept(limits: dict[str, Any], call: dict[str, Any]) -> int:
    """The most rows of one rank, if it has `max_tokens` tokens, that the call may keep on another rank."""
    tokens, local = limits["max_tokens"], most_local(call["placement"], limits["ranks"])
    capacity = math.ceil(call["capacity_factor"] * (tokens * call["top_k"]) / call["experts"])
    return min(local * capacity, tokens * min(local, call["top_k"]))


@pytest.mark.timeout(0)
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_calls_are_right_or_refused(ranks, case):
    limits, call = case
    fits = most_kept(limits, call) * limits["ranks"] <= room(limits)[1]
    assert fits or call["experts"] < limits["experts"]  # a call of all experts always fits
    if fits:
        run(ranks, random_problem(**call), limits)
    else:
        layer = LayerSpec(**{name: call[name] for name in ("hidden", "intermediate", "experts", "top_k")})
        with pytest.raises(HeapError, match=f"got {most_kept(limits, call)} "):
            arguments.checked_capacity(room_of(limits), call["capacity_factor"], layer, call["placement"])


def test_fewer_experts_on_one_rank_are_refused_by_all(ranks):
    """The context has memory for 64 rows of another rank: 4 of 8 experts, which keep 16 rows each. If a call has 4
    experts, each keeps 32 rows. So 2 of them on a rank fit, and 3 are too many."""
    limits = limits_of(2, capacity_factor=1.0)
    sizes = SIZES | {"experts": 4, "capacity_factor": 1.0}
    run(ranks, random_problem(4, [64, 64], **sizes), limits)
    message = (
        r"all 2 ranks: LimitExceeded: capacity_factor: expected one by which a rank keeps at most 64 rows of another "
        r"rank, .*, got 96 \(3 of 4 experts with 32 each\)"
    )
    with pytest.raises(RankFailed, match=message):
        run(ranks, random_problem(4, [64, 64], **sizes, placement=[1, 1, 0, 1]), limits)


@pytest.mark.parametrize(("factor", "got"), [(None, "None"), (1.01, r"1\.01"), (0, "0"), (float("nan"), "nan")])
def test_calls_must_have_a_capacity_factor_within_the_contexts(factor, got):
    good = random_problem(5, [64], **SIZES, capacity_factor=1.0).arguments(0)
    with flashmoe.Context(**limits_of(1, capacity_factor=1)) as context:
        message = rf"^capacity_factor: expected a number in \(0, 1\], as the context has memory for, got {got}"
        with pytest.raises(InvalidArgument, match=message):
            flashmoe.moe(context, **good | {"capacity_factor": factor})
        assert flashmoe.moe(context, **good).shape == (64, 24)
