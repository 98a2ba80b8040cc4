"""A layer whose experts are spread over the ranks in different ways, as in COMET's figures 12 and 14.

    torchrun --nproc-per-node N benchmarks/parallelism.py splits|imbalance|routing [--shapes NAME ...] [--tokens T]
        [--engine cuda|cpu] [--repeats N] [--out benchmarks/results/parallelism/h200xN.json]

`splits`: expert parallelism times tensor parallelism. For each divisor n of N, n ranks share each expert, with a slice
on each of them. With n = 1 experts are whole; with n = N each rank has a slice of every expert. Each split must compute
the same result, except for rounding; "difference" is how far its result is from that of the first split.

`imbalance`: experts that are chosen unevenly. Their shares of all choices have the mean 1 / E and the standard
deviation --spread. The experts lie in contiguous shares; or as `flashmoe.placement.balanced` places them, with E / 8
copies, for the load of the batch that is measured; or they are split as above. "fullest" is the load of the rank that
computes the most rows, divided by the mean of all ranks.

`routing`: the same placements, for the shipped layer's experts, chosen as the layer's router chooses them for the
shipped passage. The tokens of the passage are repeated --passes times: this keeps their loads, and makes a call so long
that disturbances matter less.

Every rank has T tokens, whose experts are given. Each time is that of the slowest rank; figures are medians of
--repeats calls. Placements that are compared (not splits) are called in turn; "of_contiguous" is the median of the
ratios of a call's time to that of the neighbouring call with contiguous shares. With the CUDA engine, the GPUs are kept
busy, then meet in an all-reduce, behind which the call begins. With the CPU engine (whose shape is "small"), a call
begins at a barrier. Rank 0 prints and writes JSON.
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
    """The rows of `routing`: the shipped passage is dealt out evenly to the ranks, and repeated `passes` times."""
    layer, states = shipped_layer()
    sizes = {"hidden": layer.hidden, "intermediate": layer.intermediate, "experts": layer.experts, "top_k": layer.top_k}
    with flashmoe.Context(engine="cpu", max_tokens=len(states), **sizes, dtype=layer.dtype.name) as context:
        flashmoe.moe(context, states, **layer.tensors(), **layer.rule())
        ids = context.last_call.topk_ids
    by_rank = [np.tile(each.astype(np.int32), (passes, 1)) for each in np.array_split(ids, dist.get_world_size())]
    shape = (*sizes.values(), layer.activation)
    return placed({"shape": "shipped", "tokens": len(by_rank[0])}, (*shape, ()), by_rank, repeats, engine)


def start(engine: str) -> dict[str, Any]:
    """Joins the group that torchrun has started. Returns where its results come from."""
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
