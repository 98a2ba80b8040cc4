"""Llama 4's blocks, whose experts are not on Transformers' experts interface. In Transformers, each expert computes all
tokens, scaled by the router's scores. Here an expert computes only the tokens for which the block's router chose it."""

from __future__ import annotations

import torch
from torch import Tensor

from .attributes import computed_by, unpatched
from .experts import experts_forward
from .recognise import is_of_llama4
from .watched import is_watched


def block_forward(block: torch.nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """What a Llama4TextMoe returns for hidden states [..., H]: its results [T, H], and its router's logits [T, E]."""
    experts = block.experts
    of_group = type(experts).forward is experts_forward  # a rank's share, which only this forward can compute
    if not of_group and is_watched(block, calls_router=True):
        return unpatched(type(block)).forward(block, hidden_states)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = block.router(x)
    weights, index = scores.topk(block.top_k, dim=1)  # experts that are not chosen have a score of 0
    routed = experts(x, index, weights) if of_group else experts_forward(experts, x, index, weights)
    return block.shared_expert(x) + routed, logits


def patch_blocks(model: torch.nn.Module) -> None:
    """Makes every Llama4TextMoe of `model` compute by `block_forward`."""
    for block in model.modules():
        if is_of_llama4(block, "Llama4TextMoe"):
            block.__class__ = computed_by(type(block), block_forward)
