"""How ranks that share no memory exchange what they must know of one another before they are a group."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from .. import errors
from ..errors import FlashMoEError, GroupError, InvalidArgument, PeerTimeout
from ..system.foreign import clipped, parsed, shown

SECRET = "FLASHMOE_SECRET"
"""The environment variable in which the launcher gives every rank of a group the same secret."""
TRUST_STORE = "FLASHMOE_TRUST_STORE"
"""The environment variable that says, if it is 1, that everyone who can reach torch.distributed's store is trusted."""
MOST_BYTES = 64 << 20
"""The most bytes of a rank's message."""
MOST_OF_A_NAME = 200
"""The most characters that messages show of a name, host or address that others have sent."""
_MOST_OF_AN_ERROR = 2000
"""The most characters of an error that one rank tells another."""
_LEAST_SECRET = 16
_LOOK_SECONDS = 0.02


def secret_of_launcher() -> bytes | None:
    """The secret in the environment; None if there is none. Raises `InvalidArgument` for a secret that can be guessed,
    or that is not UTF-8."""
    # Read as bytes: Python decodes text by the locale, which may differ between machines.
    given = os.environb.get(SECRET.encode())
    if not given:
        return None
    try:
        size = len(given.decode())
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{SECRET}: expected text in UTF-8, got bytes that are none ({error.reason})") from None
    if size < _LEAST_SECRET:
        raise InvalidArgument(
            f"{SECRET}: expected at least {_LEAST_SECRET} characters, the same for every rank (such as those of: "
            f"openssl rand -hex 16), got {size}"
        )
    return given


def trusts_store() -> bool:
    """Whether the environment says that the store is trusted. Raises `InvalidArgument` for any value but 1."""
    given = os.environ.get(TRUST_STORE)
    if given not in (None, "1"):
        raise InvalidArgument(
            f"{TRUST_STORE}: expected 1 (all who reach torch.distributed's store are trusted) or none, got "
            f"{shown(given)}"
        )
    return given is not None


def proof(secret: bytes, what: bytes) -> bytes:
    """32 bytes by which a rank proves that it knows the secret and has written `what`."""
    return hmac.digest(secret, what, "sha256")


def telling(error: BaseException) -> dict[str, str]:
    """What other ranks are told of `error`: its text, and its type. For a type that is not this package's, the type is
    `FlashMoEError`."""
    name = type(error).__name__
    known = isinstance(error, FlashMoEError) and hasattr(errors, name)
    return {"kind": name if known else FlashMoEError.__name__, "text": clipped(error, _MOST_OF_AN_ERROR)}


def as_told(told: Any) -> FlashMoEError:
    """The error of which another rank tells, as `telling` made it. `told` comes from elsewhere and may be anything."""
    kind, text = (told.get("kind"), told.get("text")) if isinstance(told, dict) else (None, told)
    found = vars(errors).get(kind) if isinstance(kind, str) else None
    if not (isinstance(found, type) and issubclass(found, FlashMoEError)):
        found = GroupError
    return found(clipped(text if isinstance(text, str) else shown(text), _MOST_OF_AN_ERROR))


class Meeting(ABC):
    """One rank's side of a meeting of all `ranks`. The meeting ends when `deadline` (of the monotonic clock) has
    passed, or when a rank fails: every rank then raises the error of the rank that failed."""

    def __init__(self, group: str, rank: int, ranks: int, timeout: float, secret: bytes | None) -> None:
        """`secret`: known to the ranks and unknown to strangers; None: there is no secret."""
        self.group, self.rank, self.ranks, self.timeout = group, rank, ranks, timeout
        self._secret = secret
        self.deadline = time.monotonic() + (timeout or float("inf"))
        self.host = socket.gethostname()

    @abstractmethod
    def exchange(self, what: str, mine: Any) -> list[Any]:
        """Every rank's value of this round, by rank, once all ranks have given theirs. Values are what JSON can
        represent."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, which wait for this one, that it fails, and why. Raises nothing."""

    @abstractmethod
    def close(self) -> None:
        """Free what the meeting uses. Idempotent."""

    @property
    def secret(self) -> bytes:
        """The secret that the group's ranks know and strangers do not. Raises `InvalidArgument` if this rank has none:
        whoever asks for the secret is about to listen at a network, and must not do so without one. Only the rank's own
        environment decides whether it has one, not what other ranks say."""
        if self._secret is None:
            raise InvalidArgument(
                f"{SECRET}: expected the secret of group '{self.group}', whose ranks are of several machines, the same "
                f"for every rank (such as what openssl rand -hex 16 prints), got none on rank {self.rank} (host "
                f"{self.host}); {TRUST_STORE}=1 on every rank does without, and trusts all who reach "
                "torch.distributed's store"
            )
        return self._secret

    def key(self, what: bytes) -> bytes:
        """32 bytes that the group's ranks know and strangers do not, different for each `what`. Raises as `secret`
        does."""
        return proof(self.secret, what)

    @property
    def address(self) -> str | None:
        """An IP address at which ranks of other machines reach this rank, if the meeting has shown one."""
        return None

    def missing(self, rank: int) -> PeerTimeout:
        """The error for a rank that did not join in time."""
        return PeerTimeout(
            f"group '{self.group}': rank {rank} did not join within {self.timeout:g} s (rank {self.rank} on host "
            f"{self.host} waited)"
        )


_LAUNCHERS = b"the launcher's"
"""What rank 0 writes to the store in place of the secret, if the launcher has given one."""
_NOTHING = "nothing"
"""What stores answer for a missing key."""


class StoreMeeting(Meeting):
    """A meeting in a store of ``torch.distributed``: any store that has `set`, `add` and `compare_set`. Ranks sign with
    the secret what they write there. A writer that can reach the store but does not know the secret is not believed.

    If the launcher gave no secret, rank 0 makes one and puts it into the store. Ranks sign with this secret too, but it
    is the meeting's `secret` only for a rank that trusts everyone who can reach the store.
    """

    def __init__(
        self,
        store: Any,
        group: str,
        rank: int,
        ranks: int,
        timeout: float,
        secret: bytes | None,
        prefix: str,
        trusted: bool = False,
    ) -> None:
        """`secret`: the launcher's. `trusted`: whether the store is trusted if there is no such secret."""
        super().__init__(group, rank, ranks, timeout, secret)
        self._store, self._prefix = store, f"flashmoe/{prefix}"
        came = self._ask(store.add, f"rank/{rank}", 1)
        if rank == 0:
            # compare_set leaves a value that is there: a second rank 0 changes nothing.
            self._ask(store.compare_set, "secret", "", _LAUNCHERS if secret else secrets.token_hex(32))
        self._signing = secret or self._secret_of_store()
        if trusted:
            self._secret = self._signing
        if came != 1:
            error = GroupError(
                f"rank: group '{group}' already has a rank {rank} (a second joins from host {self.host})"
            )
            self.fail(error)
            raise error

    def exchange(self, what: str, mine: Any) -> list[Any]:
        self._write(f"{what}/{self.rank}", mine)
        # A rank does not read its own value from the store. Otherwise someone who can write to the store could put the
        # signed values of an earlier meeting there, and every rank would believe them.
        own = parsed(json.dumps(mine).encode())
        return [own if rank == self.rank else self._read(what, rank) for rank in range(self.ranks)]

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(GroupError):  # the store may be gone
            self._write("failed", telling(error))

    def close(self) -> None:
        pass

    def _secret_of_store(self) -> bytes:
        found = self._await("secret", 0)
        if found == _LAUNCHERS:
            raise GroupError(
                f"{SECRET}: expected the same secret on every rank of group '{self.group}', got one on rank 0, and "
                f"none on rank {self.rank} (host {self.host})"
            )
        with contextlib.suppress(ValueError):
            if len(found) == 64 and bytes.fromhex(found.decode()):
                return found
        raise self._strange("secret", "64 hexadecimal digits of rank 0", found)

    def _write(self, key: str, value: Any) -> None:
        text = json.dumps(value).encode()
        self._ask(self._store.set, key, (self._signature(key, text) + text).hex())

    def _read(self, what: str, rank: int) -> Any:
        return self._opened(key := f"{what}/{rank}", self._await(key, rank), rank)

    def _await(self, key: str, rank: int) -> bytes:
        """What is at `key`, once `rank` has written it. If any rank has failed before that, raises that rank's
        error."""
        while (found := self._look(key)) is None:
            # Before the secret is known, this rank cannot check who has signed a failure.
            if key != "secret" and (told := self._look("failed")) is not None:
                raise as_told(self._opened("failed", told, rank))
            if time.monotonic() > self.deadline:
                raise self.missing(rank)
            time.sleep(_LOOK_SECONDS)
        return found

    def _look(self, key: str) -> bytes | None:
        # get() would wait for a key that somebody has deleted, and longer than this rank may wait.
        found = self._ask(self._store.compare_set, key, _NOTHING, _NOTHING)
        return None if found == _NOTHING.encode() else found

    def _opened(self, key: str, found: bytes, rank: int) -> Any:
        signed = b""
        if len(found) <= 2 * MOST_BYTES:
            with contextlib.suppress(ValueError):  # not UTF-8, or no hexadecimal digits
                signed = bytes.fromhex(found.decode())
        if len(signed) < 32:
            raise self._strange(key, f"what rank {rank} has signed, in hexadecimal digits", found)
        if not hmac.compare_digest(signed[:32], self._signature(key, signed[32:])):
            raise GroupError(
                f"{SECRET}: expected the same secret on every rank of group '{self.group}', got another from rank "
                f"{rank}"
            )
        try:
            return parsed(signed[32:])
        except ValueError as error:
            raise self._strange(key, f"JSON of rank {rank} ({clipped(error)})", signed[32:]) from None

    def _strange(self, key: str, expected: str, found: bytes) -> GroupError:
        return GroupError(
            f"group '{self.group}': expected at '{self._prefix}/{key}' in torch.distributed's store {expected}, got "
            f"{len(found)} bytes, {shown(found)}"
        )

    def _ask(self, does: Callable[..., Any], key: str, *arguments: Any) -> Any:
        try:
            return does(f"{self._prefix}/{key}", *arguments)
        except Exception as error:  # each store has its own types of error
            raise GroupError(
                f"group '{self.group}': rank {self.rank} on host {self.host} cannot reach torch.distributed's store, "
                f"or that cannot {does.__name__} '{clipped(self._prefix)}/{key}': {clipped(error)}"
            ) from error

    def _signature(self, key: str, text: bytes) -> bytes:
        return proof(self._signing, f"store {self._prefix}/{key} ".encode() + text)
