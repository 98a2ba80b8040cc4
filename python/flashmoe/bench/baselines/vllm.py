"""vLLM's fused experts, its Triton kernels.

Written by reading vLLM's source (``vllm/model_executor/layers/fused_moe``, which exports `fused_experts` if Triton is
installed). It has not been run here: no machine of ours has had a GPU and vLLM for CUDA at once.
"""

from __future__ import annotations

from ..layer import TURNS, Layer
from ..run import Call
from .needs import Needs
from .pytorch import route

NEEDS = Needs(("vllm",), gpu=True, one_rank=True, gated=True)


def call(layer: Layer) -> Call:
    import torch
    from vllm.model_executor.layers.fused_moe import fused_experts

    def forward(i: int) -> torch.Tensor:
        x = layer.xs[i % TURNS]
        weights, ids = route(layer, x)
        return fused_experts(hidden_states=x, w1=layer.w1, w2=layer.w2, topk_weights=weights, topk_ids=ids.int())

    return forward
