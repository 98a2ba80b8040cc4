"""How the ranks of a group on the CPU engine meet that need not be of one machine: those that can share memory do, the
others are reached through the network."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import machine, openssl
from .._version import __version__
from ..errors import GroupError
from ..meeting import Meeting, proof
from .base import Membership

INTERFACE = "FLASHMOE_INTERFACE"
"""The environment variable that names the network interfaces, or addresses of this host, where others reach a rank,
separated by commas. Default: the address by which a rank met rank 0; all of the host's where ranks met in a store."""


class Joined(NamedTuple):
    """A rank that has joined."""

    owner: Callable[[], int]
    """Gives the library's number of the context, and owns that."""
    network: Callable[[], int] | None
    """The same of what carries messages to other machines; None where all ranks are on one."""
    hosts: tuple[str, ...]
    """By rank."""
    here: tuple[int, ...]
    """The ranks of this machine."""


def join(library: Any, limits: dict[str, Any], who: Membership, meet: Callable[[], Meeting]) -> Joined:
    """Joins the group: every rank must. Raises the same on all if one fails."""
    meeting = meet()
    try:
        return _join(library, limits, who, meeting)
    except BaseException as error:
        meeting.fail(error)
        raise
    finally:
        meeting.close()


def _join(library: Any, limits: dict[str, Any], who: Membership, meeting: Meeting) -> Joined:
    mine = {
        "version": __version__,
        "machine": machine.identity(),
        "host": meeting.host,
        "limits": limits,
        "nonce": secrets.token_hex(16),
    }
    said = meeting.exchange("who", mine)
    _check_agreement(library, limits, who, said)
    hosts = tuple(str(each["host"]) for each in said)
    names = [str(each["machine"]) for each in said]
    machines = [names.index(each) for each in names]
    here = tuple(rank for rank, each in enumerate(names) if each == mine["machine"])
    # Under a name that only these ranks know: others of the machine may have a group of the same name.
    key = proof(meeting.secret, "".join(["couriers ", *(str(each["nonce"]) for each in said)]).encode())
    name = f"{who.name[:100]}-{hashlib.sha256(key).hexdigest()[:16]}-{here[0]}"
    network = None
    if len(here) == len(said):
        owner = library.context_create(limits, who.rank, name, who.timeout_ns, [])
    else:
        at = os.environ.get(INTERFACE) or meeting.address or ""
        network = library.network_open(who.rank, len(said), key.hex(), who.timeout_ns, openssl.library(), at)
        addresses = meeting.exchange("address", str(library.network_address(network())))
        place = machines, [str(each) for each in addresses], list(hosts)
        owner = library.network_context(network(), limits, who.rank, name, who.timeout_ns, *place)
        meeting.exchange("listening", True)
        library.network_await(network())
    meeting.exchange("joined", True)
    return Joined(owner, network, hosts, here)


def _check_agreement(library: Any, limits: dict[str, Any], who: Membership, said: list[Any]) -> None:
    for rank, each in enumerate(said):
        differs = ""
        if each["version"] != said[who.rank]["version"]:
            differs = f"version: rank {who.rank} has {said[who.rank]['version']}, rank {rank} has {each['version']}"
        differs = differs or str(library.limits_difference(limits, who.rank, each["limits"], rank))
        if differs:
            raise GroupError(f"group '{who.name}' disagrees on {differs}")
