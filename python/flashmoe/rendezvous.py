"""Ranks that meet at an address: rank 0 listens there, and who knows the group's secret joins.

Both sides of a connection prove that they know the secret, neither shows it (HMAC-SHA256 of both sides' random
numbers), and every message is signed with a key of that connection. Nothing is encrypted. A stranger who connects is
refused, or ignored; the listener waits for nobody in particular, and goes on.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from typing import Any

from .errors import FlashMoEError, GroupError, InvalidArgument, PeerTimeout
from .meeting import SECRET, Meeting, kind_of, proof, raise_as_told

GREETING = b"flashmoe rendezvous 1\n"
_NONCE, _PROOF = 32, 32
_REFUSED = bytes(_PROOF)
_MOST_BYTES = 64 << 20
"""Of a message of a rank."""
_MOST_STRANGERS = 64
"""Connections that have not proved anything; of more, the oldest is closed."""
_PROOF_SECONDS = 10.0
"""Within which they must."""
_GRACE_SECONDS = 1.0
"""A rank waits so much longer than rank 0, which knows better who is missing."""
_LAST_SECONDS = 5.0
"""The most that rank 0 waits for others to take what it last sent them."""


def parsed(address: str, name: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``; raises `InvalidArgument` that calls it `name`."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgument(f"{name}: expected host:port, got {address!r}")
    return host.strip("[]"), int(port)


class AddressMeeting(Meeting):
    """See `Meeting`. Rank 0's side is a rank like the others, and the listener besides, a thread of its process."""

    def __init__(
        self, address: tuple[str, int], group: str, rank: int, ranks: int, timeout: float, secret: bytes
    ) -> None:
        super().__init__(group, rank, ranks, timeout, secret)
        self._address = "{}:{}".format(*address)
        self._listener = _Listener(address, self) if rank == 0 else None
        self._link: _Link | None = None
        try:
            self._link = self._connect(address)
        except BaseException:
            self.close()
            raise

    def exchange(self, what: str, mine: Any) -> list[Any]:
        self._tell({"round": what, "value": mine})
        told = self._hear()
        if told.get("round") != what:
            raise GroupError(
                f"group '{self.group}': rank {self.rank} is at '{what}', others at {told.get('round')!r}: they are of "
                "different versions"
            )
        return told["all"]

    def fail(self, error: BaseException) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._tell({"failed": {"kind": kind_of(error), "text": str(error)}})

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._listener is not None:
            self._listener.close()

    @property
    def address(self) -> str | None:
        return self._listener.local if self._listener is not None else self._link and self._link.local

    def _connect(self, address: tuple[str, int]) -> _Link:
        """A connection whose other side has proved that it knows the secret, and taken this rank."""
        why: str = "no answer"
        while True:
            try:
                with contextlib.ExitStack() as unless_welcome:
                    link = _Link(socket.create_connection(address, max(0.05, min(2.0, self._left()))))
                    unless_welcome.callback(link.close)
                    link.prove(self.secret, self._left() + _GRACE_SECONDS)
                    link.send({"rank": self.rank, "ranks": self.ranks, "group": self.group, "host": self.host})
                    self._link = link
                    told = self._hear()
                    if "welcome" in told:
                        unless_welcome.pop_all()
                        return link
                    why = f"it is that of group '{told.get('other')}'"
            except _WrongSecret:
                raise GroupError(
                    f"{SECRET}: expected that of rank 0 at {self._address}, which has refused it, got another on rank "
                    f"{self.rank} (host {self.host})"
                ) from None
            except socket.gaierror as error:
                raise InvalidArgument(f"rendezvous: cannot find host {address[0]!r}: {error.strerror}") from error
            except OSError as error:
                why = error.strerror or str(error)
            if self._left() <= 0:
                raise PeerTimeout(
                    f"group '{self.group}': rank {self.rank} on host {self.host} cannot reach the rendezvous "
                    f"{self._address}, where rank 0 listens, within {self.timeout:g} s: {why}"
                )
            time.sleep(0.05)

    def _left(self) -> float:
        return min(self.deadline - time.monotonic(), 1e6)

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._link is not None
        with contextlib.suppress(ConnectionError):  # rank 0 has said why it goes, or has gone: _hear() knows
            self._link.send(what)

    def _hear(self) -> dict[str, Any]:
        assert self._link is not None
        try:
            told = self._link.receive(self._left() + _GRACE_SECONDS)
        except TimeoutError:
            raise self.missing(0) from None
        except OSError as error:
            raise GroupError(
                f"group '{self.group}': rank 0, at {self._address}, has gone while ranks joined ({error})"
            ) from None
        if "failed" in told:
            raise_as_told(told["failed"]["kind"], told["failed"]["text"])
        return told


class _WrongSecret(Exception):
    pass


class _Frames:
    """Messages of a connection as bytes: each its length, its signature, and JSON."""

    def __init__(self, key: bytes, own: bytes, other: bytes) -> None:
        self._key, self._own, self._other = key, own, other
        self._sent = self._received = 0

    def pack(self, what: dict[str, Any]) -> bytes:
        text = json.dumps(what).encode()
        signed = proof(self._key, self._own + struct.pack("!Q", self._sent) + text)
        self._sent += 1
        return struct.pack("!I", len(text)) + signed + text

    @staticmethod
    def needed(buffer: bytes | bytearray) -> int:
        """Bytes of the message that the buffer begins with, as far as is known."""
        if len(buffer) < 4:
            return 4
        size = struct.unpack("!I", buffer[:4])[0]
        if size > _MOST_BYTES:
            raise ConnectionAbortedError(f"a message of {size} bytes")
        return 4 + _PROOF + size

    def unpack(self, message: bytes) -> dict[str, Any]:
        signed, text = message[4 : 4 + _PROOF], message[4 + _PROOF :]
        if not hmac.compare_digest(signed, proof(self._key, self._other + struct.pack("!Q", self._received) + text)):
            raise ConnectionAbortedError("a message that is not signed by a rank")
        self._received += 1
        return json.loads(text)


class _Link:
    """A rank's connection to the listener."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames: _Frames | None = None
        self.local: str = connection.getsockname()[0]

    def prove(self, secret: bytes, seconds: float) -> None:
        self._socket.settimeout(max(0.01, min(seconds, _PROOF_SECONDS)))
        greeting = self._read(len(GREETING) + _NONCE)
        if not greeting.startswith(GREETING):
            raise ConnectionAbortedError("what answers there is no rendezvous of FlashMoE's")
        nonces = greeting[len(GREETING) :] + (own := secrets.token_bytes(_NONCE))
        self._socket.sendall(own + proof(secret, b"rank " + nonces))
        if not hmac.compare_digest(self._read(_PROOF), proof(secret, b"listener " + nonces)):
            raise _WrongSecret
        self._frames = _Frames(proof(secret, b"connection " + nonces), b"rank ", b"listener ")

    def send(self, what: dict[str, Any]) -> None:
        assert self._frames is not None
        self._socket.sendall(self._frames.pack(what))

    def receive(self, seconds: float) -> dict[str, Any]:
        assert self._frames is not None
        self._socket.settimeout(max(0.01, seconds))
        buffer = b""
        while len(buffer) < (needed := _Frames.needed(buffer)):
            buffer += self._read(needed - len(buffer))
        return self._frames.unpack(buffer)

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes:
        parts, left = [], size
        while left:
            part = self._socket.recv(left)
            if not part:
                raise ConnectionResetError("it closed the connection")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


class _Guest:
    """A connection as the listener has it."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        self.socket, self.where = connection, where
        self.came = time.monotonic()
        self.nonce = secrets.token_bytes(_NONCE)
        self.frames: _Frames | None = None
        self.rank: int | None = None
        self.host = where
        self.incoming, self.outgoing = bytearray(), bytearray(GREETING + self.nonce)
        self.ends = False  # once what is outgoing is sent


class _Listener:
    """Rank 0's: lets ranks in, hands round what they say, and says who is missing."""

    def __init__(self, address: tuple[str, int], meeting: Meeting) -> None:
        self._meeting = meeting
        self._socket = _listening(address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._guests: list[_Guest] = []
        self._ranks: dict[int, _Guest] = {}
        self._rounds: dict[str, dict[int, Any]] = {}
        self._notes: list[str] = []  # of who was refused
        self._failed: dict[str, Any] | None = None  # what the meeting ended with first
        self._over = threading.Event()
        self.local: str | None = None
        """The address of this host by which a rank of another has come."""
        self._thread = threading.Thread(target=self._run, name="flashmoe rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends when the ranks have taken what they were sent, or soon after."""
        self._over.set()
        self._thread.join(_LAST_SECONDS + 1)

    def _run(self) -> None:
        end, told = float("inf"), False
        try:
            while True:
                for key, _ in self._selector.select(0.02):
                    if key.fileobj is self._socket:
                        self._accept()
                for guest in list(self._guests):
                    self._serve(guest)
                now = time.monotonic()
                if self._over.is_set():
                    end = min(end, now + _LAST_SECONDS)
                elif now > self._meeting.deadline and not told:
                    self._fail(PeerTimeout.__name__, self._who_is_missing())
                    told = True
                if now > end or (self._over.is_set() and not self._ranks):
                    return
        finally:
            for guest in self._guests:
                guest.socket.close()
            self._selector.close()
            self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, where = self._socket.accept()
            connection.setblocking(False)
            self._guests.append(_Guest(connection, where[0]))
            self._selector.register(connection, selectors.EVENT_READ)
        strangers = [guest for guest in self._guests if guest.frames is None]
        if len(strangers) > _MOST_STRANGERS:
            self._drop(strangers[0])

    def _serve(self, guest: _Guest) -> None:
        try:
            if guest.frames is None and time.monotonic() - guest.came > _PROOF_SECONDS:
                return self._drop(guest)
            self._receive(guest)
            while guest.outgoing:
                del guest.outgoing[: guest.socket.send(guest.outgoing)]
            if guest.ends:
                self._drop(guest)
        except BlockingIOError:
            pass
        except (OSError, ValueError, KeyError, TypeError):
            self._drop(guest)

    def _receive(self, guest: _Guest) -> None:
        closed = False
        with contextlib.suppress(BlockingIOError):
            # A stranger's are few; a rank's, no more at a time than others' turns allow.
            part = guest.socket.recv(_NONCE + _PROOF if guest.frames is None else 1 << 20)
            closed = not part
            guest.incoming += part
        if guest.frames is None and len(guest.incoming) >= _NONCE + _PROOF:
            self._judge(guest, bytes(guest.incoming))
            guest.incoming.clear()
        while guest.frames is not None and len(guest.incoming) >= (needed := _Frames.needed(guest.incoming)):
            message = bytes(guest.incoming[:needed])
            del guest.incoming[:needed]
            self._hear(guest, guest.frames.unpack(message))
        if closed:
            raise ConnectionResetError

    def _judge(self, guest: _Guest, answer: bytes) -> None:
        secret, nonces = self._meeting.secret, guest.nonce + answer[:_NONCE]
        if len(answer) == _NONCE + _PROOF and hmac.compare_digest(answer[_NONCE:], proof(secret, b"rank " + nonces)):
            guest.outgoing += proof(secret, b"listener " + nonces)
            guest.frames = _Frames(proof(secret, b"connection " + nonces), b"listener ", b"rank ")
            return
        self._notes.append(f"one from {guest.where} with another secret was refused")
        guest.outgoing += _REFUSED
        guest.ends = True

    def _hear(self, guest: _Guest, said: dict[str, Any]) -> None:
        if guest.rank is None:
            self._welcome(guest, said)
        elif "failed" in said:
            self._fail(said["failed"]["kind"], said["failed"]["text"])
        else:
            values = self._rounds.setdefault(said["round"], {})
            values[guest.rank] = said["value"]
            if len(values) == self._meeting.ranks:
                everyones = [values[rank] for rank in range(self._meeting.ranks)]
                for each in self._ranks.values():
                    self._say(each, {"round": said["round"], "all": everyones})

    def _welcome(self, guest: _Guest, said: dict[str, Any]) -> None:
        group, rank, ranks = said["group"], int(said["rank"]), int(said["ranks"])
        guest.host = str(said["host"])
        if group != self._meeting.group:
            self._say(guest, {"other": self._meeting.group})
            guest.ends = True
            return
        if self._failed is not None:  # rank 0, too, may come behind one that ends the meeting
            self._say(guest, self._failed)
            guest.ends = True
            return
        if ranks != self._meeting.ranks or not 0 <= rank < ranks:
            return self._fail(
                GroupError.__name__,
                f"group '{group}' disagrees on ranks: rank 0 has {self._meeting.ranks}, rank {rank} on host "
                f"{guest.host} has {ranks}",
                guest,
            )
        if (first := self._ranks.get(rank)) is not None:
            text = f"rank: group '{group}' already has a rank {rank} (the first on host {first.host}, another on host "
            text += f"{guest.host})"
            self._notes.append(f"rank {rank} came twice")
            return self._fail(GroupError.__name__, text, guest)
        guest.rank = rank
        self._ranks[rank] = guest
        if rank != 0:
            self.local = guest.socket.getsockname()[0]
        self._say(guest, {"welcome": rank})

    def _fail(self, kind: str, text: str, guest: _Guest | None = None) -> None:
        """Ends the meeting for all, those too that are still to come; `guest`: one that is no rank of it."""
        said = {"failed": {"kind": kind, "text": text}}
        self._failed = self._failed or said
        for each in [*self._ranks.values(), *([guest] if guest else [])]:
            self._say(each, said)
        if guest is not None:
            guest.ends = True

    def _say(self, guest: _Guest, what: dict[str, Any]) -> None:
        assert guest.frames is not None
        guest.outgoing += guest.frames.pack(what)

    def _drop(self, guest: _Guest) -> None:
        self._selector.unregister(guest.socket)
        guest.socket.close()
        self._guests.remove(guest)
        if guest.rank is None:
            return
        del self._ranks[guest.rank]
        if not self._over.is_set():
            group, host = self._meeting.group, guest.host
            self._fail(
                GroupError.__name__, f"group '{group}': rank {guest.rank} on host {host} has gone while ranks joined"
            )

    def _who_is_missing(self) -> str:
        latest = next((values for values in reversed(self._rounds.values())), {})
        here = latest if len(self._ranks) == self._meeting.ranks else self._ranks
        rank = next((rank for rank in range(self._meeting.ranks) if rank not in here), 0)
        notes = f"; {'; '.join(dict.fromkeys(self._notes))}" if self._notes else ""
        return f"{self._meeting.missing(rank)}{notes}"


def _listening(address: tuple[str, int]) -> socket.socket:
    """Raises `GroupError` where the port is taken, `InvalidArgument` where the address is not of this host."""
    what = "{}:{}".format(*address)
    try:
        family, _, _, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise InvalidArgument(f"rendezvous: cannot find host {address[0]!r}: {error.strerror}") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise GroupError(
                f"rendezvous: expected port {address[1]} of {address[0]} to be free for rank 0 (host "
                f"{socket.gethostname()}), got one that another process listens on"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise InvalidArgument(
                f"rendezvous: expected an address of rank 0's host, which is {socket.gethostname()}, got {what}"
            ) from error
        raise FlashMoEError(f"rendezvous: rank 0 cannot listen at {what}: {error.strerror}") from error
    return listener
