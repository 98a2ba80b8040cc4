"""What ranks are told about a rank that was killed, and when."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...launch import RankFailed, RankPool
from ..joining import free_port, join
from ..layer import Layer, Sizes
from ..plan import Machine, Point, Suite, Voided
from ..run import Run
from .latency import small

CALLS = 20
"""Calls before the rank is killed."""
VICTIM = 1


def points(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups[1:]:  # MPS promises nothing to processes that share a GPU with a killed one
        sizes = {"timeout": 1.0, **small()} if machine.small else {"timeout": 4.0, "shape": "qwen3-30b", "tokens": 1024}
        yield Point(f"a rank killed x{ranks}", ranks, {"ranks": ranks, **sizes}, kills=True)


def measure(run: Run, ranks: int, timeout: float, **sizes: Any) -> dict[str, Any]:
    """Starts ranks of its own, and kills one of them between two calls. Raises `Voided` unless all others name it.
    `timeout`: how many seconds a context waits for a rank before it looks what has become of that rank."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (run.engine, free_port(), timeout, sizes, folder)
        try:
            with RankPool(ranks) as pool:
                pool.call(_die, [arguments] * ranks, timeout=SUITE.seconds)
        except RankFailed as failed:
            if set(failed.errors) != {VICTIM}:
                raise
        said = {rank: Path(folder, str(rank)).read_text() for rank in range(ranks) if rank != VICTIM}
    seconds = {rank: float(each.partition(" ")[0]) for rank, each in said.items()}
    if wrong := [each for each in said.values() if f"rank {VICTIM} holds up call" not in each]:
        raise Voided(f"expected each rank to name rank {VICTIM}, which was killed, got {wrong[0][:300]!r}")
    check = run.check(max(seconds.values()), 2 * timeout, "seconds until all others were told who is gone")
    return {"check": check, "values": {"said": said, "figures": {"seconds until it is named": max(seconds.values())}}}


def _die(
    rank: int, ranks: int, name: str, engine: str, port: int, timeout: float, sizes: dict[str, Any], folder: str
) -> None:
    """Writes what a rank is told to a file with its number, after the seconds that this took."""
    from ...errors import FlashMoEError

    join(engine, rank, ranks, port)
    layer = Layer(Run(engine, rank, ranks, 0), Sizes.of(**sizes), timeout=timeout)
    for i in range(CALLS):
        layer(i)
    layer.context.synchronize()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    begin, told = time.monotonic(), "nothing"
    try:
        layer(0)
        layer.context.synchronize()
    except FlashMoEError as error:
        told = f"{type(error).__name__}: {error}"
    Path(folder, str(rank)).write_text(f"{time.monotonic() - begin:.3f} {told}")


SUITE = Suite(
    "faults", "a rank that is killed: when the others know, and what they are told", (), points, measure, seconds=150.0
)
