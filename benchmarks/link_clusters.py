"""How many clusters should stop early to reduce (link_clusters, see flashmoe.Context), as in COMET's figure 8.

    torchrun --nproc-per-node N benchmarks/link_clusters.py [--shapes NAME ...] [--tokens T] [--numbers 0 4 8 ...]
        [--out benchmarks/results/link_clusters/h200xN.json]

For each shape, these are timed in turn, in one run: the layer with the direct return, the layer with the reduced return
and each number of clusters, and the floor. fused_group.py describes the floor and the two timers. Each time is that of
the slowest rank. Before the timing, calls with the reduced return must have the same bits with every number of
clusters; otherwise the program ends.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import flashmoe
import torch
import torch.distributed as dist
from flashmoe.bench.expected import sampled_error
from flashmoe.bench.floors import floor_call
from flashmoe.bench.joining import join_gpus
from flashmoe.bench.measure import group_milliseconds, in_turn
from flashmoe.bench.origin import QUERY, commit_option, nvidia_smi, write
from flashmoe.bench.overlap import GroupLayer
from flashmoe.bench.shapes import SHAPES
from harness import described, medians_and_spread

DEFAULT = ("qwen3-next", "qwen3-30b", "olmoe")
NUMBERS = (0, 4, 8, 12, 16, 24)
TIMERS = {True: "busy_", False: "plain_"}


def measure(name: str, tokens: int, numbers: list[int], repeats: int) -> dict[str, Any]:
    torch.manual_seed(tokens)
    layer = GroupLayer(name, tokens, return_mode="direct")
    router = torch.randn(layer.experts, layer.hidden, device="cuda", dtype=torch.bfloat16) * 0.02
    dist.broadcast(router, 0)
    contexts = {"direct": layer.context}
    contexts |= {f"reduced {n}": layer.open({"link_clusters": n}, "reduced") for n in numbers}

    def call(context: flashmoe.Context) -> Any:
        routing = {"router": router, "top_k": layer.top_k, "activation": layer.activation}
        return lambda _: flashmoe.moe(context, layer.x, layer.w1, layer.w2, **routing)

    calls = {way: call(context) for way, context in contexts.items()}
    results = {way: each(0) for way, each in calls.items()}
    for context in contexts.values():
        context.synchronize()
    first, *others = (y for way, y in results.items() if way != "direct")
    if not all(torch.equal(first, y) for y in others):
        raise SystemExit(f"{name}: bits depend on the number of clusters")
    gated = layer.activation == "swiglu"
    sample = (layer.x, results["direct"], router, layer.own, layer.w1, layer.w2, layer.top_k, gated)
    error = sampled_error(*sample)
    calls["floor"] = floor_call(tokens * layer.top_k, layer.hidden, layer.inner, len(layer.own), layer.w1, layer.w2)
    timed = in_turn(group_milliseconds, calls, repeats)
    for context in list(contexts.values())[1:]:
        context.synchronize()
        dist.barrier()  # no rank may close its context while another rank's call still waits for this rank
        context.close()
    layer.close()
    row: dict[str, Any] = {"shape": name, "tokens": tokens, "ranks": layer.ranks, "error": error}
    row |= medians_and_spread(timed, TIMERS)
    for kind in TIMERS.values():
        row[f"{kind}over_floor"] = {way: row[f"{kind}{way}_ms"] / row[f"{kind}floor_ms"] for way in contexts}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=DEFAULT, choices=list(SHAPES))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--numbers", type=int, nargs="*", default=NUMBERS)
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    rank = join_gpus()
    result = {**described(args.commit, dist.get_world_size()), "shapes": []}
    for name in args.shapes:
        row = measure(name, args.tokens or SHAPES[name][-1][0], args.numbers, args.repeats)
        row["nvidia_smi"] = {QUERY: nvidia_smi().splitlines()}
        result["shapes"].append(row)
        if rank == 0:
            print(f"{name}, {row['tokens']} tokens, floor {row['busy_floor_ms']:.3f} ms, error {row['error']:.1e}")
            for way, ratio in row["busy_over_floor"].items():
                print(
                    f"  {way:>12} {row[f'busy_{way}_ms']:.3f} ms, {ratio:.3f}, plain {row['plain_over_floor'][way]:.3f}"
                )
            if args.out:
                write(args.out, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
