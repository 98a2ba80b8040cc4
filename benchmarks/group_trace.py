"""How each GPU of a group spends the time of a call, from a trace of the call.

    torchrun --nproc-per-node N benchmarks/group_trace.py [--shape NAME] [--tokens T] [--return reduced]
        [--profile name=value ...] [--histogram 40] [--perfetto FILE]

The traced call follows 40 other calls. All of them begin in the same way: each GPU is kept busy, then all GPUs meet in
an all-reduce. A call after a pause would not be typical, because its first stores to a peer take 0.1 ms. Prints for
each rank, in microseconds since its first event: when gate and packets end, when blocks send, when the first task of
each block begins and its last task ends, and how long tasks, epilogues, waits and combines take. --histogram adds a
table of GEMM tasks by the time at which they begin, in bins of so many microseconds. The last line says how the
processors spent their time (flashmoe.account). --perfetto writes all ranks' spans, by the clock of this machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import flashmoe
import torch
import torch.distributed as dist
from epilogues import with_epilogues
from flashmoe.account import PARTS, Account, accounts
from flashmoe.bench.joining import join_gpus
from flashmoe.bench.measure import own_span
from flashmoe.bench.overlap import GroupLayer
from flashmoe.bench.shapes import SHAPES
from flashmoe.trace import CallTrace, Event, write_traces
from harness import profile_of

CALLS_BEFORE = 40
GEMMS = ("gemm0", "gemm1")


def summary(events: Sequence[Event], histogram: int = 0) -> list[str]:
    """Lines of text about one rank's call. `histogram`: the microseconds of a bin; 0: no histogram."""
    begin = min(event.start_ns for event in events)

    def at(ns: float) -> float:
        return (ns - begin) / 1000

    by_kind, by_block = defaultdict(list), defaultdict(list)
    for event in sorted(events, key=lambda event: event.end_ns):
        by_kind[event.kind].append(event)
        by_block[event.actor].append(event)
    lines = [f"ends {at(max(event.end_ns for event in events)):.0f}"]
    if gates := by_kind["gate"]:
        lines.append("gate ends " + spread(at(event.end_ns) for event in gates))
    # Spans of the kind "dispatch": a block has a few for the token blocks that it dispatches. A block that also sends
    # has one more for each share of the rows that one of its warps sends, so it has many.
    sending = {actor for actor, own in by_block.items() if sum(event.kind == "dispatch" for event in own) > 8}
    sent = [event for event in by_kind["dispatch"] if event.actor in sending]
    if own := [event for event in by_kind["dispatch"] if event.actor not in sending]:
        lines.append("packets end " + spread(at(event.end_ns) for event in own))
    if sent:
        lines.append(f"{len(sending)} blocks send {len(sent)} shares, each " + spread(map(microseconds, sent)))
        lines.append(f"rows have gone at {at(max(event.end_ns for event in sent)):.0f}")
    tasks = [[event for event in own if event.kind in GEMMS] for own in by_block.values()]
    if any(tasks):
        lines.append("blocks' first task begins " + spread(at(min(e.start_ns for e in own)) for own in tasks if own))
        lines.append("blocks' last task ends " + spread(at(own[-1].end_ns) for own in tasks if own))
    for kind in (*GEMMS, "wait", "reduce", "combine"):
        by_group = defaultdict(list)
        for event in by_kind[kind]:
            by_group[event.column if kind == "combine" else 0].append(event)
        for group, spans in sorted(by_group.items()):
            name = f"{kind} of group {group}" if len(by_group) > 1 else kind
            first, last = min(event.start_ns for event in spans), max(event.end_ns for event in spans)
            span = f"from {at(first):.0f} until {at(last):.0f}"
            lines.append(f"{len(spans)} {name}, {span}, each " + spread(map(microseconds, spans)))
    epilogues = with_epilogues(events)
    for kind in GEMMS:
        if pairs := [pair for pair in epilogues if pair[0].kind == kind]:
            lines.append(f"epilogue of {kind} " + spread(microseconds(epilogue) for _, epilogue in pairs))
    if histogram:
        lines += binned(epilogues, begin, histogram)
    return lines


def binned(pairs: Iterable[tuple[Event, Event]], begin: int, width: int) -> list[str]:
    """A line for each bin: how many tasks of each GEMM begin in it, their mean time, and that of their epilogues."""
    bins = defaultdict(lambda: {kind: [] for kind in GEMMS})
    for task, epilogue in pairs:
        bins[(task.start_ns - begin) // (1000 * width)][task.kind].append((microseconds(task), microseconds(epilogue)))
    lines = ["begin     gemm0  time epilogue     gemm1  time epilogue"]
    for n in sorted(bins):
        columns = []
        for kind in GEMMS:
            times = bins[n][kind] or [(0.0, 0.0)]
            task, epilogue = (statistics.mean(each) for each in zip(*times, strict=True))
            columns.append(f"{len(bins[n][kind]):9d} {task:5.1f} {epilogue:8.2f}")
        lines.append(f"{n * width:5d}" + " ".join(columns))
    return lines


def described(found: Account) -> str:
    """An account as one line of text."""
    shares = found.shares()
    return "; ".join(f"{part} {shares[part] * 100:.1f} %" for part in (*PARTS, "uncovered") if part in shares)


def microseconds(event: Event) -> float:
    return (event.end_ns - event.start_ns) / 1000


def spread(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return (
        f"{ordered[0]:.1f} to {ordered[-1]:.1f}, mean {statistics.mean(ordered):.1f}, "
        f"median {statistics.median(ordered):.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="paper-E64", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--profile", nargs="*", default=[], help="name=value, see flashmoe.Context")
    parser.add_argument("--return", dest="return_mode", default="auto")
    parser.add_argument("--perfetto", help="a file for ui.perfetto.dev")
    parser.add_argument("--histogram", type=int, default=0, help="microseconds of a bin")
    args = parser.parse_args()
    rank = join_gpus()
    layer = GroupLayer(args.shape, args.tokens, profile_of(args.profile), args.return_mode)
    torch.manual_seed(args.tokens)
    router = torch.randn(layer.experts, layer.hidden, device="cuda", dtype=torch.bfloat16) * 0.02

    def call(i: int) -> torch.Tensor:
        routing = {"router": router, "top_k": layer.top_k, "activation": layer.activation}
        return flashmoe.moe(layer.context, layer.x, layer.w1, layer.w2, **routing)

    layer.context.trace(lambda: call(0))  # loads the kernel that traces, so that no later call includes this
    for i in range(CALLS_BEFORE):
        own_span(call, i, True)
    (own,) = layer.context.trace(lambda: own_span(call, CALLS_BEFORE, True))
    traces: list[CallTrace] = [own] * layer.ranks
    dist.all_gather_object(traces, own)
    if rank == 0:
        for trace, found in zip(traces, accounts(traces), strict=True):
            print(f"rank {trace.rank} of {args.shape}, {args.tokens} tokens")
            for line in [*summary(trace.events, args.histogram), described(found)]:
                print(f"  {line}", flush=True)
        if args.perfetto is not None:
            write_traces(args.perfetto, [[trace] for trace in traces], {"layer": args.shape, "tokens": args.tokens})
    layer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
