"""Liger-Kernel's fused MoE: a Triton kernel for gather, GEMM and SwiGLU, another for GEMM 1, a third for the sum.

Written by reading liger-kernel 0.8.5 (``liger_kernel/ops/fused_moe.py``). It has not been run here to its end: its
first call of a shape tunes itself, which took longer than the half minute that there was.
"""

from __future__ import annotations

from ..layer import TURNS, Layer
from ..run import Call
from . import not_installed
from .pytorch import route


def lacks(layer: Layer) -> str | None:
    if reason := not_installed("liger_kernel", "triton"):
        return reason
    if layer.run.engine == "cpu":
        return "its kernels need a GPU"
    if layer.run.ranks > 1:
        return "its experts are one rank's"
    return None if layer.sizes.gated else "its experts are gated"


def call(layer: Layer) -> Call:
    import torch
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def forward(i: int) -> torch.Tensor:
        x = layer.xs[i % TURNS]
        weights, ids = route(layer, x)
        with torch.no_grad():
            return LigerFusedMoEFunction.apply(x, layer.w1, layer.w2, ids.int(), weights)

    return forward
