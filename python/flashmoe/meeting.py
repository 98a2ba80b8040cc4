"""How ranks that share no memory exchange what they must know of one another before they are a group."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from typing import Any, NoReturn

from . import errors
from .errors import FlashMoEError, GroupError, InvalidArgument, PeerTimeout

SECRET = "FLASHMOE_SECRET"
"""The environment variable by which the launcher gives every rank of a group the same secret."""
_LEAST_SECRET = 16
_LOOK_SECONDS = 0.02


def secret_of_launcher() -> bytes | None:
    """The secret in the environment; None without one. Raises `InvalidArgument` for one that can be guessed."""
    given = os.environ.get(SECRET)
    if not given:
        return None
    if len(given) < _LEAST_SECRET:
        raise InvalidArgument(
            f"{SECRET}: expected at least {_LEAST_SECRET} characters, the same for every rank (such as those of: "
            f"openssl rand -hex 16), got {len(given)}"
        )
    return given.encode()


def proof(secret: bytes, what: bytes) -> bytes:
    """32 bytes by which who knows the secret shows it, and that `what` is theirs."""
    return hmac.digest(secret, what, "sha256")


def kind_of(error: BaseException) -> str:
    """The name by which other ranks raise it: that of this package's error, or of their common base."""
    name = type(error).__name__
    return name if isinstance(error, FlashMoEError) and hasattr(errors, name) else FlashMoEError.__name__


def raise_as_told(kind: str, text: str) -> NoReturn:
    """Raise what another rank has failed with."""
    found = getattr(errors, kind, None)
    raise (found if isinstance(found, type) and issubclass(found, FlashMoEError) else GroupError)(text)


class Meeting(ABC):
    """One rank's side of a meeting of all `ranks`, which ends by itself when `deadline` has passed (by the monotonic
    clock), or when a rank fails: then every rank raises what that one has raised."""

    def __init__(self, group: str, rank: int, ranks: int, timeout: float, secret: bytes) -> None:
        self.group, self.rank, self.ranks, self.timeout, self.secret = group, rank, ranks, timeout, secret
        self.deadline = time.monotonic() + (timeout or float("inf"))
        self.host = socket.gethostname()

    @abstractmethod
    def exchange(self, what: str, mine: Any) -> list[Any]:
        """Every rank's value of this round, by rank, once all have given theirs; values are what JSON can say."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the others, who wait for this rank, that it fails, and why."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the meeting needs. Idempotent."""

    @property
    def address(self) -> str | None:
        """This host's address by which this rank has met the others, where that is known."""
        return None

    def missing(self, rank: int) -> PeerTimeout:
        """The error of a rank that is not there in time."""
        return PeerTimeout(
            f"group '{self.group}': rank {rank} did not join within {self.timeout:g} s (rank {self.rank} on host "
            f"{self.host} waited)"
        )


class StoreMeeting(Meeting):
    """By a store of ``torch.distributed``: any that has `set`, `get`, `add` and `check`. What is written there is
    signed with the secret: who can write to the store, but does not know that, is not believed."""

    def __init__(
        self, store: Any, group: str, rank: int, ranks: int, timeout: float, secret: bytes | None, prefix: str
    ) -> None:
        """`secret` None: rank 0 makes one, and who can read the store knows it."""
        super().__init__(group, rank, ranks, timeout, secret or b"")
        self._store, self._prefix = store, f"flashmoe/{prefix}"
        try:
            came = store.add(f"{self._prefix}/rank/{rank}", 1)
            if secret is None and rank == 0 and came == 1:
                store.set(f"{self._prefix}/secret", secrets.token_hex(32))
            if secret is None:
                self._await("secret", 0)
                self.secret = bytes(store.get(f"{self._prefix}/secret"))
        except PeerTimeout:
            raise
        except Exception as error:  # each store has its own
            raise GroupError(
                f"group '{group}': rank {rank} on host {self.host} cannot reach torch.distributed's store: {error}"
            ) from error
        if came > 1:
            error = GroupError(
                f"rank: group '{group}' already has a rank {rank} (a second joins from host {self.host})"
            )
            self.fail(error)
            raise error

    def exchange(self, what: str, mine: Any) -> list[Any]:
        self._write(f"{what}/{self.rank}", mine)
        return [self._read(what, rank) for rank in range(self.ranks)]

    def fail(self, error: BaseException) -> None:
        self._write("failed", {"kind": kind_of(error), "text": str(error)})

    def close(self) -> None:
        pass

    def _write(self, key: str, value: Any) -> None:
        text = json.dumps(value).encode()
        self._store.set(f"{self._prefix}/{key}", (self._signature(key, text) + text).hex())

    def _read(self, what: str, rank: int) -> Any:
        self._await(key := f"{what}/{rank}", rank)
        return self._value(key, rank)

    def _await(self, key: str, rank: int) -> None:
        """Waits until `rank` has written it, or any has failed."""
        while not self._store.check([f"{self._prefix}/{key}"]):
            if self._store.check([f"{self._prefix}/failed"]):
                told = self._value("failed", rank)
                raise_as_told(told["kind"], told["text"])
            if time.monotonic() > self.deadline:
                raise self.missing(rank)
            time.sleep(_LOOK_SECONDS)

    def _value(self, key: str, rank: int) -> Any:
        raw = bytes.fromhex(self._store.get(f"{self._prefix}/{key}").decode())
        if not hmac.compare_digest(raw[:32], self._signature(key, raw[32:])):
            raise GroupError(
                f"{SECRET}: expected the same secret on every rank of group '{self.group}', got another from rank "
                f"{rank}"
            )
        return json.loads(raw[32:])

    def _signature(self, key: str, text: bytes) -> bytes:
        return proof(self.secret, f"store {self._prefix}/{key} ".encode() + text)
