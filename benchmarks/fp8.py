"""A layer with experts in FP8, timed beside the bare GEMMs in FP8 and beside a layer of its sizes in bfloat16.

    python benchmarks/fp8.py [--layers NAME ...] [--out benchmarks/results/fp8/h200x1.json]

"fused": the whole layer in one launch (router, quantising x, dispatch to combine). Its weights have a scale for each
block of 128 x 128, as in checkpoints. "floor": PyTorch's two grouped GEMMs in FP8 with a scale for each row. Its rows
are quantised beforehand, as many as the layer has, and spread over the experts at random. "bf16": the layer in
bfloat16, if the memory holds both layers. All are timed in turn, in one run, by two timers: "busy" (the GPU is kept
busy before the call, so that the launches are not in the figure) and "plain" (they are). Figures are medians of
--repeats calls.
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
from flashmoe.bench.quantised import by_block, floor_call, weights
from harness import described

LAYERS = {  # H, I, E, K, T, and the largest allowed ratio of the times fused / floor
    "qwen3-30b": (2048, 768, 128, 8, 8192, 1.15),
    "mixtral": (4096, 14336, 8, 2, 8192, 1.12),
    "deepseek-v3": (7168, 2048, 256, 8, 4096, 1.10),
}
BF16_BYTES = 40 << 30
"""The most bytes that a layer's weights in bfloat16 may have. A layer with more is timed only in FP8, because its
weights in FP8 need memory too."""


def context_of(layer: str, **types: str) -> flashmoe.Context:
    hidden, inner, experts, top_k, tokens, _ = LAYERS[layer]
    sizes = {"hidden": hidden, "intermediate": inner, "experts": experts, "top_k": top_k, "max_tokens": tokens}
    return flashmoe.Context(engine="cuda", dtype="bfloat16", profile={}, **sizes, **types)


def measure(layer: str, repeats: int, with_bf16: bool) -> dict[str, Any]:
    hidden, inner, experts, top_k, tokens, allowed = LAYERS[layer]
    torch.manual_seed(1)
    xs = [torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    router = torch.randn(experts, hidden, device="cuda", dtype=torch.bfloat16) * 0.02
    (w1, s1), (w2, s2) = (weights(experts, n, k, by_block) for n, k in ((2 * inner, hidden), (hidden, inner)))
    calls = {"floor": floor_call(hidden, inner, experts, tokens * top_k)}
    torch.cuda.empty_cache()
    contexts = [context_of(layer, weight_dtype="float8_e4m3fn")]
    moe = functools.partial(flashmoe.moe, router=router, top_k=top_k)
    calls["fused"] = lambda i: moe(contexts[0], xs[i % 4], w1, w2, gate_up_scale=s1, down_scale=s2)
    if with_bf16 and 2 * (w1.numel() + w2.numel()) <= BF16_BYTES:
        plain = [(torch.randn(each.shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)) for each in (w1, w2)]
        contexts.append(context_of(layer))
        calls["bf16"] = lambda i: moe(contexts[1], xs[i % 4], *plain)
    timed = in_turn(milliseconds, calls, repeats)
    for context in contexts:
        context.synchronize()
        context.close()
    row: dict[str, Any] = {"layer": layer, "tokens": tokens, "allowed": allowed}
    for how, busy in (("busy", True), ("plain", False)):
        medians = {what: statistics.median(timed[what, busy]) for what in calls}
        row[how] = {f"{what}_ms": value for what, value in medians.items()}
        row[how]["ratio"] = medians["fused"] / medians["floor"]
        row[how]["tflops"] = tokens * top_k * 6 * hidden * inner / medians["fused"] * 1e-9
    row["nvidia_smi"] = {QUERY: nvidia_smi()}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--without-bf16", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    result: dict[str, Any] = {**described(args.commit), "layers": []}
    print(result["device"])
    for name in args.layers:
        row = measure(name, args.repeats, not args.without_bf16)
        result["layers"].append(row)
        for how in ("busy", "plain"):
            figures = " ".join(f"{what} {value:.4f}" for what, value in row[how].items())
            print(f"{name:>12} {how:>5} {figures} (ratio allowed: {row['allowed']})", flush=True)
        torch.cuda.empty_cache()
    if args.out:
        write(args.out, result)
    return int(any(row["busy"]["ratio"] > row["allowed"] for row in result["layers"]))


if __name__ == "__main__":
    raise SystemExit(main())
