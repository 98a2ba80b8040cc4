"""The floors: what a layer cannot be faster than, the bare GEMMs and, on several GPUs, the bare exchange of rows.

    python benchmarks/floors.py [--shapes NAME ...] [--tokens T ...] [--out FILE.json]
    torchrun --nproc-per-node N benchmarks/floors.py ...

The GEMMs are PyTorch's two grouped ones on ready inputs, without activation, as many rows as the rank's tokens have,
spread at random over the experts that it holds. The exchange is NCCL's all_to_all_single of a row for each of the
rank's (token, k) pairs, one way. "busy": behind work that hides the launches; "plain": a clock is started, both GEMMs
are launched and waited for. Medians of --repeats, of each the slowest rank. The scripts that put a layer beside its
floor take it from here, and time it in turn with the layer.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import SHAPES, WHOLE, commit_option, described, flops, group_milliseconds, join, milliseconds, write


def floor_call(rows: int, hidden: int, inner: int, experts: int, w1: torch.Tensor, w2: torch.Tensor):
    """Both grouped GEMMs on ready inputs, their rows spread over the experts at random."""
    counts = torch.bincount(torch.randint(experts, (rows,), device=w1.device), minlength=experts)
    return grouped_gemms(counts, rows, hidden, inner, w1, w2)


def grouped_gemms(counts: torch.Tensor, rows: int, hidden: int, inner: int, w1: torch.Tensor, w2: torch.Tensor):
    """Both grouped GEMMs on ready inputs, with so many of the rows an expert."""
    offsets = counts.cumsum(0).int()
    x = torch.randn(rows, hidden, device=w1.device, dtype=w1.dtype)
    h = torch.randn(rows, inner, device=w1.device, dtype=w1.dtype)

    def call(_: int) -> None:
        torch._grouped_mm(x, w1.transpose(1, 2), offs=offsets)
        torch._grouped_mm(h, w2.transpose(1, 2), offs=offsets)

    return call


def backward_floor_call(rows: int, hidden: int, inner: int, experts: int, w1: torch.Tensor, w2: torch.Tensor):
    """The four grouped GEMMs of a backward pass on ready inputs, their rows spread over the experts at random: two of
    rows, by the matrices, and two over rows, of the matrices' shapes."""
    make = {"device": w1.device, "dtype": w1.dtype}
    offsets = torch.bincount(torch.randint(experts, (rows,), device=w1.device), minlength=experts).cumsum(0).int()
    x, dy = (torch.randn(rows, hidden, **make) for _ in range(2))
    a, dz = (torch.randn(rows, columns, **make) for columns in (inner, w1.shape[1]))
    if w1.dtype == torch.float32:  # PyTorch's grouped GEMM has no kernel for it: a product of cuBLAS's for each expert
        return by_expert(offsets, ((dy, w2), (dz, w1)), ((dy, a), (dz, x)))

    def call(_: int) -> None:
        torch._grouped_mm(dy, w2, offs=offsets)
        torch._grouped_mm(dz, w1, offs=offsets)
        torch._grouped_mm(dy.t(), a, offs=offsets)
        torch._grouped_mm(dz.t(), x, offs=offsets)

    return call


Pairs = tuple[tuple[torch.Tensor, torch.Tensor], ...]


def by_expert(offsets: torch.Tensor, of_rows: Pairs, over_rows: Pairs) -> Callable[[int], None]:
    """Products of rows [M, A] by matrices [E, A, B], and over rows, of [M, A] and [M, B], an expert at a time; its rows
    end at `offsets`, which the host knows before."""
    ends = offsets.tolist()
    spans = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    results = [rows.new_empty(len(rows), matrices.shape[2]) for rows, matrices in of_rows]
    sums = [left.new_empty(len(spans), left.shape[1], right.shape[1]) for left, right in over_rows]

    def call(_: int) -> None:
        for (rows, matrices), result in zip(of_rows, results, strict=True):
            for expert, span in enumerate(spans):
                torch.mm(rows[span], matrices[expert], out=result[span])
        for (left, right), total in zip(over_rows, sums, strict=True):
            for expert, span in enumerate(spans):
                torch.mm(left[span].t(), right[span], out=total[expert])

    return call


def exchange(
    rows: int, hidden: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> Callable[[int], None]:
    """The backend's (NCCL's) all-to-all of so many rows, one way, as many to each rank."""
    rows = rows // dist.get_world_size() * dist.get_world_size()
    sent = torch.randn(rows, hidden, device=device, dtype=dtype)
    received = torch.empty_like(sent)

    def call(_: int) -> None:
        dist.all_to_all_single(received, sent)

    return call


def ceilings() -> tuple[float, float]:
    """Milliseconds of cuBLAS's 8192^3 product and of a copy of 2 GiB: what this card does today."""
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
        "tflops": flops(name, tokens) / busy * 1e-9,
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
    rank = join() if "RANK" in os.environ else 0
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
