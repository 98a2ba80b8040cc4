"""A cable with faults between the hosts of tests: a process that has the other end of each host's network interface.
It passes each IP packet on after a delay, and now and then it stalls: for a while, it passes no packet on. It loses no
packet and keeps their order."""

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
"""The bytes of an IPv4 packet that have its destination's address."""


class Cable(NamedTuple):
    """The faults of a cable, and whether it records."""

    delay: float
    """Seconds from a packet's arrival to its passing on, in each direction."""
    stall: float
    """Seconds that a stall lasts. Packets that arrive in a stall are passed on after it."""
    packets: int
    """How many packets arrive from one stall to the next, on average. (The number is random, from 0.5 to 1.5 times
    this.)"""
    seed: int
    records: bool = False
    """Whether the cable keeps every packet, for `Carried.record`."""


GOOD = Cable(delay=0.0, stall=0.0, packets=1 << 40, seed=0)


class Carried(NamedTuple):
    packets: int
    stalls: int
    record: list[bytes]
    """All packets so far if the cable records, otherwise none."""


def carry(pipe: Any, keepers: list[int], addresses: list[bytes], cable: Cable) -> None:
    """Makes the interface eth0 in each keeper's namespace, sends "ready" through `pipe`, and carries packets. It
    answers every message in `pipe` with what it has carried so far."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    ends = dict(zip(addresses, map(_interface, keepers), strict=True))
    enter(home)
    pipe.send("ready")
    rng = random.Random(cable.seed)
    held: deque[tuple[float, int, bytes]] = deque()  # the time to pass it on, the interface, the packet
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
            to = ends.get(packet[DESTINATION])  # None: it goes to no host here, but to all neighbours
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
