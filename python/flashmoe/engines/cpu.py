"""The CPU engine: a rank is a process, its heap is shared memory, and its processors are threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _ffi
from .. import placement as placements
from ..calls.arguments import check, check_tokens, redispatches
from ..calls.ending import Call
from ..calls.tensors import as_view, believed, empty_like, host_view, operand, refuse_unwritable, signature
from ..contexts.limits import ContextSpec, Room
from ..errors import InvalidArgument
from ..report import TASK_KINDS, CallReport, chosen_experts, traffic
from ..spec import LayerSpec, Options
from ..spec.tensors import WRITTEN, Tensors
from ..trace import PHASES, CallTrace, Event
from .base import Engine, Gradients, Membership

if TYPE_CHECKING:
    from .network import Joined

_PHASES = PHASES[: PHASES.index("epilogue")]  # the phases whose sums the library has
machines: tuple[int, ...] = ()
"""For tests: by rank, a number for the machine on which ranks that meet in shared memory pretend to be. Empty: all
ranks are on one machine."""
_MOST_LAYERS = 1024  # the most prepared layers that are kept; each takes a few kilobytes


class Prepared(NamedTuple):
    """What calls have in common if their tensors have the same shapes (except T) and types, and their options are the
    same."""

    call: Callable[..., Any]
    """The library's function for such calls: it knows the layer, where the experts are, and the order of tasks."""
    layer: LayerSpec
    owners: tuple[int, ...]
    """For each expert, the rank to which this rank sends the expert's tokens."""


class Crossed(NamedTuple):
    """What a rank has sent to other machines. The headers of messages are not counted."""

    messages: int
    bytes: int
    bytes_of_size: tuple[int, ...]
    """How many of the bytes were in messages of at least 2**n and less than 2**(n+1) bytes, for each n."""


class Ended(NamedTuple):
    """A call that is over, and the library's figures of it."""

    prepared: Prepared
    raw: Mapping[str, Any]
    topk_ids: np.ndarray
    """Slices of experts, int32 [T, K slices], -1 where there is none."""
    topk_weights: np.ndarray
    """float32 [T, K slices]."""


class CpuEngine(Engine):
    """A rank on the CPU; its calls are over when they return."""

    def __init__(self, asked: ContextSpec, who: Membership) -> None:
        library = _ffi.library()
        self.room = Room.of(asked, who.rank)
        self.processors = asked.processors
        self.joined: Joined | None = None
        """How the group's ranks are spread over machines; None if they have met in shared memory."""
        if who.meet is None:
            owner = library.context_create(self.room.limits, who.rank, who.name, who.timeout_ns, list(machines))
        else:
            from .network import join

            self.joined = join(library, self.room.limits, who, who.meet)
            owner = self.joined.owner
        super().__init__(owner, library.context_close)
        self.heap_bytes, self.workspace_bytes = library.context_bytes(self._handle)
        self._layers: dict[Hashable, Prepared] = {}
        """Layers of earlier calls, by `_key`: everything that `check` looks at except T."""
        self._report: CallReport | None = None
        self._unread: Ended | None = None  # the last call, until its report is asked for
        self._perturbation = 0

    def call(self, tensors: Tensors, options: Options, trace: bool) -> Any:
        return self._call(tensors, options, trace, False)[0]

    def call_and_keep(self, tensors: Tensors, options: Options) -> tuple[Any, Any, Any]:
        import torch

        y, kept = self._call(tensors, options, False, True)
        return y, torch.from_dlpack(kept), torch.empty(0, dtype=torch.int64)

    def backward(self, kept: Any, counted: Any, options: Options, gradients: Gradients) -> None:
        of_each = gradients.given, gradients.wanted
        views = [{name: host_view(each) for name, each in tensors.items()} for tensors in of_each]
        records = self._recorded is not None
        how = int(kept[0]), records, self._order(), 1, self._perturbation
        events = _ffi.library().context_backward(self.checked_handle(), *how, *views, gradients.accumulates)
        if records:
            self._recorded.append(self._trace_of(events, True))

    def refuse(self, reason: str) -> None:
        if not self.closed and os.getpid() == self._process:
            with Call():
                _ffi.library().context_refuse(self._handle, reason)

    def _call(self, tensors: Tensors, options: Options, trace: bool, keeps: bool) -> tuple[Any, Any]:
        """The result, and what is kept, or None if nothing is kept."""
        handle = self.checked_handle()
        self._report = self._unread = None
        for name, each in zip(WRITTEN, tensors.written, strict=True):
            refuse_unwritable(name, each)
        given = Tensors(*map(believed, Tensors._fields, tensors))
        prepared = self._prepared(handle, given, options)
        tokens, choices = given.x.shape[0], prepared.layer.choices
        views = [None if each is None else host_view(each) for each in given.floats]
        ids = weights = None
        if given.topk_ids is not None:
            ids = _expert_ids(given.topk_ids)
            weights = host_view(given.topk_weights)
        out = empty_like(tensors.x)
        results = believed("out", out)
        if tuple(results.shape) != tuple(given.x.shape):  # `out` is made from x's attributes
            raise InvalidArgument(f"x: expected {list(given.x.shape)}, as its memory is, got {list(results.shape)}")
        chosen, weighted = np.empty((tokens, choices), np.int32), np.empty((tokens, choices), np.float32)
        records = self._recorded is not None
        raw = prepared.call(
            tokens,
            bool(trace) or records,
            self._perturbation,
            keeps,
            keeps and redispatches(self.room, options),
            bool(options.strict),
            *views,
            ids,
            weights,
            *[None if each is None else host_view(each) for each in given.written],
            host_view(results),
            as_view(chosen),
            as_view(weighted),
        )
        report = {key: raw[key] for key in raw if key != "kept"}  # the report must not keep it alive
        self._unread = Ended(prepared, report, chosen, weighted)
        if records:
            self._recorded.append(self._trace_of(raw["events"], False))
        return out, raw["kept"] if keeps else None

    def last_call(self) -> CallReport | None:
        if self._unread is not None:
            self._report = self._report_of(self._unread)
            self._unread = None
        return self._report

    def _read_recorded(self) -> None:
        """Does nothing, because each call adds its own trace."""

    def _trace_of(self, flat: Sequence[int], backward: bool) -> CallTrace:
        """The call's trace. The call begins with its processors' first event and ends with their last one, because the
        events of processors have no gaps."""
        events = _events(flat)
        of_processors = [event for event in events if event.actor != "os"]
        start, end = min(event.start_ns for event in of_processors), max(event.end_ns for event in of_processors)
        return CallTrace(self.room.rank, backward, self.processors, start, end, events)

    def synchronize(self) -> None:
        self.checked_handle()

    def crossed(self) -> Crossed:
        """What this rank has sent to ranks on other machines since the context was made."""
        if self.joined is None or self.joined.network is None:
            return Crossed(0, 0, ())
        messages, sent, *sizes = map(int, _ffi.library().network_crossed(self.joined.network()))
        return Crossed(messages, sent, tuple(sizes))

    def set_tile(self, rows: int, columns: int) -> None:
        """For tests: sets another shape of tiles, so that small problems have many tiles. The same on every rank."""
        _ffi.library().context_set_tile(self.checked_handle(), rows, columns)

    def perturb(self, seed: int) -> None:
        """For tests: puts random delays at every atomic operation of later calls; 0 turns them off."""
        self._perturbation = seed

    def _prepared(self, handle: int, tensors: Tensors, options: Options) -> Prepared:
        """The call's layer, from an earlier call or after its arguments are checked."""
        key = _key(tensors, options)
        known = self._layers.get(key) if key is not None else None
        if known is not None and _are_alike(tensors):
            check_tokens(self.room, options, tensors.x.shape[0])
            return known
        args = check(self.room, operand, tensors, options)
        # The most return groups; no group has less than a block of columns. With several groups, the first columns
        # travel while the last are computed.
        groups = 8 if args.layer.return_mode == "reduced" else 1
        call = _ffi.library().context_layer(
            handle, args.layer.to_map(), placements.flat(args.placement), self._order(), groups
        )
        prepared = Prepared(call, args.layer, placements.owners(args.placement, self.room.rank))
        if key is not None:
            if len(self._layers) >= _MOST_LAYERS:
                del self._layers[next(iter(self._layers))]
            self._layers[key] = prepared
        return prepared

    def _order(self) -> dict[str, int]:
        """The settings of the order of tasks (see `profile` of `flashmoe.Context`)."""
        return {
            "gemm1_lag": 0,
            "raster": 4,
            # The operating system shares cores among threads, so the OS actor may stand still for milliseconds. The
            # tasks that it has published ahead must last for this time.
            "window": 16 * self.processors,
            "gemm1_lists": 2,
            "own_first": 1,
            "senders": 0,
            "link_clusters": 0,
        }

    def _report_of(self, ended: Ended) -> CallReport:
        """The library's figures as a `CallReport`."""
        layer, raw, ids = ended.prepared.layer, ended.raw, ended.topk_ids
        ns = dict(zip(_PHASES, raw["ns"], strict=True))
        count = dict(zip(_PHASES, raw["count"], strict=True))
        tasks = {kind: int(count[kind]) for kind in TASK_KINDS}
        phase_ns = {kind: int(spent) for kind, spent in ns.items() if kind not in ("wait", "schedule")}
        phase_ns["idle"] = max(0, int(raw["wall_ns"]) * self.processors - sum(phase_ns.values()))
        return CallReport(
            tokens=len(ids),
            return_mode=layer.return_mode,
            **chosen_experts(ids, ended.topk_weights, layer.slices),
            dropped=int(raw["dropped"]),
            bad_rows=int(raw["bad_rows"]),
            tasks=tasks,
            tiles=int(raw["tiles"]),
            tile_rows=int(raw["tile_rows"]),
            **traffic(
                ids,
                ended.prepared.owners,
                self.room.rank,
                layer,
                rows=int(raw["rows_sent"]),
                returned=int(raw["return_rows_sent"]),
                pairs=int(raw["entries_sent"]),
                packets=tasks["gate"] * (self.room.ranks - 1),
            ),
            phase_ns=phase_ns,
            wall_ns=int(raw["wall_ns"]),
            processors=self.processors,
            events=_events(raw["events"]),
        )


def _expert_ids(ids: Any) -> Any:
    """The given ids as the engine takes them, int32. An id outside the range of int32 becomes the nearest int32."""
    view = host_view(ids)
    wide = np.from_dlpack(view)
    if wide.dtype == np.int32:
        return view
    return as_view(np.clip(wide, np.iinfo(np.int32).min, np.iinfo(np.int32).max).astype(np.int32))


def _events(flat: Sequence[int]) -> list[Event]:
    rows = np.array(list(flat), np.int64).reshape(-1, 7).tolist()
    return [
        Event("os" if actor == 0 else f"processor {actor - 1}", PHASES[phase], start, end, index, column, 0, expert)
        for actor, phase, start, end, index, column, expert in rows
    ]


def _are_alike(tensors: Tensors) -> bool:
    """Whether T, which is not in `_key`, is the same in all tensors."""
    tokens = tensors.x.shape[0]
    return all(each is None or each.shape[0] == tokens for each in _of_tokens(tensors))


def _of_tokens(tensors: Tensors) -> tuple[Any, ...]:
    """The tensors besides x whose first dimension is T."""
    return tensors.x_scale, tensors.topk_ids, tensors.topk_weights, tensors.router_logits


def _key(tensors: Tensors, options: Options) -> Hashable:
    """A key that is equal for calls that `check` treats alike, apart from their T. None if an argument is not a dense
    tensor of NumPy or PyTorch, or an option has no hash."""
    try:
        key = (
            signature(tensors.x, 1),
            *[None if each is None else signature(each) for each in (*tensors.of_layer, tensors.load)],
            *[None if each is None else signature(each, 1) for each in _of_tokens(tensors)],
            options,
            type(options.top_k),  # True is equal to 1, and 2.0 to 2
            type(options.most_tokens),
        )
        hash(key)
    except (AttributeError, TypeError, RuntimeError):  # `check` finds what is wrong, if anything is
        return None
    return key
