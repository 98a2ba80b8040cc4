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
    for ranks in machine.groups[1:]:  # not with a shared GPU: MPS promises nothing if one of its processes is killed
        sizes = {"timeout": 1.0, **small()} if machine.small else {"timeout": 4.0, "shape": "qwen3-30b", "tokens": 1024}
        yield Point(f"a rank killed x{ranks}", ranks, {"ranks": ranks, **sizes}, kills=True)


def measure(run: Run, ranks: int, timeout: float, **sizes: Any) -> dict[str, Any]:
    """Starts ranks of its own. One of them is killed between two calls. Raises `Voided` unless all others name that
    rank in their errors. `timeout`: how many seconds a context waits for a rank before it checks whether that rank is
    still there."""
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
    """Runs in each rank. After some calls, the victim kills itself, and every other rank calls once more. Each of these
    ranks writes to a file, named by the rank's number, the seconds that this call took and the error that it raised."""
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
