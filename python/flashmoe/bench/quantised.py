"""Matrices in e4m3, and the GEMMs alone of a layer that has such matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch

F8 = torch.float8_e4m3fn


def by_row(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in FP8 and a scale for each."""
    scale = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448.0
    return (rows.float() / scale).to(F8), scale.squeeze(-1).contiguous()


def by_block(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix of whole blocks of 128 x 128 in FP8, and a scale for each."""
    rows, columns = matrix.shape
    blocks = matrix.float().view(rows // 128, 128, columns // 128, 128)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448.0
    return (blocks / scale).view(rows, columns).to(F8), scale.view(rows // 128, columns // 128)


def weights(experts: int, rows: int, columns: int, quantise: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    """Random matrices in FP8, and their scales. They are made expert by expert, because the float32 copies that
    `quantise` makes would not fit in memory for all experts at once."""
    matrices = torch.empty(experts, rows, columns, device="cuda", dtype=F8)
    scales = []
    for expert in range(experts):
        random = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)
        matrices[expert], scale = quantise(random)
        scales.append(scale)
    return matrices, torch.stack(scales)


def floor_call(hidden: int, inner: int, experts: int, rows: int) -> Callable[[int], None]:
    """Both grouped GEMMs in FP8 on ready inputs that have a scale for each row. The rows are spread over the experts at
    random."""
    counts = torch.bincount(torch.randint(experts, (rows,), device="cuda"), minlength=experts)
    offsets = counts.cumsum(0).int()
    (w1, s1), (w2, s2) = (weights(experts, n, k, by_row) for n, k in ((2 * inner, hidden), (hidden, inner)))
    (x, of_x), (h, of_h) = (
        by_row(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)) for columns in (hidden, inner)
    )
    how = {"offs": offsets, "out_dtype": torch.bfloat16, "use_fast_accum": True}

    def call(_: int) -> None:
        torch._scaled_grouped_mm(x, w1.transpose(1, 2), of_x, s1, **how)
        torch._scaled_grouped_mm(h, w2.transpose(1, 2), of_h, s2, **how)

    return call
