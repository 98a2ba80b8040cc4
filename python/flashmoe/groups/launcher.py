"""What a launcher tells the processes that it starts, on one machine or several: who they are, and where they meet."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import FlashMoEError, InvalidArgument
from ..system.foreign import clipped
from .meeting import MOST_OF_A_NAME, SECRET, Meeting, StoreMeeting, secret_of_launcher, trusts_store
from .rendezvous import AddressMeeting, parsed

ADDRESS = "FLASHMOE_RENDEZVOUS"
"""The environment variable that names the address where ranks meet: host:port on rank 0's host."""

Meet = Callable[[str, int, int, float], Meeting]
"""(the group's name, rank, ranks, timeout in seconds or 0 for none) -> the meeting."""

_joined: dict[str, itertools.count[int]] = {}
"""Numbers the meetings of this process under each name. A store still has the values of earlier meetings, so each
meeting uses keys of its own there."""


class Launched(NamedTuple):
    """The place of this process among those that a launcher has started."""

    rank: int
    ranks: int


def launched() -> Launched | None:
    """This process's place, as ``torchrun`` and other launchers give it in ``RANK`` and ``WORLD_SIZE``; None if one of
    these is not set. Raises `InvalidArgument` for other values than they can have."""
    rank, ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or ranks is None:
        return None
    numbers = all(each.isdecimal() and len(each) < 10 for each in (rank, ranks))
    if not (numbers and int(rank) < int(ranks)):
        got = " and ".join(clipped(repr(each), MOST_OF_A_NAME) for each in (rank, ranks))
        raise InvalidArgument(f"RANK, WORLD_SIZE: expected a rank below the number of ranks, got {got}")
    return Launched(int(rank), int(ranks))


def meet_of(address: str) -> Meet:
    """Begins a meeting at `address`. Raises `InvalidArgument` if it is no address or the environment has no secret."""
    where = parsed(address, "rendezvous")
    secret = secret_of_launcher()
    if secret is None:
        raise InvalidArgument(
            f"{SECRET}: expected the secret of the ranks that meet at {address}, the same for every rank (such as what "
            "openssl rand -hex 16 prints), got none"
        )
    return lambda name, rank, ranks, timeout: AddressMeeting(where, name, rank, ranks, timeout, secret)


def meet_in(store: Any, prefix: str | None = None) -> Meet:
    """Begins a meeting in a store of torch.distributed, under `prefix`, or if this is None, under a prefix made of the
    group's name. If the environment has no secret, the meeting has none. Its ranks must then be on one machine, unless
    the environment says that the store is trusted (`flashmoe.groups.meeting.TRUST_STORE`)."""

    def meet(name: str, rank: int, ranks: int, timeout: float) -> Meeting:
        number = next(_joined.setdefault(name, itertools.count()))
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        where = prefix or f"{restarts}/{name}/{number}"
        secret, trusted = secret_of_launcher(), trusts_store()
        return StoreMeeting(store, name, rank, ranks, timeout, secret, where, trusted)

    return meet


def meet_of_environment() -> Meet | None:
    """Begins the meeting that the environment names: at ``FLASHMOE_RENDEZVOUS``; else in the store that ``torchrun``
    keeps for its processes; else at ``MASTER_ADDR:MASTER_PORT``, where rank 0 itself listens then. None if the
    environment names no place to meet."""
    if address := os.environ.get(ADDRESS):
        return meet_of(address)
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        return None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return meet_of(f"{host}:{port}")
    where = parsed(f"{host}:{port}", "MASTER_ADDR, MASTER_PORT")

    def meet(name: str, rank: int, ranks: int, timeout: float) -> Meeting:
        return meet_in(_agent_store(where, timeout))(name, rank, ranks, timeout)

    return meet


def _agent_store(where: tuple[str, int], timeout: float) -> Any:
    """A connection to torchrun's own store."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    try:
        return TCPStore(*where, is_master=False, timeout=timedelta(seconds=timeout or 1e6), wait_for_workers=False)
    except Exception as error:  # torch has several types of error for this
        raise FlashMoEError(f"rendezvous: cannot reach torchrun's store at {where[0]}:{where[1]}: {error}") from error
