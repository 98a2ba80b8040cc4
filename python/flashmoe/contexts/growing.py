"""`GrowingContext`: a context for layers of one shape whose callers do not know how many tokens will come."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ..errors import FlashMoEError, GroupError
from ..spec import MAX_CUDA_TOKENS, MAX_TOKENS
from .context import Context, contexts

Result = TypeVar("Result")

_FEWEST_TOKENS = 64  # enough for a first call that decodes; the memory for them is small beside a layer's weights


class Shape(NamedTuple):
    """The arguments of a context that a growing context keeps: all sizes and types except `max_tokens`."""

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
    """The `max_tokens` of a context that is made for a call of `tokens` tokens on that device. It is rounded up, so
    that the context also serves somewhat larger calls."""
    most = MAX_TOKENS if device is None else MAX_CUDA_TOKENS
    if tokens > most:
        return tokens  # the context raises the error
    return min(most, max(_FEWEST_TOKENS, 1 << (tokens - 1).bit_length()))


class GrowingContext:
    """A rank alone, whose context has memory for the most tokens that any call has had so far.

    Its number (see `flashmoe.contexts.context.context_id`) depends on the shape alone. The number stays the same while
    one `Context` replaces another, and in every process, so compiled code may hold it, also on disk. T is rounded up to
    a power of two, so a prompt that gets longer call by call makes the memory grow only a few times.

    A context that is replaced is not closed, because another thread may be within one of its calls: this object only
    drops its reference. A context with a call in a captured CUDA graph is kept, because replays write to its memory.

    A call that fails breaks its context. The caller of that call gets the error. The next call gets a new context,
    since a rank that is alone has to agree with nobody. A forked process has none of the context's threads, so its
    first call gets a new context too.
    """

    _kind: tuple[Any, ...] = ()
    """What a subclass puts before the shape when its number is computed, so that classes have different numbers."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._context: Context | None = None
        self._captured: list[Context] = []
        self._lock = threading.Lock()
        self.number = _number_of(*self._kind, *shape)
        contexts[self.number] = self

    def with_room_for(self, tokens: int) -> Context:
        """A context with room for T = `tokens`. Raises what `Context` raises. Raises `FlashMoEError` if a CUDA graph is
        being captured and a context would have to be made."""
        capturing = self.shape.device is not None and _captures()
        with self._lock:
            if self._context is None or tokens > self._context.limits["max_tokens"]:
                if capturing:
                    raise FlashMoEError(
                        f"context: expected a call of at least T={tokens} tokens before one is captured, got none; "
                        "memory cannot be taken during a capture"
                    )
                self._context = None  # before the new one is made: memory may not hold both
                room = rounded_tokens(tokens, self.shape.device)
                self._context = Context(max_tokens=room, **self.shape._asdict())
            if capturing and self._context not in self._captured:
                self._captured.append(self._context)
            return self._context

    def use(self, tokens: int, call: Callable[[Context], Result]) -> Result:
        """What `call` returns for a context with room for T tokens. If that context was already broken, by a call that
        has failed meanwhile in this thread or another, `call` is made once more with a new context. Raises what `call`
        and `with_room_for` raise."""
        context = self.with_room_for(tokens)
        try:
            return call(context)
        except GroupError as error:
            if type(error) is not GroupError:  # PeerTimeout: this call's own, or one that no caller has got yet
                raise
            with self._lock:
                if self._context is context:
                    self._context = None
        return call(self.with_room_for(tokens))

    def let_go(self) -> None:
        """Frees the context's memory, unless a CUDA graph writes to it; the next call makes a new context. If another
        thread is within a call, the memory is freed when that call is over."""
        with self._lock:
            self._context = None

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowingContext:
        """The same object, because copies of a model share it."""
        return self

    def __reduce__(self) -> Any:
        return growing_context, (self.shape,)


def _captures() -> bool:
    """Whether PyTorch's current stream is being captured into a CUDA graph."""
    import torch

    return torch.cuda.is_current_stream_capturing()


def _number_of(*what: Any) -> int:
    """A number from 2^62 to 2^63, computed from `what`. The numbers that `next_number` gives count from 1, and never
    become so large."""
    digest = hashlib.sha256(repr(what).encode()).digest()
    return 1 << 62 | int.from_bytes(digest[:8]) >> 2


_shared: weakref.WeakValueDictionary[Shape, GrowingContext] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def growing_context(shape: Shape) -> GrowingContext:
    """The growing context of that shape, as long as somebody holds it; otherwise a new one."""
    with _sharing:
        found = _shared.get(shape)
        if found is None:
            found = _shared[shape] = GrowingContext(shape)
        return found


def _begin_anew() -> None:
    """Is called in a forked process: makes new locks, because another thread may have held the old ones, and drops the
    contexts, because they are the parent's."""
    global _sharing
    _sharing = threading.Lock()
    for each in list(contexts.values()):
        if isinstance(each, GrowingContext):
            each._lock, each._context, each._captured = threading.Lock(), None, []


os.register_at_fork(after_in_child=_begin_anew)
