"""Converts tensors of frameworks to what the operator takes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contexts.growing import Shape
from ..spec import STORED_AS


def as_taken(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of tokens' experts in a type that the operator takes: float32 or x's type, `dtype`."""
    return weights if weights.dtype in (torch.float32, dtype) else weights.to(torch.float32)


def shape_of(
    weights: Tensor,
    hidden: int,
    intermediate: int,
    top_k: int,
    shared_intermediate: int = 0,
    beside: torch.dtype | None = None,
) -> Shape:
    """What a context is made for, if its calls have `weights` as the `down_proj` of all experts. `beside`: the type of
    the experts' biases, used only if weights are quantised: x then has this type, or bfloat16 if there are no
    biases."""
    device = weights.device.index if weights.device.type == "cuda" else None
    dtype = str(weights.dtype).removeprefix("torch.")
    sizes = hidden, intermediate, weights.shape[0], top_k, shared_intermediate
    if (quantised := STORED_AS.get(dtype)) is not None:
        of_x = str(beside or torch.bfloat16).removeprefix("torch.")
        return Shape(device, of_x, *sizes, weight_dtype=quantised)
    return Shape(device, dtype, *sizes)
