"""The picture that ``flashmoe run`` writes: of the run, or of a simulated call if the run's would show only waiting."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from .. import models, simulation
from ..groups import launcher
from ..trace import Event
from .console import count
from .workload import Workload

MODEL, GPUS, TOKENS = "qwen3-30b-a3b", 4, 8192
"""The model, the number of GPUs and the tokens of each GPU of the simulated call."""


class Picture(NamedTuple):
    """What `flashmoe.trace.write_timeline` draws."""

    events_by_rank: Sequence[Sequence[Event]]
    title: str
    hint: str
    """What `flashmoe run` prints about the picture."""


def picture_of(workload: Workload, events: Sequence[Sequence[Event]], title: str) -> Picture:
    """The run's own events, under the run's `title`, if its ranks had the cores that they need; else a simulated call.

    Each rank of the CPU engine has a thread that schedules and at least one that computes. With fewer cores than
    threads, threads mostly wait until a core is free, and the picture would show these waits instead of the protocol.
    """
    ranks, cores = len(events), len(os.sched_getaffinity(0))
    if workload.engine == "cuda" or launcher.launched() is not None or cores >= 2 * ranks:
        return Picture(events, title, "who did what when")
    few = f"{count(cores, 'core')} for {count(ranks, 'rank')}"
    return Picture(
        simulation.timeline(models.find(MODEL), tokens=TOKENS, gpus=GPUS),
        f"SIMULATED, and not of this run, which had {few}: a layer of {MODEL} on {GPUS} GPUs, {TOKENS:,} tokens each",
        f"a simulated call of {GPUS} GPUs: with {few}, a picture of your run would show how they wait",
    )
