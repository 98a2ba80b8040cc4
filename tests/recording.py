"""Finds, in the packets that a cable has recorded (relay.py), the bytes that TCP connections have sent."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

TCP = 6
"""TCP's protocol number in an IPv4 header."""


class Side(NamedTuple):
    """One direction of a TCP connection: the addresses and ports of its sender and receiver."""

    source: str
    source_port: int
    destination: str
    destination_port: int


def streams(packets: Iterable[bytes]) -> dict[Side, bytes]:
    """For each direction of each connection, the bytes that were sent: from the beginning of the connection up to the
    first byte that no packet has."""
    begins: dict[Side, int] = {}
    parts: dict[Side, dict[int, bytes]] = {}
    for packet in packets:
        header, total = (packet[0] & 15) * 4, struct.unpack("!H", packet[2:4])[0]
        if packet[0] >> 4 != 4 or packet[9] != TCP:
            continue
        segment = packet[header:total]
        ports, sequence = struct.unpack("!HH", segment[:4]), struct.unpack("!I", segment[4:8])[0]
        addresses = [".".join(map(str, packet[at : at + 4])) for at in (12, 16)]
        side = Side(addresses[0], ports[0], addresses[1], ports[1])
        if segment[13] & 2:  # SYN
            begins[side], parts[side] = sequence + 1, {}
        elif side in begins:
            parts[side][(sequence - begins[side]) & 0xFFFFFFFF] = segment[(segment[12] >> 4) * 4 :]
    return {side: _joined(each) for side, each in parts.items()}


def _joined(parts: dict[int, bytes]) -> bytes:
    said = bytearray()
    for at in sorted(parts):
        if at > len(said):
            break
        said[at:] = parts[at] + said[at + len(parts[at]) :]
    return bytes(said)
