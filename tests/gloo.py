"""Ranks of torch.distributed over gloo, for tests. The ranks are processes of a `RankPool`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from flashmoe.launch import RankPool
from problems import PATIENCE


class Gloo:
    """Calls ``fn(rank, *args)`` in as many ranks of the pool as asked for. Returns what each rank returned, by rank."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool = pool
        self._folder = folder

    def __call__(self, ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        store = f"file://{self._folder}/rendezvous-{secrets.token_hex(6)}"
        return self._pool.call(_as_rank, [(store, fn, args)] * ranks, ranks=ranks, timeout=6 * PATIENCE)


def _as_rank(rank: int, ranks: int, _: str, store: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    try:
        dist.barrier()  # otherwise a rank may end before another has connected to it, and the other fails
        return fn(rank, *args)
    finally:
        dist.destroy_process_group()
