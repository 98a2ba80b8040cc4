"""A sign of life from a rank of a group whose host is at work inside a call, so that the other ranks wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ..errors import FlashMoEError

_PER_TIMEOUT = 8
"""A wait compares two looks at its peers, half a timeout apart. There must be some beats between them, even from a busy
host."""


@contextlib.contextmanager
def beating(beat: Callable[[], None], timeout_ns: int) -> Iterator[None]:
    """While the ``with`` block runs, a thread calls `beat` several times in each timeout. With `timeout_ns` 0, which
    means that waits have no timeout, nobody calls `beat`."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(timeout_ns / _PER_TIMEOUT * 1e-9):
            try:
                beat()
            except FlashMoEError:  # the context was closed, or the device is lost: the call will say so
                return

    if timeout_ns == 0:
        yield
        return
    thread = threading.Thread(target=go_on, name="flashmoe beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
