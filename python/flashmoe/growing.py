"""`GrowingContext`: a context for layers of one shape whose callers do not know how many tokens will come."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from .context import Context, contexts
from .errors import FlashMoEError, GroupError
from .spec import MAX_CUDA_TOKENS, MAX_TOKENS

Result = TypeVar("Result")

_FEWEST_TOKENS = 64  # what a first call that decodes leaves room for; the memory is small beside any weights


class Shape(NamedTuple):
    """What a context is made for but for T, by the names of its arguments."""

    device: int | None
    """Ordinal of the CUDA device; None: the CPU engine."""
    dtype: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    shared_intermediate: int = 0
    weight_dtype: str | None = None


def rounded_tokens(tokens: int, device: int | None) -> int:
    """T of a context that is made for a call of T tokens on that device, so that it lasts for some larger ones."""
    most = MAX_TOKENS if device is None else MAX_CUDA_TOKENS
    if tokens > most:
        return tokens  # the context says so
    return min(most, max(_FEWEST_TOKENS, 1 << (tokens - 1).bit_length()))


class GrowingContext:
    """One rank alone, with memory for as many tokens as any call has had so far.

    Its number (see `flashmoe.context.context_id`) is the shape's: the same while contexts come and go, and in every
    process, so that compiled code may hold it, also on disk. T is rounded up to a power of two: a prompt that gets
    longer call by call grows it a few times.

    Contexts are not closed but let go of: another thread may be within a call of the one that is replaced. One that a
    CUDA graph has captured is kept, because its replays write to that context's memory.

    A call that fails breaks its context. Who made that call is told; the next one has another context, as a rank alone
    has nobody to agree with on one.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._context: Context | None = None
        self._captured: list[Context] = []
        self._lock = threading.Lock()
        self.number = _number_of(shape)
        contexts[self.number] = self

    def with_room_for(self, tokens: int) -> Context:
        """The context for a call of T tokens. Raises what `Context` does, and `FlashMoEError` if there is none yet
        while a CUDA graph is captured."""
        capturing = self.shape.device is not None and torch.cuda.is_current_stream_capturing()
        with self._lock:
            if self._context is None or tokens > self._context.limits["max_tokens"]:
                if capturing:
                    raise FlashMoEError(
                        f"context: expected a call of at least T={tokens} tokens before one is captured, got none; "
                        "memory cannot be taken during a capture"
                    )
                self._context = None  # first, so that both need not fit into memory
                room = rounded_tokens(tokens, self.shape.device)
                self._context = Context(max_tokens=room, **self.shape._asdict())
            if capturing and self._context not in self._captured:
                self._captured.append(self._context)
            return self._context

    def use(self, tokens: int, call: Callable[[Context], Result]) -> Result:
        """What `call` returns for the context for its T tokens; made once more where that context was broken before, by
        a call that has failed meanwhile in this thread or another. Raises what `call` and `with_room_for` do."""
        context = self.with_room_for(tokens)
        try:
            return call(context)
        except GroupError as error:
            if type(error) is not GroupError:  # a timeout: it was this call's, or nobody has heard of it yet
                raise
            with self._lock:
                if self._context is context:
                    self._context = None
        return call(self.with_room_for(tokens))

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowingContext:
        """The same: copies of a model share it."""
        return self

    def __reduce__(self) -> Any:
        return growing_context, (self.shape,)


def _number_of(shape: Shape) -> int:
    """From 2^62 to 2^63: those of contexts, which are counted from 1, are never as large."""
    digest = hashlib.sha256(repr(tuple(shape)).encode()).digest()
    return 1 << 62 | int.from_bytes(digest[:8]) >> 2


_shared: weakref.WeakValueDictionary[Shape, GrowingContext] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def growing_context(shape: Shape) -> GrowingContext:
    """The one of that shape, for as long as somebody holds it; else a new one."""
    with _sharing:
        found = _shared.get(shape)
        if found is None:
            found = _shared[shape] = GrowingContext(shape)
        return found
