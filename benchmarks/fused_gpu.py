"""The fused kernel on one GPU beside the bare GEMMs of the same layer, in one run.

    python benchmarks/fused_gpu.py [--shapes NAME ...] [--out benchmarks/results/fused_gpu/h200x1.json]

For each shape and number of tokens, two calls are timed in turn, by CUDA events: the whole layer (router to combine,
one launch), and the floor. The floor is PyTorch's two grouped GEMMs alone, on ready inputs, with the same number of
rows, spread over the experts at random. There are two timers. "busy": the GPU is kept busy before each call, so that
no gap before a launch is in the figure. "plain": the launches are in the figure (one of the layer, two of the floor).
Figures are medians and spread of --repeats calls. Prints ratios, writes JSON.
"""

from __future__ import annotations

import argparse
import pathlib
from contextlib import closing

import torch
from flashmoe.bench.expected import reference
from flashmoe.bench.floors import floor_call
from flashmoe.bench.layer import Sizes
from flashmoe.bench.measure import gpu_operations, in_turn, milliseconds
from flashmoe.bench.origin import QUERY, commit_option, nvidia_smi, write
from flashmoe.bench.shapes import SHAPES
from floors import ceilings
from harness import WHOLE, beside_floor, described
from lone_layer import LoneLayer

DEFAULT = tuple(name for name in WHOLE if name not in ("paper-E16", "paper-E32"))
"""Only some of the paper's numbers of experts: fused_group.py compares all of them, on groups of GPUs."""


def measure(name: str, tokens: int, repeats: int) -> dict:
    hidden, inner, experts, top_k, activation, _ = SHAPES[name]
    with closing(LoneLayer(SHAPES[name], tokens)) as layer:
        y = layer(0)
        layer.context.synchronize()
        sample = torch.randperm(tokens, device="cuda")[:8]
        router, w1, w2 = layer.router, layer.w1, layer.w2
        expected = reference(layer.xs[0][sample], router, w1, w2, top_k, activation == "swiglu", range(experts))
        error = ((y[sample].double() - expected).norm() / expected.norm()).item()
        bare = floor_call(tokens * top_k, hidden, inner, experts, w1, w2)
        timed = in_turn(milliseconds, {"fused": layer, "floor": bare}, repeats)
        layer.context.synchronize()
        operations = gpu_operations(layer) / 10
    touched = min(experts, tokens * top_k)
    if tokens * top_k < 8 * experts:
        touched = experts * (1 - (1 - top_k / experts) ** tokens)
    row = {"shape": name, "tokens": tokens, **beside_floor(timed)}
    fused = row["fused_ms"]
    return {
        **row,
        "tflops": Sizes.of(name, tokens=tokens).flops / fused * 1e-9,
        "weight_tb_s": touched * (w1[0].numel() + w2[0].numel()) * 2 / fused * 1e-9,
        "gpu_operations_per_call": operations,
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=DEFAULT)
    parser.add_argument("--tokens", type=int, nargs="*")
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    product_ms, copy_ms = ceilings()
    result = {
        **described(args.commit),
        "cublas_8192_tflops": 2 * 8192**3 / product_ms * 1e-9,
        "copy_tb_s": 2 * 2**31 / copy_ms * 1e-9,
        "shapes": [],
    }
    ceiling = f"cuBLAS {result['cublas_8192_tflops']:.0f} TFLOP/s, copy {result['copy_tb_s']:.2f} TB/s"
    print(f"{result['device']}: {ceiling}")
    columns = f"{'fused ms':>9} {'floor ms':>9} {'ratio':>6} plain {'TFLOP/s':>8} {'w TB/s':>7} ops error"
    print(f"{'shape':>12} {'tokens':>6} {columns}")
    for name in args.shapes:
        for tokens in args.tokens or SHAPES[name][-1]:
            row = measure(name, tokens, args.repeats)
            row["nvidia_smi"] = {QUERY: nvidia_smi()}
            result["shapes"].append(row)
            figures = f"{row['fused_ms']:9.4f} {row['floor_ms']:9.4f} {row['ratio']:6.3f} {row['plain_ratio']:5.3f}"
            rest = f"{row['tflops']:8.0f} {row['weight_tb_s']:7.2f} {row['gpu_operations_per_call']:3.1f}"
            print(f"{name:>12} {tokens:>6} {figures} {rest} {row['error']:.1e}", flush=True)
            torch.cuda.empty_cache()
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
