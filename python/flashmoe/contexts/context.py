"""`Context`: this process's membership in a group of ranks, and the memory that their calls share."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import placement as placements
from ..calls.ending import Call
from ..calls.keywords import with_known_options
from ..calls.profiled import is_profiled, named
from ..calls.refusals import tell
from ..calls.tensors import refuse_unstored
from ..calls.through_torch import is_recomputed
from ..engines.base import Engine, Gradients, Membership
from ..engines.cpu import CpuEngine
from ..engines.cuda import CudaEngine
from ..errors import FlashMoEError, InvalidArgument
from ..report import CallReport
from ..spec import Options, bounded, one_of, truth
from ..spec.tensors import Tensors
from ..trace import CallTrace
from .limits import ENGINES, Room, checked_context

if TYPE_CHECKING:  # imported in functions at run time, because ranks that meet in shared memory do not need `groups`
    from ..groups import launcher
    from ..groups.meeting import Meeting

MAX_SECONDS = 1e9  # their nanoseconds fit 63 bits

contexts: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By number: every context that is alive, and every `flashmoe.contexts.growing.GrowingContext`."""
_numbers = itertools.count(1)

_GRADIENTS = {"y": "the gradient of y", "router_logits": "the gradient of router_logits"}
"""What error messages call the gradients that a backward pass is given, by the names of the results."""


def next_number() -> int:
    """A number that no entry of `contexts` has or had."""
    return next(_numbers)


def context_id(ctx: Context) -> int:
    """The number that stands for `ctx` in calls of ``torch.ops.flashmoe.moe``. It never changes, and no other context
    gets it.

    The number does not keep the context alive. Calls with the number of a freed context raise `FlashMoEError`.
    """
    return _checked(ctx)._number


def run(ctx: Context, tensors: Tensors, options: Options, trace: bool) -> Any:
    """Makes a call of `flashmoe.moe` on the context's engine. If this raises an error, the caller must `tell` it."""
    engine = _checked(ctx)._engine
    tensors, options = _as_called(ctx, tensors, options)
    with Call():
        if is_profiled():
            return named("flashmoe.moe", engine.call, tensors, options, trace)
        return engine.call(tensors, options, trace)


def run_and_keep(ctx: Context, tensors: Tensors, options: Options) -> tuple[Any, Any, Any]:
    """The result of `run`, and what the gradients need; see `flashmoe.engines.base.Engine`."""
    engine = _checked(ctx)._engine
    tensors, options = _as_called(ctx, tensors, options)
    with Call():
        if is_profiled():
            return named("flashmoe.moe", engine.call_and_keep, tensors, options)
        return engine.call_and_keep(tensors, options)


def run_backward(ctx: Context, kept: Any, counted: Any, options: Options, gradients: Gradients) -> None:
    """Computes the gradients of a call that left `kept` and `counted`; see `flashmoe.engines.base.Engine`."""
    engine = _checked(ctx)._engine
    try:
        if options.placement is not None:
            options = options._replace(placement=placements.as_placed(options.placement))
        for name, each in {**gradients.given, "what the call keeps": kept, "counts of what it keeps": counted}.items():
            refuse_unstored(_GRADIENTS.get(name, name), each)
        with Call():
            if is_profiled():
                named("flashmoe.moe.backward", engine.backward, kept, counted, options, gradients)
            else:
                engine.backward(kept, counted, options, gradients)
    except Exception as error:
        tell(ctx, error)
        raise


def _as_called(ctx: Context, tensors: Tensors, options: Options) -> tuple[Tensors, Options]:
    """`tensors` and `options` as engines take them. The load that the call adds to is the call's own, else the
    context's if both have the same E. A call that is a recomputation adds to none, because it has been counted."""
    load = tensors.load
    if load is None and ctx._load is not None and _experts_of(ctx, tensors, options) == ctx.experts:
        load = ctx._load
    if load is not None and is_recomputed():
        load = None
    if load is not tensors.load:
        tensors = tensors._replace(load=load)
    if options.placement is not None:
        options = options._replace(placement=placements.as_placed(options.placement))
    return tensors, options


def _experts_of(ctx: Context, tensors: Tensors, options: Options) -> int | None:
    """E, the number of experts of the call's layer. None if it cannot be found because the call is invalid."""
    if tensors.router is not None:
        return next(iter(getattr(tensors.router, "shape", ())), None)
    try:
        if ctx.ranks > 1 or options.placement is not None:
            return len(ctx.placement if options.placement is None else options.placement) // options.slices
        return tensors.gate_up_proj.shape[0]
    except (AttributeError, TypeError, IndexError, ZeroDivisionError):  # the engine says what is wrong
        return None


def room_of(ctx: Context) -> Room:
    """The bounds for calls of the context. Raises `InvalidArgument` if `ctx` is no context."""
    return _checked(ctx)._engine.room


def _zeros(experts: int, device: int | None) -> Any:
    """Counters in memory that the engine can write to."""
    if device is None:
        return np.zeros(experts, np.int64)
    import torch

    return torch.zeros(experts, dtype=torch.int64, device=f"cuda:{device}")


def _checked(ctx: Any) -> Context:
    if not isinstance(ctx, Context):
        raise InvalidArgument(f"ctx: expected a flashmoe.Context, got {type(ctx).__name__}")
    return ctx


def _checked_name(name: Any, ranks: int) -> str | None:
    """`name`, checked to be usable as part of a file's name. A rank that is alone may have any name, because it does
    not use the name. Raises `InvalidArgument`."""
    if ranks == 1 and (name is None or isinstance(name, str)):
        return name
    try:
        size = len(name.encode())
    except (AttributeError, UnicodeEncodeError):
        size = 0
    if not 1 <= size <= 200 or set(name) & set("/\0"):
        raise InvalidArgument(f"name: expected a group name of 1 to 200 bytes without '/' and NUL, got {name!r}")
    return name


def _checked_timeout(timeout: Any) -> float:
    """`timeout` in seconds, checked to be countable in nanoseconds. Raises `InvalidArgument`."""
    if not isinstance(timeout, int | float) or not 0 <= timeout <= MAX_SECONDS:
        raise InvalidArgument(f"timeout: expected seconds in [0, {MAX_SECONDS:g}], got {timeout!r}")
    return float(timeout)


class Context:
    """One rank of a group, and its symmetric heap.

    The ranks of a group are processes of one machine, or with the CPU engine of several machines (see `rendezvous`).
    With the CUDA engine a rank is a GPU of compute capability 9.0 (H100, H200). Several GPUs have each other's memory
    mapped, over NVLink (otherwise see `transport`), and their heaps are NVSHMEM's. All groups of several GPUs that a
    process joins must have the same ranks.

    The sizes are upper limits: calls may use any smaller T, H, I, E or K, and all layers of a model share one context.
    Threads that call with the same context are served one after the other.

    The engine decides what `flashmoe.moe` takes, and when its calls are over:

    - CPU engine: NumPy arrays or PyTorch tensors in host memory, contiguous. A call is over when it returns.
    - CUDA engine: PyTorch tensors of the context's device; H and I multiples of 8, E at most 1024, K at most 32, T at
      most 65536. There may be gaps between rows of x, router and weights, and between experts' matrices (strides are
      multiples of 16 bytes); all other tensors are contiguous. A call launches one kernel on PyTorch's current stream
      and returns.
      (Among several ranks, a call that keeps what gradients need makes three launches and waits for a count.) The calls
      of a context must follow one another on the device. A call can be captured into a CUDA graph, once a call like it
      has been made before the capture. The first call of a dtype and activation compiles its kernels (see
      ``flashmoe compile``).

    Parameters
    ----------
    rank: int, default 0
        This process's rank.
    ranks: int, default 1
        The number of ranks R, at most 1024; CUDA engine: 32.
    name: str or None, default None
        The group's name. It is the same on every rank, and no other group of the machine (or of the place where the
        ranks meet) uses it at that time. Required if ``ranks > 1``. All ranks are processes of one user: a process of
        another user is not taken for a rank (docs/security.md).
    max_tokens: int
        Most tokens T of a rank in a call, at most 2**20 - 1; CUDA engine: 65536.
    hidden, intermediate, experts, top_k: int
        Largest H, I, E and K: H and I at most 2**20, E at most 8192; CUDA engine: E at most 1024, K at most 32.
    shared_intermediate: int, default 0
        Largest Is of a shared expert; 0: none. The shared expert is computed as Is / I experts that every token
        chooses, so with the CUDA engine K + Is / I is at most 32.
    slices: int, default 1
        The number of slices into which calls may cut each expert (see `flashmoe.slices`). I is then the width of a
        slice, and a placement has an entry for each slice. CUDA engine: E times `slices` is at most 1024, K times
        `slices` at most 32.
    dtype: str or type, default 'bfloat16'
        Widest element type of calls: ``"float32"``, ``"bfloat16"`` or ``"float16"``, or this type as PyTorch or NumPy
        have it.
    weight_dtype: str, type or None, default None
        Element type of the experts' weights in calls: `dtype`, the default; ``"float8_e4m3fn"``: rows go to other ranks
        in this type too (docs/fp8.md); or ``"mxfp4"``: rows go in `dtype` (docs/mxfp4.md; CUDA engine: one rank and
        calls of few tokens). Calls may use only the type that is given here, because memory is made for it.
    placement: placement or None, default None
        Who holds expert 0, 1, ...: E entries, each of them a rank, or several ranks that have a copy (see
        `flashmoe.placement`). Default: contiguous shares, as even as possible.
    return_mode: str, default 'auto'
        ``"direct"``: each expert's row travels home. ``"reduced"``: a rank's rows of one token are summed before they
        travel (COMET, section 3.1). ``"auto"``: CPU engine: for each call, the mode that sends fewer rows. CUDA engine:
        the stored mode (see `profile`), else the mode that is faster by an estimate from R, K and I of the times that
        GEMMs, transfers and Reduce take, decided once for all calls. With ``"direct"`` or ``"reduced"``, calls can use
        only this mode.
    processors: int or None, default None
        What executes tasks. CPU engine: threads; default: this rank's share of the cores. CUDA engine: thread blocks,
        an even number, each of which takes a whole multiprocessor; default: all of them.
    capacity_factor: float or None, default None
        None: calls may be dropless. Otherwise each call must have a capacity factor, at most this one, and the memory
        for experts' rows has room only for the rows that such a call does not drop: with 1.0, for one rank's number of
        pairs (token, k) instead of all ranks'. In a call with fewer than `experts` experts, each may have more rows,
        but no rank may have to hold more rows of another rank than in a call with all `experts`.
    timeout: float, default 30.0
        Seconds without progress anywhere in the group after which a wait gives up, also while joining; 0: never. CPU
        engine: a rank that is alone waits for nobody, and never gives up. CUDA engine with `transport` ``"rdma"``: a
        kernel's wait until its own puts have arrived is NVSHMEM's, and has no limit.
    engine: str or None, default None
        ``"cpu"`` or ``"cuda"``. Default: ``"cuda"`` if a device is given, else ``"cpu"``.
    device: int or None, default None
        Ordinal of the CUDA device. Default with ``engine="cuda"``: PyTorch's current one.
    profile: dict or None, default None
        CUDA engine: settings of the order of tasks, by name; the built-in order decides those that are left out.
        ``gemm1_lag``: while there are GEMM0 tasks, a GEMM1 task is held back until GEMM0 is this number of tasks ahead
        of GEMM1. ``raster``: the number of tiles in a band of tasks. ``window``: the number of tasks published ahead.
        ``gemm1_lists``: 2: GEMM1 tasks with rows of other ranks' tokens go first; 1: GEMM1 tasks go as they become
        ready, so that those of an expert go side by side. ``own_first``: with n, one in n of the rank's experts can
        begin with rows of the rank's own tokens; the other experts begin when all rows of some other rank are there.
        ``senders``: the number of thread blocks that send rows to mapped memory before they compute, as far as there
        are blocks that form no tiles. ``link_clusters``: with the return mode ``"reduced"``, the number of clusters
        that stop computing early, as soon as there is something to reduce, and then only reduce and send (COMET,
        section 3.2); 0: none stops early, and all clusters reduce and send between tasks. The profile changes no bit of
        a result, and may differ from rank to rank. Default: what ``flashmoe tune`` has stored for this GPU, number of
        ranks, dtype, H, I, E and K, with the number of tokens nearest to `max_tokens` (see
        ``flashmoe.tuning.profiles``); ``{}``: the built-in order, whatever is stored.
    count_load: bool, default False
        Whether calls count for `load` which experts are chosen.
    transport: str, default 'auto'
        CUDA engine, several ranks: how rows get to other GPUs. ``"auto"``: they are stored to mapped memory; if some
        rank cannot map another's memory, all ranks use ``"rdma"``. ``"rdma"``: NVSHMEM's puts carry them, whether
        memory is mapped or not. Returns are then ``"reduced"``. `timeout` must be longer than ranks wait for one
        another, since a rank cannot see whether another rank makes progress. Puts to memory that is not mapped use the
        network that ``NVSHMEM_REMOTE_TRANSPORT`` names (``"none"`` unless it is set). ``"rdma"`` has not run over any
        network yet: tests force it over NVLink. It needs the headers of NVSHMEM 3.4 to 3.8, which NVSHMEM's package
        has.
    redispatch: bool, default False
        Several ranks: whether a call that keeps what its gradients need does not keep the rows of other ranks' tokens,
        so that its backward pass sends x once more (docs/training.md). The heap is larger by the size of the dispatched
        rows. A call may choose otherwise (`flashmoe.moe`). Without effect for a rank that is alone.
    rendezvous: str, function or None, default None
        CPU engine, several ranks: where they meet, if they may be on several machines: ``"host:port"``, an address of
        rank 0's host, at which rank 0 listens while the ranks join. Every rank needs the same secret, `FLASHMOE_SECRET`
        in its environment. The ranks find out which of them share a machine: these have each other's memory mapped, and
        reach the others by TLS (docs/several_machines.md). Default: ``FLASHMOE_RENDEZVOUS`` in the environment; without
        that, ranks meet in shared memory, all on one machine. Or a function that begins a meeting
        (`flashmoe.groups.launcher.Meet`).

    Raises
    ------
    InvalidArgument
        A parameter is outside its domain.
    HeapError
        The heap does not fit into shared memory, or into the GPU's memory, or a limit of the process forbids it.
    FlashMoEError
        There is no CUDA driver.
    GroupError
        The ranks disagree on the limits, a rank number is taken twice or by another user, or another rank did not get
        its memory.
    PeerTimeout
        A rank did not join in time.

    Examples
    --------
    >>> import flashmoe
    >>> with flashmoe.Context(max_tokens=8, hidden=16, intermediate=8, experts=4, top_k=2, dtype="float32") as ctx:
    ...     ctx.local_experts()
    [0, 1, 2, 3]
    """

    @with_known_options()
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
        dtype: Any = "bfloat16",
        placement: placements.Placement | None = None,
        return_mode: str = "auto",
        processors: int | None = None,
        capacity_factor: float | None = None,
        timeout: float = 30.0,
        engine: str | None = None,
        device: int | None = None,
        profile: Mapping[str, int] | None = None,
        transport: str = "auto",
        shared_intermediate: int = 0,
        slices: int = 1,
        count_load: bool = False,
        weight_dtype: Any = None,
        redispatch: bool = False,
        rendezvous: str | launcher.Meet | None = None,
    ) -> None:
        if engine is None:
            engine = "cpu" if device is None else "cuda"
        one_of("engine", engine, ENGINES)
        if engine == "cpu" and device is not None:
            raise InvalidArgument(f"device: expected none with the CPU engine, got {device!r}")
        asked = checked_context(
            engine=engine,
            ranks=ranks,
            max_tokens=max_tokens,
            hidden=hidden,
            intermediate=intermediate,
            experts=experts,
            top_k=top_k,
            dtype=dtype,
            placement=placement,
            return_mode=return_mode,
            processors=processors,
            capacity_factor=capacity_factor,
            transport=transport,
            shared_intermediate=shared_intermediate,
            slices=slices,
            weight_dtype=weight_dtype,
            redispatch=redispatch,
        )
        self.engine = engine
        self.ranks = asked.ranks
        self.rank = bounded("rank", rank, 0, self.ranks - 1)
        self.name = _checked_name(name, self.ranks)
        self.timeout = _checked_timeout(timeout)
        who = Membership(
            self.rank,
            self.name if self.ranks > 1 else "",
            math.ceil(self.timeout * 1e9),  # 0: no limit
            self._meeting(rendezvous),
        )
        self.profile: dict[str, int] = {}
        """The settings of the order of tasks that are not left to the built-in order."""
        self.transport = "mapped"
        """How rows get to other ranks: ``"mapped"``, stored to mapped memory, or ``"rdma"``, by puts."""
        if engine == "cuda":
            with Call():
                on_gpu = CudaEngine(asked, who, device, profile)
            self.profile = on_gpu.profile
            if on_gpu.rdma:
                self.transport = "rdma"
            self._engine: Engine = on_gpu
        else:
            if profile is not None and not (isinstance(profile, Mapping) and len(profile) == 0):
                raise InvalidArgument(f"profile: expected none with the CPU engine, got {profile!r}")
            with Call():
                self._engine = CpuEngine(asked, who)
        room = self._engine.room
        self.limits = room.limits
        self.dtype = asked.layer.y_type
        self.weight_dtype = room.layer.weight_type
        self.experts = room.layer.experts
        self.placement = room.placement
        self.return_mode = room.layer.return_mode
        self.capacity_factor = room.layer.capacity_factor or None
        """The largest capacity factor of a call; None: calls may be dropless."""
        self.device = self._engine.device
        """Ordinal of the CUDA device; None with the CPU engine."""
        self.processors = self._engine.processors
        self.heap_bytes = self._engine.heap_bytes
        """Bytes of this rank's symmetric heap."""
        self.workspace_bytes = self._engine.workspace_bytes
        """Bytes of this rank's private workspace. With the CPU engine, the system provides them only when they are
        first used."""
        self._load = _zeros(self.experts, self.device) if truth("count_load", count_load) else None
        self._number = next_number()
        contexts[self._number] = self

    def _meeting(self, rendezvous: str | launcher.Meet | None) -> Callable[[], Meeting] | None:
        """A function that begins the meeting of the ranks; None: they meet in shared memory."""
        if self.ranks == 1:
            return None
        from ..groups import launcher

        if rendezvous is None and self.engine == "cpu":
            rendezvous = os.environ.get(launcher.ADDRESS) or None
        if rendezvous is None:
            return None
        if self.engine != "cpu":
            raise InvalidArgument(f"rendezvous: expected none with the CUDA engine, got {rendezvous!r}")
        meet = launcher.meet_of(rendezvous) if isinstance(rendezvous, str) else rendezvous
        name, rank, ranks, timeout = self.name or "", self.rank, self.ranks, self.timeout
        return lambda: meet(name, rank, ranks, timeout)

    @classmethod
    def from_launcher(cls, name: str = "launched", **sizes: Any) -> Context:
        """A context whose ranks are the processes that a launcher has started, on one machine or several. The rank and
        the number of ranks are ``RANK`` and ``WORLD_SIZE``. The ranks meet at ``FLASHMOE_RENDEZVOUS`` (host:port), else
        in the store that ``torchrun`` keeps for them, else at ``MASTER_ADDR:MASTER_PORT`` (docs/several_machines.md).
        They need the same `FLASHMOE_SECRET` in their environment, except ranks of one machine in ``torchrun``'s store.
        That page also says what ``FLASHMOE_TRUST_STORE=1`` does without a secret.

        `sizes` are the keyword arguments of `Context` except rank, ranks and rendezvous. CPU engine only.
        """
        from ..groups import launcher

        found = launcher.launched()
        if found is None:
            raise InvalidArgument("RANK, WORLD_SIZE: expected them in the environment, as torchrun sets them, got none")
        meet = launcher.meet_of_environment()
        if meet is None and found.ranks > 1:
            raise InvalidArgument(
                f"{launcher.ADDRESS}: expected where ranks meet, host:port, or MASTER_ADDR and MASTER_PORT, got none"
            )
        return cls(rank=found.rank, ranks=found.ranks, name=name, rendezvous=meet, **sizes)

    @classmethod
    def from_torch(cls, group: Any = None, **sizes: Any) -> Context:
        """A context whose ranks are those of a ``torch.distributed`` process group (default: all).

        Collective over `group`, of which this process is a member. The process group serves only to agree on the
        group's name, and to find out whether all ranks are on one machine. If not, they meet in the process group's
        store (CPU engine). For this every rank needs the same `FLASHMOE_SECRET` in its environment, or
        ``FLASHMOE_TRUST_STORE=1`` (docs/several_machines.md). `sizes` are the keyword arguments of `Context` except
        rank, ranks and name.
        """
        import secrets

        import torch.distributed as dist

        from ..groups import launcher, machine
        from ..pytorch.moving import place_in

        rank, ranks = place_in(group)
        names = [f"torch-{os.getpid()}-{secrets.token_hex(8)}"]
        dist.broadcast_object_list(names, group=group, group_src=0)
        machines: list[Any] = [None] * ranks
        dist.all_gather_object(machines, machine.identity(), group=group)
        if len(set(machines)) > 1 and "rendezvous" not in sizes:
            store = dist.distributed_c10d._get_default_store()  # the store from which all process groups are made
            sizes["rendezvous"] = launcher.meet_in(store, names[0])
        return cls(rank=rank, ranks=ranks, name=names[0], **sizes)

    def local_experts(self, placement: placements.Placement | None = None) -> list[int]:
        """Ids of the experts that this rank holds, ascending: its weights have the same order. Default: the context's
        placement.

        Raises `InvalidArgument` for a placement that does not fit the group's ranks.
        """
        placed = self.placement if placement is None else placements.as_placed(placement)
        return placements.local_experts(placements.checked(placed, len(placed), self.ranks), self.rank)

    @property
    def last_call(self) -> CallReport | None:
        """Report of the last call; None before the first call, and on the CPU engine after a call that failed.

        With the CUDA engine, reading the report waits for the call and raises the call's error, so it cannot be read
        during a capture. It has times only for traced calls. After the replay of a graph it is the report of the last
        call that Python made.
        """
        return self._engine.last_call()

    def trace(self, call: Callable[[], Any]) -> list[CallTrace]:
        """Trace every call of this context that `call()` makes, forward and backward passes: one
        `flashmoe.trace.CallTrace` for each, in their order. `flashmoe.account.accounts` says where the processors' time
        went, and `flashmoe.trace.write_traces` writes what Perfetto shows (docs/tracing.md).

        `call` takes no arguments; what it returns is dropped. Every rank of a group makes the same calls, traced or
        not: tracing changes no bit of a result. With the CUDA engine, kernels that trace are other kernels, compiled
        when first called. Between two calls the host waits for the first call and reads its trace, so calls do not
        follow one another closely, and nothing can be captured.

        Raises what `call` raises.
        """
        return self._engine.record(call)

    def load(self, *, clear: bool = False) -> Any:
        """How often this rank's tokens have chosen each expert, [E] int64, in all calls of layers that have as many
        experts as the context. With `clear`, counting starts again at 0. A group's load is the sum of its ranks' loads;
        `flashmoe.placement.balanced` makes a placement from it.

        Every call counts, also a replay of a graph, except a call that is given a `load` of its own. (With such loads,
        the layers of a model can be counted apart.) After a call that fails, the counts are undefined. A call that
        ``torch.utils.checkpoint`` makes again counts once.

        Returns a NumPy array, or with the CUDA engine a tensor on its device. PyTorch's current stream makes this copy
        after the calls that are already on it, so the host does not wait. Raises `InvalidArgument` without
        `count_load`.
        """
        if self._load is None:
            raise InvalidArgument("count_load: expected a context made with count_load=True, got one without")
        load = self._load.copy() if isinstance(self._load, np.ndarray) else self._load.clone()
        if clear:
            self._load[:] = 0
        return load

    def synchronize(self) -> None:
        """Waits until all calls are over, and raises the error of the last one. Calls of the CPU engine are over when
        they return."""
        self._engine.synchronize()

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._engine.closed

    def close(self) -> None:
        """Frees heap, workspace and threads. Other ranks of the group may still finish a call. Idempotent."""
        self._engine.close()

    def __repr__(self) -> str:
        names = ("max_tokens", "hidden", "intermediate", "experts", "top_k")
        sizes = ", ".join(f"{name}={self.limits[name]}" for name in names)
        state = ", closed" if self.closed else ""
        who = f"{self.engine}, rank {self.rank} of {self.ranks}"
        return f"<flashmoe.Context {who}, {sizes}, dtype={self.dtype!r}{state}>"

    def __enter__(self) -> Context:
        self._engine.checked_handle()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        """The context itself, because copies of a layer share it."""
        return self

    def __reduce__(self) -> Any:
        raise FlashMoEError(
            "context: expected to stay in its process, got a copy by pickle (torch.save of a module?); "
            "save the module's state_dict() instead"
        )
