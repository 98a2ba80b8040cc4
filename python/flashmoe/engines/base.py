"""The interface of the engines, as a context uses it."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..contexts.limits import Room
from ..errors import FlashMoEError, InvalidArgument
from ..report import CallReport
from ..spec import Options
from ..spec.tensors import Tensors
from ..trace import CallTrace

if TYPE_CHECKING:
    from ..groups.meeting import Meeting


@dataclass(frozen=True)
class Membership:
    """Who a rank is, and how long it waits for the others."""

    rank: int
    name: str
    """The group's name; empty if the rank is alone."""
    timeout_ns: int
    """Nanoseconds without progress after which a wait gives up; 0: never."""
    meet: Callable[[], Meeting] | None = None
    """Begins a meeting with the other ranks, which may be on other machines; None: the ranks meet in shared memory."""


class Gradients(NamedTuple):
    """What a backward pass reads and writes, by the names of `Tensors`."""

    given: Mapping[str, Any]
    """The call's tensors; ``y``, the gradient of its result; and perhaps ``router_logits``, the gradient of the logits.
    These two gradients are contiguous."""
    wanted: Mapping[str, Any]
    """Where gradients are written."""
    accumulates: bool
    """Whether gradients of weights and biases are added to the contents of `wanted`, in float32, or replace them."""


class Engine(ABC):
    """A rank of a group, as an engine sees it: its memory, and the calls that use this memory."""

    room: Room
    """The bounds for calls."""
    processors: int
    """What executes tasks: threads or thread blocks."""
    heap_bytes: int
    """Bytes of this rank's symmetric heap."""
    workspace_bytes: int
    """Bytes of this rank's private workspace."""
    device: int | None = None
    """Ordinal of the CUDA device, if there is one."""

    def __init__(self, owner: Callable[[], int], close: Callable[[int], None]) -> None:
        """`owner` gives the library's number of this rank, which `close` frees. `owner` also frees the rank itself when
        it is dropped, because an interrupt may come before the finalizer is made, or while the finalizer runs."""
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
        """As `call`, but also returns what the gradients need, and numbers of rows.

        What the gradients need is a tensor of PyTorch. On the CUDA engine, the tensor contains all of it, as bytes on
        the device. On the CPU engine, the tensor is two int64, and owns an object of the library that contains it. The
        third result is a tensor of int64 on the host. Among several ranks on the CUDA engine, it has the numbers of
        rows, because these do not follow from the call's tensors. In all other cases it is empty.
        """

    @abstractmethod
    def backward(self, kept: Any, counted: Any, options: Options, gradients: Gradients) -> None:
        """Computes the gradients of the call with these options that left `kept` and `counted`."""

    @abstractmethod
    def refuse(self, reason: str) -> None:
        """Is called instead of a call that this rank cannot begin, if there are several ranks. Tells the other ranks,
        so that the call is over on all of them; does nothing if the engine cannot do that. Raises `PeerTimeout` if some
        rank does not leave, in time, an earlier call that this rank has refused."""

    @abstractmethod
    def last_call(self) -> CallReport | None:
        """See `flashmoe.Context.last_call`."""

    @abstractmethod
    def synchronize(self) -> None:
        """See `flashmoe.Context.synchronize`."""

    def record(self, call: Callable[[], Any]) -> list[CallTrace]:
        """See `flashmoe.Context.trace`."""
        if self._recorded is not None:
            raise InvalidArgument("trace: expected one trace of a context at a time, got a second one within the first")
        self._recorded = recorded = []
        try:
            call()
            self._read_recorded()
        finally:
            self._recorded = None
        return recorded

    @abstractmethod
    def _read_recorded(self) -> None:
        """Adds the trace of the last call to the recorded traces, unless it has been added already."""

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Frees what the engine holds. Idempotent."""
        self._finalizer()

    def checked_handle(self) -> int:
        """The library's number of this rank. Raises `FlashMoEError` if the rank cannot be used."""
        if os.getpid() != self._process:
            raise FlashMoEError(
                f"context: expected to be used in process {self._process}, which made it, got process {os.getpid()}, "
                "which has none of its threads"
            )
        if self.closed:
            raise FlashMoEError("context: expected an open one, got one that is closed")
        return self._handle


def _close(close: Callable[[int], None], handle: int, process: int) -> None:
    """Closes a rank, but only in the process that made it: a forked copy has no threads, and `close` would wait for
    them."""
    if os.getpid() == process:
        close(handle)
