"""What one call did: a rank's `CallReport`, and the sums over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from .spec import LayerSpec
from .trace import Event

TASK_KINDS = ("gate", "gemm0", "gemm1", "reduce", "combine")
"""The kinds of task that a report counts, in the order in which they work on a token."""

_ENTRY_BYTES = 12
_SIGNAL_BYTES = 8


@dataclass(frozen=True, eq=False)
class CallReport:
    """One rank's account of one call. T is the number of its tokens, K the number of experts per token."""

    tokens: int
    """T, the number of this rank's tokens."""
    return_mode: str
    """``direct`` or ``reduced``: the mode that the call has used, never ``auto``."""
    topk_ids: np.ndarray
    """int32 [T, K]: the experts chosen; -1 where there is none, because a capacity factor dropped the pair, the given
    routing names no expert, or the row is a bad one."""
    topk_weights: np.ndarray
    """float32 [T, K]: the weight of each chosen expert, also of a dropped pair; 0 where no expert was chosen."""
    dropped: int
    """(token, k) pairs dropped by the capacity factor."""
    bad_rows: int
    """Tokens without experts, because no choice can be made (a router logit, or a number of `choice_bias`, is NaN or
    +inf, or all logits are -inf), or because their given ids are wrong. Their rows of y are NaN."""
    tasks: dict[str, int]
    """Tasks that this rank executed, by kind (see `TASK_KINDS`). ``reduce`` and ``combine`` count the pieces of return
    groups that processors took between other tasks. In joined calls (a rank alone, ``direct``, K at most 2, no capacity
    factor), ``combine`` counts token blocks instead. On a GPU all numbers are computed from the routing, not counted by
    the kernel: ``reduce`` is always 0, and ``combine`` counts token blocks. Calls of the kernel for a few tokens have
    the numbers that the general kernel would have, although their kernel has tasks of its own."""
    tiles: int
    """Tiles that this rank formed: groups of rows that one expert computes together. On a GPU, computed from the
    routing, also for calls of the kernel for a few tokens, which forms no tiles."""
    tile_rows: int
    """Real rows in those tiles, padding not counted."""
    rows_sent: int
    """Token rows that dispatch wrote to other ranks; in a group on several machines also the rows that this rank has
    passed on to ranks of its own machine."""
    return_rows_sent: int
    """Result rows sent home to other ranks."""
    bytes_sent: int
    """Bytes sent to other ranks: token rows, result rows, their metadata and signals."""
    padded_rows: int
    """Rows that an all-to-all would send to other ranks if it padded all experts to the same number of rows: token rows
    and result rows together."""
    padded_bytes: int
    """Bytes of the `padded_rows`."""
    phase_ns: dict[str, int]
    """Nanoseconds summed over the processors: by kind of task, and ``idle``. GPU: empty unless the call was traced."""
    wall_ns: int
    """Nanoseconds from this rank's entry into the call to its exit. GPU: 0 unless the call was traced."""
    processors: int
    """Processors (threads or thread blocks that execute tasks) of this rank."""
    events: list[Event] = field(default_factory=list)
    """What each actor did when; empty unless the call was traced."""

    @property
    def idle_share(self) -> float:
        """The share of the processors' time in which they had no task, 0 to 1."""
        total = sum(self.phase_ns.values())
        return self.phase_ns.get("idle", 0) / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict of plain values and arrays; events as tuples."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain["events"] = [tuple(event) for event in self.events]
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> CallReport:
        """The inverse of `to_dict`."""
        return cls(**{**plain, "events": [Event(*event) for event in plain["events"]]})


@dataclass(frozen=True, eq=False)
class GroupReport:
    """The reports of all ranks of a group on one call, added up."""

    tokens: int
    """Tokens of all ranks."""
    pairs: int
    """(token, k) pairs computed, dropped pairs not counted."""
    dropped: int
    """(token, k) pairs dropped."""
    bad_rows: int
    """Tokens whose rows are bad; see `CallReport.bad_rows`."""
    expert_load: np.ndarray
    """int64 [E]: (token, k) pairs that each expert computed."""
    rows_sent: int
    """Token rows and result rows that went to other ranks."""
    padded_rows: int
    """Token rows and result rows that a padded all-to-all would send to other ranks."""
    bytes_sent: int
    """Bytes that ranks sent to other ranks."""
    padded_bytes: int
    """Bytes that a padded all-to-all would send."""
    wall_ns: int
    """Nanoseconds that the call took on the slowest rank."""
    idle_share: float
    """The share of all processors' time in which processors had no task, 0 to 1."""

    @property
    def load_imbalance(self) -> float:
        """The busiest expert's load over the mean load: 1 is perfectly even, 0 means no pair at all."""
        mean = float(self.expert_load.mean()) if self.expert_load.size else 0.0
        return float(self.expert_load.max()) / mean if mean else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict of plain values, `expert_load` as a list."""
        return {**asdict(self), "expert_load": self.expert_load.tolist()}


def expert_load(topk_ids: Sequence[np.ndarray], experts: int) -> np.ndarray:
    """Count the (token, k) pairs of every expert.

    `topk_ids`: for each rank an int array [T, K] with the rank's own T. Numbers that name no expert, such as the -1 of
    a dropped pair, are not counted. Returns int64 [experts].
    """
    load = np.zeros(experts, np.int64)
    for ids in topk_ids:
        load += np.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts)
    return load


def chosen_experts(ids: np.ndarray, weights: np.ndarray, slices: int) -> dict[str, np.ndarray]:
    """The routing [T, K] of a `CallReport`, from the routing of slices [T, K slices]."""
    return {"topk_ids": ids[:, ::slices] // slices, "topk_weights": weights[:, ::slices]}


def traffic(
    ids: np.ndarray,
    owners: Sequence[int],
    rank: int,
    layer: LayerSpec,
    *,
    rows: int,
    returned: int,
    pairs: int,
    packets: int,
) -> dict[str, int]:
    """The fields of a rank's `CallReport` about what the rank sends to other ranks.

    `ids`: the rank's routing, int [T, K]. `owners`: for each expert, the rank to which this rank sends its tokens for
    the expert. The other arguments count what this rank sent: `rows` of tokens, `returned` rows of results, `pairs`
    (token, k) with an entry each, and `packets` with a signal each.
    """
    # An all-to-all pads every expert to the largest number of this rank's tokens that one expert gets, there and back.
    # A capacity-based layer needs this padding in order to drop nothing.
    largest = int(expert_load([ids], len(owners)).max())
    padded = largest * sum(owner != rank for owner in owners)  # rows, each way
    out, home = layer.token_row_bytes, layer.return_row_bytes
    return {
        "rows_sent": rows,
        "return_rows_sent": returned,
        "bytes_sent": rows * out + returned * home + pairs * _ENTRY_BYTES + packets * _SIGNAL_BYTES,
        "padded_rows": 2 * padded,
        "padded_bytes": padded * (out + home),
    }


def summarize(reports: Sequence[CallReport], experts: int) -> GroupReport:
    """Add up the reports of all ranks of one call of a layer with `experts` experts."""
    load = expert_load([report.topk_ids for report in reports], experts)
    idle = sum(report.phase_ns.get("idle", 0) for report in reports)
    busy_and_idle = sum(sum(report.phase_ns.values()) for report in reports)
    return GroupReport(
        tokens=sum(report.tokens for report in reports),
        pairs=int(load.sum()),
        dropped=sum(report.dropped for report in reports),
        bad_rows=sum(report.bad_rows for report in reports),
        expert_load=load,
        rows_sent=sum(report.rows_sent + report.return_rows_sent for report in reports),
        padded_rows=sum(report.padded_rows for report in reports),
        bytes_sent=sum(report.bytes_sent for report in reports),
        padded_bytes=sum(report.padded_bytes for report in reports),
        wall_ns=max((report.wall_ns for report in reports), default=0),
        idle_share=idle / busy_and_idle if busy_and_idle else 0.0,
    )
