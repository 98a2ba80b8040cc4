"""Holds Ctrl-C back while modules are imported, because an import that Ctrl-C interrupts stays half done: NumPy, for
example, cannot be imported again in that process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred() -> Iterator[None]:
    """Python's handler of SIGINT runs after the block instead of within it. In a thread that does not run the handler,
    nothing changes."""
    before, heard = signal.getsignal(signal.SIGINT), []
    try:
        if callable(before):  # otherwise the process ignores SIGINT or ends by it, or code outside Python handles it
            signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    except ValueError:  # raised in any thread but the main one, which runs handlers
        before = None
    try:
        yield
    finally:
        if callable(before):
            signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)
