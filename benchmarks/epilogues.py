"""Pairs the GEMM tasks of a trace with their epilogues."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from flashmoe.trace import Event


def with_epilogues(events: Iterable[Event]) -> list[tuple[Event, Event]]:
    """Pairs of a GEMM task and its epilogue, as the first warp of each processor has traced them."""
    by_actor = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.end_ns, -event.start_ns)):
        if event.warp == 0:
            by_actor[event.actor].append(event)
    pairs = []
    for of_actor in by_actor.values():
        epilogue = None
        for event in of_actor:
            if event.kind == "epilogue":
                epilogue = event
            elif event.kind in ("gemm0", "gemm1") and epilogue is not None:
                pairs.append((event, epilogue))
    return pairs
