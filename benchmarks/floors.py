"""The floors, which a layer cannot be faster than: the bare GEMMs and, on several GPUs, the bare exchange of rows.

    python benchmarks/floors.py [--shapes NAME ...] [--tokens T ...] [--out FILE.json]
    torchrun --nproc-per-node N benchmarks/floors.py ...

The GEMMs are PyTorch's two grouped GEMMs on ready inputs, without the activation. They have a row for each (token, k)
of the rank, spread at random over the experts that the rank holds. The exchange is NCCL's all_to_all_single of a row
for each (token, k) of the rank, one way. "busy": the GPU is kept busy before the call, so that the launches are not in
the figure; "plain": the figure is from before the launches until the results are there. Figures are medians of
--repeats calls, each with the slowest rank's time. Scripts that compare a layer with its floor take the floor from
`flashmoe.bench.floors` too, and time both in turn.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics

import torch
import torch.distributed as dist
from flashmoe.bench.floors import exchange, floor_call
from flashmoe.bench.joining import join_gpus
from flashmoe.bench.layer import Sizes
from flashmoe.bench.measure import group_milliseconds, milliseconds
from flashmoe.bench.origin import commit_option, write
from flashmoe.bench.shapes import SHAPES
from harness import WHOLE, described


def ceilings() -> tuple[float, float]:
    """Milliseconds of cuBLAS's 8192^3 product and of a copy of 2 GiB, as measures of this card's speed."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    big = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    other = torch.empty_like(big)
    product, copy = milliseconds(lambda _: a @ a, 8), milliseconds(lambda _: other.copy_(big), 8)
    return statistics.median(product), statistics.median(copy)


def measure(name: str, tokens: int, repeats: int, ranks: int) -> dict:
    hidden, inner, experts, top_k, activation, _ = SHAPES[name]
    own, make = experts // ranks, {"device": "cuda", "dtype": torch.bfloat16}
    w1 = torch.randn(own, (2 if activation == "swiglu" else 1) * inner, hidden, **make) * 0.02
    w2 = torch.randn(own, hidden, inner, **make) * 0.02
    gemms = floor_call(tokens * top_k, hidden, inner, own, w1, w2)
    time = group_milliseconds if ranks > 1 else milliseconds
    busy, plain = (statistics.median(time(gemms, repeats, how)) for how in (True, False))
    row = {
        "shape": name,
        "tokens": tokens,
        "gemms_busy_ms": busy,
        "gemms_plain_ms": plain,
        "tflops": Sizes.of(name, tokens=tokens).flops / busy * 1e-9,
    }
    if ranks > 1:
        row["exchange_plain_ms"] = statistics.median(time(exchange(tokens * top_k, hidden), repeats, False))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=WHOLE)
    parser.add_argument("--tokens", type=int, nargs="*")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    rank = join_gpus() if "RANK" in os.environ else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    result = {**described(args.commit, ranks if dist.is_initialized() else None), "shapes": []}
    for name in args.shapes:
        for tokens in args.tokens or SHAPES[name][-1]:
            row = measure(name, tokens, args.repeats, ranks)
            result["shapes"].append(row)
            if rank == 0:
                print(" ".join(f"{each:.4f}" if isinstance(each, float) else f"{each:>10}" for each in row.values()))
            torch.cuda.empty_cache()
    if args.out and rank == 0:
        write(args.out, result)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
