"""A message to a process of this machine, and its answer, over a socket. The asking end never blocks.

A rank may stop, hang or die after any byte, and a process that the rank has forked may hold the rank's end of the
socket for ever. So the asking end only does what can be done at once, and says how far the exchange is. Its caller
decides how long the exchange may take.

A message consists of its length in 8 bytes and its content. Once the rank has the whole message, it sends the length 0,
and later the message that is its answer.
"""

from __future__ import annotations

import math
import select
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

_LENGTH = struct.Struct("!Q")
_TAKEN = _LENGTH.pack(0)
_CHUNK = 1 << 20  # bytes


class Exchange:
    """The asking end of one message and its answer. `link` must not block."""

    def __init__(self, link: socket.socket, message: bytes) -> None:
        self._link = link
        self._bytes = len(message)
        self._unsent = [memoryview(_LENGTH.pack(len(message))), memoryview(message)]
        self._received = bytearray()
        self._taken = False
        self._closed = False

    @property
    def answer(self) -> memoryview | None:
        """The whole answer; None until it is there."""
        expected = self._expected()
        if expected is None or len(self._received) < _LENGTH.size + expected:
            return None
        return memoryview(self._received)[_LENGTH.size : _LENGTH.size + expected]

    def advance(self) -> None:
        """Send and receive what is possible at once."""
        self._send()
        self._receive()

    def drain(self) -> None:
        """Receive everything that was sent. The caller knows that the other end will send nothing more."""
        while self._receive():
            pass

    def where(self, what: str) -> str:
        """How far the other end is with the task called `what`, such as ``while it ran f``."""
        expected = self._expected()
        if self._closed:
            return f"after it had closed its connection while it ran {what}"
        if expected is not None:
            return f"while it sent its answer ({len(self._received) - _LENGTH.size:,} of {expected:,} bytes)"
        if self._taken:
            return f"while it ran {what}"
        unsent = len(self._unsent[-1]) if self._unsent else 0
        return f"while it started or took its arguments ({self._bytes - unsent:,} of {self._bytes:,} bytes sent)"

    def _expected(self) -> int | None:
        """The length of the answer in bytes; None until it has been received."""
        if not self._taken or len(self._received) < _LENGTH.size:
            return None
        return _LENGTH.unpack_from(self._received)[0]

    def _send(self) -> None:
        try:
            while self._unsent:
                sent = self._link.send(self._unsent[0])
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.pop(0)
        except BlockingIOError:
            pass
        except OSError:  # the process is gone; its exit status says more
            self._unsent.clear()

    def _receive(self) -> bool:
        """Receive once. Return whether anything was received."""
        try:
            chunk = self._link.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        self._closed = not chunk
        self._received += chunk
        if not self._taken and len(self._received) >= len(_TAKEN):
            self._taken = True
            del self._received[: len(_TAKEN)]
        return bool(chunk)

    def _events(self) -> int:
        """The events that wake `wait` up."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    @staticmethod
    def wait(exchanges: Iterable[Exchange], seconds: float) -> None:
        """Wait until one of the exchanges can advance, at most `seconds`."""
        poll = select.poll()
        for exchange in exchanges:
            if not exchange._closed:  # a closed connection would end every poll at once
                poll.register(exchange._link, exchange._events())
        poll.poll(math.ceil(seconds * 1000))


def receive(link: socket.socket) -> bytes | None:
    """The answering end: wait for a message and acknowledge it; None if the connection ends before a whole message."""
    with suppress(OSError):
        header = _exactly(link, _LENGTH.size)
        message = header and _exactly(link, _LENGTH.unpack(header)[0])
        if message:
            link.sendall(_TAKEN)
            return message
    return None


def answer(link: socket.socket, payload: bytes) -> None:
    """The answering end: send an answer. If the asking process is gone, do nothing."""
    with suppress(OSError):
        link.sendall(_LENGTH.pack(len(payload)))
        link.sendall(payload)


def _exactly(link: socket.socket, count: int) -> bytearray | None:
    """`count` bytes; None if the stream ends before."""
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        if (got := link.recv_into(rest)) == 0:
            return None
        rest = rest[got:]
    return data
