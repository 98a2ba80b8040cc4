"""A small random Qwen3-MoE for the tests of trainers. Each call returns the same weights."""

from __future__ import annotations

import flashmoe.integrations.transformers  # noqa: F401
import torch
import transformers


def tiny_moe(implementation: str, vocabulary: int = 61, positions: int = 512) -> torch.nn.Module:
    """The model in float32, with experts by `implementation`. Token 0 is padding."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=24,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=positions,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.1,  # with the default, 0.02, the experts of so small a model would hardly matter
    )
    transformers.set_seed(4)
    model = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation(implementation)
    return model
