"""What a layer cannot be faster than: the bare GEMMs and, among several ranks, the bare exchange of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


def floor_call(rows: int, hidden: int, inner: int, experts: int, w1: torch.Tensor, w2: torch.Tensor):
    """Both grouped GEMMs on ready inputs, their rows spread over the experts at random."""
    counts = torch.bincount(torch.randint(experts, (rows,), device=w1.device), minlength=experts)
    return grouped_gemms(counts, rows, hidden, inner, w1, w2)


def grouped_gemms(counts: torch.Tensor, rows: int, hidden: int, inner: int, w1: torch.Tensor, w2: torch.Tensor):
    """Both grouped GEMMs on ready inputs. `counts` says how many of the rows each expert has."""
    offsets = counts.cumsum(0).int()
    x = torch.randn(rows, hidden, device=w1.device, dtype=w1.dtype)
    h = torch.randn(rows, inner, device=w1.device, dtype=w1.dtype)

    def call(_: int) -> None:
        torch._grouped_mm(x, w1.transpose(1, 2), offs=offsets)
        torch._grouped_mm(h, w2.transpose(1, 2), offs=offsets)

    return call


def backward_floor_call(rows: int, hidden: int, inner: int, experts: int, w1: torch.Tensor, w2: torch.Tensor):
    """The four grouped GEMMs of a backward pass on ready inputs, their rows spread over the experts at random. Two
    multiply rows by matrices; two sum over rows, and have results of the matrices' shapes."""
    make = {"device": w1.device, "dtype": w1.dtype}
    offsets = torch.bincount(torch.randint(experts, (rows,), device=w1.device), minlength=experts).cumsum(0).int()
    x, dy = (torch.randn(rows, hidden, **make) for _ in range(2))
    a, dz = (torch.randn(rows, columns, **make) for columns in (inner, w1.shape[1]))
    if w1.dtype == torch.float32:  # PyTorch has no grouped GEMM kernel for float32: cuBLAS multiplies expert by expert
        return by_expert(offsets, ((dy, w2), (dz, w1)), ((dy, a), (dz, x)))

    def call(_: int) -> None:
        torch._grouped_mm(dy, w2, offs=offsets)
        torch._grouped_mm(dz, w1, offs=offsets)
        torch._grouped_mm(dy.t(), a, offs=offsets)
        torch._grouped_mm(dz.t(), x, offs=offsets)

    return call


Pairs = tuple[tuple[torch.Tensor, torch.Tensor], ...]


def by_expert(offsets: torch.Tensor, of_rows: Pairs, over_rows: Pairs) -> Callable[[int], None]:
    """Products of rows [M, A] by matrices [E, A, B] (`of_rows`), and sums over rows of [M, A] by [M, B] (`over_rows`),
    one expert at a time. Expert e's rows end at `offsets[e]`; the host reads the offsets before the calls."""
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
    """An all-to-all, one way, of so many rows in equal parts for all ranks, by PyTorch's backend (NCCL on GPUs)."""
    rows = rows // dist.get_world_size() * dist.get_world_size()
    sent = torch.randn(rows, hidden, device=device, dtype=dtype)
    received = torch.empty_like(sent)

    def call(_: int) -> None:
        dist.all_to_all_single(received, sent)

    return call


def shared_gemms(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, h: torch.Tensor) -> None:
    """Both GEMMs of a shared expert."""
    torch.mm(x, gate_up.t())
    torch.mm(h, down.t())
