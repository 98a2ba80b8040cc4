"""Accounts of where processors' time went, from events that are made up and from events of the CPU engine."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import flashmoe
import pytest
import torch
from epilogues import with_epilogues
from flashmoe.account import PARTS, account, accounts, pieces
from flashmoe.trace import CallTrace, Event


def made(events: list[Event], processors: int = 1, start: int = 0, end: int = 1000, **more: Any) -> CallTrace:
    return CallTrace(0, False, processors, start, end, events, **more)


def span(kind: str, start: int, end: int, warp: int = 0, processor: int = 0) -> Event:
    return Event(f"processor {processor}", kind, start, end, 0, 0, warp)


CALL = [
    span("gate", 100, 150),
    span("dispatch", 150, 200),
    span("send", 200, 300),
    span("dispatch", 210, 290),  # inside of the send span, so it counts as sending
    span("wait", 310, 400),
    span("gemm0", 400, 500),
    span("epilogue", 480, 500),
    span("wait", 500, 560),
    span("gemm1", 560, 660),
    span("epilogue", 600, 650),
    span("return", 660, 900),
    span("combine", 700, 750),
    span("reduce", 750, 760),
    span("form", 90, 350, warp=11),
    span("combine", 400, 900, warp=9),  # of another warp than the first, so it does not count
    Event("os", "schedule", 90, 950, 0, 0, 11),
]
PARTS_OF_CALL = {
    "start": 100,
    "gate": 50,
    "dispatch": 50,
    "send": 100,
    "wait for packets": 40,
    "wait for tasks": 50 + 60,
    "gemm0": 80,
    "gemm0 epilogue": 20,
    "gemm1": 50,
    "gemm1 epilogue": 50,
    "reduce": 10,
    "combine": 50,
    "wait for returns": 240 - 60,
    "tail": 100,
}


def test_every_part():
    found = account(made(CALL))
    assert found.ns == PARTS_OF_CALL
    assert (found.total_ns, found.uncovered_ns, found.covered) == (1000, 10, 0.99)
    assert sum(found.shares().values()) == pytest.approx(1) and set(found.shares()) == {*PARTS_OF_CALL, "uncovered"}
    assert list(found.ns) == [part for part in PARTS if part in found.ns]


def test_processors_are_added_and_one_without_events_is_not_covered():
    found = account(made([*CALL, span("gemm0", 0, 1000, processor=1)], processors=3))
    assert found.total_ns == 3000 and found.ns["gemm0"] == 1080
    assert found.uncovered_ns == 1010


def test_what_is_left_out_is_not_the_tail():
    found = account(made(CALL, left_out={0: 7}))
    assert "tail" not in found.ns and found.uncovered_ns == 110


def test_packets_are_under_way_until_the_last_rank_has_dispatched():
    """In traces without formers. On the CPU engine, waits count as waits for packets until the last rank has
    dispatched, by one clock for all ranks. On a GPU, a trace without formers has no waits for packets."""
    own = made([span("dispatch", 0, 100), span("wait", 100, 1000)])
    other = CallTrace(
        1, False, 1, 5000, 6000, [span("dispatch", 5000, 5400), span("wait", 5400, 6000)], offset_ns=-5000
    )
    alone, (one, two) = account(own), accounts([own, other])
    assert alone.ns == {"dispatch": 100, "wait for tasks": 900}
    assert accounts([replace(own, engine="cuda"), other])[0].ns == alone.ns
    assert one.ns == {"dispatch": 100, "wait for packets": 300, "wait for tasks": 600}
    assert two.ns == {"dispatch": 400, "wait for tasks": 600}


@pytest.mark.parametrize("seed", range(20))
def test_no_time_is_counted_twice(seed):
    """Spans are random. Some begin within another span and end after it, as no warp's spans do. Pieces cover each
    nanosecond that a span covers, once, and no other nanosecond."""
    chance = random.Random(seed)
    starts = [chance.randrange(300) for _ in range(40)]
    events = [span(chance.choice(("wait", "gemm0")), start, start + chance.randrange(60)) for start in starts]
    covered = Counter(at for piece in pieces(events) for at in range(piece.start_ns, piece.end_ns))
    assert set(covered.values()) == {1}
    assert set(covered) == {at for event in events for at in range(event.start_ns, event.end_ns)}
    for piece in pieces(events):
        assert piece.event.start_ns <= piece.start_ns < piece.end_ns <= piece.event.end_ns


def test_tasks_with_their_epilogues():
    pairs = with_epilogues(CALL)
    assert [(task.kind, task.start_ns, epilogue.start_ns) for task, epilogue in pairs] == [
        ("gemm0", 400, 480),
        ("gemm1", 560, 600),
    ]


def test_a_call_without_time():
    assert account(made([], end=0)).covered == 1.0


@pytest.mark.parametrize("backward", [False, True])
def test_cpu_engine(backward):
    """All time of the CPU engine's processors is accounted for, and events of tasks name the tasks' experts."""
    torch.manual_seed(0)
    experts, hidden, inner, top_k, tokens = 4, 32, 16, 2, 50
    x, router = torch.randn(tokens, hidden), torch.randn(experts, hidden)
    up, down = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    tensors = (x, up, down, router)
    sizes = {"hidden": hidden, "intermediate": inner, "experts": experts, "top_k": top_k, "dtype": "float32"}
    with flashmoe.Context(max_tokens=tokens, processors=2, **sizes) as context:

        def call() -> torch.Tensor:
            return flashmoe.moe(context, x, up, down, router=router, top_k=top_k)

        plain = call()
        if backward:
            for each in tensors:
                each.requires_grad_()
        results = []
        traces = context.trace(lambda: results.append(call()) or (backward and results[0].sum().backward()))
        assert torch.equal(results[0].detach(), plain)
        assert [trace.backward for trace in traces] == [False, True][: 1 + backward]
        for trace in traces:
            found = account(trace)
            assert found.uncovered_ns == 0 and found.covered == 1.0
            assert found.processors == 2 and found.ns["gemm0"] > 0 and found.ns["gemm1"] > 0
            assert ("gradients" in found.ns) == trace.backward
            of_products = {event.expert for event in trace.events if event.kind in ("gemm0", "gemm1")}
            assert of_products == set(context.last_call.topk_ids.flat)
        assert traces[0].end_ns <= traces[-1].start_ns or not backward
        call()
        assert context.last_call.events == []
