"""Ranks that meet at an address: rank 0 listens there, and whoever knows the group's secret joins.

Both sides of a connection prove that they know the secret, and neither sends it (they send an HMAC-SHA256 of both
sides' random numbers). Every message is signed with a key of its connection. Nothing is encrypted. A stranger who
connects is refused or ignored. The listener never waits for one connection alone, so strangers cannot stop it.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import FlashMoEError, GroupError, InvalidArgument, PeerTimeout
from ..system import foreign
from ..system.foreign import clipped, is_count, shown
from .meeting import MOST_BYTES, MOST_OF_A_NAME, SECRET, Meeting, as_told, proof, telling

GREETING = b"flashmoe rendezvous 1\n"
_NONCE, _PROOF = 32, 32
_REFUSED = bytes(_PROOF)
_MOST_STRANGERS = 64
"""The most connections that have not proved that they know the secret. If there are more, one of them is closed."""
_PROOF_SECONDS = 10.0
"""Seconds within which a connection must prove that it knows the secret, and then again to say which rank it is."""
_MOST_AT_ONCE = 1 << 20
"""The most bytes that are read at once."""
_ANSWER_SECONDS = 0.25
"""Seconds that a stranger has for its proof before it may be closed for a newer one from the same address."""
_MOST_WAITING = 4096
"""The most connections that the system keeps until the listener accepts them, unless its own limit (net.core.somaxconn)
is lower. A connection that finds no room tries again a second later, and again."""
_AT_ONCE = 16
"""The most connections that become guests in a turn, before the guests that are already here are served again."""
_MOST_LOOKED_AT = 256
"""The most connections that are accepted in a turn: some of them become guests, and the others are closed."""
_MOST_NOTES = 8
_MOST_OF_A_ROUND = 100
"""The most characters of a round's name."""
_GRACE_SECONDS = 1.0
"""Seconds that a rank waits longer than rank 0, which knows better who is missing."""
_LAST_SECONDS = 5.0
"""The most seconds that rank 0 waits for others to take what it last sent them."""


def parsed(address: str, name: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``. Raises `InvalidArgument`, which calls the address `name`."""
    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not colon or not _may_be_a_host(host) or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise InvalidArgument(f"{name}: expected host:port, got {clipped(repr(address), MOST_OF_A_NAME)}")
    return host, int(port)


def _may_be_a_host(host: str) -> bool:
    """Whether the host's address may be looked up. For other names, Python would raise errors of other types."""
    try:
        return bool(host) and host.isprintable() and len(host.encode("idna")) > 0
    except UnicodeError:
        return False


class AddressMeeting(Meeting):
    """A meeting at an address; see `Meeting`. Rank 0 is a rank like the others, and also runs the listener, in a thread
    of its process."""

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
        said = told.get("all")
        if told.get("round") != what or not isinstance(said, list) or len(said) != self.ranks:
            raise GroupError(
                f"group '{self.group}': rank {self.rank} is at '{what}', others at {shown(told.get('round'))}: they "
                "are of different versions"
            )
        return said

    def fail(self, error: BaseException) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.send({"failed": telling(error)}, min(self._left() + _GRACE_SECONDS, _LAST_SECONDS))

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._listener is not None:
            self._listener.close()

    @property
    def address(self) -> str | None:
        """This host's address in the connection to rank 0. For rank 0: its address in a connection from another rank,
        if possible from another host."""
        if self._listener is not None and self._listener.local is not None:
            return self._listener.local
        return None if self._link is None else self._link.local

    def _connect(self, address: tuple[str, int]) -> _Link:
        """A connection to a listener that has proved that it knows the secret, and that has accepted this rank."""
        why: str = "no answer"
        while True:
            try:
                with contextlib.ExitStack() as unless_welcome:
                    link = _Link(socket.create_connection(address, max(0.05, min(2.0, self._left()))))
                    unless_welcome.callback(link.close)
                    link.prove(self.secret, self._left())
                    mine = {"rank": self.rank, "ranks": self.ranks, "group": self.group, "host": self.host}
                    link.send(mine, self._left() + _GRACE_SECONDS)
                    self._link = link
                    told = self._hear()
                    if "welcome" in told:
                        unless_welcome.pop_all()
                        return link
                    why = f"it is that of group '{clipped(told.get('other'), MOST_OF_A_NAME)}'"
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
        try:
            self._link.send(what, self._left() + _GRACE_SECONDS)
        except TimeoutError:
            raise self.missing(0) from None
        except OSError:  # rank 0 has said why it goes, or has gone: _hear() finds out
            pass

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
            raise as_told(told["failed"])
        return told


class _WrongSecret(Exception):
    pass


class _Frames:
    """The messages of a connection as bytes: each consists of its length, its signature, and JSON."""

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
        """The length in bytes of the message at the beginning of the buffer. Until the buffer has the 4 bytes that say
        it, the length is taken to be 4."""
        if len(buffer) < 4:
            return 4
        size = struct.unpack("!I", buffer[:4])[0]
        if size > MOST_BYTES:
            raise ConnectionAbortedError(f"a message of {size} bytes")
        return 4 + _PROOF + size

    def unpack(self, message: bytes) -> dict[str, Any]:
        signed, text = message[4 : 4 + _PROOF], message[4 + _PROOF :]
        if not hmac.compare_digest(signed, proof(self._key, self._other + struct.pack("!Q", self._received) + text)):
            raise ConnectionAbortedError("a message that is not signed by a rank")
        self._received += 1
        try:
            said = foreign.parsed(text)
        except ValueError as error:
            raise ConnectionAbortedError(f"a message that is no JSON: {clipped(error)}") from None
        if not isinstance(said, dict):
            raise ConnectionAbortedError(f"a message of another form: {shown(said)}")
        return said


class _Link:
    """A rank's connection to the listener."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames: _Frames | None = None
        self.local: str = connection.getsockname()[0]

    def prove(self, secret: bytes, seconds: float) -> None:
        until = _in(min(seconds, _PROOF_SECONDS))
        greeting = self._read(len(GREETING) + _NONCE, until)
        if not greeting.startswith(GREETING):
            raise ConnectionAbortedError("what answers at this address is not a rendezvous of FlashMoE")
        nonces = greeting[len(GREETING) :] + (own := secrets.token_bytes(_NONCE))
        self._write(own + proof(secret, b"rank " + nonces), until)
        if not hmac.compare_digest(self._read(_PROOF, until), proof(secret, b"listener " + nonces)):
            raise _WrongSecret
        self._frames = _Frames(proof(secret, b"connection " + nonces), b"rank ", b"listener ")

    def send(self, what: dict[str, Any], seconds: float) -> None:
        assert self._frames is not None
        self._write(self._frames.pack(what), _in(seconds))

    def receive(self, seconds: float) -> dict[str, Any]:
        assert self._frames is not None
        until, buffer = _in(seconds), b""
        while len(buffer) < (needed := _Frames.needed(buffer)):
            buffer += self._read(needed - len(buffer), until)
        return self._frames.unpack(buffer)

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int, until: float) -> bytes:
        parts, left = [], size
        while left:
            self._wait_no_longer(until)
            part = self._socket.recv(min(left, _MOST_AT_ONCE))
            if not part:
                raise ConnectionResetError("it closed the connection")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _write(self, data: bytes, until: float) -> None:
        self._wait_no_longer(until)
        self._socket.sendall(data)  # here the timeout covers all of the data

    def _wait_no_longer(self, until: float) -> None:
        """Limits the next operation to the time that is left. A timeout of the socket starts anew with each recv(), so
        somebody who sends a byte at a time could go on for ever."""
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._socket.settimeout(left)


def _in(seconds: float) -> float:
    """The time `seconds` from now, or if this is too soon, a time late enough to read what has already arrived."""
    return time.monotonic() + max(0.01, seconds)


class _Guest:
    """A connection, as the listener sees it."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        self.socket, self.where, self.source = connection, where, _source_of(where)
        self.since = time.monotonic()
        """When it connected; later, when it proved that it knows the secret."""
        self.nonce = secrets.token_bytes(_NONCE)
        self.frames: _Frames | None = None
        self.rank: int | None = None
        self.host = where
        self.in_round = False  # it has given its value in a round that is not over
        self.incoming, self.outgoing = bytearray(), bytearray(GREETING + self.nonce)
        self.ends = False  # the connection is closed once `outgoing` is sent


def _source_of(address: str) -> str:
    """Who connects, as far as addresses show. In IPv6 all 2**64 addresses of a network may belong to one host, so they
    count as one."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address


class _Listener:
    """Rank 0's listener: lets ranks in, passes each rank's values on to all ranks, and says who is missing."""

    def __init__(self, address: tuple[str, int], meeting: Meeting) -> None:
        self._meeting = meeting
        self._socket = _listening(address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._guests: list[_Guest] = []
        self._strangers: list[_Guest] = []  # guests that have proved nothing
        self._ranks: dict[int, _Guest] = {}
        self._rounds: dict[str, dict[int, Any]] = {}  # rounds that are not over
        self._notes: dict[str, None] = {}  # about connections that were refused
        self._notes_left_out = 0
        self._failed: dict[str, Any] | None = None  # the message about the first error that ended the meeting
        self._over = threading.Event()
        self.local: str | None = None
        """The address of this host to which another rank has connected, if possible from another host."""
        self._thread = threading.Thread(target=self._run, name="flashmoe rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the listener once all ranks have read what was sent to them and have gone, or after a few seconds."""
        self._over.set()
        self._thread.join(_LAST_SECONDS + 1)

    def _run(self) -> None:
        end, told = float("inf"), False
        try:
            while True:
                ready = [key.data for key, _ in self._selector.select(0.02)]
                # Guests that are already here come first, so that a rank that has sent its proof is not closed to make
                # room for a newcomer.
                for guest in ready:
                    if guest is not None:
                        self._serve(guest, self._receive)
                if None in ready:
                    self._accept()
                for guest in list(self._guests):
                    self._serve(guest, self._send)
                now = time.monotonic()
                if self._over.is_set():
                    end = min(end, now + _LAST_SECONDS)
                elif now > self._meeting.deadline and not told:
                    self._fail(PeerTimeout(self._who_is_missing()))
                    told = True
                if now > end or (self._over.is_set() and not self._ranks):
                    return
        finally:
            for guest in self._guests:
                guest.socket.close()
            self._selector.close()
            self._socket.close()

    def _accept(self) -> None:
        """Accepts some of the connections that wait, and not all of them, because strangers might connect so fast that
        this would never end, while ranks wait to be served."""
        let_in = 0
        for _ in range(_MOST_LOOKED_AT):
            try:
                connection, where = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._close_a_stranger()
                    time.sleep(0.01)  # if there was no stranger, this process may close another file by then
                return
            connection.setblocking(False)
            if _has_spoken(connection):
                connection.close()
                continue
            guest = _Guest(connection, where[0])
            self._guests.append(guest)
            self._strangers.append(guest)
            self._selector.register(connection, selectors.EVENT_READ, guest)
            if len(self._strangers) > _MOST_STRANGERS:
                self._close_a_stranger()
            let_in += 1
            if let_in == _AT_ONCE:
                return

    def _close_a_stranger(self) -> None:
        """Closes a stranger from the address that has most strangers, so that many from one address close out nobody
        else. Closes the oldest of them if it has had the time for an answer, otherwise the youngest. So strangers who
        stay and say nothing make room, and strangers who come fast do not push out a rank before it can have proved
        itself."""
        by_source: dict[str, list[_Guest]] = {}
        for guest in self._strangers:
            by_source.setdefault(guest.source, []).append(guest)
        if by_source:
            guests = max(by_source.values(), key=len)
            self._drop(guests[0 if time.monotonic() - guests[0].since > _ANSWER_SECONDS else -1])

    def _serve(self, guest: _Guest, serve: Callable[[_Guest], None]) -> None:
        try:
            serve(guest)
        except BlockingIOError:
            pass
        except (OSError, ValueError, KeyError, TypeError):
            self._drop(guest)

    def _send(self, guest: _Guest) -> None:
        if guest.rank is None and time.monotonic() - guest.since > _PROOF_SECONDS:
            return self._drop(guest)
        while guest.outgoing:
            del guest.outgoing[: guest.socket.send(guest.outgoing)]
        if guest.ends:
            self._drop(guest)

    def _receive(self, guest: _Guest) -> None:
        if guest.ends:  # whatever else this guest sends is ignored
            return
        # A stranger should send few bytes. Of a rank, a limited number is read at a time, so that others get a turn.
        part = guest.socket.recv(_NONCE + _PROOF if guest.frames is None else _MOST_AT_ONCE)
        guest.incoming += part
        if guest.frames is None and len(guest.incoming) >= _NONCE + _PROOF:
            self._judge(guest, bytes(guest.incoming))
            guest.incoming.clear()
        while guest.frames is not None and len(guest.incoming) >= (needed := _Frames.needed(guest.incoming)):
            message = bytes(guest.incoming[:needed])
            del guest.incoming[:needed]
            self._hear(guest, guest.frames.unpack(message))
        if not part:
            raise ConnectionResetError

    def _judge(self, guest: _Guest, answer: bytes) -> None:
        secret, nonces = self._meeting.secret, guest.nonce + answer[:_NONCE]
        if len(answer) == _NONCE + _PROOF and hmac.compare_digest(answer[_NONCE:], proof(secret, b"rank " + nonces)):
            guest.outgoing += proof(secret, b"listener " + nonces)
            guest.frames = _Frames(proof(secret, b"connection " + nonces), b"listener ", b"rank ")
            guest.since = time.monotonic()
            self._strangers.remove(guest)
            return
        self._note(f"one from {guest.where} with another secret was refused")
        guest.outgoing += _REFUSED
        guest.ends = True

    def _hear(self, guest: _Guest, said: dict[str, Any]) -> None:
        if guest.rank is None:
            return self._welcome(guest, said)
        if "failed" in said:
            return self._fail(as_told(said["failed"]))
        what = said["round"]
        if guest.in_round or not isinstance(what, str) or len(what) > _MOST_OF_A_ROUND:
            raise ValueError(what)
        guest.in_round = True
        values = self._rounds.setdefault(what, {})
        values[guest.rank] = said["value"]
        if len(values) == self._meeting.ranks:
            del self._rounds[what]
            everyones = [values[rank] for rank in range(self._meeting.ranks)]
            for each in self._ranks.values():
                each.in_round = False
                self._say(each, {"round": what, "all": everyones})

    def _welcome(self, guest: _Guest, said: dict[str, Any]) -> None:
        group, rank, ranks, host = said["group"], said["rank"], said["ranks"], said["host"]
        if not (isinstance(group, str) and is_count(rank) and is_count(ranks) and isinstance(host, str)):
            raise ValueError(said)
        guest.host = clipped(host, MOST_OF_A_NAME)
        if group != self._meeting.group:
            self._say(guest, {"other": self._meeting.group})
            guest.ends = True
            return
        if self._failed is not None:  # the meeting has ended before this rank (it may be rank 0) came
            self._say(guest, self._failed)
            guest.ends = True
            return
        if ranks != self._meeting.ranks or not 0 <= rank < ranks:
            text = f"group '{group}' disagrees on ranks: rank 0 has {self._meeting.ranks}, rank {rank} on host "
            text += f"{guest.host} has {ranks}"
            return self._fail(GroupError(text), guest)
        if (first := self._ranks.get(rank)) is not None:
            text = f"rank: group '{group}' already has a rank {rank} (the first on host {first.host}, another on host "
            text += f"{guest.host})"
            self._note(f"rank {rank} came twice")
            return self._fail(GroupError(text), guest)
        guest.rank = rank
        self._ranks[rank] = guest
        local = guest.socket.getsockname()[0]
        if rank != 0 and (self.local is None or local != guest.where):
            self.local = local
        self._say(guest, {"welcome": rank})

    def _fail(self, error: FlashMoEError, guest: _Guest | None = None) -> None:
        """Ends the meeting for all ranks, also for those that are still to come. `guest`: a connection that is told,
        too, although it is none of the ranks."""
        said = {"failed": telling(error)}
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
        if guest.frames is None:
            self._strangers.remove(guest)
        if guest.rank is None:
            return
        del self._ranks[guest.rank]
        if not self._over.is_set():
            group, host = self._meeting.group, guest.host
            self._fail(GroupError(f"group '{group}': rank {guest.rank} on host {host} has gone while ranks joined"))

    def _note(self, text: str) -> None:
        if text not in self._notes and len(self._notes) == _MOST_NOTES:
            self._notes_left_out += 1
        else:
            self._notes[text] = None

    def _who_is_missing(self) -> str:
        latest = next((values for values in reversed(self._rounds.values())), {})
        here = latest if len(self._ranks) == self._meeting.ranks else self._ranks
        rank = next((rank for rank in range(self._meeting.ranks) if rank not in here), 0)
        notes = [*self._notes, *([f"and {self._notes_left_out} more"] if self._notes_left_out else [])]
        return "; ".join([str(self._meeting.missing(rank)), *notes])


def _has_spoken(connection: socket.socket) -> bool:
    """Whether the other side has sent something, or has closed the connection, before it was greeted. No rank does
    that. A stranger who connects, talks and goes costs no more than this check."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _listening(address: tuple[str, int]) -> socket.socket:
    """A socket that listens at the address. Raises `GroupError` if the port is taken, `InvalidArgument` if the address
    is not this host's."""
    what = "{}:{}".format(*address)
    try:
        family, _, _, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise InvalidArgument(f"rendezvous: cannot find host {address[0]!r}: {error.strerror}") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_MOST_WAITING)
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
