"""The experts of Transformers' Qwen3-MoE by ``grouped_mm``, with the routing of the baseline `pytorch`."""

from __future__ import annotations

from ..layer import TURNS, Layer
from ..run import Call
from .needs import Needs

IMPLEMENTATION = "grouped_mm"
NEEDS = Needs(("transformers",), one_rank=True, gated=True)


def call(layer: Layer) -> Call:
    return block(layer, IMPLEMENTATION)


def block(layer: Layer, implementation: str) -> Call:
    """Transformers' experts with the layer's own weights. The routing is that of `pytorch.py`, from float32 logits:
    with logits rounded to bfloat16, other experts would be chosen."""
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from .pytorch import route

    sizes = layer.sizes
    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        experts_implementation=implementation,
    )
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(layer.w1, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(layer.w2, requires_grad=False)

    def forward(i: int) -> torch.Tensor:
        x = layer.xs[i % TURNS]
        weights, ids = route(layer, x)
        with torch.no_grad():
            return experts(x, ids, weights.to(x.dtype))

    return forward
