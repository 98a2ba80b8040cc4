"""How the ranks of a group on the CPU engine meet if they may be on several machines. Ranks of one machine share
memory, and reach the ranks of other machines through the network."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from .._version import __version__
from ..errors import GroupError
from ..groups import machine
from ..groups.meeting import MOST_OF_A_NAME, Meeting
from ..system import openssl
from ..system.foreign import clipped, is_count, shown
from .base import Membership

INTERFACE = "FLASHMOE_INTERFACE"
"""The environment variable that names the network interfaces, or addresses of this host, at which other ranks reach
this rank, separated by commas. Default: this host's address at which the rank met rank 0; all of the host's addresses
if the ranks met in a store."""


class Joined(NamedTuple):
    """A rank that has joined."""

    owner: Callable[[], int]
    """Gives the library's number of the context, and owns the context."""
    network: Callable[[], int] | None
    """Gives the library's number of the object that carries messages to other machines, and owns this object; None if
    all ranks are on one machine."""
    hosts: tuple[str, ...]
    """The host of each rank."""
    here: tuple[int, ...]
    """The ranks of this machine."""


def join(library: Any, limits: dict[str, Any], who: Membership, meet: Callable[[], Meeting]) -> Joined:
    """Joins the group; every rank must do so. If one rank fails, all raise the same error."""
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
    _check_agreement(library, limits, who, said, mine)
    hosts = tuple(clipped(each["host"], MOST_OF_A_NAME) for each in said)
    names = [each["machine"] for each in said]
    machines = [names.index(each) for each in names]
    here = tuple(rank for rank, each in enumerate(names) if each == mine["machine"])
    of_all = "".join(["couriers ", *(each["nonce"] for each in said)]).encode()
    # Only the ranks of this group know this name. Other processes of the machine may have a group called `who.name`.
    name = f"{who.name[:100]}-{hashlib.sha256(of_all).hexdigest()[:16]}-{here[0]}"
    network = None
    if len(here) == len(said):
        owner = library.context_create(limits, who.rank, name, who.timeout_ns, [])
    else:
        # Raises an error if this rank has no secret: without a secret it must not listen at a network, whatever the
        # other ranks say.
        key = meeting.key(of_all).hex()
        where = openssl.library(), _reached_at(meeting)
        network = library.network_open(who.rank, len(said), key, who.timeout_ns, *where)
    try:
        if network is not None:
            addresses = meeting.exchange("address", str(library.network_address(network())))
            place = machines, [str(each) for each in addresses], list(hosts)
            owner = library.network_context(network(), limits, who.rank, name, who.timeout_ns, *place)
            meeting.exchange("listening", True)
            library.network_await(network())
        meeting.exchange("joined", True)
        return Joined(owner, network, hosts, here)
    except BaseException:
        owner = network = None  # the error keeps this frame's variables alive, but they must stop listening now
        raise


def _reached_at(meeting: Meeting) -> str:
    """Interfaces or addresses at which the other ranks reach this rank; empty: all addresses of the host."""
    if named := os.environ.get(INTERFACE):
        return named
    met = (meeting.address or "").removeprefix("::ffff:")  # an IPv4 address in IPv6's form
    return "" if "%" in met else met  # a link-local address with its zone means nothing to other hosts


def _check_agreement(
    library: Any, limits: dict[str, Any], who: Membership, said: list[Any], mine: dict[str, Any]
) -> None:
    for rank, each in enumerate(said):
        if not isinstance(each, dict) or not all(type(each.get(name)) is type(value) for name, value in mine.items()):
            raise GroupError(
                f"group '{who.name}': expected rank {rank} to send its {', '.join(mine)}, got {clipped(shown(each))}"
            )
        differs = ""
        if each["version"] != mine["version"]:
            theirs = clipped(each["version"], MOST_OF_A_NAME)
            differs = f"version: rank {who.rank} has {mine['version']}, rank {rank} has {theirs}"
        elif each["limits"].keys() != limits.keys() or not all(map(is_count, each["limits"].values())):
            differs = (
                f"limits: expected rank {rank} to send numbers of the same names, got {clipped(shown(each['limits']))}"
            )
        differs = differs or str(library.limits_difference(limits, who.rank, each["limits"], rank))
        if differs:
            raise GroupError(f"group '{who.name}' disagrees on {differs}")
