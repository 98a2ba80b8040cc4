"""What every actor did when, as a Chrome trace (for Perfetto) and as a picture; docs/tracing.md.

`flashmoe.Context.trace` returns a `CallTrace` for each call, and `write_traces` writes the traces of all ranks.
`write_perfetto` and `write_timeline` take `events_by_rank`: a list of each rank's `Event`s, rank 0 first. An actor is
``os`` (scheduler and subscriber) or ``processor N``: a thread of the CPU engine or a thread block of a GPU. Times of
all ranks must come from one clock; they are shown from the earliest event on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from .errors import InvalidArgument
from .system.drawing import new_figure

PHASES = (
    "gate",
    "dispatch",
    "gemm0",
    "gemm1",
    "reduce",
    "combine",
    "wait",
    "schedule",
    "epilogue",
    "form",
    "send",
    "rehearse",
    "gradients",
    "return",
)
"""Kinds of event, in the order of ``Phase`` in include/flashmoe/spec/enums.h."""


class Event(NamedTuple):
    """One span of one actor's time."""

    actor: str
    """``os`` or ``processor N``."""
    kind: str
    """``gate``, ``dispatch``, ``gemm0``, ``gemm1``, ``reduce``, ``combine`` or ``wait``; in a backward pass also
    ``gradients`` (products over rows); for the OS actor ``schedule``. On a GPU also ``rehearse`` (a task without rows)
    and ``form`` (until all packets have become tiles); within products ``epilogue`` (from accumulators to memory);
    around other spans ``send`` (rows to other ranks) and ``return`` (what a warp does after its role: sums, and waits
    for the rows that they need)."""
    start_ns: int
    """Nanoseconds of CLOCK_MONOTONIC, which the processes of one machine share; on a GPU, of the GPU's global timer."""
    end_ns: int
    """Nanoseconds, not before `start_ns`."""
    index: int
    """The tile, or the token block, that the task works on. On a GPU, where warps reduce and combine in pieces: the
    piece."""
    column: int
    """The block of columns; 0 for kinds without one. For ``reduce`` on a GPU: 256 x source rank + return group."""
    warp: int = 0
    """On a GPU, the warp's number in its thread block. Warp 0 is one of the consumers; `flashmoe.account` takes its
    time for that of the processor."""
    expert: int = -1
    """For a product, its expert; E means the shared expert. -1 for an event without an expert."""


@dataclass(frozen=True)
class CallTrace:
    """One rank's events of one call, and what is needed to place them beside other ranks' events."""

    rank: int
    backward: bool
    """Whether the call is a backward pass."""
    processors: int
    start_ns: int
    """The time of the first thread block's first instruction; CPU engine: of the call's start."""
    end_ns: int
    events: list[Event]
    engine: str = "cpu"
    """``cpu`` or ``cuda``."""
    left_out: dict[int, int] = field(default_factory=dict)
    """For each processor that had more events than there was room for: how many are missing, the last ones."""
    offset_ns: int = 0
    """What to add to times to get the machine's CLOCK_MONOTONIC."""
    error_ns: int = 0
    """How far a time plus `offset_ns` may be off: half the time that it took to read the device's clock, plus the drift
    between the two clocks until a second reading."""

    @property
    def wall_ns(self) -> int:
        """Nanoseconds from start to end."""
        return self.end_ns - self.start_ns

    def on_host_clock(self) -> CallTrace:
        """The same trace by CLOCK_MONOTONIC, which ranks of one machine share."""
        by = self.offset_ns
        return replace(
            self,
            start_ns=self.start_ns + by,
            end_ns=self.end_ns + by,
            events=[event._replace(start_ns=event.start_ns + by, end_ns=event.end_ns + by) for event in self.events],
            offset_ns=0,
        )


# For each kind of event, its colour in the picture (hex) and in Chrome (a reserved name). Sending has warm colours,
# computing cold ones, returning green. Waiting is so pale that a busy rank looks full and an idle one empty.
_COLOURS = {
    "gate": ("#8c6bb1", "vsync_highlight_color"),
    "dispatch": ("#f28e2b", "thread_state_iowait"),
    "gemm0": ("#2c6fbb", "thread_state_running"),
    "gemm1": ("#7fb8e6", "thread_state_runnable"),
    "reduce": ("#b5cf6b", "rail_animation"),
    "combine": ("#3a9e5c", "good"),
    "wait": ("#e3e3e3", "grey"),
    "schedule": ("#b8a9c9", "thread_state_unknown"),
    "epilogue": ("#12406f", "rail_load"),
    "form": ("#c7a76c", "thread_state_sleeping"),
    "send": ("#f9cf9f", "olive"),
    "rehearse": ("#cfdbe8", "generic_work"),
    "gradients": ("#1f7a7a", "rail_response"),
    "return": ("#dfe8d8", "white"),
}
_WITHIN_TASKS = ("epilogue",)
_AROUND_TASKS = ("wait", "return", "send")
_OF_OTHER_WARPS = ("form",)  # at the same time as their processor's other spans, so not in the picture
_OTHER_COLOUR = ("#d4508b", "bad")


def write_traces(path: str | Path, traces_by_rank: Sequence[Sequence[CallTrace]], about: Mapping[str, Any]) -> None:
    """Write what `Context.trace` returned on each rank, rank 0 first, by `write_perfetto`, on the machine's clock.

    `about` becomes the file's ``otherData``, to which ``clock_error_us`` is added: for each rank, by how many
    microseconds its spans may be off from the host's clock. Between spans of two ranks, the two errors add up.

    Examples
    --------
    >>> import flashmoe, json, numpy as np, pathlib, tempfile
    >>> from flashmoe.trace import write_traces
    >>> x, router = np.ones((5, 16), np.float32), np.ones((4, 16), np.float32)
    >>> gate_up_proj, down_proj = np.ones((4, 16, 16), np.float32), np.ones((4, 16, 8), np.float32)
    >>> with flashmoe.Context(max_tokens=8, hidden=16, intermediate=8, experts=4, top_k=2, dtype="float32") as ctx:
    ...     traces = ctx.trace(lambda: flashmoe.moe(ctx, x, gate_up_proj, down_proj, router=router, top_k=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_traces(path := pathlib.Path(folder, "trace.json"), [traces], {"layer": "a small one"})
    ...     json.loads(path.read_text())["otherData"]
    {'layer': 'a small one', 'clock_error_us': [0.0]}
    """
    events = [[event for trace in traces for event in trace.on_host_clock().events] for traces in traces_by_rank]
    errors = [max((trace.error_ns for trace in traces), default=0) / 1000 for traces in traces_by_rank]
    write_perfetto(path, events, {**about, "clock_error_us": errors})


def write_perfetto(
    path: str | Path, events_by_rank: Sequence[Sequence[Event]], about: Mapping[str, Any] | None = None
) -> None:
    """Write Chrome trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

    A rank becomes a process. An actor becomes a thread, and so does each further warp of an actor. A task becomes a
    span named by its kind, with `index`, `column` and, if there is one, `expert` as arguments. Times are in
    microseconds. `about`: the file's ``otherData``.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> from flashmoe.trace import Event, write_perfetto
    >>> events = [Event("processor 0", "combine", start_ns=1000, end_ns=3000, index=0, column=0)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_perfetto(path := pathlib.Path(folder, "trace.json"), [events])
    ...     span = json.loads(path.read_text())["traceEvents"][-1]
    >>> span["name"], span["ts"], span["dur"]
    ('combine', 0.0, 2.0)
    """
    origin = _span(events_by_rank)[0]
    records: list[dict[str, Any]] = []
    for rank, events in enumerate(events_by_rank):
        threads = {row: number for number, row in enumerate(_rows(events))}
        records.append(_metadata(rank, 0, "process_name", name=f"rank {rank}"))
        records.append(_metadata(rank, 0, "process_sort_index", sort_index=rank))
        for (actor, warp), thread in threads.items():
            name = actor if warp == 0 else f"{actor}, warp {warp}"
            records.append(_metadata(rank, thread, "thread_name", name=name))
            records.append(_metadata(rank, thread, "thread_sort_index", sort_index=thread))
        for event in events:
            records.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": threads[_row(event)],
                    "name": event.kind,
                    "cname": _colour(event.kind)[1],
                    "ts": (event.start_ns - origin) / 1000,
                    "dur": (event.end_ns - event.start_ns) / 1000,
                    "args": {"index": event.index, "column": event.column}
                    | ({"expert": event.expert} if event.expert >= 0 else {}),
                }
            )
    document = {"traceEvents": records, "displayTimeUnit": "ns"} | ({"otherData": dict(about)} if about else {})
    Path(path).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


def write_timeline(path: str | Path, events_by_rank: Sequence[Sequence[Event]], title: str = "") -> None:
    """Draw a PNG: one panel per rank, one row per actor, time to the right, colour by kind of event.

    Readable from a handful of rows to a few hundred: rows shrink, and only as many are labelled as fit. Raises
    `FlashMoEError` if matplotlib is not installed.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from flashmoe.trace import Event, write_timeline
    >>> events = [Event("processor 0", "combine", start_ns=1000, end_ns=3000, index=0, column=0)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_timeline(path := pathlib.Path(folder, "timeline.png"), [events], title="One task")
    ...     path.read_bytes()[1:4]
    b'PNG'
    """
    origin, end = _span(events_by_rank)
    unit, unit_ns = _time_unit(end - origin)
    actors = [_actors(events) for events in events_by_rank]
    rows = [max(1, len(names)) for names in actors]
    row_inches = min(0.22, max(0.035, 10 / sum(rows)))
    head, foot, gap = 0.95, 0.55, 0.12  # inches: title and legend, time axis, between panels
    height = head + foot + row_inches * sum(rows) + gap * (len(rows) - 1)
    figure = new_figure(figsize=(14, height), dpi=110)
    from matplotlib.patches import Patch  # slow to import, and drawing is optional

    top = height - head
    for rank, (events, names) in enumerate(zip(events_by_rank, actors, strict=True)):
        panel = row_inches * rows[rank]
        axes = figure.add_axes((0.1, (top - panel) / height, 0.885, panel / height))
        _draw_rank(axes, events, names, origin, unit_ns, row_inches)
        axes.set_xlim(0, max(end - origin, 1) / unit_ns)
        figure.text(0.008, (top - panel / 2) / height, f"rank {rank}", fontweight="bold", va="center")
        axes.tick_params(labelbottom=rank == len(rows) - 1, bottom=rank == len(rows) - 1)
        top -= panel + gap
    axes.set_xlabel(f"time since the first event ({unit})")
    kinds = {event.kind for events in events_by_rank for event in events}
    ordered = [kind for kind in _COLOURS if kind in kinds] + sorted(kinds - _COLOURS.keys())
    figure.legend(
        handles=[Patch(facecolor=_colour(kind)[0], label=kind) for kind in ordered],
        loc="upper center",
        bbox_to_anchor=(0.5425, 1 - 0.42 / height),
        ncols=len(ordered),
        frameon=False,
        handlelength=1.2,
    )
    figure.text(0.5425, 1 - 0.3 / height, title, ha="center", va="center", fontsize=12)
    figure.savefig(Path(path), format="png")


def _draw_rank(
    axes: Any, events: Sequence[Event], names: Sequence[str], origin: int, unit_ns: int, row_inches: float
) -> None:
    """Fill one panel: a rectangle per event. Matplotlib draws all events of a kind as one collection, because it would
    be slow with 100,000 single rectangles."""
    from matplotlib.collections import PolyCollection

    rows = {actor: row for row, actor in enumerate(names)}
    rectangles: dict[str, list[list[tuple[float, float]]]] = {}
    for event in events:
        if event.kind in _OF_OTHER_WARPS:
            continue
        left, right = (event.start_ns - origin) / unit_ns, (event.end_ns - origin) / unit_ns
        top, bottom = rows[event.actor] - 0.42, rows[event.actor] + 0.42
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        rectangles.setdefault(event.kind, []).append(corners)
    # Spans around tasks, such as waits, are drawn first, so that a task within one covers it. Spans within tasks are
    # drawn last. Edges in the colour of the fill keep a short task visible.
    for kind in sorted(rectangles, key=lambda kind: (kind in _WITHIN_TASKS) - (kind in _AROUND_TASKS)):
        colour = _colour(kind)[0]
        edges = "none" if kind in _AROUND_TASKS else colour
        axes.add_collection(PolyCollection(rectangles[kind], facecolors=colour, edgecolors=edges, linewidths=0.7))
    stride = max(1, round(0.15 / row_inches))  # a label is 0.15 inch high
    # Labels: os, and every processor whose number the stride divides, except 0, whose label would cover that of os.
    labelled = [row for row in range(len(names)) if stride == 1 or row == 0 or (row > 1 and row % stride == 1)]
    axes.set_yticks(labelled, [names[row] for row in labelled], fontsize=7.5)
    axes.set_ylim(max(1, len(names)) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#bbbbbb", linewidth=0.4)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _span(events_by_rank: Sequence[Sequence[Event]]) -> tuple[int, int]:
    """The earliest start and the latest end of all events, in nanoseconds."""
    events = [event for rank in events_by_rank for event in rank]
    if not events:
        raise InvalidArgument("events_by_rank: expected at least one event; was the call traced?")
    return min(event.start_ns for event in events), max(event.end_ns for event in events)


def _actors(events: Sequence[Event]) -> list[str]:
    """The names of the actors, ``os`` first, then processors by number (2 before 10)."""
    return sorted({event.actor for event in events}, key=_order)


def _rows(events: Sequence[Event]) -> list[tuple[str, int]]:
    """All pairs (actor, warp), in the order of `_actors` and then by warp."""
    return sorted({_row(event) for event in events}, key=lambda row: (_order(row[0]), row[1]))


def _row(event: Event) -> tuple[str, int]:
    return event.actor, 0 if event.actor == "os" else event.warp


def _order(actor: str) -> tuple[bool, list[tuple[int, str]]]:
    pieces = re.split(r"(\d+)", actor)
    return actor != "os", [(int(piece) if piece.isdigit() else -1, piece) for piece in pieces]


def _time_unit(span_ns: int) -> tuple[str, int]:
    """The unit of time that keeps the axis's numbers below a few thousand: its name, and its nanoseconds."""
    return ("µs", 1_000) if span_ns < 5_000_000 else ("ms", 1_000_000)


def _colour(kind: str) -> tuple[str, str]:
    """The colours of a kind of event: hex, and Chrome's name."""
    return _COLOURS.get(kind, _OTHER_COLOUR)


def _metadata(rank: int, thread: int, what: str, **args: Any) -> dict[str, Any]:
    """A record that names or sorts a process or a thread."""
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": args}
