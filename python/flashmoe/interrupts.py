"""Ctrl-C while modules are imported. What it interrupts there stays half done: neither NumPy nor PyTorch can then be
imported again in that process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred() -> Iterator[None]:
    """Python's handler of SIGINT runs behind the block rather than within. Nothing changes where it would not run in
    this thread."""
    before, heard = signal.getsignal(signal.SIGINT), []
    try:
        if callable(before):  # else the process ignores it or ends by it, or another program's code has it
            signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    except ValueError:  # in another thread than the main one, which runs handlers
        before = None
    try:
        yield
    finally:
        if callable(before):
            signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)
