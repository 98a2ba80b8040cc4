"""Whole Mixture-of-Experts blocks of Transformers' models as one call of `flashmoe.moe`, router and all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgument
from ...torch_op import call
from .attributes import tensor_of
from .experts import NAME, experts_modules, number_of, operands_of, options_of
from .llama4 import block_forward
from .recognise import recognise
from .shared import shared_operands

Rule = Callable[[torch.nn.Module], dict[str, Any]]
"""What a router, by its attributes, is to `flashmoe.moe`."""


def _softmax(gate: torch.nn.Module) -> dict[str, Any]:
    """A linear layer of the model's type, the largest of a float32 softmax, divided by their sum or not."""
    rounded = tensor_of(gate, "weight").dtype != torch.float32
    return {"renormalize": vars(gate).get("norm_topk_prob", True), "round_logits": rounded}


def _grouped_sigmoid(gate: torch.nn.Module) -> dict[str, Any]:
    """DeepSeek-V3's, whose logits are float32."""
    return {
        "score": "sigmoid",
        "choice_bias": gate.e_score_correction_bias.float(),  # float32 as a rule
        "groups": gate.num_group,
        "top_groups": gate.topk_group,
        "renormalize": gate.norm_topk_prob,
        "routed_scale": gate.routed_scaling_factor,
    }


Forward = Callable[[Any, Tensor], Any]
"""What a block makes of hidden states."""


def _one_call(rule: Rule) -> Forward:
    """A block with such a router as a call of the operator."""

    def forward(block: Any, hidden_states: Tensor) -> Tensor:
        if block.training or _is_watched(block._modules["gate"]):
            return block._flashmoe_unfused.forward(block, hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        return _one_call_of(block, x, rule).reshape(hidden_states.shape)

    return forward


_OF_SOFTMAX, _OF_GROUPS = _one_call(_softmax), _one_call(_grouped_sigmoid)

BLOCKS: dict[tuple[str, str], tuple[str, Forward]] = {
    ("mixtral", "MixtralSparseMoeBlock"): ("MixtralTopKRouter", _OF_SOFTMAX),
    ("qwen2_moe", "Qwen2MoeSparseMoeBlock"): ("Qwen2MoeTopKRouter", _OF_SOFTMAX),
    ("qwen3_moe", "Qwen3MoeSparseMoeBlock"): ("Qwen3MoeTopKRouter", _OF_SOFTMAX),
    ("olmoe", "OlmoeSparseMoeBlock"): ("OlmoeTopKRouter", _OF_SOFTMAX),
    ("qwen3_next", "Qwen3NextSparseMoeBlock"): ("Qwen3NextTopKRouter", _OF_SOFTMAX),
    ("deepseek_v3", "DeepseekV3MoE"): ("DeepseekV3TopkRouter", _OF_GROUPS),
    ("glm4_moe", "Glm4MoeMoE"): ("Glm4MoeTopkRouter", _OF_GROUPS),
    ("llama4", "Llama4TextMoe"): ("Llama4Router", block_forward),
}
"""What is known: a model's folder in Transformers and the class of its block; the class of the block's router, and what
computes the block by `flashmoe.moe`. A router has no flags to be recognised by, as experts have: its class is known."""


def fuse(model: torch.nn.Module) -> torch.nn.Module:
    """Makes every Mixture-of-Experts block of `model` one call of `flashmoe.moe`; `model` itself.

    Parameters stay where they are, under their names: the model is saved as it was loaded, and weights that change in
    place are seen by the next call. Where a model is asked for its router's logits, or somebody watches the router by a
    hook, and in training, the block runs as before, with its experts by FlashMoE. A block of Llama 4, which returns its
    router's logits, always calls its router. All experts must be here: see `parallelize` for others.

    Weights of a token's experts stay float32, where models of a narrower type round them to it.

    Raises
    ------
    InvalidArgument
        A block's class, its router's or its experts are not among those that are known (`BLOCKS`, `recognise`); nothing
        is changed then.
    """
    owners = [block for block in model.modules() if isinstance(getattr(block, "experts", None), torch.nn.Module)]
    known = {id(experts) for experts in experts_modules(model)}
    blocks = [block for block in owners if id(block.experts) in known or _names(block) in BLOCKS]
    if not blocks:
        raise InvalidArgument(f"{type(model).__name__}: expected Mixture-of-Experts blocks, got none")
    forwards = [_forward_of(block) for block in blocks]
    for block in blocks:
        recognise(block.experts)
    for block, forward in zip(blocks, forwards, strict=True):
        block.__class__ = _fused(type(block), forward)
        if hasattr(block.experts, "config"):
            block.experts.config._experts_implementation = NAME
    return model


def _names(module: torch.nn.Module) -> tuple[str, str]:
    """Folder and class of a module of Transformers."""
    kind = type(module)
    parts = kind.__module__.split(".")
    return (parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else kind.__module__), kind.__name__


def _forward_of(block: torch.nn.Module) -> Forward:
    names = _names(block)
    if names not in BLOCKS:
        known = ", ".join(name for _, name in BLOCKS)
        raise InvalidArgument(f"{names[1]}: expected a block that can be fused, one of {known}")
    expected, forward = BLOCKS[names]
    attribute = "router" if hasattr(block, "router") else "gate"
    router = getattr(block, attribute, None)
    if _names(router) != (names[0], expected) or "forward" in vars(block) or "forward" in vars(router):
        raise InvalidArgument(
            f"{names[1]}.{attribute}: expected {expected} of Transformers, got {type(router).__name__}"
        )
    return forward


@cache
def _fused(kind: type, forward: Forward) -> type:
    """`kind`, whose calls are the operator's."""
    if "_flashmoe_unfused" in vars(kind):
        return kind
    return type(kind.__name__, (kind,), {"forward": forward, "_flashmoe_unfused": kind, "__module__": kind.__module__})


def _one_call_of(block: torch.nn.Module, x: Tensor, rule: Rule) -> Tensor:
    """[T, H]: what the block makes of x [T, H]."""
    experts, gate = block._modules["experts"], block._modules["gate"]  # as attributes, PyTorch looks for them last
    options, routing, top_k = recognise(experts), rule(gate), gate.top_k
    router = {"router": tensor_of(gate, "weight"), "choice_bias": routing.pop("choice_bias", None)}
    shared = shared_operands(block, options, x, top_k)
    tensors = operands_of(experts, options, x, **router, **shared)
    number = number_of(experts, options, top_k, shared["shared_down"].shape[1] if shared else 0)
    y = call(number, tensors, options_of(experts, options, top_k=top_k, **routing))
    return y if shared else _with_shared(block, x, y)


def _with_shared(block: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """y with the results of the shared expert, where the block has one."""
    modules = block._modules
    if "shared_expert" in modules:
        return y + torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    if "shared_experts" in modules:
        return y + block.shared_experts(x)
    return y


def _is_watched(gate: torch.nn.Module) -> bool:
    """Whether somebody waits for the router's own results: a hook, or a model's caller who has asked for its logits.
    (Transformers leaves its hooks in place, idle, once they were needed; what is compiled cannot tell.)"""
    if not gate._forward_hooks and not gate._forward_pre_hooks:
        return False
    if torch.compiler.is_compiling():
        return True
    from transformers.utils import output_capturing  # such hooks are its

    collected = output_capturing._active_collector.get()
    idle = collected is None or "router_logits" not in collected
    hooks = (*gate._forward_hooks.values(), *gate._forward_pre_hooks.values())
    return not (idle and all(hook.__module__ == output_capturing.__name__ for hook in hooks))
