"""Ranks as processes of this machine: start them, give them work, collect the results, leave none behind.

A rank's exception comes back as itself, with the rank's own traceback as its cause. A rank that dies without
answering (a signal, an exit) is reported as that. Workers end with their pool, and with their parent.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .errors import FlashMoEError, InvalidArgument

GRACE_SECONDS = 60.0
"""How long the other ranks may take to end once one has failed: above the engine's default time limit of
30 s, so that they can report what they waited for."""

# Every rank has processors of its own: a BLAS that starts a thread per core in each only adds contention.
_CHILD_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_SPAWN = multiprocessing.get_context("spawn")  # fork would copy locks held by BLAS or the engine's threads
_counter = itertools.count()


class RankKilled(FlashMoEError):
    """A rank's process ended without an answer: a signal killed it, or it exited."""


class RankOverdue(FlashMoEError):
    """A rank had not answered when the time limit ran out; its process was killed."""


class RankFailed(FlashMoEError):
    """One or more ranks failed. `errors` maps each of them to its exception."""

    def __init__(self, errors: dict[int, BaseException], ranks: int) -> None:
        self.errors = errors
        self.ranks = ranks
        grouped: dict[str, list[int]] = {}
        for rank, error in sorted(errors.items()):
            grouped.setdefault(_describe(error), []).append(rank)
        super().__init__("; ".join(f"{_name_ranks(who, ranks)}: {what}" for what, who in grouped.items()))

    def __reduce__(self) -> tuple[type[RankFailed], tuple[dict[int, BaseException], int]]:
        return RankFailed, (self.errors, self.ranks)


class RemoteTraceback(Exception):
    """The traceback text of an exception that was raised in another process; only ever a cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def group_name() -> str:
    """A name that no other group on this machine has: process id, counter, random digits."""
    return f"{os.getpid()}-{next(_counter)}-{secrets.token_hex(4)}"


def run_ranks(
    ranks: int, fn: Callable[..., Any], per_rank_args: Sequence[tuple], *, timeout: float | None = None
) -> list[Any]:
    """Call ``fn(rank, ranks, name, *per_rank_args[rank])`` in `ranks` new processes; results in rank order.

    `fn` must be importable (defined at the top level of a module). `name` is a fresh group name, the same for
    all. `timeout` is in seconds, None for no limit. Raises `RankFailed` when any rank does not return.
    """
    with RankPool(ranks) as pool:
        return pool.call(fn, per_rank_args, timeout=timeout)


class RankPool:
    """`ranks` processes that stay, so that many calls share the cost of starting them.

    A rank that was killed stays dead: a later call that needs it reports it as killed. A context manager.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise InvalidArgument(f"ranks: expected at least 1, got {ranks}")
        self.ranks = ranks
        self._workers: list[_Worker] = []
        try:
            with _environment(_CHILD_ENVIRONMENT):
                for rank in range(ranks):
                    self._workers.append(_Worker(rank))
        except BaseException:
            self.close()
            raise

    def call(
        self,
        fn: Callable[..., Any],
        per_rank_args: Sequence[tuple],
        ranks: int | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call ``fn(rank, ranks, name, *per_rank_args[rank])`` in the first `ranks` processes (default: all).

        Waits for every rank, at most `timeout` seconds in all, and at most `GRACE_SECONDS` after the first
        failure; who has not answered by then is killed. Returns the results in rank order, or raises
        `RankFailed`.
        """
        ranks = self.ranks if ranks is None else ranks
        if not 1 <= ranks <= self.ranks:
            raise InvalidArgument(f"ranks: expected 1 to {self.ranks}, got {ranks}")
        if len(per_rank_args) != ranks:
            raise InvalidArgument(f"per_rank_args: expected {ranks} tuples, got {len(per_rank_args)}")
        if not self._workers:
            raise FlashMoEError("this RankPool is closed")
        workers, name = self._workers[:ranks], group_name()
        # All messages are made before the first is sent: an argument that cannot be pickled starts no rank.
        messages = [pickle.dumps((fn, (rank, ranks, name, *args))) for rank, args in enumerate(per_rank_args)]
        try:
            for worker, message in zip(workers, messages, strict=True):
                worker.send(message)
            results, errors = _collect(workers, timeout)
        except BaseException:  # an interrupt: their answers would be taken for those of the next call
            for worker in workers:
                worker.kill()
            _remove_segments(name)
            raise
        if errors:
            _remove_segments(name)
            raise RankFailed(errors, ranks) from errors[min(errors)]
        return [results[rank] for rank in range(ranks)]

    def kill(self, rank: int) -> None:
        """Kill a rank's process with SIGKILL and wait until it is gone."""
        self._workers[rank].kill()

    def close(self) -> None:
        """Kill and reap every process. Idempotent."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()  # all at once first: none sees another go and starts to complain
        for worker in workers:
            worker.kill()
            worker.pipe.close()
            worker.process.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """The parent's end of one rank: its process and the pipe to it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs,), name=f"flashmoe rank {rank}", daemon=True)
        self.process.start()
        theirs.close()  # the child holds the only other end, so its death reads as an end of file

    def send(self, message: bytes) -> None:
        """Hand over work. A dead process is noticed when the answer is awaited, not here."""
        with suppress(OSError):
            self.pipe.send_bytes(message)

    def receive(self) -> tuple[Any, BaseException | None]:
        """The answer (result, error) of a pipe that is ready."""
        try:
            result, error, text = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            return None, RankKilled(_describe_exit(self.process.exitcode))
        except Exception as problem:
            return None, FlashMoEError(f"its answer cannot be read: {_describe(problem)}")
        if error is not None:
            error.__cause__ = RemoteTraceback(text)
        return result, error

    def kill(self) -> None:
        """Kill the process if it lives, and reap it."""
        self.process.kill()
        self.process.join()


def _collect(workers: Sequence[_Worker], timeout: float | None) -> tuple[dict[int, Any], dict[int, BaseException]]:
    """Await one answer of each worker: (results, errors), both by rank. Kills who is overdue."""
    started = time.monotonic()
    deadline = None if timeout is None else started + timeout
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    waiting = {worker.pipe: worker for worker in workers}
    while waiting:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), remaining)
        if not ready:
            for worker in waiting.values():
                worker.kill()
                elapsed = time.monotonic() - started
                errors[worker.rank] = RankOverdue(f"no answer after {elapsed:.1f} s; its process was killed")
            break
        for pipe in ready:
            worker = waiting.pop(pipe)
            result, error = worker.receive()
            if error is None:
                results[worker.rank] = result
                continue
            grace = time.monotonic() + GRACE_SECONDS
            deadline = grace if deadline is None else min(deadline, grace)
            errors[worker.rank] = error
    return results, errors


def _serve(pipe: Connection) -> None:
    """A worker's life: take a call, answer it, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C goes to the whole group; the parent ends us
    groups: list[str] = []  # of the call that is under way
    threading.Thread(target=_follow_parent, args=(groups,), daemon=True).start()
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        pipe.send_bytes(_answer(message, groups))


def _answer(message: bytes, groups: list[str]) -> bytes:
    """Run one pickled (fn, args), its group's name in `groups`; the pickled (result, error, traceback text)."""
    try:
        fn, args = pickle.loads(message)
        groups[:] = [args[2]]
        return pickle.dumps((fn(*args), None, ""))
    except BaseException as error:  # SystemExit too: the parent is owed an answer
        text = traceback.format_exc()
        return pickle.dumps((None, _portable(error), text))


def _portable(error: BaseException) -> BaseException:
    """`error`, or a FlashMoEError that describes it if it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return FlashMoEError(_describe(error))


def _follow_parent(groups: list[str]) -> None:
    """End this process when its parent is gone, also in the middle of a call, and leave nothing of its `groups` behind.

    Not prctl(PR_SET_PDEATHSIG): that fires when the thread that started this process ends, parent alive or
    not.
    """
    wait([multiprocessing.parent_process().sentinel])
    try:
        for name in groups:
            _remove_segments(name)
    finally:
        os._exit(1)


def _remove_segments(name: str) -> None:
    """Free what ranks that died while they made the group `name` left in shared memory."""
    for pattern in (f"flashmoe-{name}-*", f".flashmoe-{name}-*"):  # named, and not yet (csrc/host/segment.cpp)
        for segment in Path("/dev/shm").glob(pattern):
            with suppress(FileNotFoundError):
                if segment.lstat().st_uid == os.geteuid():  # every user may make files there
                    segment.unlink()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started within: a BLAS reads them when it is loaded."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _describe(error: BaseException) -> str:
    """`Type: message`; the type is left out where the message says it all."""
    if isinstance(error, RankKilled | RankOverdue):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _describe_exit(status: int | None) -> str:
    """What a process's exit status means."""
    if status is not None and status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"its process exited with status {status} before it answered"


def _name_ranks(who: list[int], ranks: int) -> str:
    """`rank 2`, `ranks 0, 3` or `all 4 ranks`."""
    if len(who) == 1:
        return f"rank {who[0]}"
    return f"all {ranks} ranks" if len(who) == ranks else f"ranks {', '.join(map(str, who))}"
