"""Traces as Perfetto JSON and as a picture."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from flashmoe.errors import InvalidArgument
from flashmoe.trace import Event, write_perfetto, write_timeline

SECOND = 1_000_000_000
EVENTS = [
    [
        Event("processor 10", "gemm0", SECOND + 4_000, SECOND + 9_500, 3, 1),
        Event("processor 2", "gate", SECOND + 1_000, SECOND + 4_000, 0, 0),
        Event("os", "wait", SECOND + 1_250, SECOND + 2_000, 0, 0),
    ],
    [Event("processor 0", "combine", SECOND + 2_000, SECOND + 8_000, 5, 0)],
]


def many(ranks: int, processors: int, tasks: int) -> list[list[Event]]:
    """The events of a busy group, in which each actor executes one kind of task after the other."""
    kinds = ("gate", "dispatch", "gemm0", "gemm1", "reduce", "combine", "wait")
    actors = ["os", *(f"processor {number}" for number in range(processors))]
    return [
        [
            Event(actor, kinds[task * 7 // tasks], task * 1000, task * 1000 + 900, task, 0)
            for actor in actors
            for task in range(tasks)
        ]
        for _ in range(ranks)
    ]


def png_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file, in pixels."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", head[16:])


def test_perfetto(tmp_path):
    path = tmp_path / "trace.json"
    write_perfetto(path, EVENTS)
    records = json.loads(path.read_text())["traceEvents"]

    named = {
        (record["pid"], record["tid"]): record["args"]["name"] for record in records if record["name"] == "thread_name"
    }
    assert named == {(0, 0): "os", (0, 1): "processor 2", (0, 2): "processor 10", (1, 0): "processor 0"}
    processes = [record for record in records if record["name"] == "process_name"]
    assert [(record["pid"], record["args"]["name"]) for record in processes] == [(0, "rank 0"), (1, "rank 1")]

    spans = [record for record in records if record["ph"] == "X"]
    assert len(spans) == 4
    gemm = next(span for span in spans if span["name"] == "gemm0")
    assert (gemm["pid"], gemm["tid"], gemm["ts"], gemm["dur"]) == (0, 2, 3.0, 5.5)
    assert gemm["args"] == {"index": 3, "column": 1}
    assert min(span["ts"] for span in spans) == 0.0
    assert len({span["cname"] for span in spans}) == 4


@pytest.mark.parametrize("events", [EVENTS, many(1, 1, 1), many(4, 2, 14), many(4, 132, 14)])
def test_timeline(tmp_path, events):
    path = tmp_path / "timeline.png"
    write_timeline(path, events, "a title")
    width, height = png_size(path)
    assert width == 1540
    assert 150 <= height <= 2400


def test_rank_without_events_and_unknown_kind(tmp_path):
    events = [[], [Event("os", "something new", 5, 5, 0, 0)]]
    write_timeline(tmp_path / "timeline.png", events)
    write_perfetto(tmp_path / "trace.json", events)
    assert "something new" in (tmp_path / "trace.json").read_text()


@pytest.mark.parametrize("write", [write_perfetto, write_timeline])
def test_no_events_at_all_is_an_error(tmp_path, write):
    with pytest.raises(InvalidArgument, match="at least one event"):
        write(tmp_path / "file", [[], []])
