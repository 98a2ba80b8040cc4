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

from . import errors
from .errors import FlashMoEError, GroupError, InvalidArgument, PeerTimeout
from .foreign import clipped, parsed, shown

SECRET = "FLASHMOE_SECRET"
"""The environment variable by which the launcher gives every rank of a group the same secret."""
TRUST_STORE = "FLASHMOE_TRUST_STORE"
"""The environment variable that says, where it is 1, that all who reach torch.distributed's store are trusted."""
MOST_BYTES = 64 << 20
"""Of a message of a rank."""
MOST_OF_A_NAME = 200
"""Characters that messages have of a name, a host or an address which others say."""
_MOST_OF_AN_ERROR = 2000
"""Characters of an error that another rank tells of."""
_LEAST_SECRET = 16
_LOOK_SECONDS = 0.02


def secret_of_launcher() -> bytes | None:
    """The secret in the environment; None without one. Raises `InvalidArgument` for one that can be guessed, or is no
    UTF-8."""
    # As bytes: what Python makes of them depends on the locale, which may be another on each machine.
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
    """Whether the environment says so. Raises `InvalidArgument` where it says anything but 1."""
    given = os.environ.get(TRUST_STORE)
    if given not in (None, "1"):
        raise InvalidArgument(
            f"{TRUST_STORE}: expected 1 (all who reach torch.distributed's store are trusted) or none, got "
            f"{shown(given)}"
        )
    return given is not None


def proof(secret: bytes, what: bytes) -> bytes:
    """32 bytes by which who knows the secret shows it, and that `what` is theirs."""
    return hmac.digest(secret, what, "sha256")


def telling(error: BaseException) -> dict[str, str]:
    """What other ranks are told of `error`: its name, or that of the base of this package's errors, and its text."""
    name = type(error).__name__
    known = isinstance(error, FlashMoEError) and hasattr(errors, name)
    return {"kind": name if known else FlashMoEError.__name__, "text": clipped(error, _MOST_OF_AN_ERROR)}


def as_told(told: Any) -> FlashMoEError:
    """The error that another rank tells of, whatever that has said."""
    kind, text = (told.get("kind"), told.get("text")) if isinstance(told, dict) else (None, told)
    found = vars(errors).get(kind) if isinstance(kind, str) else None
    if not (isinstance(found, type) and issubclass(found, FlashMoEError)):
        found = GroupError
    return found(clipped(text if isinstance(text, str) else shown(text), _MOST_OF_AN_ERROR))


class Meeting(ABC):
    """One rank's side of a meeting of all `ranks`, which ends by itself when `deadline` has passed (by the monotonic
    clock), or when a rank fails: then every rank raises what that one has raised."""

    def __init__(self, group: str, rank: int, ranks: int, timeout: float, secret: bytes | None) -> None:
        """`secret`: what strangers do not know; None where there is nothing of that kind."""
        self.group, self.rank, self.ranks, self.timeout = group, rank, ranks, timeout
        self._secret = secret
        self.deadline = time.monotonic() + (timeout or float("inf"))
        self.host = socket.gethostname()

    @abstractmethod
    def exchange(self, what: str, mine: Any) -> list[Any]:
        """Every rank's value of this round, by rank, once all have given theirs; values are what JSON can say."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the others, who wait for this rank, that it fails, and why. Raises nothing."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the meeting needs. Idempotent."""

    @property
    def secret(self) -> bytes:
        """What the group's ranks know, and strangers do not. Raises `InvalidArgument` where this rank was given none:
        whoever asks for it opens something to a network. What others say has no part in that."""
        if self._secret is None:
            raise InvalidArgument(
                f"{SECRET}: expected the secret of group '{self.group}', whose ranks are of several machines, the same "
                f"for every rank (such as what openssl rand -hex 16 prints), got none on rank {self.rank} (host "
                f"{self.host}); {TRUST_STORE}=1 on every rank does without, and trusts all who reach "
                "torch.distributed's store"
            )
        return self._secret

    def key(self, what: bytes) -> bytes:
        """32 bytes that the group's ranks know, and strangers do not, for what `what` says. Raises as `secret` does."""
        return proof(self.secret, what)

    @property
    def address(self) -> str | None:
        """An IP address of this rank by which ranks of other machines reach it, where the meeting has shown one."""
        return None
        return None

    def missing(self, rank: int) -> PeerTimeout:
        """The error of a rank that is not there in time."""
        return PeerTimeout(
            f"group '{self.group}': rank {rank} did not join within {self.timeout:g} s (rank {self.rank} on host "
            f"{self.host} waited)"
        )


_LAUNCHERS = b"the launcher's"
"""What rank 0 says in the store of a secret that it does not say there."""
_NOTHING = "nothing"
"""What stores answer for a key that they do not have."""


class StoreMeeting(Meeting):
    """By a store of ``torch.distributed``: any that has `set`, `add` and `compare_set`. What is written there is
    signed with the secret: who can write to the store, but does not know that, is not believed.

    Without a secret of the launcher's, rank 0 makes one and puts it into the store. Ranks sign with that, too, but it
    is the meeting's `secret` only for a rank that trusts all who reach the store."""

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
        """`secret`: the launcher's. `trusted`: whether the store is, where there is none."""
        super().__init__(group, rank, ranks, timeout, secret)
        self._store, self._prefix = store, f"flashmoe/{prefix}"
        came = self._ask(store.add, f"rank/{rank}", 1)
        if rank == 0:
            # Not in the place of what is there: a second rank 0 changes nothing.
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
        # Its own value a rank does not read again: were all of an earlier meeting's put back, this one would be that.
        own = parsed(json.dumps(mine).encode())
        return [own if rank == self.rank else self._read(what, rank) for rank in range(self.ranks)]

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(GroupError):  # of a store that is gone
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
        """What is there, once `rank` has written it; raises what any has failed with before."""
        while (found := self._look(key)) is None:
            # Before the secret is known, who has signed that is not.
            if key != "secret" and (told := self._look("failed")) is not None:
                raise as_told(self._opened("failed", told, rank))
            if time.monotonic() > self.deadline:
                raise self.missing(rank)
            time.sleep(_LOOK_SECONDS)
        return found

    def _look(self, key: str) -> bytes | None:
        # get() would wait for a key that somebody has deleted, and longer than this rank may.
        found = self._ask(self._store.compare_set, key, _NOTHING, _NOTHING)
        return None if found == _NOTHING.encode() else found

    def _opened(self, key: str, found: bytes, rank: int) -> Any:
        signed = b""
        if len(found) <= 2 * MOST_BYTES:
            with contextlib.suppress(ValueError):  # no UTF-8, or no digits
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
        except Exception as error:  # each store has its own
            raise GroupError(
                f"group '{self.group}': rank {self.rank} on host {self.host} cannot reach torch.distributed's store, "
                f"or that cannot {does.__name__} '{clipped(self._prefix)}/{key}': {clipped(error)}"
            ) from error

    def _signature(self, key: str, text: bytes) -> bytes:
        return proof(self._signing, f"store {self._prefix}/{key} ".encode() + text)
