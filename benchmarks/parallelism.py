"""A layer whose experts are spread over the ranks in different ways: what COMET's figures 12 and 14 vary.

    torchrun --nproc-per-node N benchmarks/parallelism.py splits|imbalance|routing [--shapes NAME ...] [--tokens T]
        [--engine cuda|cpu] [--repeats N] [--out benchmarks/results/parallelism/h200xN.json]

`splits`: expert times tensor parallelism. For every divisor n of N, groups of n ranks share each expert, a slice a
rank: from n = 1, whole experts, to n = N, a slice of every expert everywhere. The results are those of the first split,
but for rounding; "difference" says how far they are apart.

`imbalance`: experts that are chosen unevenly. Their shares of all choices have the standard deviation --spread around
1 / E; experts lie in contiguous shares, or as `flashmoe.placement.balanced` places them, with E / 8 copies, by the load
of that very batch, or are split as above. "fullest" is what the rank that computes most has, of the mean.

`routing`: the same two placements of the shipped layer's experts, chosen as its router chooses them for its passage,
which comes --passes times over: the loads are the passage's, and a call is long beside what disturbs it.

Every rank has T tokens, whose experts are given. Of each call the slowest rank's time counts; medians of --repeats.
The placements that are compared are called in turn; "of_contiguous" is the median of what two neighbouring calls
have to one another.
With the CUDA engine a call begins behind an all-reduce on GPUs that are kept busy, where ranks share one, and with the
CPU engine (whose shape is "small"), at a barrier. Rank 0 prints and writes JSON.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import sys
from typing import Any

import flashmoe
import numpy as np
import torch
import torch.distributed as dist
from flashmoe.bench.joining import join_gpus
from flashmoe.bench.origin import as_typed, commit_option, cpu_model, write
from flashmoe.bench.shapes import SHAPES, SMALL
from flashmoe.bench.spreading import TYPES, imbalance, placed, splits
from flashmoe.checkpoint import shipped_layer
from harness import described


def routing(repeats: int, engine: str, passes: int) -> list[dict[str, Any]]:
    """The shipped passage, dealt out evenly, `passes` times over."""
    layer, states = shipped_layer()
    sizes = {"hidden": layer.hidden, "intermediate": layer.intermediate, "experts": layer.experts, "top_k": layer.top_k}
    with flashmoe.Context(engine="cpu", max_tokens=len(states), **sizes, dtype=layer.dtype.name) as context:
        flashmoe.moe(context, states, **layer.tensors(), **layer.rule())
        ids = context.last_call.topk_ids
    by_rank = [np.tile(each.astype(np.int32), (passes, 1)) for each in np.array_split(ids, dist.get_world_size())]
    shape = (*sizes.values(), layer.activation)
    return placed({"shape": "shipped", "tokens": len(by_rank[0])}, (*shape, ()), by_rank, repeats, engine)


def start(engine: str) -> dict[str, Any]:
    """Joins the group that torchrun has started; where what it measures comes from."""
    if engine == "cuda":
        join_gpus()
        return described("", dist.get_world_size())
    dist.init_process_group("gloo")
    origin = {"device": f"{cpu_model()} x0", "cores": os.cpu_count(), "torch": torch.__version__}
    return origin | {"command": as_typed(f"torchrun --nproc-per-node {dist.get_world_size()}", sys.argv)}


def report(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    result["rows"] += rows
    for row in rows if dist.get_rank() == 0 else ():
        shown = {key: value for key, value in row.items() if key != "samples_ms"}
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in shown.items()), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=["splits", "imbalance", "routing"])
    parser.add_argument("--engine", choices=list(TYPES), default="cuda")
    parser.add_argument("--shapes", nargs="*", default=None)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--spread", type=float, nargs="*", default=[0.0, 0.01, 0.02, 0.03, 0.04, 0.05])
    parser.add_argument("--passes", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    shapes = SHAPES | SMALL
    result: dict[str, Any] = start(args.engine) | {"commit": args.commit, "suite": args.suite, "rows": []}
    by_suite = {"splits": splits, "imbalance": functools.partial(imbalance, spreads=args.spread)}
    if args.suite == "routing":
        report(result, routing(args.repeats, args.engine, args.passes))
    else:
        for name in args.shapes or (["mixtral", "paper-E8"] if args.engine == "cuda" else list(SMALL)):
            tokens = args.tokens or shapes[name][-1][0]
            report(result, by_suite[args.suite](name, shapes[name], tokens, args.repeats, args.engine))
    if args.out and dist.get_rank() == 0:
        write(args.out, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
