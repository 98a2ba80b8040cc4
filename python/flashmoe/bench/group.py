"""Processes of ranks, joined to one process group of PyTorch. They are kept from one point to the next."""

from __future__ import annotations

from typing import Any

from ..launch import RankPool
from .joining import free_port, join
from .plan import Point
from .run import Run

START_SECONDS = 300.0


class Group:
    """`ranks` processes. On GPUs, each has a GPU of its own, or shares one (`joining.ranks_a_gpu`); with the CPU
    engine, they share the cores."""

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
        """What the suite's function returns in rank 0. Raises `RankFailed`; after that, the group must be closed."""
        arguments = (self.engine, suite, point.sizes, repeats)
        return self._pool.call(_measure, [arguments] * self.ranks, timeout=timeout)[0]

    def close(self) -> None:
        self._pool.close()


def _join(rank: int, ranks: int, name: str, engine: str, port: int) -> None:
    join(engine, rank, ranks, port)


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

            torch.cuda.empty_cache()  # the next point's context cannot use memory in PyTorch's cache
    return {**measured, "clocks": run.clocks}
