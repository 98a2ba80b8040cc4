"""Where the processors' time of a traced call went.

A processor's time is the time of its first warp (CPU engine: of its thread), which computes tasks until none are left.
A trace has spans: what the warp did, from when to when. Spans may lie within other spans. Each nanosecond from the
call's start to its end belongs to the part of the innermost span around it. Time before the first span is ``start``,
time after the last span is ``tail``. Time between two spans belongs to no part; `Account.uncovered_ns` counts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .trace import CallTrace, Event

PARTS = {
    "start": "before the processor's first span: launch, barriers",
    "gate": "logits and the choice of experts",
    "dispatch": "packets of the own tokens; CPU engine: and rows to other ranks",
    "send": "rows to other ranks, by the blocks that send",
    "rehearse": "tasks without rows, while the first tiles form",
    "wait for packets": "no task, and not all packets have become tiles yet",
    "wait for tasks": "no task, although all have",
    "gemm0": "products of GEMM0, epilogues apart",
    "gemm0 epilogue": "activation, and stores of intermediate rows",
    "gemm1": "products of GEMM1, epilogues apart",
    "gemm1 epilogue": "weights, and stores of result rows",
    "gradients": "a backward pass's products over rows",
    "reduce": "sums of rows for other ranks",
    "combine": "sums of rows at home",
    "wait for returns": "tasks are over, and rows to sum are not there yet",
    "tail": "behind the processor's last span",
}
"""The parts of an account, in the order of a call, each with its meaning."""

_MAIN_WARP = 0


@dataclass(frozen=True)
class Account:
    """The time of all processors of a rank in one call, in nanoseconds."""

    rank: int
    backward: bool
    wall_ns: int
    """From the call's start to its end."""
    processors: int
    ns: dict[str, int]
    """Nanoseconds of each part of `PARTS` that occurred."""

    @property
    def total_ns(self) -> int:
        """The time of all processors together."""
        return self.wall_ns * self.processors

    @property
    def uncovered_ns(self) -> int:
        """The processors' time that belongs to no part."""
        return self.total_ns - sum(self.ns.values())

    @property
    def covered(self) -> float:
        """The share of the processors' time that the parts cover, 0 to 1."""
        return sum(self.ns.values()) / self.total_ns if self.total_ns else 1.0

    def shares(self) -> dict[str, float]:
        """The share of each part in the processors' time, and that of ``uncovered``: together 1."""
        total = self.total_ns or 1
        return {part: ns / total for part, ns in self.ns.items()} | {"uncovered": self.uncovered_ns / total}


def accounts(traces: Sequence[CallTrace]) -> list[Account]:
    """Each rank's account of one call. `traces`: the call's traces of all known ranks, which have the same engine.

    A processor without a task waits for packets or for tasks. On a GPU, it waits for packets until the rank's formers
    have made tiles of all packets; a call without formers (of few tokens) has only waits for tasks. The CPU engine has
    no formers: there, processors wait for packets until the last rank of `traces` has dispatched its tokens.

    Examples
    --------
    In real calls, the traces are those that `Context.trace` returns.

    >>> from flashmoe.account import accounts
    >>> from flashmoe.trace import CallTrace, Event
    >>> events = [Event("processor 0", "gate", 1000, 3000, 0, 0), Event("processor 0", "gemm0", 3000, 8000, 0, 0)]
    >>> trace = CallTrace(rank=0, backward=False, processors=1, start_ns=0, end_ns=10000, events=events)
    >>> accounts([trace])[0].ns
    {'start': 1000, 'gate': 2000, 'gemm0': 5000, 'tail': 2000}
    """
    traces = [trace.on_host_clock() for trace in traces]
    dispatched = [event.end_ns for trace in traces for event in trace.events if event.kind == "dispatch"]
    last = max(dispatched, default=0)
    return [_account(trace, last if trace.engine == "cpu" else 0) for trace in traces]


def account(trace: CallTrace) -> Account:
    """The account of one rank, from its trace alone.

    Examples
    --------
    >>> from flashmoe.account import account
    >>> from flashmoe.trace import CallTrace, Event
    >>> events = [Event("processor 0", "gate", 1000, 3000, 0, 0), Event("processor 0", "gemm0", 3000, 8000, 0, 0)]
    >>> trace = CallTrace(rank=0, backward=False, processors=1, start_ns=0, end_ns=10000, events=events)
    >>> account(trace).shares()
    {'start': 0.1, 'gate': 0.2, 'gemm0': 0.5, 'tail': 0.2, 'uncovered': 0.0}
    """
    return accounts([trace])[0]


class Piece(NamedTuple):
    """A stretch of time, with the span that it lies in and the span around that span, if there is one."""

    start_ns: int
    end_ns: int
    event: Event
    around: Event | None


def pieces(events: Iterable[Event]) -> Iterator[Piece]:
    """The time that one warp's spans (`events`) cover, in order, cut where the innermost span changes. No nanosecond is
    in two pieces."""
    stack: list[Event] = []
    now = 0

    def until(end: int) -> Iterator[Piece]:
        nonlocal now
        if stack and end > now:
            yield Piece(now, end, stack[-1], stack[-2] if len(stack) > 1 else None)
        now = max(now, end)

    for event in sorted(events, key=lambda event: (event.start_ns, -event.end_ns)):
        while stack and stack[-1].end_ns <= event.start_ns:
            yield from until(stack[-1].end_ns)
            stack.pop()
        yield from until(event.start_ns)
        stack.append(event)
    while stack:
        yield from until(stack[-1].end_ns)
        stack.pop()


def _account(trace: CallTrace, dispatched_ns: int) -> Account:
    formed = max((event.end_ns for event in trace.events if event.kind == "form"), default=dispatched_ns)
    by_processor = defaultdict(list)
    for event in trace.events:
        if event.warp == _MAIN_WARP and event.actor != "os":
            by_processor[event.actor].append(event)
    ns: dict[str, int] = defaultdict(int)
    for number in range(trace.processors):
        events = by_processor[f"processor {number}"]
        if not events:
            continue
        ns["start"] += min(event.start_ns for event in events) - trace.start_ns
        if number not in trace.left_out:  # otherwise spans are missing, and the last one recorded is not the last
            ns["tail"] += trace.end_ns - max(event.end_ns for event in events)
        for piece in pieces(events):
            if piece.event.kind == "wait":
                before = min(max(formed, piece.start_ns), piece.end_ns)
                ns["wait for packets"] += before - piece.start_ns
                ns["wait for tasks"] += piece.end_ns - before
            else:
                ns[_part(piece)] += piece.end_ns - piece.start_ns
    return Account(
        trace.rank, trace.backward, trace.wall_ns, trace.processors, {part: ns[part] for part in PARTS if ns[part]}
    )


def _part(piece: Piece) -> str:
    kind, around = piece.event.kind, "" if piece.around is None else piece.around.kind
    if kind == "epilogue":
        return f"{around} epilogue"
    if kind == "dispatch" and around == "send":
        return around
    return "wait for returns" if kind == "return" else kind
