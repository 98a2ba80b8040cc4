"""How daemon threads that are in a call are stopped when Python ends.

Once Python has finalised the interpreter, it ends each thread that asks for the interpreter's lock, by unwinding the
thread's stack. If C++ frames on the stack do not allow this, the process aborts. So the calls are ended before Python
finalises the interpreter, and their threads then wait for the end of the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref

from .. import _ffi

_PATIENCE = 5.0
"""Seconds that `_end_calls` waits for calls to end. A call ends after its current task, or at the next check of a
wait."""

_inside: set[int] = set()
"""Identifiers of the threads that are in a call. No lock guards the set, because a fork might copy a lock while it is
held; the interpreter's lock is enough to add and to remove an identifier."""
_ended_by: int | None = None
"""The thread that is ending Python; None: Python is not ending. Functions that this thread runs at the end may still
make calls."""

os.register_at_fork(after_in_child=_inside.clear)


class Call:
    """``with Call():`` encloses a call. Once Python is ending, a thread that enters or leaves the block waits for ever,
    unless it is the thread that ends Python."""

    __slots__ = ()

    def __enter__(self) -> None:
        _inside.add(threading.get_ident())
        _wait_if_ended()

    def __exit__(self, *exc: object) -> None:
        _wait_if_ended()
        _inside.discard(threading.get_ident())


def _wait_if_ended() -> None:
    if _ended_by is None or _ended_by == threading.get_ident():
        return
    _inside.discard(threading.get_ident())
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


# The first `weakref.finalize` of a process registers with `atexit` the function that closes all contexts when Python
# ends. It is made here, before `_end_calls` is registered, because what is registered first runs last: contexts are
# closed after calls have ended.
weakref.finalize(Call, int)


@atexit.register
def _end_calls() -> None:
    global _ended_by
    _ended_by = threading.get_ident()
    if not _inside - {_ended_by}:
        return
    _ffi.library().end_calls()
    end = time.monotonic() + _PATIENCE
    while _inside - {_ended_by} and time.monotonic() < end:
        time.sleep(0.001)
