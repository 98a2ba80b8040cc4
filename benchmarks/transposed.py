"""What transposed weights cost on one GPU: the layers of gpt-oss and Llama 4 with matrices as their checkpoints store
them (transposed), beside the same layers with ordinary matrices.

    python benchmarks/transposed.py [--layers NAME ...] [--repeats 32] [--out benchmarks/results/transposed/h200x1.json]

Layers have random bf16 weights and their model's options. Both kinds are timed in turn, by two timers: "busy" (the GPU
is kept busy before the call, so that the launch is not in the figure) and "plain" (the launch is in it). Figures are
medians; those of "busy" come with the smallest and largest. "ratio" is the time of transposed over that of ordinary
weights, "difference" is the relative difference of the two results. (With ordinary weights, calls of few tokens use a
kernel of their own; with transposed weights, they use the general kernel.)
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
from typing import Any

import flashmoe
import torch
from flashmoe.bench.measure import in_turn, milliseconds
from flashmoe.bench.origin import QUERY, commit_option, nvidia_smi, write
from harness import described

GPT_OSS = {"activation": "clamped_swiglu", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "interleaved": True}
LLAMA4 = {"score": "sigmoid", "renormalize": False, "weights_on_input": True}
LAYERS = {  # H, I, E, K, options, whether there are biases
    "gpt-oss-20b": (2880, 2880, 32, 4, GPT_OSS, True),
    "llama4-scout": (5120, 8192, 16, 1, LLAMA4, False),
}
TOKENS = (8192, 64, 1)


def measure(name: str, tokens: int, repeats: int) -> dict[str, Any]:
    hidden, inner, experts, top_k, options, biased = LAYERS[name]
    torch.manual_seed(1)
    normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    xs = [normal(tokens, hidden) for _ in range(4)]
    gate_up = torch.stack([normal(2 * inner, hidden) * 0.02 for _ in range(experts)])
    down = torch.stack([normal(hidden, inner) * 0.02 for _ in range(experts)])
    turned = {"gate_up_proj": gate_up.mT.contiguous(), "down_proj": down.mT.contiguous(), "transposed": True}
    biases = {"gate_up_bias": normal(experts, 2 * inner), "down_bias": normal(experts, hidden)} if biased else {}
    router = normal(experts, hidden) * 0.02
    sizes = {"hidden": hidden, "intermediate": inner, "experts": experts, "top_k": top_k}
    torch.cuda.empty_cache()  # the context's memory does not come from PyTorch's cache
    with flashmoe.Context(engine="cuda", max_tokens=tokens, return_mode="direct", profile={}, **sizes) as context:
        moe = functools.partial(flashmoe.moe, context, router=router, top_k=top_k, **options, **biases)
        calls = {
            "ordinary": lambda i: moe(xs[i % 4], gate_up, down),
            "transposed": lambda i: moe(xs[i % 4], **turned),
        }
        one, other = (call(0).double() for call in calls.values())
        timed = in_turn(milliseconds, calls, repeats)
        context.synchronize()
    row: dict[str, Any] = {"layer": name, "tokens": tokens, **sizes}
    for what in calls:
        row[f"{what}_ms"] = statistics.median(timed[what, True])
        row[f"{what}_min_max"] = [min(timed[what, True]), max(timed[what, True])]
        row[f"plain_{what}_ms"] = statistics.median(timed[what, False])
    row["ratio"] = row["transposed_ms"] / row["ordinary_ms"]
    row["plain_ratio"] = row["plain_transposed_ms"] / row["plain_ordinary_ms"]
    return row | {"difference": ((one - other).norm() / one.norm()).item(), "nvidia_smi": {QUERY: nvidia_smi()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    result = {**described(args.commit), "layers": []}
    print(f"{result['device']}\n{'layer':>12} {'tokens':>6} ordinary transposed  ratio  plain difference")
    for name in args.layers:
        for tokens in args.tokens:
            row = measure(name, tokens, args.repeats)
            result["layers"].append(row)
            figures = f"{row['ordinary_ms']:8.4f} {row['transposed_ms']:10.4f} {row['ratio']:6.3f}"
            print(f"{name:>12} {tokens:>6} {figures} {row['plain_ratio']:6.3f} {row['difference']:.1e}", flush=True)
            torch.cuda.empty_cache()
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
