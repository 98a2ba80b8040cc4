"""The CPU engine's reports on calls (`CallReport`, `GroupReport`, the events of traced calls), against what the routing
alone says that they must be."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import flashmoe
import numpy as np
import pytest
from flashmoe.launch import RankPool
from flashmoe.report import CallReport, summarize
from flashmoe.trace import Event
from problems import DTYPES, PATIENCE, Problem, check, random_problem

TILE = (8, 16)
"""Rows and columns of a tile: few, so that there are many tiles."""
SIZES = {"hidden": 40, "intermediate": 24, "experts": 6, "top_k": 3}
COLUMNS = {"gemm0": 2, "gemm1": 3}  # blocks of 16 columns: of I = 24 columns, and of H = 40
TOKENS = [70, 0, 301]
PLACEMENTS = {
    "contiguous": [0, 0, 1, 1, 2, 2],
    "scattered": [2, 0, 1, 0, 2, 1],
    "rank 0 without": [2, 1, 1, 2, 1, 1],
    "copies": [[2, 1], 0, [1, 0, 2], [2, 0], 2, 1],
}
CAPACITIES = {"dropless": None, "drops": 0.7}
TASKS = ("gate", "gemm0", "gemm1", "reduce", "combine")


def problem_of(mode: str, placement: str, capacity: str = "dropless", dtype: str = "float32") -> Problem:
    """A call to which the ids are given, so that what ranks send is known without the engine."""
    options = {"return_mode": mode, "capacity_factor": CAPACITIES[capacity]}
    return random_problem(
        1, TOKENS, **SIZES, dtype=dtype, fused=False, skew=3.0, placement=PLACEMENTS[placement], **options
    )


def kept(ids: np.ndarray, factor: float | None) -> np.ndarray:
    """A rank's ids, with -1 for dropped choices. In the order of tokens and of k, an expert keeps its first
    ceil(factor * T * K / E) choices."""
    ids = ids.copy()
    if factor is None:
        return ids
    room = dict.fromkeys(range(SIZES["experts"]), math.ceil(factor * ids.size / SIZES["experts"]))
    for t, k in np.ndindex(ids.shape):
        expert = int(ids[t, k])
        if room[expert] == 0:
            ids[t, k] = -1
        else:
            room[expert] -= 1
    return ids


def block_tokens(tokens: int, processors: int) -> int:
    """Tokens of a token block: the largest power of two, of 8 to 128, that gives each processor two blocks; else 8."""
    return next((size for size in (128, 64, 32, 16, 8) if -(-tokens // size) >= 2 * processors), 8)


def blocks_of(tokens: int, processors: int) -> int:
    return -(-tokens // block_tokens(tokens, processors))


def pieces_of(tokens: int, processors: int) -> int:
    """How many pieces a return group of so many tokens is cut into: one for each processor, more if a piece would have
    over 128 tokens."""
    return -(-tokens // min(max(-(-tokens // processors), 1), 128))


class Counted(NamedTuple):
    """The counts in a rank's report."""

    dropped: int
    tiles: int
    tile_rows: int
    rows_sent: int
    return_rows_sent: int
    bytes_sent: int
    padded_rows: int
    padded_bytes: int
    tasks: dict[str, int]


def expected_counts(problem: Problem, processors: int) -> list[Counted]:
    """The counts that each rank's report has to have, by rank."""
    reduced = problem.options["return_mode"] == "reduced"
    row_bytes = SIZES["hidden"] * problem.down_proj.itemsize
    ids = [kept(each, problem.options["capacity_factor"]) for each in problem.topk_ids]
    # A dropped choice has the id -1, and so the destination -1: it goes to no rank.
    ranks_of = [np.array([*problem.destinations(p), -1])[each] for p, each in enumerate(ids)]
    blocks = [blocks_of(len(each), processors) for each in ids]
    counted = []
    for rank, mine in enumerate(ids):
        others = [q for q in range(problem.ranks) if q != rank]
        # A token's row goes once to each rank that has any of its experts.
        rows = sum(len({*owners} - {rank, -1}) for owners in ranks_of[rank].tolist())
        pairs = int(((ranks_of[rank] != rank) & (ranks_of[rank] != -1)).sum())
        here = [owners == rank for owners in ranks_of]
        returned = sum(int(here[p].any(axis=1).sum() if reduced else here[p].sum()) for p in others)
        held = problem.held_by(rank)
        load = [
            sum(int((each[where] == expert).sum()) for each, where in zip(ids, here, strict=True)) for expert in held
        ]
        tiles = sum(-(-rows // TILE[0]) for rows in load)
        largest = max(int((mine == expert).sum()) for expert in range(SIZES["experts"]))
        padded = 2 * largest * (SIZES["experts"] - len(held))
        sent_blocks = blocks[rank] * len(others)
        groups = COLUMNS["gemm1"] if reduced else 1
        tasks = {
            "gate": blocks[rank],
            "gemm0": tiles * COLUMNS["gemm0"],
            "gemm1": tiles * COLUMNS["gemm1"],
            "reduce": sum(pieces_of(len(each), processors) for each in ids) * groups if reduced and held else 0,
            "combine": pieces_of(len(mine), processors) * groups,
        }
        counted.append(
            Counted(
                dropped=int((mine < 0).sum()),
                tiles=tiles,
                tile_rows=sum(load),
                rows_sent=rows,
                return_rows_sent=returned,
                bytes_sent=(rows + returned) * row_bytes + pairs * 12 + sent_blocks * 8,
                padded_rows=padded,
                padded_bytes=padded * row_bytes,
                tasks=tasks,
            )
        )
    return counted


def counts_in(report: CallReport) -> Counted:
    return Counted(*(getattr(report, name) for name in Counted._fields))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mode", ["direct", "reduced"])
def test_reports_count_what_the_routing_says(ranks, mode, placement, capacity, dtype):
    problem = problem_of(mode, placement, capacity, dtype)
    processors = 2
    outcomes = ranks.call(problem, problem.limits() | {"processors": processors}, tile=TILE)
    check(problem, outcomes)
    reports = [outcome.report for outcome in outcomes]
    expected = expected_counts(problem, processors)
    assert [counts_in(report) for report in reports] == expected
    assert all(each.dropped > 0 for each in expected[::2]) == (capacity == "drops")
    assert [(report.tokens, report.return_mode) for report in reports] == [(tokens, mode) for tokens in TOKENS]

    ids = np.concatenate([kept(each, problem.options["capacity_factor"]) for each in problem.topk_ids]).ravel()
    load = [int((ids == expert).sum()) for expert in range(SIZES["experts"])]
    group = summarize(reports, SIZES["experts"])
    assert group.expert_load.tolist() == load
    assert (group.tokens, group.pairs) == (sum(TOKENS), sum(load))
    assert group.dropped == sum(TOKENS) * SIZES["top_k"] - sum(load)
    assert group.rows_sent == sum(each.rows_sent + each.return_rows_sent for each in expected)
    assert group.padded_rows == sum(each.padded_rows for each in expected)
    assert (group.bytes_sent, group.padded_bytes) == (
        sum(each.bytes_sent for each in expected),
        sum(each.padded_bytes for each in expected),
    )
    assert group.load_imbalance == pytest.approx(max(load) * SIZES["experts"] / sum(load))


@pytest.mark.parametrize("mode", ["direct", "reduced"])
def test_auto_reports_the_mode_that_sends_fewer_rows(ranks, mode):
    """With two ranks and K = 3, two of a token's experts are on the same rank, which sums their rows before it sends
    them. With K = 1, there are no rows to sum."""
    sizes = SIZES | {"top_k": 3 if mode == "reduced" else 1}
    problem = random_problem(2, [33, 20], **sizes, return_mode="auto")
    assert [outcome.report.return_mode for outcome in ranks.call(problem)] == [mode] * 2


def test_a_rank_alone_sends_nothing(ranks):
    """Two ranks without tokens send nothing either. The load imbalance is 1 if the 18 choices are spread evenly over
    six experts, 2 if one expert has a third of the choices, and 0 if there are no choices."""
    one, none = random_problem(3, [6], **SIZES, fused=False), random_problem(3, [0, 0], **SIZES, fused=False)
    even = replace(one, topk_ids=[np.array([[0, 1, 2], [3, 4, 5]] * 3, np.int32)])
    uneven = replace(one, topk_ids=[np.array([[0, 1, 2], [0, 3, 4]] * 3, np.int32)])
    for problem, imbalance in ((even, 1.0), (uneven, 2.0), (none, 0.0)):
        reports = [outcome.report for outcome in ranks.call(problem)]
        for report in reports:
            assert (report.rows_sent, report.return_rows_sent, report.bytes_sent) == (0, 0, 0)
            assert (report.padded_rows, report.padded_bytes) == (0, 0)
        assert summarize(reports, SIZES["experts"]).load_imbalance == imbalance


# ---- Traced calls ------------------------------------------------------------------------------------------


class Traced(NamedTuple):
    """The report of a rank's traced call, the times just before and after the call, whether its result has the bits of
    an untraced call, and the untraced call's events."""

    before_ns: int
    report: CallReport
    after_ns: int
    same_bits: bool
    untraced_events: list[Event]


def trace_call(
    rank: int, ranks: int, name: str, limits: dict[str, Any], arguments: dict[str, Any], processors: int
) -> Traced:
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits, processors=processors) as context:
        context._engine.set_tile(*TILE)
        y = flashmoe.moe(context, **arguments)
        events = context.last_call.events
        before = time.monotonic_ns()
        traced = flashmoe.moe(context, **arguments, trace=True)
        after = time.monotonic_ns()
        return Traced(before, context.last_call, after, y.tobytes() == traced.tobytes(), events)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as made:
        yield made


@pytest.mark.parametrize("mode", ["direct", "reduced"])
def test_traced_call(pool, mode):
    processors = 2
    problem = problem_of(mode, "scattered")
    each = [(problem.limits(), problem.arguments(rank), processors) for rank in range(3)]
    told: list[Traced] = pool.call(trace_call, each, timeout=6 * PATIENCE)
    for rank, counted in enumerate(expected_counts(problem, processors)):
        assert told[rank].same_bits and told[rank].untraced_events == []
        assert counts_in(told[rank].report) == counted
        every_task_is_there(told[rank].report, rank, [len(ids) for ids in problem.topk_ids])
        times_add_up(told[rank])
    # All processes have the same clock, so their times can be compared: no rank ends its call before all ranks have
    # begun theirs.
    spans = [span_of(each.report.events) for each in told]
    assert max(start for start, _ in spans) < min(end for _, end in spans)
    group = summarize([each.report for each in told], SIZES["experts"])
    assert group.wall_ns == max(end - start for start, end in spans)
    waited = sum(spent_on("wait", each.report) for each in told)
    assert group.idle_share == pytest.approx(waited / (processors * sum(end - start for start, end in spans)))


def span_of(events: list[Event]) -> tuple[int, int]:
    """The times when the first processor begins a call and when the last processor ends it."""
    times = [(event.start_ns, event.end_ns) for event in events if event.actor != "os"]
    return min(start for start, _ in times), max(end for _, end in times)


def spent_on(kind: str, report: CallReport) -> int:
    return sum(event.end_ns - event.start_ns for event in report.events if event.kind == kind)


def every_task_is_there(report: CallReport, rank: int, tokens: list[int]) -> None:
    """The report has one event for each task, with the task's index and column. A block's rows go to another rank in
    parts of 32 tokens, with one event each."""
    tiles, blocks, groups = range(report.tiles), range(report.tasks["gate"]), range(COLUMNS["gemm1"])
    of_tiles = {kind: itertools.product(tiles, range(COLUMNS[kind])) for kind in COLUMNS}
    columns = {"direct": range(1), "reduced": groups}[report.return_mode]
    pieces = [range(pieces_of(each, report.processors)) for each in tokens]
    parts = -(-block_tokens(tokens[rank], report.processors) // 32)
    others = [q for q in range(len(tokens)) if q != rank]
    expected_events = {
        **of_tiles,
        "gate": itertools.product(blocks, [0]),
        "dispatch": [*itertools.product(blocks, [0]), *itertools.product(blocks, others * parts)],
        "combine": itertools.product(pieces[rank], columns),
        "reduce": [(n, p << 8 | g) for p, of in enumerate(pieces) for n in of for g in groups]
        if report.tasks["reduce"]
        else [],
    }
    for kind, expected in expected_events.items():
        seen = Counter((event.index, event.column) for event in report.events if event.kind == kind)
        assert seen == Counter(expected), kind
    counts = Counter(event.kind for event in report.events)
    assert {kind: counts[kind] for kind in TASKS} == report.tasks
    assert [event.actor for event in report.events if event.kind == "schedule"] == ["os"]
    assert set(counts) <= {*TASKS, "dispatch", "wait", "schedule"}


def times_add_up(traced: Traced) -> None:
    """A processor's tasks and waits follow one another without a gap, from the call's begin to its end."""
    report = traced.report
    start, end = span_of(report.events)
    assert traced.before_ns <= start < end <= traced.after_ns
    assert report.wall_ns == end - start
    actors = {event.actor for event in report.events}
    assert actors == {"os", *(f"processor {number}" for number in range(report.processors))}
    for actor in actors - {"os"}:
        spans = [(event.start_ns, event.end_ns) for event in report.events if event.actor == actor]
        assert all(begins <= ends for begins, ends in spans)
        assert [begins for begins, _ in spans] == [start, *(ends for _, ends in spans[:-1])]
        assert spans[-1][1] == end
    (schedule,) = (event for event in report.events if event.actor == "os")
    assert start <= schedule.start_ns < schedule.end_ns <= end
    assert set(report.phase_ns) == {*TASKS, "dispatch", "idle"}
    for kind, spent in report.phase_ns.items():
        assert spent == spent_on("wait" if kind == "idle" else kind, report), kind
    assert report.idle_share == report.phase_ns["idle"] / (report.processors * report.wall_ns)


def test_times_of_an_untraced_call(ranks):
    """The times in the report (`phase_ns`) add up to the processors' whole time, from the call's begin to its end."""
    problem = problem_of("reduced", "rank 0 without")
    for rank, outcome in enumerate(ranks.call(problem, problem.limits() | {"processors": 2}, tile=TILE)):
        report = outcome.report
        assert report.processors == 2 and report.events == []
        assert sum(report.phase_ns.values()) == 2 * report.wall_ns > 0
        for kind in TASKS:
            assert report.tasks[kind] > 0 or report.phase_ns[kind] == 0, kind
        assert (report.phase_ns["gemm0"] > 0) == (rank != 0)
