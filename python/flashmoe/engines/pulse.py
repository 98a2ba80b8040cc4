"""Signs of life from a rank whose host works within a call, so that other ranks' waits for the rank do not expire."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ..errors import FlashMoEError

_PER_TIMEOUT = 8
"""How often `beat` is called in a timeout. A wait reads the peers' progress twice, half a timeout apart. Between the
two readings there must be some calls of `beat`, even if the host is busy."""


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
