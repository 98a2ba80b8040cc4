"""Liger-Kernel's fused MoE: a Triton kernel for gather, GEMM and SwiGLU, another for GEMM 1, a third for the sum.

Written by reading liger-kernel 0.8.5 (``liger_kernel/ops/fused_moe.py`` and ``fused_moe_kernels.py``). On one GPU its
results have been right with its tuning switched off; times without tuning are not reported. With tuning, the first call
of a shape compiles and times 104 configurations, one after the other, which takes more than a minute. So here it
chooses among 20 of them (`fewer_configurations`): a fifth of the work. How long this takes has not been measured.
"""

from __future__ import annotations

import functools
from typing import Any

from ..layer import TURNS, Layer
from ..run import Call
from .needs import Needs
from .pytorch import route

NEEDS = Needs(("liger_kernel", "triton"), gpu=True, one_rank=True, gated=True)


@functools.cache
def fewer_configurations() -> None:
    """Makes Liger's kernels try fewer configurations, for all calls of this process. For the two GEMMs: only the
    largest block, which they also take without tuning, with every number of warps and of stages. For the sum over a
    token's experts: four warps, and blocks of 128 or 512 columns and of 2 or 8 experts, which suit the layers here."""
    from liger_kernel.ops import fused_moe_kernels as kernels

    keep(kernels._fused_up_proj_swiglu_kernel, BLOCK_N=(128,), BLOCK_K=(64,))
    keep(kernels._fused_down_proj_kernel, BLOCK_N=(128,), BLOCK_K=(64,))
    keep(kernels._token_gather_weighted_sum_kernel, BLOCK_H=(128, 512), BLOCK_K=(2, 8), num_warps=(4,))


def keep(kernel: Any, **values: tuple[int, ...]) -> None:
    """Makes Triton try only configurations in which each named parameter has one of the given values."""
    kept = [
        config
        for config in kernel.configs
        if all({**config.kwargs, "num_warps": config.num_warps}[name] in of for name, of in values.items())
    ]
    if not kept:
        raise ValueError(f"none of its configurations has {values}: another release's")
    kernel.configs = kept


def call(layer: Layer) -> Call:
    import torch
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    fewer_configurations()

    def forward(i: int) -> torch.Tensor:
        x = layer.xs[i % TURNS]
        weights, ids = route(layer, x)
        with torch.no_grad():
            return LigerFusedMoEFunction.apply(x, layer.w1, layer.w2, ids.int(), weights)

    return forward
