"""The CPU engine: a rank is a process, its heap shared memory, its processors threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _ffi
from ..arguments import Arguments, Options, Tensors, check
from ..errors import InvalidArgument
from ..limits import ContextSpec, Room
from ..report import TASK_KINDS, CallReport, traffic
from ..spec import DTYPES
from ..tensors import Operand, as_view, believed, empty_like, operand
from ..trace import PHASES, Event
from .base import Engine, Membership

_PHASES = PHASES[:-1]  # epilogues are not told apart from products


class CpuEngine(Engine):
    """A rank on the CPU; its calls are over when they return."""

    def __init__(self, asked: ContextSpec, who: Membership) -> None:
        library = _ffi.library()
        self.room = Room.of(asked, who.rank)
        self.processors = asked.processors
        owner = library.context_create(self.room.limits, who.rank, who.name, who.timeout_ns)
        super().__init__(owner, library.context_close)
        self.heap_bytes, self.workspace_bytes = library.context_bytes(self._handle)
        self._report: CallReport | None = None
        self._perturbation = 0

    def call(self, tensors: Tensors, options: Options, trace: bool) -> Any:
        handle = self.checked_handle()
        self._report = None
        given = Tensors(*map(believed, Tensors._fields, tensors))
        args = check(self.room, operand, given, options)
        layer, operands = args.layer, dict(args.operands)
        if "topk_ids" in operands:
            operands["topk_ids"] = self._expert_ids(operands["topk_ids"], layer.experts)
        out = empty_like(tensors.x)
        operands["out"] = operand("out", believed("out", out), "", DTYPES)
        if operands["out"].shape != operands["x"].shape:  # of x's attributes, which may say what its memory is not
            raise InvalidArgument(f"x: expected {list(operands['x'].shape)}, as its memory is, got {list(out.shape)}")
        ids = np.empty((args.tokens, layer.top_k), np.int32)
        weights = np.empty((args.tokens, layer.top_k), np.float32)
        order = {
            "gemm1_lag": 0,
            "raster": 4,
            # Threads get the cores in slices: the OS actor may be off its core for milliseconds, and tasks must last.
            "window": 16 * self.processors,
            "gemm1_lists": 2,
            "own_first": 1,
            "senders": 0,
        }
        in_this_call = {
            "tokens": args.tokens,
            # Return groups (as many as there are columns for): the first columns travel while the last are computed.
            "groups": 8 if layer.return_mode == "reduced" else 1,
            "trace": int(bool(trace)),
            "perturbation": self._perturbation,
        }
        raw = _ffi.library().context_call(
            handle,
            layer.to_map(),
            list(args.owners),
            order,
            in_this_call,
            {name: each.view for name, each in operands.items()},
            as_view(ids),
            as_view(weights),
        )
        self._report = self._report_of(raw, args, ids, weights)
        return out

    def last_call(self) -> CallReport | None:
        return self._report

    def synchronize(self) -> None:
        self.checked_handle()

    def set_tile(self, rows: int, columns: int) -> None:
        """For tests: tiles of another shape, so that small problems have many. Same on every rank."""
        _ffi.library().context_set_tile(self.checked_handle(), rows, columns)

    def perturb(self, seed: int) -> None:
        """For tests: random delays at every atomic operation of the calls to come; 0 turns them off."""
        self._perturbation = seed

    def _expert_ids(self, ids: Operand, experts: int) -> Operand:
        """Given ids as the engine takes them, int32; -1 for what does not fit. A rank alone is told here of what is no
        expert, and its context stays usable; several all hear of it, from the engine."""
        wide = np.from_dlpack(ids.view)
        if self.room.ranks == 1 and len(outside := np.argwhere((wide < 0) | (wide >= experts))):
            token, k = outside[0]
            raise InvalidArgument(f"topk_ids: expected ids in [0, E={experts}), got {wide[token, k]} at [{token}, {k}]")
        if ids.dtype == "int32":
            return ids
        narrow = wide.astype(np.int32)
        return operand("topk_ids", np.where(narrow == wide, narrow, np.int32(-1)), "", ("int32",))

    def _report_of(self, raw: Any, args: Arguments, ids: np.ndarray, weights: np.ndarray) -> CallReport:
        """The library's figures as a `CallReport`."""
        layer = args.layer
        ns = dict(zip(_PHASES, raw["ns"], strict=True))
        count = dict(zip(_PHASES, raw["count"], strict=True))
        tasks = {kind: int(count[kind]) for kind in TASK_KINDS}
        phase_ns = {kind: int(spent) for kind, spent in ns.items() if kind not in ("wait", "schedule")}
        phase_ns["idle"] = max(0, int(raw["wall_ns"]) * self.processors - sum(phase_ns.values()))
        return CallReport(
            tokens=args.tokens,
            return_mode=layer.return_mode,
            topk_ids=ids,
            topk_weights=weights,
            dropped=int(raw["dropped"]),
            tasks=tasks,
            tiles=int(raw["tiles"]),
            tile_rows=int(raw["tile_rows"]),
            **traffic(
                ids,
                args.owners,
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


def _events(flat: Sequence[int]) -> list[Event]:
    rows = np.array(list(flat), np.int64).reshape(-1, 6).tolist()
    return [
        Event("os" if actor == 0 else f"processor {actor - 1}", PHASES[phase], start, end, index, column)
        for actor, phase, start, end, index, column in rows
    ]
