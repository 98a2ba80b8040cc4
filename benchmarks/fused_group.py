"""The fused kernel on a group of GPUs beside the bare GEMMs of the same layer, in one run.

    torchrun --nproc-per-node N benchmarks/fused_group.py [--shapes NAME ...] [--tokens T ...]
        [--return direct reduced ...] [--profile gemm1_lag=400 ...] [--out benchmarks/results/fused_group/h200xN.json]

For each shape and number of tokens a GPU, two calls are timed in turn: the whole layer (router to combine, one launch a
rank), and the floor. The floor is PyTorch's two grouped GEMMs alone, on ready inputs, with a row for each (token, k) of
this rank, spread over its experts at random. There are two timers. "busy": each GPU is kept busy, then all GPUs meet in
an all-reduce, which the timed call follows without a gap. "plain": all hosts meet at a barrier, and the launch is in
the figure. Each time is that of the slowest rank; figures are medians of --repeats calls. Rank 0 prints ratios and
writes JSON. If the paper's layer ran with several numbers of experts (paper-E8 to paper-E128, 16384 tokens), rank 0
also prints the slowest one's time divided by the fastest one's.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib

import flashmoe
import torch
import torch.distributed as dist
from flashmoe.bench.expected import sampled_error
from flashmoe.bench.floors import floor_call
from flashmoe.bench.joining import join_gpus
from flashmoe.bench.layer import Sizes
from flashmoe.bench.measure import gpu_operations, group_milliseconds, in_turn
from flashmoe.bench.origin import QUERY, commit_option, nvidia_smi, write
from flashmoe.bench.shapes import SHAPES
from flashmoe.placement import contiguous, local_experts
from harness import WHOLE, beside_floor, described, profile_of

PAPER_TOKENS = 16384
"""The tokens of each GPU in the paper's figure that varies the number of experts."""


def measure(name: str, tokens: int, repeats: int, profile: dict[str, int], return_mode: str) -> dict:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, inner, experts, top_k, activation, _ = SHAPES[name]
    gated = activation == "swiglu"
    make = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(tokens)
    router = torch.randn(experts, hidden, **make) * 0.02
    own = local_experts(contiguous(experts, ranks), rank)
    w1 = torch.empty(len(own), (2 if gated else 1) * inner, hidden, **make)
    w2 = torch.empty(len(own), hidden, inner, **make)
    for i, expert in enumerate(own):
        torch.manual_seed(1000 + expert)
        w1[i] = torch.randn_like(w1[i]) * 0.02
        w2[i] = torch.randn_like(w2[i]) * 0.02
    torch.manual_seed(rank + 1)
    xs = [torch.randn(tokens, hidden, **make) for _ in range(4)]
    sizes = {"max_tokens": tokens, "hidden": hidden, "intermediate": inner, "experts": experts, "top_k": top_k}
    with flashmoe.Context.from_torch(engine="cuda", return_mode=return_mode, profile=profile, **sizes) as ctx:

        def layer(i: int) -> torch.Tensor:
            return flashmoe.moe(ctx, xs[i % 4], w1, w2, router=router, top_k=top_k, activation=activation)

        y = layer(0)
        ctx.synchronize()
        error = sampled_error(xs[0], y, router, own, w1, w2, top_k, gated)
        bare = floor_call(tokens * top_k, hidden, inner, len(own), w1, w2)
        timed = in_turn(group_milliseconds, {"fused": layer, "floor": bare}, repeats)
        ctx.synchronize()
        dist.barrier()
        operations = gpu_operations(layer) / 10
        returned = ctx.last_call.return_mode
        dist.barrier()  # no rank may close its context while another rank's call still waits for this rank
    row = {"shape": name, "tokens": tokens, "ranks": ranks, "return_mode": returned, "profile": profile}
    row |= beside_floor(timed)
    return {
        **row,
        "tflops": Sizes.of(name, tokens=tokens).flops / row["fused_ms"] * 1e-9,
        "mtokens_per_s": tokens / row["fused_ms"] * 1e-3,
        "gpu_operations_per_call": operations,
        "error": error,
    }


def paper_line(rows: list[dict]) -> dict | None:
    """How much the time of the paper's layer depends on its number of experts; None if fewer than two of them ran."""
    times = {
        row["shape"]: row["fused_ms"]
        for row in rows
        if row["shape"].startswith("paper-E") and row["tokens"] == PAPER_TOKENS
    }
    if len(times) < 2:
        return None
    return {
        "tokens": PAPER_TOKENS,
        "fused_ms": times,
        "slowest_over_fastest": max(times.values()) / min(times.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=WHOLE)
    parser.add_argument("--tokens", type=int, nargs="*")
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--return", dest="returns", nargs="*", default=["auto"])
    parser.add_argument("--profile", nargs="*", default=[], help="name=value, see flashmoe.Context")
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    rank = join_gpus()
    profile = profile_of(args.profile)
    result = {**described(args.commit, dist.get_world_size()), "shapes": [], "paper_line": {}}
    by_return: dict[str, list[dict]] = {return_mode: [] for return_mode in args.returns}
    if rank == 0:
        print(f"{'shape':>12} tokens return  fused ms  floor ms  ratio plain  TFLOP/s Mtok/s ops error")
    for name, return_mode in itertools.product(args.shapes, args.returns):
        for tokens in args.tokens or [t for t in SHAPES[name][-1] if t >= 1024]:
            row = measure(name, tokens, args.repeats, profile, return_mode)
            row["nvidia_smi"] = {QUERY: nvidia_smi().splitlines()}
            result["shapes"].append(row)
            by_return[return_mode].append(row)
            if rank == 0:
                print(
                    f"{name:>12} {tokens:>6} {row['return_mode']:7} {row['fused_ms']:9.4f} {row['floor_ms']:9.4f} "
                    f"{row['ratio']:6.3f} {row['plain_ratio']:5.3f} {row['tflops']:8.0f} {row['mtokens_per_s']:6.1f} "
                    f"{row['gpu_operations_per_call']:3.1f} {row['error']:.1e}",
                    flush=True,
                )
            torch.cuda.empty_cache()
    for return_mode, rows in by_return.items():
        if (line := paper_line(rows)) is None:
            continue
        result["paper_line"][return_mode] = line
        if rank == 0:
            names = ", ".join(name.removeprefix("paper-") for name in line["fused_ms"])
            print(f"{names} ({return_mode}): slowest / fastest {line['slowest_over_fastest']:.3f}", flush=True)
    if args.out and rank == 0:
        write(args.out, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
