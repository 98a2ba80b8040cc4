"""What a context asks of its engine."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..arguments import Options, Tensors
from ..errors import FlashMoEError, InvalidArgument
from ..limits import Room
from ..meeting import Meeting
from ..report import CallReport
from ..trace import CallTrace


@dataclass(frozen=True)
class Membership:
    """Who a rank is, and how long it waits for the others."""

    rank: int
    name: str
    """The group's; empty where the rank is alone."""
    timeout_ns: int
    """Nanoseconds without progress after which a wait gives up; 0: never."""
    meet: Callable[[], Meeting] | None = None
    """Begins a meeting with the other ranks, which may be of other machines; None: they meet in shared memory."""


class Gradients(NamedTuple):
    """What a backward pass reads and writes, by the names of `Tensors`."""

    given: Mapping[str, Any]
    """The call's tensors; ``y``, the gradient of its result; perhaps ``router_logits``, that of the logits. These two
    are contiguous."""
    wanted: Mapping[str, Any]
    """Where gradients are written."""
    accumulates: bool
    """Those of weights and biases are added to what is there, in float32."""


class Engine(ABC):
    """A rank of a group as an engine has it: memory of its own, and the calls that use it."""

    room: Room
    """What calls may be."""
    processors: int
    """What executes tasks: threads or thread blocks."""
    heap_bytes: int
    """Bytes of this rank's symmetric heap."""
    workspace_bytes: int
    """Bytes of this rank's private workspace."""
    device: int | None = None
    """Ordinal of the CUDA device, if there is one."""

    def __init__(self, owner: Callable[[], int], close: Callable[[int], None]) -> None:
        """`owner` gives the library's number of what `close` frees, and frees that itself when it is dropped: an
        interrupt may come before the finalizer is made, or while it runs."""
        self._owner = owner
        self._handle = owner()
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _close, close, self._handle, self._process)
        self._recorded: list[CallTrace] | None = None  # while calls are recorded

    @abstractmethod
    def call(self, tensors: Tensors, options: Options, trace: bool) -> Any:
        """A call of `flashmoe.moe`: its result [T, H], of x's library and type."""

    @abstractmethod
    def call_and_keep(self, tensors: Tensors, options: Options) -> tuple[Any, Any, Any]:
        """The same, and what its gradients need: a tensor of PyTorch. On the CPU engine it is two int64, whose memory
        owns the rest; on the CUDA engine all of it, bytes on the device. And how many rows these are of, int64 on the
        host, where that is not known from the call: among several ranks on the CUDA engine; else empty."""

    @abstractmethod
    def backward(self, kept: Any, counted: Any, options: Options, gradients: Gradients) -> None:
        """The gradients of the call of these options that left `kept` and `counted`."""

    @abstractmethod
    def refuse(self, reason: str) -> None:
        """In place of a call that this rank cannot begin, where there are several: tells the others, so that the call
        is over on all, or does nothing if the engine cannot. Raises `PeerTimeout` where an earlier call was refused
        that not all ranks have come to in time."""

    @abstractmethod
    def last_call(self) -> CallReport | None:
        """See `flashmoe.Context.last_call`."""

    @abstractmethod
    def synchronize(self) -> None:
        """See `flashmoe.Context.synchronize`."""

    def record(self, call: Callable[[], Any]) -> list[CallTrace]:
        """See `flashmoe.Context.trace`."""
        if self._recorded is not None:
            raise InvalidArgument("trace: expected calls of flashmoe.moe, got another trace of the same context")
        self._recorded = recorded = []
        try:
            call()
            self._read_recorded()
        finally:
            self._recorded = None
        return recorded

    @abstractmethod
    def _read_recorded(self) -> None:
        """Adds the last call to those recorded, if it has not been so."""

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Frees what the engine has. Idempotent."""
        self._finalizer()

    def checked_handle(self) -> int:
        """The library's number of this rank; raises `FlashMoEError` where it cannot be used."""
        if os.getpid() != self._process:
            raise FlashMoEError(
                f"context: expected to be used in process {self._process}, which made it, got process {os.getpid()}, "
                "which has none of its threads"
            )
        if self.closed:
            raise FlashMoEError("context: expected an open one, got one that is closed")
        return self._handle


def _close(close: Callable[[int], None], handle: int, process: int) -> None:
    """Closes a rank, but not what a fork has copied of it: its threads are not there, and would be waited for."""
    if os.getpid() == process:
        close(handle)
