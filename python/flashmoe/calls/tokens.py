"""Tokens with several leading dimensions, such as [batch, sequence, H]: the call is made with them as [T, H]."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from ..spec.tensors import Tensors

_OF_TOKENS = ("x_scale", "topk_ids", "topk_weights", "router_logits")
"""The tensors besides x that have a row for each token. Each may have x's leading dimensions, or T."""


def flattened(tensors: Tensors) -> Tensors:
    """`tensors`, with one dimension T in place of x's leading dimensions. A tensor that does not have them stays as it
    is, and so does a `router_logits` that is not contiguous, because the call would write to a reshaped copy. If such a
    tensor is wrong, the checks of the call say so."""
    leading = tensors.x.shape[:-1]
    rows = {"x": _rows(tensors.x)}
    for name in _OF_TOKENS:
        each = getattr(tensors, name)
        if each is None or getattr(each, "shape", ())[:-1] != leading:
            continue
        if name != "router_logits" or _is_contiguous(each):
            rows[name] = _rows(each)
    return tensors._replace(**rows)


def has_leading(x: Any) -> bool:
    """Whether x has more dimensions than [T, H], and is a dense tensor of NumPy or PyTorch."""
    if getattr(x, "ndim", 2) <= 2:
        return False
    if isinstance(x, np.ndarray):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested


def _rows(tensor: Any) -> Any:
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _is_contiguous(tensor: Any) -> bool:
    return tensor.is_contiguous() if hasattr(tensor, "is_contiguous") else tensor.flags.c_contiguous
