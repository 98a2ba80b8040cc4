"""What a layer of Megatron-Core computes, in the words of `flashmoe.moe`, read from its `TransformerConfig`.

Nothing here imports Megatron: the configuration is read by its attributes. What the operator does not compute is
refused by name, because a layer that is only nearly right would be trained for weeks.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from ...errors import InvalidArgument

FLAGS: dict[str, Any] = {
    "fp8": None,
    "fp4": None,
    "moe_latent_size": None,
    "moe_expert_rank_capacity_factor": None,
    "moe_mlp_glu_interleave_size": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_router_padding_for_quantization": False,
    "moe_shared_expert_overlap": False,
    "overlap_moe_expert_parallel_comm": False,
    "overlap_dispatch_backward_with_experts_wgrad": False,
    "delay_wgrad_compute": False,
    "use_te_activation_func": False,
    "cuda_graph_impl": "none",
    "expert_tensor_parallel_size": 1,
}
"""Attributes of a `TransformerConfig` for which the operator supports only this value. Not every release of
Megatron-Core has each of them; a missing attribute counts as this value. An attribute that is None is accepted, too,
whatever the value here."""

_OFFLOADED = ("expert_fc1", "moe_act")
"""Parts of experts that Megatron can offload, and that do not exist here."""
_QUICK_GELU_ALPHA = 1.702
_UNGATED = {"silu": "silu", "gelu": "gelu", "relu": "relu", "squared_relu": "relu2"}
"""The operator's activation, by the name of Megatron's function."""


def check(config: Any) -> None:
    """Raises `InvalidArgument` for a layer that the operator does not compute."""
    for name, value in FLAGS.items():
        got = getattr(config, name, value)
        if got != value and got is not None:
            raise refusal(name, repr(value), repr(got))
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        raise refusal("transformer_impl", "one that trains", "'inference_optimized'")
    if getattr(config, "fine_grained_activation_offloading", False):
        offloaded = [name for name in config.offload_modules or [] if name in _OFFLOADED]
        if offloaded:
            raise refusal("offload_modules", f"none of {', '.join(_OFFLOADED)}", ", ".join(offloaded))
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        raise refusal("moe_apply_probs_on_input", "False unless moe_router_topk is 1", "True")


def check_padding(config: Any) -> None:
    """Raises `InvalidArgument` if experts are padded to a capacity. Megatron may turn this on while it generates."""
    if config.moe_pad_expert_input_to_capacity:
        raise refusal("moe_pad_expert_input_to_capacity", "False", "True")


def options_of(config: Any) -> dict[str, Any]:
    """The operator's options for the activation between the two products, and for where weights are applied."""
    return activation_of(config) | {"weights_on_input": bool(config.moe_apply_probs_on_input)}


def activation_of(config: Any) -> dict[str, Any]:
    """The operator's activation, and its parameters."""
    name = _name(config.activation_func)
    if not config.gated_linear_unit:
        if name not in _UNGATED:
            raise refusal("activation_func", f"one of {', '.join(_UNGATED)}", name)
        return {"activation": _UNGATED[name]}
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
    plain = limit is None and offset == 0
    if name == "gelu":
        if not plain:
            got = f"{limit} and {offset}"
            raise refusal("activation_func_clamp_value, glu_linear_offset", "None and 0 with a gate of gelu", got)
        return {"activation": "geglu"}
    if name not in ("silu", "quick_gelu"):
        raise refusal("activation_func", "one of silu, gelu, quick_gelu with gated_linear_unit", name)
    if name == "silu" and plain:
        return {"activation": "swiglu"}
    alpha = 1.0 if name == "silu" else _QUICK_GELU_ALPHA
    return {"activation": "clamped_swiglu", "limit": limit, "alpha": alpha, "up_offset": float(offset)}


def _name(function: Any) -> str:
    """The name of PyTorch's function, or of one of Megatron's own."""
    known = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu"}
    if function in known:
        return known[function]
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", repr(function))
    return name if module.startswith("megatron.core.") else f"{module}.{name}"


def refusal(name: str, expected: str, got: object) -> InvalidArgument:
    return InvalidArgument(f"{name}: expected {expected}, got {got}; FlashMoE does not compute this layer of Megatron")
