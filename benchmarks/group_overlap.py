"""How much longer a group of GPUs takes because of rows that travel, of uneven experts and of late ranks.

    torchrun --nproc-per-node N benchmarks/group_overlap.py [--out benchmarks/results/group_overlap/h200xN.json]

There are three parts, all with given routing. Figures are medians of --repeats calls ("hidden": sixteen times as many).
Calls that are compared take turns, so that all of them have the same clocks and power.

- "hidden": the time of a call whose tokens choose among all experts, less that of a call whose tokens choose among
  their own rank's experts, so that no row travels. Of the differences of neighbouring calls, it gives the median and
  the quartiles. Each time is that of the slowest rank. Each expert has exactly as many rows in both calls, so that both
  compute the same tiles. If experts were drawn freely, the fullest rank's rows would vary by as much as is to be
  measured.
  "exposed" is the difference over the time that communication takes alone, in COMET's sense, which means collectives:
  twice (there and back) NCCL's all_to_all_single of the layer's T K rows of H, timed in turn with the calls by the same
  timer. This exchange moves a row for each expert, even if two of them are on one rank, and also the rank's own rows.
  "exposed_of_link" is the difference over the time on the link, at 350 GB/s, of the rows that really travel: the rows
  that a rank sends, each once to a rank, and those that it returns.
- "uneven": 8 experts and K = 2. The experts' shares of the choices have the standard deviations of COMET's figure 14.
  They grow from the first expert to the last, so that the last rank has the most rows. "ratio" is the call's time over
  that of the bare GEMMs of the fullest rank's rows. The figure's own setting is Mixtral's experts with 8192 tokens of
  all ranks together. Further settings have 8192 tokens a GPU, with Mixtral's and with the paper's sizes.
- "late": the last rank begins a millisecond late. Figures say how much later the other ranks end, and what share of
  their GEMM tasks they have done by the time at which the last rank begins.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics

import torch
import torch.distributed as dist
from flashmoe.bench.floors import grouped_gemms
from flashmoe.bench.joining import join_gpus
from flashmoe.bench.measure import own_milliseconds
from flashmoe.bench.origin import commit_option, write
from flashmoe.bench.overlap import GivenLayer, everyone, hidden
from flashmoe.placement import local_experts
from harness import described

DEVIATIONS = (0.0, 0.01, 0.032, 0.05)
FIGURE_TOKENS = 8192
"""The tokens of all ranks together in COMET's figure 14."""


def uneven(name: str, tokens: int, repeats: int) -> list[dict]:
    layer = GivenLayer(name, tokens)
    rows = [uneven_row(layer, deviation, repeats) for deviation in DEVIATIONS]
    layer.close()
    return [{"shape": name, "tokens": tokens, "tokens_in_all": tokens * layer.ranks, **row} for row in rows]


def uneven_row(layer: GivenLayer, deviation: float, repeats: int) -> dict:
    spread = torch.linspace(-1.0, 1.0, layer.experts)
    ids = layer.choose(1.0 / layer.experts + deviation * spread / spread.std(correction=0))
    counts = torch.bincount(ids.flatten().long(), minlength=layer.experts)
    dist.all_reduce(counts)
    of_rank = [counts[local_experts(layer.owners, rank)] for rank in range(layer.ranks)]
    loads = [int(counts.sum()) for counts in of_rank]
    heaviest = of_rank[loads.index(max(loads))]
    bare = grouped_gemms(heaviest, int(heaviest.sum()), layer.hidden, layer.inner, layer.w1, layer.w2)
    fused, floor = (statistics.median(each) for each in layer.in_turn(repeats, layer.call(ids), bare))
    drawn = (counts / counts.sum()).std(correction=0).item()
    return {
        "deviation": deviation,
        "deviation_drawn": drawn,
        "rows": loads,
        "fused_ms": fused,
        "floor_ms": floor,
        "ratio": fused / floor,
    }


def late(name: str, tokens: int, repeats: int) -> dict:
    layer = GivenLayer(name, tokens)
    moe = layer.call(layer.choose(torch.ones(layer.experts)))
    is_late = layer.rank == layer.ranks - 1
    cycles = cycles_of_a_millisecond()

    def delayed(i: int, **how) -> None:
        if is_late:
            torch.cuda._sleep(cycles)
        moe(i, **how)

    usual, held_up = [], []
    for _ in range(4):
        usual += own_milliseconds(moe, repeats // 4, True)
        held_up += own_milliseconds(delayed, repeats // 4, True)
    ends_later = statistics.median(held_up) - statistics.median(usual)
    others = everyone(-1e9 if is_late else ends_later)
    moe(0, trace=True)
    dist.barrier()
    torch.cuda.synchronize()
    delayed(0, trace=True)
    layer.context.synchronize()
    tasks = [event for event in layer.context.last_call.events if event.kind in ("gemm0", "gemm1")]
    begin = min(event.start_ns for event in layer.context.last_call.events)
    done = sum(event.end_ns < begin + 1_000_000 for event in tasks) / len(tasks)
    share = everyone(1.0 if is_late else done, dist.ReduceOp.MIN)
    layer.close()
    return {"shape": name, "tokens": tokens, "others_end_later_ms": others, "done_meanwhile": share}


def cycles_of_a_millisecond() -> int:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):
        start.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
    return int(20_000_000 / start.elapsed_time(end))


def shown(value: object) -> str:
    if isinstance(value, list):
        return " / ".join(map(shown, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    rank = join_gpus()
    settings = (("mixtral", FIGURE_TOKENS // dist.get_world_size()), ("mixtral", 8192), ("paper-E8", 8192))
    result = {
        **described(args.commit, dist.get_world_size()),
        "hidden": [hidden(name, 8192, args.repeats) for name in ("mixtral", "qwen3-30b", "paper-E64")],
        "uneven": [row for name, tokens in settings for row in uneven(name, tokens, args.repeats)],
        "late": [late("paper-E64", 8192, args.repeats)],
    }
    if rank == 0:
        for part in ("hidden", "uneven", "late"):
            for row in result[part]:
                print(f"{part}: " + ", ".join(f"{name} {shown(value)}" for name, value in row.items()), flush=True)
        if args.out:
            write(args.out, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
