"""Processes that tests start to join groups. A test may run them as another user, stop them, kill them, or tell them
what to do."""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import secrets
import signal
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import flashmoe
import pytest
from flashmoe import _ffi

MARGIN = 15.0
"""Seconds that a busy machine may need for what takes milliseconds on an idle one."""
LIMITS = {"hidden": 16, "intermediate": 12, "experts": 4, "top_k": 2, "max_tokens": 20, "dtype": "float32"}
SHARED_MEMORY = Path("/dev/shm")

# Each process is forked from a server that has imported the slow modules, so that a start takes milliseconds, not
# seconds.
_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["flashmoe", "tvm_ffi"])


class Process:
    """Runs `fn(pipe, *args)` in a process of its own. If `uid` is given, that user runs it, which needs root."""

    def __init__(self, fn: Callable[..., None], *args: Any, uid: int | None = None) -> None:
        self._pipe, theirs = _FORKSERVER.Pipe()
        self._process = _FORKSERVER.Process(target=_run, args=(uid, fn, theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self, seconds: float = MARGIN) -> Any:
        """The process's next message."""
        assert self._pipe.poll(seconds), f"nothing heard for {seconds} s"
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join(MARGIN)
            raise AssertionError(f"it ended with {self._process.exitcode} and said nothing") from None

    def tell(self, message: Any) -> None:
        self._pipe.send(message)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._process.join()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _run(uid: int | None, fn: Callable[..., None], pipe: Any, *args: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _ffi.library()  # loaded before the user changes, because the other user may be unable to read it
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    fn(pipe, *args)


@dataclass(frozen=True)
class Joined:
    """How an attempt to join ended: its error if there was one, and the seconds it took."""

    error: Exception | None
    seconds: float


def join(pipe: Any, name: str, rank: int, ranks: int, timeout: float) -> None:
    """A rank that joins once, says how that ended, and closes its context when it is told to."""
    since = time.monotonic()
    try:
        context = flashmoe.Context(name=name, rank=rank, ranks=ranks, timeout=timeout, **LIMITS)
    except Exception as error:
        pipe.send(Joined(error, time.monotonic() - since))
    else:
        pipe.send(Joined(None, time.monotonic() - since))
        pipe.recv()
        context.close()


class Processes:
    """The processes of one test, and the name of its group. After the test, all of them are ended, and what they have
    left in shared memory under this name is removed."""

    def __init__(self) -> None:
        self.name = f"test-{secrets.token_hex(6)}"
        self._all: list[Process] = []

    def start(self, fn: Callable[..., None], *args: Any, uid: int | None = None) -> Process:
        process = Process(fn, *args, uid=uid)
        self._all.append(process)
        return process

    def join(self, rank: int, ranks: int, timeout: float = 2.0, *, uid: int | None = None) -> Process:
        """Start a rank of the test's group."""
        return self.start(join, self.name, rank, ranks, timeout, uid=uid)

    def path(self, rank: int) -> Path:
        """The path that a rank's segment has while the rank joins."""
        return SHARED_MEMORY / f"flashmoe-{self.name}-{rank}"

    def await_path(self, rank: int) -> Path:
        await_condition(lambda: os.path.lexists(self.path(rank)), f"{self.path(rank)} is not there")
        return self.path(rank)

    def end(self) -> None:
        for process in self._all:
            process.end()
        for path in glob.glob(f"/dev/shm/*{self.name}*"):
            if os.path.isdir(path) and not os.path.islink(path):
                os.rmdir(path)
            else:
                os.unlink(path)


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    try:
        yield processes
    finally:
        processes.end()


def await_condition(holds: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + MARGIN
    while not holds():
        assert time.monotonic() < end, otherwise
        time.sleep(0.001)


class Page:
    """The control page of a segment (`ControlPage` in csrc/host/segment.h), by the offsets of its fields."""

    SIZE = 3 * 4096
    FIELDS: ClassVar = {
        "state": (0, "I"),
        "seen_by": (4, "I"),
        "magic": (8, "Q"),
        "pid": (16, "i"),
        "started": (32, "Q"),
        "bytes": (40, "Q"),
        "ranks": (48, "I"),
    }
    READY, FAILED = 1, 4

    def __init__(self, path: Path) -> None:
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115

    def __getitem__(self, field: str) -> int:
        offset, kind = self.FIELDS[field]
        return struct.unpack(kind, os.pread(self._file.fileno(), struct.calcsize(kind), offset))[0]

    def __setitem__(self, field: str, value: int) -> None:
        offset, kind = self.FIELDS[field]
        os.pwrite(self._file.fileno(), struct.pack(kind, value), offset)

    def read(self) -> bytes:
        return os.pread(self._file.fileno(), self.SIZE, 0)

    def write(self, offset: int, data: bytes) -> None:
        os.pwrite(self._file.fileno(), data, offset)

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def page_of(path: Path) -> Iterator[Page]:
    page = Page(path)
    try:
        yield page
    finally:
        page.close()
