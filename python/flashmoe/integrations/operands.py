"""What frameworks have as the operator takes it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..growing import Shape
from ..spec import FP8


def as_taken(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights of a token's experts, of which the operator takes float32 and x's type, `dtype`."""
    return weights if weights.dtype in (torch.float32, dtype) else weights.to(torch.float32)


def shape_of(weights: Tensor, hidden: int, intermediate: int, top_k: int, shared_intermediate: int = 0) -> Shape:
    """What a context is made for whose calls have such a `down_proj` of all experts."""
    device = weights.device.index if weights.device.type == "cuda" else None
    dtype = str(weights.dtype).removeprefix("torch.")
    sizes = hidden, intermediate, weights.shape[0], top_k, shared_intermediate
    if dtype == FP8:  # models in it compute in types of 16 bits
        return Shape(device, "bfloat16", *sizes, weight_dtype=FP8)
    return Shape(device, dtype, *sizes)
