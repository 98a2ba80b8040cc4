"""A backward pass on one GPU beside the bare GEMMs of the same layer, and what keeping for it costs a forward pass.

    python benchmarks/backward.py [--shapes NAME ...] [--dtype float32 [--exact]] [--out FILE.json]

For each shape, the calls below are timed in turn, in one run, by three timers. "busy": the GPU is kept busy before each
call, so that the figure has no gap before a launch in it. "plain": the figure includes the launches. "sustained": each
call follows others of its kind without a pause, so the GPU has the clocks that its power allows for long; with layers
of many milliseconds, these are not the clocks of a single call.

  backward    the backward pass of the whole layer, under autograd: gradients of x, of the router and of both matrices
              of the experts
  given       the same with the routing given: gradients of x, of the combine weights and of both matrices
  floor       PyTorch's four grouped GEMMs of a backward pass alone, on ready inputs; in float32, which they
              do not take, cuBLAS's products for each expert, in TF32 or, with --exact, in fp32
  keeps       the forward pass that keeps what gradients need
  inference   the forward pass that keeps nothing

Figures are medians and spread of --repeats calls. Prints ratios, writes JSON.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from contextlib import closing
from typing import Any

import torch
from flashmoe.bench.floors import backward_floor_call
from flashmoe.bench.layer import Sizes
from flashmoe.bench.measure import AUTOGRAD_CYCLES, in_turn, milliseconds, passes
from flashmoe.bench.origin import QUERY, commit_option, nvidia_smi, write
from flashmoe.bench.shapes import SHAPES, TRAINED
from harness import described, medians_and_spread, sustained
from lone_layer import LoneLayer

TIMERS = {True: "", False: "plain_", None: "sustained_"}
"""How keys of a row begin. True: the GPU was kept busy with other work (busy); False: it was idle (plain); None: it was
kept busy with calls of the same kind (sustained)."""


def measure(name: str, tokens: int, repeats: int, dtype: str, exact: bool) -> dict[str, Any]:
    hidden, inner, experts, top_k, _, _ = SHAPES[name]
    torch.backends.cuda.matmul.allow_tf32 = not exact  # for the products of the floor
    with closing(LoneLayer(SHAPES[name], tokens, dtype, exact)) as layer:
        calls = passes(layer, exact)
        bare = backward_floor_call(tokens * top_k, hidden, inner, experts, layer.w1.detach(), layer.w2.detach())
        timer = functools.partial(milliseconds, cycles=AUTOGRAD_CYCLES)
        calls["floor"] = bare
        timed = {**in_turn(timer, calls, repeats), **sustained(calls, repeats)}
        layer.context.synchronize()
    row: dict[str, Any] = {"shape": name, "tokens": tokens, "dtype": dtype, "exact": exact}
    row |= medians_and_spread(timed, TIMERS)
    for kind in TIMERS.values():
        for call in ("backward", "given"):
            row[f"{kind}{call}_ratio"] = row[f"{kind}{call}_ms"] / row[f"{kind}floor_ms"]
        row[f"{kind}keeps_ratio"] = row[f"{kind}keeps_ms"] / row[f"{kind}inference_ms"]
    row["tflops"] = 2 * Sizes.of(name, tokens=tokens).flops / row["given_ms"] * 1e-9
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=TRAINED)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--exact", action="store_true", help="float32 without TF32")
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    result: dict[str, Any] = {**described(args.commit), "shapes": []}
    print(f"{result['device']}: milliseconds, and parts of the floor, busy, plain and sustained")
    print(f"{'shape':>12} {'tokens':>6} {'floor':>7} {'backward':>8} {'':17} {'given':>7} {'':17} keeps/inference")
    for name in args.shapes:
        tokens = SHAPES[name][-1][0]
        row = measure(name, tokens, args.repeats, args.dtype, args.exact)
        row["nvidia_smi"] = {QUERY: nvidia_smi()}
        result["shapes"].append(row)
        figures = [f"{name:>12} {tokens:>6} {row['floor_ms']:7.3f}"]
        for call, width in (("backward", 8), ("given", 7)):
            ratios = [f"{row[f'{kind}{call}_ratio']:.3f}" for kind in TIMERS.values()]
            figures.append(f"{row[f'{call}_ms']:{width}.3f} {' '.join(ratios)}")
        figures.append(f"{row['keeps_ms']:.3f}/{row['inference_ms']:.3f} {row['keeps_ratio']:.3f}")
        print(" ".join(figures), flush=True)
        torch.cuda.empty_cache()
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
