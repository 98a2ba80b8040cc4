"""A traced call of the CUDA engine."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from flashmoe.trace import write_perfetto, write_timeline
from layers import call, check, context_of, random_problem

pytestmark = pytest.mark.gpu

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
        _, later = call(context, problem, trace=True)  # whose events are its own
        assert max(event.end_ns for event in report.events) <= min(event.start_ns for event in later.events)

        write_timeline(tmp_path / "timeline.png", [report.events], "one GPU")
        write_perfetto(tmp_path / "trace.json", [report.events])
        assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
        records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert set(KINDS) <= {record["name"] for record in records if record["ph"] == "X"}

        again, untraced = call(context, problem)
        assert torch.equal(again, plain) and not untraced.events


def test_traces_of_many_and_of_no_events():
    """More events than fit are left out; a call without tokens has none."""
    problem = random_problem(2, 6000, hidden=1024, intermediate=512, experts=16, top_k=8)
    with context_of(problem, processors=2) as context:
        y, report = call(context, problem, trace=True)
        check(problem, y, report)
        assert max(Counter(event.actor for event in report.events).values()) == 4095
        problem.x = problem.x[:0]
        _, report = call(context, problem, trace=True)
        assert report.events == [] and report.wall_ns == 0
