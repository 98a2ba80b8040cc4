"""Llama 4's blocks, whose experts are not on Transformers' experts interface: each takes all tokens, scaled by the
router's scores. Here an expert takes the tokens that the block's own router has chosen it for."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .experts import experts_forward
from .recognise import is_of_llama4


def block_forward(block: torch.nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """What a Llama4TextMoe returns for hidden states [..., H]: its results [T, H], and its router's logits [T, E]."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = block.router(x)
    index = logits.topk(block.top_k, dim=1).indices
    routed = experts_forward(block.experts, x, index, scores.gather(1, index))
    return block.shared_expert(x) + routed, logits


def patch_blocks(model: torch.nn.Module) -> None:
    """Has every Llama4TextMoe of `model` compute by `block_forward`."""
    for block in model.modules():
        if is_of_llama4(block, "Llama4TextMoe"):
            block.__class__ = _patched(type(block))


@cache
def _patched(kind: type) -> type:
    if kind.forward is block_forward:
        return kind
    return type(kind.__name__, (kind,), {"forward": block_forward, "__module__": kind.__module__})
