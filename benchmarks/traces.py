"""Accounts of traced calls of several layers on one GPU, as ``flashmoe trace`` makes them, and what tracing costs.

    python benchmarks/traces.py [--layers NAME ...] [--pairs N] [--out FILE] [--traces FOLDER]

In layers of two ranks, the ranks share the GPU, with half of its multiprocessors each. They run at the same time if
NVIDIA's MPS can be started. Their times are not those of two GPUs. But they show which part of the time the account
covers; and because both ranks read the same timer, the difference of their clocks shows how exact a reading is. A run
adds to the layers in the result's file if these are of the same commit and device. --traces keeps the traces for
Perfetto.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from flashmoe import models
from flashmoe.bench.origin import commit_option, result_path, write
from flashmoe.cli.trace import quantised
from flashmoe.cli.traced import accounts_of, summary, traced
from flashmoe.cli.workload import Request, random_workload
from flashmoe.spec import FP8
from flashmoe.trace import write_traces
from harness import described
from same_bits import mps, sharing


class Layer(NamedTuple):
    model: str
    tokens: int
    ranks: int = 1
    fp8: bool = False
    backward: bool = False


LAYERS = {
    "qwen3-30b-a3b 8192": Layer("qwen3-30b-a3b", 8192),
    "qwen3-30b-a3b 8": Layer("qwen3-30b-a3b", 8),
    "mixtral-8x7b 8192": Layer("mixtral-8x7b", 8192),
    "qwen3-30b-a3b 4096 x2": Layer("qwen3-30b-a3b", 4096, ranks=2),
    "qwen3-30b-a3b 8192 fp8": Layer("qwen3-30b-a3b", 8192, fp8=True),
    "qwen3-30b-a3b 8192 training": Layer("qwen3-30b-a3b", 8192, backward=True),
}


def measure(name: str, pairs: int, traces: Path | None) -> dict[str, Any]:
    layer = LAYERS[name]
    request = Request(layer.ranks, layer.tokens, "bfloat16", "auto", "cuda")
    workload = random_workload(models.find(layer.model), request, 0, 0.0)
    if layer.fp8:
        workload = quantised(workload, FP8)
    with mps(layer.ranks > 1) as told:
        told = {**sharing(), **told} if layer.ranks > 1 else {}
        os.environ.update(told)
        settings = {"device": 0, "processors": 66} if layer.ranks > 1 else {}
        of_ranks = traced(workload, layer.backward, pairs, **settings)
        for each in told:
            del os.environ[each]
    found = summary(workload, of_ranks) | ({"under_mps": len(told) > 1} if layer.ranks > 1 else {})
    # Ranks that share the GPU read the same timer: their clocks' offsets differ only by the errors of reading it.
    offsets = [each.traces[-1].offset_ns for each in of_ranks]
    if layer.ranks > 1:
        found["clock_difference_us"] = (max(offsets) - min(offsets)) / 1000
    if traces is not None:
        write_traces(traces / f"{name.replace(' ', '-')}.json", [each.traces for each in of_ranks], found)
    for of_call in accounts_of(of_ranks):
        for each in of_call:
            shares = ", ".join(f"{part} {share * 100:.2f}" for part, share in each.shares().items())
            way = "backward" if each.backward else "forward"
            print(f"{name}, {way}, rank {each.rank}: {each.wall_ns / 1000:.1f} us; {shares}", flush=True)
    print(f"  overhead {found['overhead']}, clocks {found['clock_error_us']}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--pairs", type=int, default=16, help="of calls, traced and not")
    parser.add_argument("--out", type=Path, help="where to write the result; default: benchmarks/results/trace/")
    parser.add_argument("--traces", type=Path, help="a folder for what Perfetto shows")
    commit_option(parser)
    args = parser.parse_args()
    layers = {name: measure(name, args.pairs, args.traces) for name in args.layers}
    result = described(args.commit)
    path = args.out or result_path("trace", result["device"], 1)
    before = json.loads(path.read_text()) if path.exists() else {}
    if all(before.get(each) == result[each] for each in ("commit", "device")):
        layers = before["layers"] | layers
    write(path, result | {"layers": layers})


if __name__ == "__main__":
    main()
