"""Calls within ``torch.autocast``, which compute in autocast's type, as `torch.nn.Linear` does."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calls.through_torch import in_autocast
from ..errors import InvalidArgument
from ..spec import Options
from ..spec.tensors import PARAMETERS, Tensors

_CAST = (torch.float32, torch.bfloat16, torch.float16)
"""The types that autocast changes."""


def type_of_products(x: Tensor) -> torch.dtype:
    """The type in which `torch.nn.Linear` computes with x: that of the innermost ``torch.autocast``; outside of one,
    and for types that autocast leaves alone, x's own."""
    return torch.get_autocast_dtype(x.device.type) if in_autocast(x) and x.dtype in _CAST else x.dtype


def as_autocast(tensors: Tensors, options: Options, main_grad: bool = False) -> tuple[Tensors, Options]:
    """The call, changed as the innermost ``torch.autocast`` requires; outside of one, the call as it is.

    x, weights and biases are cast to autocast's type, so the result has this type too. Gradients have the types that
    the tensors had before they were cast. A router's logits are rounded to autocast's type, as those of a linear layer,
    and its scores are float32. `choice_bias`, float32 weights of given routing, tensors in float64, and calls with
    quantised weights stay as they are. Casts are not kept from call to call; autograd keeps them until the backward
    pass, as it keeps those of `torch.nn.Linear`.

    Raises `InvalidArgument` with `main_grad` and a parameter of another type: a cast parameter has no `main_grad`.
    """
    if not in_autocast(tensors.x) or tensors.x.dtype not in _CAST or tensors.gate_up_scale is not None:
        return tensors, options
    to = type_of_products(tensors.x)
    cast = {}
    for name in ("x", *PARAMETERS):
        each = getattr(tensors, name)
        if not isinstance(each, Tensor) or each.dtype is to or each.dtype not in _CAST:
            continue
        if main_grad and name != "x" and each.requires_grad:
            raise InvalidArgument(
                f"main_grad: expected False within autocast, which casts {name} from {each.dtype} to {to}, got True"
            )
        cast[name] = each.to(to)
    weights = tensors.topk_weights
    if isinstance(weights, Tensor) and weights.dtype in _CAST and weights.dtype is not to:
        cast["topk_weights"] = weights.float()
    if tensors.router is not None:
        options = options._replace(round_logits=True)
    return tensors._replace(**cast), options
