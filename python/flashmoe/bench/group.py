"""Ranks that stay from one point to the next, joined to one process group of PyTorch."""

from __future__ import annotations

import os
import socket
from typing import Any

from ..launch import RankPool
from .plan import Point
from .programs import program
from .run import Run

START_SECONDS = 300.0


class Group:
    """`ranks` processes, each with a GPU of its own or with cores that they share."""

    def __init__(self, engine: str, ranks: int) -> None:
        self.engine, self.ranks = engine, ranks
        port = free_port()
        self._pool = RankPool(ranks)
        try:
            self._pool.call(_join, [(engine, port)] * ranks, timeout=START_SECONDS)
        except BaseException:
            self._pool.close()
            raise

    def measure(self, suite: str, point: Point, repeats: int, timeout: float) -> dict[str, Any]:
        """What the suite's function says in rank 0. Raises `RankFailed`, after which the group must be closed."""
        arguments = (self.engine, suite, point.sizes, repeats)
        return self._pool.call(_measure, [arguments] * self.ranks, timeout=timeout)[0]

    def close(self) -> None:
        self._pool.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _join(rank: int, ranks: int, name: str, engine: str, port: int) -> None:
    join(engine, rank, ranks, port)


def join(engine: str, rank: int, ranks: int, port: int | None = None) -> None:
    """In a rank's process, once. What torchrun tells its processes, these are told too. `port`: where ranks meet; None
    for a rank alone."""
    import torch.distributed as dist

    port = free_port() if port is None else port
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in told.items()})
    if engine == "cuda":
        program("harness").join()
    else:
        dist.init_process_group("gloo")


def _measure(
    rank: int, ranks: int, name: str, engine: str, suite: str, sizes: dict[str, Any], repeats: int
) -> dict[str, Any]:
    from .suites import SUITES

    run = Run(engine, rank, ranks, repeats)
    try:
        measured = SUITES[suite].measure(run, **sizes)
    finally:
        if engine == "cuda":
            import torch

            torch.cuda.empty_cache()  # the next point's context does not take from PyTorch's cache
    return {**measured, "clocks": run.clocks}
