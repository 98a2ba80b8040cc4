"""A traced call of the CUDA engine."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
import torch
from flashmoe.account import account
from flashmoe.trace import write_perfetto, write_timeline
from layers import call, check, context_of, random_problem

pytestmark = [pytest.mark.gpu, pytest.mark.undisturbed]

KINDS = ("gate", "dispatch", "gemm0", "gemm1", "combine", "wait", "epilogue")


@pytest.mark.parametrize("ids", [None, "int32"], ids=["router", "given"])
def test_traced_call(tmp_path, ids):
    problem = random_problem(1, 700, hidden=512, intermediate=256, experts=16, top_k=4, ids=ids)
    with context_of(problem) as context:
        plain, _ = call(context, problem)
        y, report = call(context, problem, trace=True)
        assert torch.equal(y, plain)
        check(problem, y, report)
        processors = context.processors

        counts = Counter(event.kind for event in report.events)
        assert set(KINDS) <= set(counts)
        assert counts["gate"] == report.tasks["gate"]
        for kind in ("gemm0", "gemm1"):  # two thread blocks compute each task
            assert counts[kind] == 2 * report.tasks[kind], kind
        assert counts["dispatch"] == report.tasks["gate"]
        assert counts["combine"] >= report.tasks["combine"]
        assert {event.index for event in report.events if event.kind == "gemm0"} == set(range(report.tiles))
        for event in report.events:
            assert 0 < event.start_ns <= event.end_ns
            number = int(event.actor.removeprefix("processor ")) if event.actor != "os" else 0
            assert 0 <= number < processors
        assert report.phase_ns["gemm0"] > 0
        _, later = call(context, problem, trace=True)  # its report has only its own events
        assert max(event.end_ns for event in report.events) <= min(event.start_ns for event in later.events)

        write_timeline(tmp_path / "timeline.png", [report.events], "one GPU")
        write_perfetto(tmp_path / "trace.json", [report.events])
        assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
        records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert set(KINDS) <= {record["name"] for record in records if record["ph"] == "X"}

        again, untraced = call(context, problem)
        assert torch.equal(again, plain) and not untraced.events


@pytest.mark.parametrize("tokens", [8, 700, 5000])
@pytest.mark.parametrize("top_k", [2, 4])
def test_account(tokens, top_k):
    """Spans cover at least 98 % of the multiprocessors' time, and the parts are those that such a call can have."""
    problem = random_problem(3, tokens, hidden=1024, intermediate=512, experts=16, top_k=top_k)
    with context_of(problem) as context:
        plain, _ = call(context, problem)
        results = []
        for _ in range(2):  # the first call also loads the kernel
            (traced,) = context.trace(lambda: results.append(call(context, problem)[0]))
        assert all(torch.equal(y, plain) for y in results)
        found = account(traced)
        assert found.covered >= 0.98 and found.uncovered_ns >= 0, found.shares()
        assert found.processors == context.processors and not traced.left_out
        assert {"start", "gate", "gemm0", "gemm1", "wait for tasks"} <= set(found.ns), found.ns
        assert ("wait for packets" in found.ns) == (tokens > 8)
        assert 0 < traced.error_ns < 1_000_000
        here = traced.on_host_clock()
        assert here.end_ns < time.monotonic_ns() < here.end_ns + 60 * 10**9
        experts = {event.expert for event in traced.events if event.kind == "gemm0"}
        assert experts <= set(range(16)) and len(experts) > 1


def test_traces_of_many_and_of_no_events():
    """A thread block's events beyond 16383 are left out; a call without tokens has no events."""
    problem = random_problem(2, 24000, hidden=1024, intermediate=512, experts=16, top_k=8)
    with context_of(problem, processors=2) as context:
        _, report = call(context, problem, trace=True)
        assert max(Counter(event.actor for event in report.events).values()) == 16383
        (traced,) = context.trace(lambda: call(context, problem))
        assert set(traced.left_out) == {0, 1} and account(traced).covered < 1
        problem.x = problem.x[:0]
        _, report = call(context, problem, trace=True)
        assert report.events == [] and report.wall_ns == 0
