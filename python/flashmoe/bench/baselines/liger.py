"""Liger-Kernel's fused MoE: a Triton kernel for gather, GEMM and SwiGLU, another for GEMM 1, a third for the sum.

Written by reading liger-kernel 0.8.5 (``liger_kernel/ops/fused_moe.py``). On one GPU its
rows have been right with its tuning switched off, which makes no figures; with it the first call of a shape tries 104
configurations, one after the other, which took longer than the minute that there was.
"""

from __future__ import annotations

from ..layer import TURNS, Layer
from ..run import Call
from .needs import Needs
from .pytorch import route

NEEDS = Needs(("liger_kernel", "triton"), gpu=True, one_rank=True, gated=True)


def call(layer: Layer) -> Call:
    import torch
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def forward(i: int) -> torch.Tensor:
        x = layer.xs[i % TURNS]
        weights, ids = route(layer, x)
        with torch.no_grad():
            return LigerFusedMoEFunction.apply(x, layer.w1, layer.w2, ids.int(), weights)

    return forward
