"""Ranks as processes of this machine: start them, give them work, collect the results, leave none behind.

If ranks raise exceptions, the caller gets them unchanged, each with the rank's own traceback as its cause. A rank that
dies without answering (by a signal or an exit) is reported as dead, even if a process that the rank has forked lives
on. A time limit covers all of a call, because a rank may stop or hang before it takes its arguments, while it computes,
or in the middle of its answer. Workers end with their pool, and with their parent.
"""

from __future__ import annotations

import itertools
import logging
import math
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from .errors import FlashMoEError, InvalidArgument
from .groups import link
from .spec import MAX_RANKS, bounded

R = TypeVar("R")

GRACE_SECONDS = 60.0
"""How long the other ranks may take to answer once one has failed. This is more than a context's default timeout of
30 s, so that they can report what they waited for."""

_LOOK_SECONDS = 0.05
"""The time between two checks of a call that its ranks live. The end of a rank's connection is not enough to see that
it has died, because a process that the rank has forked may hold the connection open."""

_REAP_SECONDS = 10.0
"""How long to wait until a killed process is gone. If a driver hangs, the operating system may keep a process for
ever."""

# A rank's processors already use its share of the cores. If BLAS started a thread for each core in every rank, the
# threads would only compete for the cores.
_CHILD_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_SPAWN = multiprocessing.get_context("spawn")  # fork would copy locks held by BLAS or the engine's threads
_counter = itertools.count()
_log = logging.getLogger("flashmoe")


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
    """The traceback text of an exception that was raised in another process. It is set as a cause, and never raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def group_name() -> str:
    """A name that no other group on this machine has: process id, counter, random digits."""
    return f"{os.getpid()}-{next(_counter)}-{secrets.token_hex(4)}"


def run_ranks(
    ranks: int, fn: Callable[..., R], per_rank_args: Sequence[tuple[Any, ...]], *, timeout: float | None = None
) -> list[R]:
    """Call ``fn(rank, ranks, name, *per_rank_args[rank])`` in `ranks` new processes; results in rank order.

    `fn` must be importable (defined at the top level of a module). `name` is a fresh group name, the same for
    all. `timeout` is in seconds, from when the processes are started to the last answer, None for no limit. Raises
    `InvalidArgument` before a process is started, and `RankFailed` when any rank does not return.

    Examples
    --------
    A string's method, which can be pickled too, stands here for a function of a module. In a file, the call has to be
    under ``if __name__ == "__main__":``, because the new processes import that file.

    >>> from flashmoe.launch import run_ranks
    >>> run_ranks(2, "rank {0} of {1} gets {3}".format, [("a",), ("b",)])
    ['rank 0 of 2 gets a', 'rank 1 of 2 gets b']
    """
    call = _Call.checked(ranks, MAX_RANKS, fn, per_rank_args, timeout)
    with RankPool(ranks) as pool:
        return pool._run(call)


class RankPool:
    """`ranks` processes that stay, so that many calls share the cost of starting them.

    A rank that was killed stays dead: a later call that needs it reports it as killed. A context manager.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = bounded("ranks", ranks, 1, MAX_RANKS)
        self._workers: list[_Worker] = []
        try:
            with _environment(_CHILD_ENVIRONMENT):
                for rank in range(self.ranks):
                    self._workers.append(_Worker(rank))
                    self._workers[-1].start()
        except BaseException:
            self.close()
            raise

    def call(
        self,
        fn: Callable[..., R],
        per_rank_args: Sequence[tuple[Any, ...]],
        ranks: int | None = None,
        *,
        timeout: float | None = None,
    ) -> list[R]:
        """Call ``fn(rank, ranks, name, *per_rank_args[rank])`` in the first `ranks` processes (default: all).

        Waits for every rank, at most `timeout` seconds in all, and at most `GRACE_SECONDS` after the first failure;
        ranks that have not answered by then are killed. Returns the results in rank order, or raises `RankFailed`.
        """
        return self._run(_Call.checked(self.ranks if ranks is None else ranks, self.ranks, fn, per_rank_args, timeout))

    def _run(self, call: _Call) -> list[Any]:
        if not self._workers:
            raise FlashMoEError("this RankPool is closed")
        workers = self._workers[: len(call.messages)]
        try:
            results, errors = _collect(workers, call)
        except BaseException:  # an interrupt: late answers would be taken for those of the next call
            _kill(workers)
            _remove_segments(call.name)
            raise
        if errors:
            _remove_segments(call.name)
            raise RankFailed(errors, len(workers)) from errors[min(errors)]
        return [results[worker.rank] for worker in workers]

    def kill(self, rank: int) -> None:
        """Kill a rank's process with SIGKILL and wait until it is gone."""
        _kill([self._workers[rank]])

    def close(self) -> None:
        """Kill and reap every process. Idempotent."""
        workers, self._workers = self._workers, []
        _kill(workers)
        for worker in workers:
            worker.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Call:
    """A call in all ranks, whose arguments are checked and pickled."""

    name: str
    """The group's name."""
    what: str
    """The function's name, for messages."""
    messages: list[bytes]
    """One message for each rank. All are made before the first is sent, so that no rank has begun if an argument cannot
    be pickled."""
    deadline: float
    """When the call's time is over: seconds of the monotonic clock, infinite without a limit."""

    @classmethod
    def checked(
        cls, ranks: int, most: int, fn: Callable[..., Any], per_rank_args: Sequence[tuple], timeout: float | None
    ) -> _Call:
        """Checks the arguments. Raises `InvalidArgument`."""
        ranks = bounded("ranks", ranks, 1, most)
        if not callable(fn):
            raise InvalidArgument(f"fn: expected a function, got {type(fn).__name__}")
        if len(per_rank_args) != ranks:
            raise InvalidArgument(f"per_rank_args: expected {ranks} tuples, got {len(per_rank_args)}")
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise InvalidArgument(f"timeout: expected seconds, at least 0, or None, got {timeout!r}")
        name = group_name()
        messages = [_pickled(fn, (rank, ranks, name), args) for rank, args in enumerate(per_rank_args)]
        what = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', type(fn).__name__)}"
        return cls(name, what, messages, math.inf if timeout is None else time.monotonic() + timeout)


def _pickled(fn: Callable[..., Any], place: tuple[int, int, str], args: Any) -> bytes:
    """The message for a rank. `place`: the rank's number, the number of ranks, and the group's name. Raises
    `InvalidArgument`, which names the argument that cannot be pickled."""
    argument = f"per_rank_args[{place[0]}]"
    if not isinstance(args, tuple | list):
        raise InvalidArgument(f"{argument}: expected a tuple of arguments, got {type(args).__name__}")
    try:
        return pickle.dumps((fn, (*place, *args)))
    except Exception as error:  # the __reduce__ of another type may raise anything
        problem, what = error, "a tuple of what can be pickled"
    try:
        pickle.dumps(fn)
    except Exception as error:
        argument, problem, what = "fn", error, "a function that is defined at the top level of a module"
    raise InvalidArgument(f"{argument}: expected {what}, got {_describe(problem)}") from problem


class _Worker:
    """The parent's end of one rank: its process and the link to it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.link, self._theirs = socket.socketpair()
        self.link.setblocking(False)
        self.process = _SPAWN.Process(target=_serve, args=(self._theirs,), name=f"flashmoe rank {rank}", daemon=True)

    def start(self) -> None:
        """Start the process."""
        try:
            with _interrupts_held():
                self.process.start()
        finally:
            self._theirs.close()

    def read(self, answer: memoryview) -> tuple[Any, BaseException | None]:
        """The (result, error) of an answer."""
        try:
            result, error, text = pickle.loads(answer)
        except Exception as problem:
            return None, FlashMoEError(f"its answer cannot be read: {_describe(problem)}")
        if error is not None:
            error.__cause__ = RemoteTraceback(text)
        return result, error

    def ending(self) -> str | None:
        """How the process ended; None while it lives."""
        if (status := self.process.exitcode) is not None:
            return _describe_exit(status)
        try:
            os.kill(self.process.pid, 0)
        except ProcessLookupError:  # a handler of SIGCHLD that takes every child has reaped it
            return "its process ended before it answered"
        return None

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger keeps the process from running."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except (OSError, IndexError):
            return False

    def close(self) -> None:
        """Free what the parent holds of a process that was killed."""
        self.link.close()
        self._theirs.close()
        with suppress(ValueError):  # it was not reaped, or never started
            self.process.close()


def _kill(workers: Sequence[_Worker]) -> None:
    """Kill and reap the processes that live, stopped or not. Their links are closed: nothing that they have sent is
    taken for an answer to a later call."""
    started = [worker for worker in workers if worker.process.pid is not None]
    for worker in started:
        worker.process.kill()  # all are killed first, so that no rank sees another go and reports it
    deadline = time.monotonic() + _REAP_SECONDS
    for worker in started:
        worker.link.close()
        while worker.ending() is None:  # not join(): it waits for the end of a pipe that forks may hold
            if time.monotonic() > deadline:
                _log.warning("rank %d: process %d was killed, but does not end", worker.rank, worker.process.pid)
                break
            time.sleep(0.001)


def _collect(workers: Sequence[_Worker], call: _Call) -> tuple[dict[int, Any], dict[int, BaseException]]:
    """Send the messages and wait for each worker's answer: (results, errors), both by rank. Kills workers that are
    overdue."""
    started, deadline = time.monotonic(), call.deadline
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    waiting = {
        worker: link.Exchange(worker.link, message) for worker, message in zip(workers, call.messages, strict=True)
    }
    while waiting:
        for worker, exchange in list(waiting.items()):
            ending = worker.ending()  # asked first: the link then has all that an ended process sent
            if ending is None:
                exchange.advance()
            else:
                exchange.drain()
            if exchange.answer is not None:
                result, error = worker.read(exchange.answer)
            elif ending is not None:
                result, error = None, RankKilled(ending)
            else:
                continue
            del waiting[worker]
            if error is None:
                results[worker.rank] = result
            else:
                errors[worker.rank] = error
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        left = deadline - time.monotonic()
        if left <= 0:
            break
        if waiting:
            link.Exchange.wait(waiting.values(), min(left, _LOOK_SECONDS))
    elapsed = time.monotonic() - started
    for worker, exchange in waiting.items():
        stopped = ", which was stopped," if worker.is_stopped() else ""
        where = exchange.where(call.what)
        errors[worker.rank] = RankOverdue(f"no answer after {elapsed:.1f} s, {where}; its process{stopped} was killed")
    _kill(list(waiting))
    return results, errors


def _serve(to_parent: socket.socket) -> None:
    """What a worker's process runs: takes one call after the other and answers it, until the link closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole process group; the parent ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see _interrupts_held
    to_parent.set_inheritable(False)  # no program that a rank starts inherits it
    groups: list[str] = []  # the group name of the call that is under way
    threading.Thread(target=_follow_parent, args=(groups,), daemon=True).start()
    while (message := link.receive(to_parent)) is not None:
        link.answer(to_parent, _answer(message, groups))


def _answer(message: bytes, groups: list[str]) -> bytes:
    """Run one pickled (fn, args), and put its group's name into `groups`. Returns the pickled (result, error, traceback
    text)."""
    try:
        fn, args = pickle.loads(message)
        groups[:] = [args[2]]
        return pickle.dumps((fn(*args), None, ""))
    except BaseException as error:  # SystemExit too: the parent waits for an answer
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

    prctl(PR_SET_PDEATHSIG) would not do, because it also ends this process when only the parent's thread that started
    it ends.
    """
    wait([multiprocessing.parent_process().sentinel])
    try:
        for name in groups:
            _remove_segments(name)
    finally:
        os._exit(1)


def _remove_segments(name: str) -> None:
    """Free the shared memory that ranks have left if they died while they made the group `name`."""
    for pattern in (f"flashmoe-{name}-*", f".flashmoe-{name}-*"):  # final and temporary names (csrc/host/segment.cpp)
        for segment in Path("/dev/shm").glob(pattern):
            with suppress(FileNotFoundError):
                if segment.lstat().st_uid == os.geteuid():  # every user may make files there
                    segment.unlink()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold SIGINT back from this thread, and from a process that is started within the block. That process inherits the
    mask, and ignores SIGINT once it is ready. Otherwise Ctrl-C, which goes to the whole process group, would make a
    rank print a traceback if it is still importing."""
    resource_tracker.ensure_running()  # otherwise the block may start the tracker, and that would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started within the block. They must be set before the process
    starts, because a BLAS reads them when it is loaded."""
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
    """`Type: message`; only the message for the errors of this module, because it says everything."""
    if isinstance(error, RankKilled | RankOverdue):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _describe_exit(status: int) -> str:
    """What a process's exit status means."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"its process exited with status {status} before it answered"


def _name_ranks(who: list[int], ranks: int) -> str:
    """`rank 2`, `ranks 0, 3` or `all 4 ranks`."""
    if len(who) == 1:
        return f"rank {who[0]}"
    return f"all {ranks} ranks" if len(who) == ranks else f"ranks {', '.join(map(str, who))}"
