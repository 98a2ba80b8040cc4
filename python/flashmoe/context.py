"""`Context`: this process's membership in a group of ranks, and the memory that their calls share."""

from __future__ import annotations

import itertools
import logging
import math
import operator
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import _ffi, profiles
from . import placement as placements
from .errors import FlashMoEError, InvalidArgument
from .jit import nvshmem_package
from .report import CallReport
from .tensors import DTYPES

ENGINES = ("cpu", "cuda")
RETURN_MODES = ("direct", "reduced", "auto")
TRANSPORTS = ("auto", "rdma")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# What the C++ types hold: tokens 20 bits of a signal, tasks' columns 24 bits, an entry's k 16 bits.
MAX_TOKENS = 2**20 - 1
MAX_RANKS = 1024
MAX_EXPERTS = 8192
MAX_WIDTH = 2**20  # H and I
# What the CUDA kernel's shared memory holds.
MAX_CUDA_TOKENS = 65536
MAX_CUDA_EXPERTS = 1024
MAX_CUDA_TOP_K = 32
MAX_CUDA_RANKS = 32


MAX_SECONDS = 1e9  # nanoseconds in 63 bits

contexts: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()
"""Those that live, by `context_id`."""
_numbers = itertools.count(1)


def context_id(ctx: Context) -> int:
    """The number that stands for `ctx` in calls of ``torch.ops.flashmoe.moe``: always the same, and never another's.

    It does not keep the context alive; calls with the number of a context that is gone raise `FlashMoEError`.
    """
    if not isinstance(ctx, Context):
        raise InvalidArgument(f"ctx: expected a flashmoe.Context, got {type(ctx).__name__}")
    return ctx._number


def bounded(name: str, value: Any, low: int, high: int, symbol: str = "") -> int:
    """`value`, an integer of any type, as an int in [low, high]; raises `InvalidArgument`. `symbol`: what `high` is."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high or isinstance(value, bool):
        raise InvalidArgument(f"{name}: expected an integer in [{low}, {symbol}{high}], got {value!r}")
    return number


def make_limits(
    *,
    engine: str,
    ranks: int,
    max_tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    dtype: str,
    placement: Sequence[int] | None,
    return_mode: str,
    processors: int | None,
    capacity_factor: float | None,
    transport: str = "auto",
) -> dict[str, int]:
    """The C++ ``Limits`` (heap_layout.h) that a context with these arguments asks its engine for; see `Context`.

    Raises `InvalidArgument` for what no context of the engine can have.
    """
    cuda = engine == "cuda"
    ranks = bounded("ranks", ranks, 1, MAX_RANKS)
    if cuda and ranks > MAX_CUDA_RANKS:
        raise InvalidArgument(f"ranks: expected at most {MAX_CUDA_RANKS} with the CUDA engine, got {ranks}")
    experts = bounded("experts", experts, 1, MAX_CUDA_EXPERTS if cuda else MAX_EXPERTS)
    top_k = bounded("top_k", top_k, 1, min(experts, MAX_CUDA_TOP_K) if cuda else experts)
    if dtype not in DTYPES:
        raise InvalidArgument(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    intermediate = bounded("intermediate", intermediate, 1, MAX_WIDTH)
    rdma = checked_transport(transport, engine, ranks) == "rdma"
    return_mode = engine_return_mode(engine, return_mode, ranks, top_k, intermediate, rdma)
    slots = {"direct": top_k, "reduced": ranks, "auto": max(top_k, ranks)}
    max_tokens = bounded("max_tokens", max_tokens, 1, MAX_CUDA_TOKENS if cuda else MAX_TOKENS)
    factor = checked_capacity_factor(capacity_factor)
    if processors is None:
        processors = 0 if cuda else max(1, (os.cpu_count() or 1) // ranks)
    else:
        processors = bounded("processors", processors, 1, 1024)
    return {
        "ranks": ranks,
        "max_tokens": max_tokens,
        "hidden": bounded("hidden", hidden, 1, MAX_WIDTH),
        "intermediate": intermediate,
        "experts": experts,
        "max_local_experts": max(1, placements.most_local(placements.checked(placement, experts, ranks), ranks)),
        "top_k": top_k,
        "elem_bytes": ELEMENT_BYTES[dtype],
        "return_slots": slots[return_mode],
        "capacity": _ffi.library().expert_capacity(factor, max_tokens, top_k, experts),
        "staging": int(return_mode != "direct"),
        "rdma": int(rdma),
        "processors": processors,
    }


def checked_transport(transport: str, engine: str, ranks: int) -> str:
    """`transport`, once it is one that such a context may ask for; raises `InvalidArgument`."""
    if transport not in TRANSPORTS:
        raise InvalidArgument(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
    if transport == "rdma" and engine != "cuda":
        raise InvalidArgument("transport: expected 'auto' with the CPU engine, got 'rdma'")
    if transport == "rdma" and ranks == 1:
        raise InvalidArgument("transport: expected 'auto' with one GPU, got 'rdma'")
    return transport


def checked_capacity_factor(factor: Any, most: float | None = None) -> float:
    """`factor` as a float, 0 for None. With `most`, that of a context, it must be a number no larger.

    Raises `InvalidArgument`.
    """
    if factor is None and most is None:
        return 0.0
    try:
        value = float(factor)
    except (TypeError, ValueError):
        value = -1.0
    if not 0.0 < value < math.inf or (most is not None and value > most):
        expected = "> 0 or None" if most is None else f"in (0, {most:g}], as the context has memory for"
        raise InvalidArgument(f"capacity_factor: expected a number {expected}, got {factor!r}")
    return value


def engine_return_mode(
    engine: str, return_mode: str, ranks: int, top_k: int, intermediate: int, rdma: bool = False
) -> str:
    """The return mode that a context of the engine has, of those that its caller allows. Raises `InvalidArgument`."""
    if return_mode not in RETURN_MODES:
        raise InvalidArgument(f"return_mode: expected one of {', '.join(RETURN_MODES)}, got {return_mode!r}")
    if engine == "cpu":
        return return_mode
    if ranks == 1 and return_mode == "reduced":
        raise InvalidArgument("return_mode: expected 'direct' or 'auto' with one GPU, got 'reduced'")
    if rdma and return_mode == "direct":
        raise InvalidArgument("return_mode: expected 'reduced' or 'auto' with transport 'rdma', got 'direct'")
    if return_mode == "auto":
        return "reduced" if rdma or _ffi.library().cuda_reduces(ranks, top_k, intermediate) else "direct"
    return return_mode


@dataclass(frozen=True)
class Knob:
    """A number that a profile may set."""

    most: int
    """The least is 1."""
    tried: tuple[int, ...]
    """By `flashmoe tune`, besides what is built in."""
    alone: bool = True
    """Whether it means something to a rank that has no peers."""


PROFILE = {
    "gemm1_lag": Knob(2**31, (66, 132, 264, 528, 1056, 2**31)),
    "raster": Knob(32, (2, 4, 8, 16, 32)),  # kMaxRaster in order.h
    "window": Knob(2**20, (66, 132, 264, 528, 1056)),
    "gemm1_lists": Knob(2, (1, 2), alone=False),
    "own_first": Knob(2**10, (1, 2, 4), alone=False),
    "senders": Knob(2**10, (8, 16, 24, 32, 48), alone=False),
}
"""What a profile may say, see `Context`."""


def _checked_profile(profile: Mapping[str, int]) -> dict[str, int]:
    """`profile` once its names and values are known to be a policy; raises `InvalidArgument`."""
    if unknown := set(profile) - set(PROFILE):
        raise InvalidArgument(f"profile: expected names among {', '.join(PROFILE)}, got {sorted(unknown)}")
    return {name: bounded(f"profile[{name}]", value, 1, PROFILE[name].most) for name, value in profile.items()}


def _stored_profile(setting: profiles.Setting) -> tuple[dict[str, int], str | None]:
    """What `flashmoe tune` has stored for contexts like this one, and the return mode. Nothing, with a warning, where
    that cannot be used: it is a matter of speed alone."""
    try:
        stored = profiles.lookup(setting)
        mode = stored.pop("return_mode", None)
        if mode is not None:
            engine_return_mode("cuda", mode, setting.ranks, setting.top_k, setting.intermediate)
        return _checked_profile(stored), mode
    except FlashMoEError as error:
        profiles.notice(logging.WARNING, f"profile: what is stored is not used: {error}")
        return {}, None


def nvshmem_library() -> str:
    """NVSHMEM's host library: that of the package nvidia-nvshmem-cu13 (or -cu12), which PyTorch depends on, else the
    name that the loader looks for."""
    name = "libnvshmem_host.so.3"
    return next((str(path) for folder in nvshmem_package() if (path := folder / "lib" / name).is_file()), name)


def _checked_name(name: Any) -> str:
    """`name`, once it can be part of a file's name; raises `InvalidArgument`."""
    try:
        size = len(name.encode())
    except (AttributeError, UnicodeEncodeError):
        size = 0
    if not 1 <= size <= 200 or set(name) & set("/\0"):
        raise InvalidArgument(f"name: expected a group name of 1 to 200 bytes without '/' and NUL, got {name!r}")
    return name


def _close(close: Any, handle: int, process: int) -> None:
    """Closes a context, but not what a fork has copied of it: its threads are not there, and would be waited for."""
    if os.getpid() == process:
        close(handle)


class Context:
    """One rank of a group, and its symmetric heap. The ranks of a group are processes of one machine. With the CUDA
    engine a rank is a GPU of compute capability 9.0 (H100, H200); several have each other's memory mapped, over NVLink
    (else see `transport`), and their heaps are NVSHMEM's. All groups of several GPUs that a process joins must have the
    same ranks.

    The sizes are upper limits: calls may use any smaller T, H, I, E or K, and all layers of a model share one context.

    Parameters
    ----------
    rank, ranks:
        This process's rank and the number of ranks R, at most 1024; CUDA engine: 32.
    name:
        The group's name, the same on every rank and used by no other group of the machine at that time. Required if
        ``ranks > 1``.
    max_tokens:
        Most tokens T of a rank in a call, at most 2**20 - 1; CUDA engine: 65536.
    hidden, intermediate, experts, top_k:
        Largest H, I, E and K: H and I at most 2**20, E at most 8192; CUDA engine: E at most 1024, K at most 32.
    dtype:
        Widest element type of calls: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    placement:
        E ranks: who holds expert 0, 1, ... Default: contiguous shares, as even as possible.
    return_mode:
        ``"direct"``: each expert's row travels home. ``"reduced"``: a rank's rows of one token are summed before they
        travel (COMET, section 3.1). ``"auto"``: whichever sends fewer rows, per call; CUDA engine: the stored one (see
        `profile`), else ``"reduced"`` where direct rows would take more than 1.5 times as long as the GEMMs, and fewer
        than 0.8 times as many would come back, once for all calls. It bounds what calls may use.
    processors:
        What executes tasks. CPU engine: threads; default: this rank's share of the cores. CUDA engine: thread blocks,
        an even number, each of which takes a whole multiprocessor; default: all of them.
    capacity_factor:
        None: calls may be dropless. Else each must have a capacity factor, at most this one, and what holds the rows of
        experts has room for those that such a call keeps: with 1.0, for one rank's number of (token, k) pairs instead
        of all ranks'. A call of fewer experts must keep no more rows of one rank on another than one of all `experts`
        may: it has fewer for more rows each.
    timeout:
        Seconds without progress anywhere in the group after which a wait gives up, also while joining; 0: never.
    engine:
        ``"cpu"`` or ``"cuda"``. Default: ``"cuda"`` if a device is given, else ``"cpu"``.
    device:
        Ordinal of the CUDA device. Default with ``engine="cuda"``: PyTorch's current one.
    profile:
        CUDA engine: the order of tasks, where it is to differ from the built-in one. ``gemm1_lag``: GEMM1 tasks are
        held back until so many GEMM0 tasks are ahead of them, while there are any. ``raster``: tiles of a window of
        tasks. ``window``: tasks published ahead. ``gemm1_lists``: 2, GEMM1 tasks with rows of
        other ranks' tokens go first; 1, all of an expert's go side by side. ``own_first``: of so many of the rank's
        experts one begins with its own rows, the others when those of another rank are here. ``senders``: thread
        blocks that send rows to mapped memory before they compute, as far as there are any that form no tiles. It
        changes no bit of a result, and may differ from rank to rank.
        Default: what ``flashmoe tune`` has stored for this GPU, number of ranks, dtype, H, I, E and K, with the
        number of tokens nearest to `max_tokens` (see ``flashmoe.profiles``); ``{}``: the built-in order, whatever is
        stored.
    transport:
        CUDA engine, several ranks: how rows get to other GPUs. ``"auto"``: they are stored to mapped memory; where some
        rank cannot map another's, all take what follows. ``"rdma"``: by NVSHMEM's puts, mapped or not; returns are then
        ``"reduced"``, and `timeout` must be longer than ranks wait for one another, since whether another rank makes
        progress cannot be seen. Puts to memory that is not mapped take a network that ``NVSHMEM_REMOTE_TRANSPORT``
        names (``"none"`` unless it is set). No network has carried this path yet: tests force it over NVLink. It needs
        NVSHMEM's headers, which its package has.

    Raises
    ------
    InvalidArgument
        A parameter is outside its domain.
    HeapError
        The heap does not fit into shared memory, or into that of the GPU.
    FlashMoEError
        There is no CUDA driver.
    GroupError
        The ranks disagree on the limits, a rank number is taken twice, or another rank did not get its memory.
    PeerTimeout
        A rank did not join in time.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        ranks: int = 1,
        name: str | None = None,
        max_tokens: int,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        dtype: str = "bfloat16",
        placement: Sequence[int] | None = None,
        return_mode: str = "auto",
        processors: int | None = None,
        capacity_factor: float | None = None,
        timeout: float = 30.0,
        engine: str | None = None,
        device: int | None = None,
        profile: Mapping[str, int] | None = None,
        transport: str = "auto",
    ) -> None:
        if engine is None:
            engine = "cpu" if device is None else "cuda"
        if engine not in ENGINES:
            raise InvalidArgument(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
        if engine == "cpu" and device is not None:
            raise InvalidArgument(f"device: expected none with the CPU engine, got {device!r}")
        cuda = engine == "cuda"
        self.engine = engine
        limits_with = partial(
            make_limits,
            engine=engine,
            ranks=ranks,
            max_tokens=max_tokens,
            hidden=hidden,
            intermediate=intermediate,
            experts=experts,
            top_k=top_k,
            dtype=dtype,
            placement=placement,
            processors=processors,
            capacity_factor=capacity_factor,
        )
        self.limits = limits_with(return_mode=return_mode, transport=transport)
        self.ranks = self.limits["ranks"]
        self.rank = bounded("rank", rank, 0, self.ranks - 1)
        self.name = _checked_name(name) if self.ranks > 1 else name
        self.experts = self.limits["experts"]
        self.placement = placements.checked(placement, self.experts, self.ranks)
        self.dtype = dtype
        mode = return_mode
        self.profile: dict[str, int] = {}
        """In what the order of tasks differs from the built-in one."""
        if profile and not cuda:
            raise InvalidArgument(f"profile: expected none with the CPU engine, got {profile!r}")
        if cuda:
            ordinal = -1 if device is None else bounded("device", device, 0, 2**15)
            self.profile, stored_mode = self._chosen_profile(profile, ordinal)
            if return_mode == "auto" and stored_mode is not None and transport != "rdma":
                mode = stored_mode
                self.limits = limits_with(return_mode=mode)
        self.processors = self.limits["processors"]
        self.capacity_factor = checked_capacity_factor(capacity_factor) or None
        """The largest of a call; None: calls may be dropless."""
        if not isinstance(timeout, int | float) or not 0 <= timeout <= MAX_SECONDS:
            raise InvalidArgument(f"timeout: expected seconds in [0, {MAX_SECONDS:g}], got {timeout!r}")
        self.timeout = float(timeout)
        self._report: CallReport | None = None
        self._unread: tuple[Any, int] | None = None  # what gpu.report takes, of a call whose report was not asked for
        self._perturbation = 0
        self._process = os.getpid()
        timeout_ns = math.ceil(self.timeout * 1e9)  # 0 is no limit
        self.device: int | None = None
        """Ordinal of the CUDA device; None with the CPU engine."""
        library = _ffi.library()
        if cuda:
            library_path = nvshmem_library() if self.ranks > 1 else ""

            def create(joining: str) -> int:
                numbers = {**self.limits, **self.profile, "rank": self.rank}
                return library.cuda_create(numbers, joining, library_path, ordinal, timeout_ns)

            self._handle = create(name or "")
            if self._handle == 0:  # on every rank: some memory is not mapped
                mode = return_mode
                self.limits = limits_with(return_mode=mode, transport="rdma")
                self._handle = create(f"{name}-rdma")
            self._finalizer = weakref.finalize(self, _close, library.cuda_close, self._handle, self._process)
            self._layers: dict[Any, Any] = {}  # of gpu.Layer
            described = library.cuda_describe(self._handle)
            self.device, self.processors, heap, workspace, self._tile_rows, self._tile_features = described
        else:
            self._handle = library.context_create(self.limits, self.rank, name or "", timeout_ns)
            self._finalizer = weakref.finalize(self, _close, library.context_close, self._handle, self._process)
            heap, workspace = library.context_bytes(self._handle)
        rdma = self.limits["rdma"] != 0
        self.transport = "rdma" if rdma else "mapped"
        """How rows get to other ranks: stored to memory that is ``"mapped"``, or put, ``"rdma"``."""
        self.return_mode = engine_return_mode(
            engine, mode, self.ranks, self.limits["top_k"], self.limits["intermediate"], rdma
        )
        self.heap_bytes: int = heap
        """Bytes of this rank's symmetric heap."""
        self.workspace_bytes: int = workspace
        """Bytes of this rank's private workspace; with the CPU engine, taken from the system as they are first used."""
        self._number = next(_numbers)
        contexts[self._number] = self

    @classmethod
    def from_torch(cls, group: Any = None, **sizes: Any) -> Context:
        """A context whose ranks are those of a ``torch.distributed`` process group (default: all).

        Collective over `group`, which serves only to agree on the group's name. `sizes` are the keyword arguments of
        `Context` but rank, ranks and name.
        """
        import secrets

        import torch.distributed as dist

        if not dist.is_initialized():
            raise InvalidArgument("group: expected torch.distributed to be initialised, got no process group")
        names = [f"torch-{os.getpid()}-{secrets.token_hex(8)}"]
        dist.broadcast_object_list(names, group=group, group_src=0)
        return cls(rank=dist.get_rank(group), ranks=dist.get_world_size(group), name=names[0], **sizes)

    def local_experts(self, placement: Sequence[int] | None = None) -> list[int]:
        """Ids of the experts this rank holds, ascending: the order of its weights. Default: the context's placement.

        Raises `InvalidArgument` for a placement that is none of ranks of the group.
        """
        owners = self.placement if placement is None else placements.as_ints(placement)
        return placements.local_experts(placements.checked(owners, len(owners), self.ranks), self.rank)

    @property
    def last_call(self) -> CallReport | None:
        """Report of the last call, None before the first, and on the CPU engine after one that failed.

        With the CUDA engine, reading it waits for the call and raises what that ran into, so it cannot be read during
        a capture. It has times of traced calls only. After the replay of a graph: of the last call that was made.
        """
        if self._unread is not None:
            from . import gpu

            self._report = gpu.report(self, *self._unread)
            self._unread = None
        return self._report

    def synchronize(self) -> None:
        """Waits until all calls are over, and raises what the last of them ran into. The CPU engine's have done so."""
        handle = self._checked_handle()
        if self.engine == "cuda":
            from . import gpu

            _ffi.library().cuda_synchronize(handle, gpu.current_stream(self.device))

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Frees heap, workspace and threads. Other ranks of the group may still finish a call. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Context:
        self._checked_handle()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        """The context itself: copies of a layer share it."""
        return self

    def __reduce__(self) -> Any:
        raise FlashMoEError(
            "context: expected to stay in its process, got a copy by pickle (torch.save of a module?); "
            "save the module's state_dict() instead"
        )

    def _chosen_profile(self, given: Mapping[str, int] | None, ordinal: int) -> tuple[dict[str, int], str | None]:
        """The given profile, else what is stored for contexts like this one: profile and return mode."""
        if given is not None:
            return _checked_profile(given), None
        device = _ffi.library().cuda_device_name(ordinal)
        sizes = {name: self.limits[name] for name in ("hidden", "intermediate", "experts", "top_k")}
        tokens = self.limits["max_tokens"]
        return _stored_profile(profiles.Setting(device, self.ranks, self.dtype, tokens=tokens, **sizes))

    def _checked_handle(self) -> int:
        if os.getpid() != self._process:
            raise FlashMoEError(
                f"context: expected to be used in process {self._process}, which made it, got process {os.getpid()}, "
                "which has none of its threads"
            )
        if self.closed:
            raise FlashMoEError("context: it is closed")
        return self._handle

    def _set_tile(self, rows: int, columns: int) -> None:
        """For tests: tiles of another shape, so that small problems have many. Same on every rank."""
        _ffi.library().context_set_tile(self._checked_handle(), rows, columns)

    def _perturb(self, seed: int) -> None:
        """For tests: random delays at every atomic operation of the calls to come; 0 turns them off."""
        self._perturbation = seed
