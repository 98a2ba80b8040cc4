"""A cable of tests' own between hosts: a process that has the other end of each host's network interface, and hands IP
packets on later than they came, and now and then none for a while. It loses none and keeps their order."""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import time
from collections import deque
from typing import Any, NamedTuple

from namespaces import enter

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
DESTINATION = slice(16, 20)
"""Of an IPv4 packet: the address it goes to."""


class Cable(NamedTuple):
    """What is wrong with it."""

    delay: float
    """Seconds, each way."""
    stall: float
    """Seconds for which nothing gets through, and all comes after."""
    packets: int
    """From one stall to the next, on average: half as many to half as many again."""
    seed: int
    records: bool = False
    """Whether every packet is kept, for who asks what was carried."""


GOOD = Cable(delay=0.0, stall=0.0, packets=1 << 40, seed=0)


class Carried(NamedTuple):
    packets: int
    stalls: int
    record: list[bytes]
    """All packets so far, of a cable that records."""


def carry(pipe: Any, keepers: list[int], addresses: list[bytes], cable: Cable) -> None:
    """Makes the interface eth0 of each keeper's namespace, says so, and carries; told anything, says what it has
    carried."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    ends = dict(zip(addresses, map(_interface, keepers), strict=True))
    enter(home)
    pipe.send("ready")
    rng = random.Random(cable.seed)
    held: deque[tuple[float, int, bytes]] = deque()  # when, to which interface, what
    packets = stalls = 0
    record: list[bytes] = []
    next_stall, stalled_until = _until_stall(rng, cable), 0.0
    while True:
        due = max(held[0][0], stalled_until) if held else None
        wait = None if due is None else max(0.0, due - time.monotonic())
        ready, _, _ = select.select([pipe, *ends.values()], [], [], wait)
        now = time.monotonic()
        for end in ready:
            if end is pipe:
                pipe.recv()
                pipe.send(Carried(packets, stalls, record))
                continue
            packet = os.read(end, 65536)
            to = ends.get(packet[DESTINATION])  # else to nobody here: what hosts say to all neighbours
            if to is None:
                continue
            held.append((now + cable.delay, to, packet))
            packets += 1
            if cable.records:
                record.append(packet)
            if packets == next_stall:
                next_stall += _until_stall(rng, cable)
                stalled_until = now + cable.stall
                stalls += 1
        while held and now >= max(held[0][0], stalled_until):
            _, to, packet = held.popleft()
            os.write(to, packet)


def _until_stall(rng: random.Random, cable: Cable) -> int:
    return rng.randint(cable.packets // 2, cable.packets * 3 // 2)


def _interface(keeper: int) -> int:
    with open(f"/proc/{keeper}/ns/net") as namespace:
        enter(namespace.fileno())
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    return end
