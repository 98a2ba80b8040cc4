"""Ranks of groups on several machines, which are hosts that tests make (hosts.py): functions that the ranks call, and
functions by which tests tell the ranks to call them."""

from __future__ import annotations

import functools
import glob
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flashmoe
import numpy as np
import pytest
from flashmoe.engines import cpu
from flashmoe.report import CallReport
from hosts import Network
from processes import MARGIN, Process

LONG = os.environ.get("FLASHMOE_LONG_TESTS") == "1"
"""Whether tests make 2,000 calls and try 200 examples, as in ``make nightly``, instead of fewer."""
nightly = pytest.mark.skipif(not LONG, reason="expected FLASHMOE_LONG_TESTS=1, as make nightly sets it")
SECRET = "a secret of tests' own"
PORT = 7788
H, I, E, K = 24, 20, 8, 3
MakeNetwork = Callable[[int], Network]


class Layer(NamedTuple):
    gate_up: np.ndarray
    down: np.ndarray
    router: np.ndarray

    @classmethod
    def random(cls, seed: int) -> Layer:
        rng = np.random.default_rng(seed)
        return cls(
            *((rng.standard_normal(shape) / 6).astype(np.float32) for shape in ((E, 2 * I, H), (E, H, I), (E, H)))
        )


def tokens_of(counts: Sequence[int], seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed + 1000)
    return [rng.standard_normal((count, H)).astype(np.float32) for count in counts]


# ---- What ranks do -------------------------------------------------------------------------------------------

OPEN: dict[str, flashmoe.Context] = {}


def enter(
    rank: int,
    ranks: int,
    address: str | None,
    mode: str = "direct",
    timeout: float = 5.0,
    name: str = "g",
    machines: Sequence[int] = (),
    **options: Any,
) -> float:
    """Joins a group. Returns the seconds that joining took."""
    cpu.machines = tuple(machines)
    since = time.monotonic()
    sizes = {"max_tokens": 200, "hidden": H, "intermediate": I, "experts": E, "top_k": K, "dtype": "float32"}
    OPEN["it"] = flashmoe.Context(
        rank=rank,
        ranks=ranks,
        name=name,
        rendezvous=address,
        return_mode=mode,
        processors=1,
        timeout=timeout,
        **{**sizes, **options},
    )
    return time.monotonic() - since


def compute(x: np.ndarray, seed: int, calls: int = 1) -> np.ndarray:
    """Makes `calls` calls, whose results must all have the same bits. Returns the last result."""
    ctx, layer = OPEN["it"], Layer.random(seed)
    own = ctx.local_experts()
    first = None
    for _ in range(calls):
        y = flashmoe.moe(ctx, x, layer.gate_up[own], layer.down[own], router=layer.router, top_k=K)
        first = y if first is None else first
        assert np.array_equal(y, first)
    return y


def gradients(x: np.ndarray, dy: np.ndarray, seed: int) -> list[np.ndarray]:
    """The gradients of x, of the router, and of the weights of this rank's experts."""
    import torch

    ctx, layer = OPEN["it"], Layer.random(seed)
    own = ctx.local_experts()
    tensors = x, layer.router, layer.gate_up[own], layer.down[own]
    leaves = [torch.tensor(each, requires_grad=True) for each in tensors]
    flashmoe.moe(ctx, leaves[0], *leaves[2:], router=leaves[1], top_k=K).backward(torch.tensor(dy))
    return [each.grad.numpy() for each in leaves]


def crossed() -> Any:
    return OPEN["it"]._engine.crossed()


def token_blocks() -> int:
    """The number of this rank's token blocks in the last call."""
    return OPEN["it"].last_call.tasks["gate"]


def last_call() -> CallReport:
    return OPEN["it"].last_call


def leave() -> tuple[float, list[str]]:
    """Closes the context. Returns the seconds that closing took, and the names that are left in shared memory."""
    since = time.monotonic()
    OPEN.pop("it").close()
    return time.monotonic() - since, glob.glob("/dev/shm/*flashmoe*")


# ---- What tests do -------------------------------------------------------------------------------------------


def all_of(ranks: Sequence[Process], fn: Any, each: Sequence[tuple], seconds: float = 4 * MARGIN) -> list[Any]:
    for rank, arguments in zip(ranks, each, strict=True):
        rank.tell((fn, arguments))
    return [rank.hear(seconds) for rank in ranks]


def formed(
    net: Network, spread: Sequence[int], mode: str = "direct", timeout: float = 30.0, **options: Any
) -> list[Process]:
    """Ranks that have joined a group, each on the host that `spread` says."""
    ranks = net.start(spread, FLASHMOE_SECRET=SECRET)
    join(ranks, f"{net.address(spread[0])}:{PORT}", mode, timeout, **options)
    return ranks


def join(ranks: Sequence[Process], where: str, mode: str = "direct", timeout: float = 30.0, **options: Any) -> None:
    enter_with = functools.partial(enter, **options)
    for answer in all_of(ranks, enter_with, [(p, len(ranks), where, mode, timeout) for p in range(len(ranks))]):
        if isinstance(answer, Exception):
            raise answer


def one_rank(net: Network, mode: str = "direct") -> Process:
    alone = net.start([0])[0]
    alone.tell((enter, (0, 1, None, mode)))
    assert isinstance(alone.hear(2 * MARGIN), float)
    return alone


def told(process: Process, fn: Any, *arguments: Any, seconds: float = 4 * MARGIN) -> Any:
    process.tell((fn, arguments))
    return process.hear(seconds)


def check_leaving(ranks: Sequence[Process], seconds: float = MARGIN, on_hosts: bool = True) -> None:
    """Has ranks close. Each must need less than `seconds`, and leave nothing in its host's shared memory. (The latter
    is not checked without `on_hosts`, because other processes use this machine's shared memory too.)"""
    for took, left in all_of(ranks, leave, [()] * len(ranks)):
        assert took < seconds
        assert left == [] or not on_hosts
