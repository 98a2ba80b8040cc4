"""The report of a call of the CUDA engine: counts that follow from its routing, and times from its trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..account import account
from ..report import TASK_KINDS, CallReport, chosen_experts, traffic
from ..spec import LayerSpec
from ..trace import PHASES, CallTrace, Event

_EVENT = np.dtype(
    [
        *(("start", "<u8"), ("end", "<u8"), ("kind", "<u2"), ("warp", "<u2")),
        *(("index", "<i4"), ("column", "<u4"), ("expert", "<i4")),  # -1: none
    ]
)


@dataclass(frozen=True)
class Ended:
    """What a rank knows about a call that is over."""

    layer: LayerSpec
    owners: tuple[int, ...]
    """For each expert, the rank to which this rank sends the expert's tokens."""
    rank: int
    ranks: int
    processors: int
    """Thread blocks."""
    topk_ids: np.ndarray
    """Slices of experts, int32 [T, K slices]; -1 for a dropped choice, below -1 for a choice without an expert."""
    topk_weights: np.ndarray
    """float32 [T, K slices]."""
    bad_rows: int
    """Tokens for which no choice could be made."""
    load: np.ndarray
    """How many rows each expert computed on this rank: [E] for a rank alone, else [El]; and, as a last entry, the
    shared expert if there is one."""
    returned: int
    """Rows that went to other ranks as results."""
    passed_on: int
    """Rows of other machines' tokens that this rank, as a relay, has passed on to ranks of its own machine."""
    machines: tuple[int, ...]
    """The machine of each rank."""
    block_tokens: int
    """Tokens of a token block."""
    tile_rows: int
    task_features: int
    """How many rows of a weight matrix one task multiplies."""


def counted(call: Ended) -> CallReport:
    """The report of a call, without times. Only a trace has times; see `timed`."""
    layer, ids = call.layer, np.maximum(call.topk_ids, -1)
    # All tiles of an expert but the last are full.
    tiles = int((-(-call.load // call.tile_rows)).sum())
    # GEMM0 has tasks for each slice of the shared expert's tiles.
    sliced = tiles + max(0, layer.shared - 1) * -(-len(ids) // call.tile_rows)
    blocks = -(-len(ids) // call.block_tokens)
    features = call.task_features
    columns0 = -(-layer.intermediate // (features // 2 if layer.gated else features))
    columns1 = -(-layer.hidden // features)
    counts = {"gate": blocks, "gemm0": sliced * columns0, "gemm1": tiles * columns1, "reduce": 0, "combine": blocks}
    owners = np.array([*call.owners, call.rank])[ids]  # -1, a pair without an expert, selects the last entry
    others = [q for q in range(call.ranks) if q != call.rank]
    here = call.machines[call.rank]
    # A row goes to each rank of this machine that needs it, and once to each other machine that needs it.
    went_to = [[q] for q in others if call.machines[q] == here]
    went_to += [[q for q in others if call.machines[q] == m] for m in set(call.machines) - {here}]
    return CallReport(
        tokens=len(ids),
        return_mode=layer.return_mode,
        **chosen_experts(ids, call.topk_weights, layer.slices),
        dropped=int((call.topk_ids == -1).sum()) // layer.slices,
        bad_rows=call.bad_rows,
        tasks={kind: counts[kind] for kind in TASK_KINDS},
        tiles=tiles,
        tile_rows=int(call.load.sum()),
        **traffic(
            ids,
            call.owners,
            call.rank,
            layer,
            rows=sum(int(np.isin(owners, there).any(axis=1).sum()) for there in went_to) + call.passed_on,
            returned=call.returned,
            pairs=int((owners != call.rank).sum()),
            packets=blocks * len(others),
        ),
        phase_ns={},
        wall_ns=0,
        processors=call.processors,
    )


def timed(untimed: CallReport, trace: CallTrace) -> CallReport:
    """`untimed`, with the times and events of the call's trace."""
    found = account(trace)
    spent = dict.fromkeys(("gate", "dispatch", *TASK_KINDS[1:]), 0)
    for part, ns in found.ns.items():
        kind = part.removesuffix(" epilogue").replace("send", "dispatch")
        if kind in spent:
            spent[kind] += ns
    spent["idle"] = found.total_ns - sum(spent.values())
    return replace(untimed, phase_ns=spent, wall_ns=trace.wall_ns, events=trace.events)


def call_trace(raw: np.ndarray, blocks: int, rank: int, backward: bool, experts: Sequence[int]) -> CallTrace:
    """The trace that `blocks` thread blocks have written to `raw`, uint8. Each block has a header, as long as an event,
    and then as many events as fit. The header has three numbers of 64 bits: how many events there were, when the block
    began, and when it ended. `experts` translates an event's number of an expert: it has the ids of the experts that
    the rank holds, and last E, which stands for the shared expert. All greater numbers mean the shared expert too."""
    per_block = raw.reshape(blocks, -1)
    headers = per_block[:, : _EVENT.itemsize].copy().view("<u8")
    per_block = per_block.view(_EVENT)
    events, left_out, room = [], {}, per_block.shape[1] - 1
    for block, (count, *_) in enumerate(headers.tolist()):
        if count > room:
            left_out[block] = count - room
        for start, end, kind, warp, index, column, expert in per_block[block, 1 : 1 + min(count, room)].tolist():
            name = PHASES[kind]
            actor = "os" if name == "schedule" else f"processor {block}"
            whose = -1 if expert < 0 else experts[min(expert, len(experts) - 1)]
            events.append(Event(actor, name, start, end, index, column, warp, whose))
    return CallTrace(
        rank, backward, blocks, int(headers[:, 1].min()), int(headers[:, 2].max()), events, "cuda", left_out
    )
