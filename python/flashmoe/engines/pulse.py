"""What a rank of a group says while its host is at work inside a call, so that the others wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ..errors import FlashMoEError

_PER_TIMEOUT = 8
"""A wait compares two looks at its peers, half a timeout apart: each stretch has some beats, also of a busy host."""


@contextlib.contextmanager
def beating(beat: Callable[[], None], timeout_ns: int) -> Iterator[None]:
    """While the block runs a thread calls `beat` several times in a timeout; 0, which is none: never."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(timeout_ns / _PER_TIMEOUT * 1e-9):
            try:
                beat()
            except FlashMoEError:  # the context is closed meanwhile, or the device is lost, as the call will say
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
