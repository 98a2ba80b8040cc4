"""What a stranger on the network can do to a group on several machines: a host without the group's secret.

It attacks while the group meets and while it runs. While the group meets, ranks listen at their doors
(csrc/network/door.h), so that other ranks can connect to them.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashmoe import PeerTimeout, _ffi
from flashmoe.groups.rendezvous import AddressMeeting
from flashmoe.system import openssl
from hosts import Host, Network, network
from processes import MARGIN, Process, await_condition, processes
from recording import Side, streams
from relay import GOOD
from spread_ranks import (
    LONG,
    OPEN,
    PORT,
    SECRET,
    MakeNetwork,
    all_of,
    check_leaving,
    compute,
    enter,
    formed,
    tokens_of,
    told,
)

__all__ = ["network", "processes"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forks of a process with threads warn

LISTENS, ESTABLISHED = "0A", "01"  # states in /proc/net/tcp
GUESTS = 64
"""The most connections at a rank's door that have not proved to be ranks."""
COUNTS = [30, 41, 7]
HELD = 8.0 if LONG else 3.0
"""Seconds for which a group's meeting is held up, while rank 0's door is open."""


# ---- What ranks do ---------------------------------------------------------------------------------------------------


def enter_late(seconds: float, *arguments: Any) -> None:
    """Joins, but connects to no rank before `seconds` have passed since all ranks have opened their doors."""
    exchange = AddressMeeting.exchange

    def exchange_and_wait(meeting: AddressMeeting, what: str, mine: Any) -> list[Any]:
        said = exchange(meeting, what, mine)
        if what == "address":
            time.sleep(seconds)
        return said

    AddressMeeting.exchange = exchange_and_wait  # type: ignore[method-assign]
    try:
        enter(*arguments)
    finally:
        AddressMeeting.exchange = exchange  # type: ignore[method-assign]


def enter_misled(address: str, *arguments: Any) -> None:
    """Joins, and is made to believe that rank 0's door is at `address`."""
    exchange = AddressMeeting.exchange
    AddressMeeting.exchange = (
        lambda meeting, what, mine: (  # type: ignore[method-assign]
            [address, *exchange(meeting, what, mine)[1:]] if what == "address" else exchange(meeting, what, mine)
        )
    )
    enter(*arguments)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- What strangers do -----------------------------------------------------------------------------------------------


def connections(where: tuple[str, int], count: int) -> Iterator[socket.socket]:
    for _ in range(count):
        with contextlib.suppress(OSError):
            yield socket.create_connection(where, 2)


def say(where: tuple[str, int], *parts: bytes) -> bytes:
    """Sends the parts over a new connection. Returns the answer, until none comes for 0.3 s."""
    heard = b""
    for connection in connections(where, 1):
        with connection, contextlib.suppress(OSError):
            connection.settimeout(0.3)
            for part in parts:
                connection.sendall(part)
            while part := connection.recv(4096):
                heard += part
    return heard


def put_of_ucx(where: tuple[str, int]) -> bytes:
    """Sends a message with which UCX's TCP transport would write 32 bytes to an address of the stranger's choice."""
    address = struct.pack("<H", socket.AF_INET) + struct.pack("!H", 4444) + socket.inet_aton("10.77.0.3") + bytes(8)
    hello = struct.pack("<IB", 1, 0) + struct.pack("<Q", 7) + address
    put = struct.pack("<BI", 33, 20) + struct.pack("<QQI", 0x10000, 32, 1)
    return say(where, struct.pack("<QBI", 0xCAFEBABE12345678, 32, len(hello)) + hello, put, b"x" * 32)


def random_messages(where: tuple[str, int]) -> bytes:
    rng = random.Random(1)
    return b"".join(say(where, rng.randbytes(rng.choice([1, 5, 64, 500, 9000]))) for _ in range(8))


def impossible_lengths(where: tuple[str, int]) -> bytes:
    """Sends TLS records and a handshake message with lengths that TLS does not allow, and then a megabyte of zeros."""
    records = [
        bytes([22, 3, 1, 0xFF, 0xFF]),
        bytes([22, 3, 1, 0x40, 0, 1, 0xFF, 0xFF, 0xFF]),
        bytes([23, 3, 3, 0xFF, 0xFF]),
    ]
    return b"".join(say(where, record, bytes(1 << 20)) for record in records)


def without_a_key(where: tuple[str, int]) -> bytes:
    """Tries a TLS handshake as a browser makes it, without the group's key."""
    import ssl

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for connection in connections(where, 1):
        with connection, contextlib.suppress(OSError):
            context.wrap_socket(connection)
            return b"it took a client without a key"
    return b""


def idle(where: tuple[str, int], count: int) -> int:
    """Keeps up to `count` connections that say nothing, a third of them half closed. Returns how many it got."""
    held = list(connections(where, count))
    for each in held[::3]:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_WR)
    OPEN["idle"] = held  # type: ignore[assignment]
    return len(held)


def with_another_key(where: tuple[str, int]) -> str:
    """Joins with the package's own library as rank 1 of 2, but with an invented key. Returns the error."""
    library = _ffi.library()
    ctx = OPEN["it"]
    network = library.network_open(1, 2, "5a" * 32, 2 * 10**9, openssl.library(), "")
    place = [0, 1], ["{}:{}".format(*where), ""], ["there", "here"]
    limits = {**ctx._engine.room.limits, "ranks": 2}
    owner = library.network_context(network(), limits, 1, "stranger", 2 * 10**9, *place)
    try:
        library.network_await(network())
    except PeerTimeout as error:
        return str(error)
    finally:
        library.context_close(owner())
    return "it was let in"


def attack_in_turns(where: Sequence[tuple[str, int]], seconds: float, messages: int, most_idle: int) -> dict[str, int]:
    """Scans ports, sends random messages and keeps connections idle, for `seconds` with a tenth of a core. Returns how
    many of each."""
    rng, done, held = random.Random(2), {"scanned": 0, "messages": 0, "idle": 0}, []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        since = time.process_time()
        while time.process_time() - since < 0.01:
            target = where[rng.randrange(len(where))]
            target = target if rng.random() < 0.8 else (target[0], rng.randrange(1, 65536))
            done["scanned"] += 1
            with contextlib.suppress(OSError):
                connection = socket.create_connection(target, 0.2)
                connection.settimeout(0.2)
                if len(held) < most_idle:
                    held.append(connection)
                    continue
                with connection:
                    for _ in range(50):
                        connection.sendall(rng.randbytes(rng.randrange(1, 200)))
                        done["messages"] += 1
                        if done["messages"] >= messages:
                            break
        time.sleep(0.09)
    done["idle"] = len(held)
    OPEN["held"] = held  # type: ignore[assignment]
    return done


# ---- What is looked at -----------------------------------------------------------------------------------------------


def ports(host: Host, state: str) -> list[int]:
    """The local ports of the host's sockets that are in this state."""
    lines = [line.split() for line in host.sockets()]
    return [int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == state]


def door(net: Network, host: int) -> tuple[str, int]:
    """The address and port of the door of a rank on that host."""
    found: list[int] = []

    def is_open() -> bool:
        found[:] = [port for port in ports(net.hosts[host], LISTENS) if port != PORT]
        return bool(found)

    await_condition(is_open, f"no door opens on host {host}")
    return net.address(host), found[0]


def meet_late(net: Network, spread: Sequence[int], late: Sequence[int], timeout: float = 20.0) -> list[Process]:
    """Ranks that begin to join. The `late` ones connect only after `HELD` seconds."""
    ranks = net.start(spread, FLASHMOE_SECRET=SECRET)
    all_of(ranks, os.getpid, [()] * len(ranks))  # waits until all have started
    for p, rank in enumerate(ranks):
        arguments = p, len(ranks), f"{net.address(spread[0])}:{PORT}", "direct", timeout
        rank.tell((enter_late, (HELD, *arguments)) if p in late else (enter, arguments))
    return ranks


def check_met(ranks: Sequence[Process], expected: Sequence[np.ndarray], xs: Sequence[np.ndarray]) -> None:
    for rank in ranks:
        answer = rank.hear(4 * MARGIN)
        assert not isinstance(answer, Exception), answer
    for y, right in zip(all_of(ranks, compute, [(x, 1, 5) for x in xs]), expected, strict=True):
        assert np.array_equal(y, right)


def right_results(net: Network, xs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of the same tokens on a rank alone."""
    alone = net.start([0])[0]
    told(alone, enter, 0, 1, None)
    return [told(alone, compute, x, 1) for x in xs]


# ---- The tests -------------------------------------------------------------------------------------------------------


def test_nothing_listens_and_nobody_is_let_in_once_a_group_has_met(network: MakeNetwork):
    net = network(3)
    ranks = formed(net, [0, 1, 1], timeout=10.0)
    for host in net.hosts[:2]:
        assert ports(host, LISTENS) == []
    xs = tokens_of(COUNTS, 1)
    expected = right_results(net, xs)
    stranger = net.start([2])[0]
    before = all_of(ranks, descriptors, [()] * len(ranks))
    taken = [port for host in net.hosts[:2] for port in ports(host, ESTABLISHED)]
    where = [(net.address(host), port) for host in (0, 1) for port in taken]
    for rank, x in zip(ranks, xs, strict=True):
        rank.tell((compute, (x, 1, 300 if LONG else 60)))
    done = told(stranger, attack_in_turns, where, 50.0 if LONG else 2.0, 1_000_000, 2000, seconds=60 + MARGIN)
    for rank, right in zip(ranks, expected, strict=True):
        assert np.array_equal(rank.hear(4 * MARGIN), right)
    assert done["scanned"] > 50 and done["messages"] == 0 and done["idle"] == 0
    assert all_of(ranks, descriptors, [()] * len(ranks)) == before
    check_leaving(ranks)


ATTACKS = [put_of_ucx, random_messages, impossible_lengths, without_a_key]


def test_strangers_at_an_open_door(network: MakeNetwork):
    """While a group meets, a limited number of strangers can connect to a door, and they hear only refusals."""
    net = network(3)
    xs = tokens_of(COUNTS[:2], 1)
    expected = right_results(net, xs)
    stranger = net.start([2])[0]
    told(stranger, os.getpid)
    ranks = meet_late(net, [0, 1], [1])
    where = door(net, 0)
    own = Path("/proc", str(ranks[0].pid), "fd")
    before = len(list(own.iterdir()))
    for attack in ATTACKS:
        heard = told(stranger, attack, where)
        # Each connection gets at most a TLS alert: 7 bytes, the first of which is 21.
        assert len(heard) <= 7 * 8 and all(part == 21 for part in heard[::7]), (attack, heard)
    assert told(stranger, idle, where, 900 if LONG else 300) >= GUESTS
    await_condition(lambda: len(list(own.iterdir())) >= before + GUESTS // 2, "no idle stranger is let in")
    for _ in range(20):
        assert len(list(own.iterdir())) <= before + GUESTS + 4
        time.sleep(0.01)
    check_met(ranks, expected, xs)
    await_condition(lambda: len(list(own.iterdir())) <= before + 4, "strangers are still there")
    assert ports(net.hosts[0], LISTENS) == []
    check_leaving(ranks)


def test_a_stranger_does_not_become_a_rank(network: MakeNetwork):
    """A stranger who invents a key does not get in. One who repeats at rank 0's open door what rank 2 has said there
    does not either."""
    net = network(4, GOOD._replace(records=True))
    xs = tokens_of(COUNTS, 1)
    expected = right_results(net, xs)
    stranger = net.start([3])[0]
    told(stranger, enter, 0, 1, None)
    ranks = meet_late(net, [0, 1, 2], [1])
    where = door(net, 0)

    def handshakes() -> dict[Side, bytes]:
        said = streams(net.carried().record)
        return {side: text for side, text in said.items() if side[2:] == where and len(text) > 200}

    await_condition(lambda: bool(handshakes()), "rank 2 does not come to rank 0's door")
    time.sleep(0.3)  # until rank 2's handshake is over
    (recorded,) = handshakes().values()
    server_random = say(where, recorded)
    assert server_random == b"" or server_random[0] in (21, 22)  # an alert, or a handshake that ends there
    refused = told(stranger, with_another_key, where)
    assert "cannot reach rank 0" in refused and "TLS" in refused, refused
    check_met(ranks, expected, xs)
    check_leaving(ranks)
    # The stranger repeats it once more, at the door of the next group of the same ranks.
    again = meet_late(net, [0, 1, 2], [1])
    where = door(net, 0)
    say(where, recorded)
    check_met(again, expected, xs)
    check_leaving(again)


# Used in tests alone: a private key that anybody can read protects nothing.
CERTIFICATE = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgrtMOxwhExbno6JOo
tR09Krr9dD+FroN5EC96+ggsDyOhRANCAAQCSs3amKeE2LtJjV3OzMwyZ0oxf2OL
DvtCIi40ArdUFSIKTODfWwyrDofb2ee6v5CiuvFyMF6nbjSnJOFXxRht
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBdzCCAR2gAwIBAgIUJuDNAdilMF1o4BC8KJLb10j21MgwCgYIKoZIzj0EAwIw
EDEOMAwGA1UEAwwFdGVzdHMwIBcNMjYxMTI3MTUyOTA3WhgPMjEyNjExMDMxNTI5
MDdaMBAxDjAMBgNVBAMMBXRlc3RzMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE
AkrN2pinhNi7SY1dzszMMmdKMX9jiw77QiIuNAK3VBUiCkzg31sMqw6H29nnur+Q
orrxcjBep240pyThV8UYbaNTMFEwHQYDVR0OBBYEFGTc1eTFNqAJ9B96FSiG/z+g
72xrMB8GA1UdIwQYMBaAFGTc1eTFNqAJ9B96FSiG/z+g72xrMA8GA1UdEwEB/wQF
MAMBAf8wCgYIKoZIzj0EAwIDSAAwRQIgJI7Rckj9GbJC/yteJksoPoN05XYjR4FP
YmysMW6Ms6wCIQD1QlQfAprQOh3fXktF0g6dfbTPzCta+kkTspP0MYrHNg==
-----END CERTIFICATE-----
"""


def impersonate(pipe_path: str, address: tuple[str, int]) -> None:
    """Answers at the address with a certificate, as any TLS server does, and keeps what a client then says."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pipe_path)
    with socket.create_server(address) as listener:
        listener.settimeout(0.5)
        end = time.monotonic() + 6
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with context.wrap_socket(connection, server_side=True) as led:
                    OPEN["heard"] = led.recv(4096)  # type: ignore[assignment]
                    return


def test_a_certificate_does_not_stand_in_for_the_key(network: MakeNetwork, tmp_path: Path):
    """A stranger who answers in rank 0's place, with TLS but without the group's key, is told nothing."""
    net = network(3)
    (tmp_path / "pem").write_text(CERTIFICATE)
    stranger = net.start([2])[0]
    stranger.tell((impersonate, (str(tmp_path / "pem"), (net.address(2), 4711))))
    ranks = net.start([0, 1], FLASHMOE_SECRET=SECRET)
    where = f"{net.address(0)}:{PORT}"
    ranks[0].tell((enter, (0, 2, where, "direct", 3.0)))
    ranks[1].tell((enter_misled, (f"{net.address(2)}:4711", 1, 2, where, "direct", 3.0)))
    errors = [rank.hear(4 * MARGIN) for rank in ranks]
    assert all(isinstance(error, PeerTimeout) for error in errors), errors
    assert f"cannot reach rank 0 on host host1: nothing within 3 s ({net.address(2)}:4711: TLS" in str(errors[1])
    stranger.hear(4 * MARGIN)
    assert told(stranger, OPEN.get, "heard") is None
    # The ranks keep nothing open of the group that did not form.
    assert [ports(host, LISTENS) for host in net.hosts[:2]] == [[], []]


def test_the_wire_shows_nothing_of_what_it_carries(network: MakeNetwork):
    """The bytes that a cable has carried show neither rows of x nor rows of y, though it has carried both."""
    net = network(2, GOOD._replace(records=True))
    ranks = formed(net, [0, 1], timeout=10.0)
    xs = tokens_of([60, 60], 3)
    ys = all_of(ranks, compute, [(x, 3, 2) for x in xs])
    said = b"".join(streams(net.carried().record).values())
    assert len(said) > 2 * xs[0].nbytes
    for row in np.concatenate([*xs, *ys]):
        assert row.tobytes()[:16] not in said
    check_leaving(ranks)
