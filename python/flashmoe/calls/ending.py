"""How daemon threads that are in a call are stopped when Python ends.

After the interpreter has gone, a thread that asks for its lock is ended by unwinding the thread's stack. C++ frames
that do not allow this abort the process. So calls are ended before that, and their threads then wait for the end of the
process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref

from .. import _ffi

_PATIENCE = 5.0
"""Seconds for calls to end: a call ends after one task, or after one check of a wait."""

_inside: set[int] = set()
"""Threads that are in a call. To add a thread takes only the interpreter's lock: a fork might copy any other lock while
held."""
_ended_by: int | None = None
"""The thread that ends Python, once it does. What it runs at the end may still make calls."""

os.register_at_fork(after_in_child=_inside.clear)


class Call:
    """The work of a thread within ``with Call():`` is over, or goes no further, when Python ends."""

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


# The first `weakref.finalize` of a process registers what closes all contexts at the end. It is made here, before the
# function below is registered, because what is registered first runs last.
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
