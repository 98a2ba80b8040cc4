"""Megatron-Core's `MoELayer`: its all-to-all dispatcher, and experts that are computed one after the other.

Written by reading megatron-core 0.19.2. It has been run here on one GPU, but not with several ranks. With Transformer
Engine, Megatron-Core would group the GEMMs of experts. Here it is configured without Transformer Engine, and does not
group them. The papers' Megatron-TE and Megatron-CUTLASS are other configurations than this one.
"""

from __future__ import annotations

from ..layer import TURNS, Layer
from ..run import Call
from .needs import Needs

NEEDS = Needs(("megatron.core",), gpu=True, even=True)


def call(layer: Layer) -> Call:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.nn.functional import gelu, silu

    sizes, ranks = layer.sizes, layer.run.ranks
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    dtype = layer.w1.dtype
    config = TransformerConfig(
        num_layers=1,
        hidden_size=sizes.hidden,
        num_attention_heads=16,
        num_moe_experts=sizes.experts,
        ffn_hidden_size=sizes.intermediate,
        moe_ffn_hidden_size=sizes.intermediate,
        moe_router_topk=sizes.top_k,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=ranks,
        gated_linear_unit=sizes.gated,
        activation_func=silu if sizes.gated else gelu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
    )
    made = get_moe_module_spec(use_te=False, num_experts=sizes.experts, moe_grouped_gemm=False)
    moe = made(config=config).to(layer.run.device).eval()
    with torch.no_grad():
        moe.router.weight.copy_(layer.router)
        for expert, w1, w2 in zip(moe.experts.local_experts, layer.w1, layer.w2, strict=True):
            expert.linear_fc1.weight.data = w1
            expert.linear_fc2.weight.data = w2

    def forward(i: int) -> torch.Tensor:
        with torch.no_grad():
            return moe(layer.xs[i % TURNS].unsqueeze(1))[0].squeeze(1)

    return forward
