"""The contexts for calls that are given no context: those of the layers that were called last are kept."""

from __future__ import annotations

import os
import threading

from .context import Context
from .growing import GrowingContext, Shape

MOST = 8
"""The most contexts that are kept. The number is small because each has memory for its largest call. It is enough
because a model has layers of one shape or two."""

_known: dict[Shape, KeptContext] = {}
"""All kept contexts that have been asked for. None is ever removed, because a backward pass or compiled code may still
have the number of one that has not been called for long. Only their memory is freed."""
_recent: dict[KeptContext, None] = {}
"""The kept contexts that have memory, the least recently used first; at most `MOST`."""
_lock = threading.Lock()


class KeptContext(GrowingContext):
    """A growing context whose memory is kept until calls of `MOST` other shapes have come since its last call."""

    _kind = ("kept",)

    def with_room_for(self, tokens: int) -> Context:
        with _lock:
            _recent.pop(self, None)
            if len(_recent) == MOST:  # before a new context is made: memory may not hold one more
                oldest = next(iter(_recent))
                del _recent[oldest]
                oldest.let_go()
            _recent[self] = None
            return super().with_room_for(tokens)


def known(shape: Shape) -> KeptContext | None:
    """The kept context of that shape, if it has been asked for before."""
    return _known.get(shape)


def kept_context(shape: Shape) -> KeptContext:
    """The kept context of that shape. It takes memory at its first call, not here."""
    with _lock:
        found = _known.get(shape)
        if found is None:
            found = _known[shape] = KeptContext(shape)
        return found


def release() -> None:
    """Closes the contexts of calls that were given none, and frees their memory. The next such call makes a new one.

    A context in which another thread computes is closed when that call is over. A context in whose memory a captured
    CUDA graph works is not closed.

    Examples
    --------
    >>> import flashmoe
    >>> flashmoe.release()
    """
    with _lock:
        for each in _recent:
            each.let_go()
        _recent.clear()


def _begin_anew() -> None:
    """Is called in a forked process, whose kept contexts have no memory: see `flashmoe.contexts.growing`."""
    global _lock
    _lock = threading.Lock()
    _recent.clear()


os.register_at_fork(after_in_child=_begin_anew)
