"""The fused kernel on one GPU beside the bare GEMMs of the same layer, in one run.

    python benchmarks/fused_gpu.py [--shapes NAME ...] [--out benchmarks/results/fused_gpu/h200x1.json]

Per shape and token count: the whole layer (router to combine, one launch), and the floor: PyTorch's two grouped GEMMs
alone, on ready inputs, the same number of rows spread over the experts at random (floors.py). Both are timed by events,
in turn, by two timers: "busy", with the GPU kept busy before each so that no launch gap is in the figure, and "plain",
which has the launches in it, one of the layer and two of the floor; medians and spread of --repeats. Prints ratios,
writes JSON.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics

import flashmoe
import torch
from floors import ceilings, floor_call
from harness import (
    QUERY,
    SHAPES,
    commit_option,
    described,
    flops,
    gpu_operations,
    milliseconds,
    nvidia_smi,
    reference,
    write,
)

DEFAULT = tuple(name for name in SHAPES if name not in ("paper-E16", "paper-E32"))
"""On one GPU: the line over E is a matter of groups."""


def measure(name: str, tokens: int, repeats: int) -> dict:
    hidden, inner, experts, top_k, activation, _ = SHAPES[name]
    gated = activation == "swiglu"
    torch.manual_seed(tokens)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    router = torch.randn(experts, hidden, **make) * 0.02
    w1 = torch.randn(experts, (2 if gated else 1) * inner, hidden, **make) * 0.02
    w2 = torch.randn(experts, hidden, inner, **make) * 0.02
    xs = [torch.randn(tokens, hidden, **make) for _ in range(4)]
    with flashmoe.Context(
        engine="cuda",
        max_tokens=tokens,
        hidden=hidden,
        intermediate=inner,
        experts=experts,
        top_k=top_k,
        dtype="bfloat16",
        return_mode="direct",
        profile={},
    ) as ctx:

        def layer(i: int) -> torch.Tensor:
            return flashmoe.moe(ctx, xs[i % 4], w1, w2, router=router, top_k=top_k, activation=activation)

        y = layer(0)
        ctx.synchronize()
        sample = torch.randperm(tokens, device="cuda")[:8]
        expected = reference(xs[0][sample], router, w1, w2, top_k, gated, range(experts))
        error = ((y[sample].double() - expected).norm() / expected.norm()).item()
        bare = floor_call(tokens * top_k, hidden, inner, experts, w1, w2)
        timed = {(what, busy): [] for what in ("fused", "floor") for busy in (True, False)}
        for _ in range(4):  # in turn, so that both see the same clocks
            for busy in (True, False):
                timed["fused", busy] += milliseconds(layer, repeats // 4, busy)
                timed["floor", busy] += milliseconds(bare, repeats // 4, busy)
        ctx.synchronize()
        operations = gpu_operations(layer) / 10
    median = {key: statistics.median(times) for key, times in timed.items()}
    fused, floor = median["fused", True], median["floor", True]
    touched = min(experts, tokens * top_k)
    if tokens * top_k < 8 * experts:
        touched = experts * (1 - (1 - top_k / experts) ** tokens)
    return {
        "shape": name,
        "tokens": tokens,
        "fused_ms": fused,
        "fused_min_max": [min(timed["fused", True]), max(timed["fused", True])],
        "floor_ms": floor,
        "floor_min_max": [min(timed["floor", True]), max(timed["floor", True])],
        "ratio": fused / floor,
        "plain_fused_ms": median["fused", False],
        "plain_floor_ms": median["floor", False],
        "plain_ratio": median["fused", False] / median["floor", False],
        "tflops": flops(name, tokens) / fused * 1e-9,
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
