"""Whole Mixture-of-Experts blocks of Transformers' models as one call of `flashmoe.moe`, router and all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgument
from ...torch_op import check_tensors
from .experts import NAME, experts_modules, number_of, operands_of
from .recognise import recognise

Rule = Callable[[torch.nn.Module], dict[str, Any]]
"""What a router, by its attributes, is to `flashmoe.moe`."""


def _softmax(gate: torch.nn.Module) -> dict[str, Any]:
    """A linear layer of the model's type, the largest of a float32 softmax, divided by their sum or not."""
    rounded = gate.weight.dtype != torch.float32
    return {"renormalize": getattr(gate, "norm_topk_prob", True), "round_logits": rounded}


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


BLOCKS: dict[tuple[str, str, str], Rule] = {
    ("mixtral", "MixtralSparseMoeBlock", "MixtralTopKRouter"): _softmax,
    ("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeTopKRouter"): _softmax,
    ("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter"): _softmax,
    ("olmoe", "OlmoeSparseMoeBlock", "OlmoeTopKRouter"): _softmax,
    ("qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextTopKRouter"): _softmax,
    ("deepseek_v3", "DeepseekV3MoE", "DeepseekV3TopkRouter"): _grouped_sigmoid,
    ("glm4_moe", "Glm4MoeMoE", "Glm4MoeTopkRouter"): _grouped_sigmoid,
}
"""What is known: a model's folder in Transformers, the class of its block and that of its router, and how that router's
rule is said to `flashmoe.moe`. A router has no flags to be recognised by, as experts have: it is known by its class."""


def fuse(model: torch.nn.Module) -> torch.nn.Module:
    """Makes every Mixture-of-Experts block of `model` one call of `flashmoe.moe`; `model` itself.

    Parameters stay where they are, under their names: the model is saved as it was loaded, and weights that change in
    place are seen by the next call. Where a model is asked for its router's logits, or somebody watches the router by a
    hook, and in training, the block runs as before, with its experts by FlashMoE. All experts must be here: see
    `parallelize` for others.

    Weights of a token's experts stay float32, where models of a narrower type round them to it.

    Raises
    ------
    InvalidArgument
        A block's class, its router's or its experts are not among those that are known (`BLOCKS`, `recognise`); nothing
        is changed then.
    """
    owners = [block for block in model.modules() if isinstance(getattr(block, "experts", None), torch.nn.Module)]
    known = {id(experts) for experts in experts_modules(model)}
    blocks = [block for block in owners if id(block.experts) in known or _names(block) in _by_block()]
    if not blocks:
        raise InvalidArgument(
            f"{type(model).__name__}: expected blocks with experts on Transformers' experts interface, got none"
        )
    rules = [_rule_of(block) for block in blocks]
    for block in blocks:
        recognise(block.experts)
    for block, rule in zip(blocks, rules, strict=True):
        block.__class__ = _fused(type(block), rule)
        block.experts.config._experts_implementation = NAME
    return model


def _names(module: torch.nn.Module) -> tuple[str, str]:
    """Folder and class of a module of Transformers."""
    kind = type(module)
    parts = kind.__module__.split(".")
    return (parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else kind.__module__), kind.__name__


@cache
def _by_block() -> dict[tuple[str, str], str]:
    return {(folder, block): router for folder, block, router in BLOCKS}


def _rule_of(block: torch.nn.Module) -> Rule:
    names = _names(block)
    expected = _by_block().get(names)
    gate = getattr(block, "gate", None)
    if expected is None:
        known = ", ".join(name for _, name in _by_block())
        raise InvalidArgument(f"{names[1]}: expected a block that can be fused, one of {known}")
    if _names(gate) != (names[0], expected) or "forward" in vars(block) or "forward" in vars(gate):
        raise InvalidArgument(f"{names[1]}.gate: expected {expected} of Transformers, got {type(gate).__name__}")
    return BLOCKS[(*names, expected)]


@cache
def _fused(kind: type, rule: Rule) -> type:
    """`kind`, whose calls are the operator's."""
    if "_flashmoe_unfused" in vars(kind):
        return kind

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if self.training or _is_watched(self.gate):
            return kind.forward(self, hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        return _with_shared(self, x, _routed(self, x, rule)).reshape(hidden_states.shape)

    return type(kind.__name__, (kind,), {"forward": forward, "_flashmoe_unfused": kind, "__module__": kind.__module__})


def _routed(block: torch.nn.Module, x: Tensor, rule: Rule) -> Tensor:
    """[T, H]: what the block's experts make of x [T, H]."""
    experts, gate = block.experts, block.gate
    options = recognise(experts)
    routing = rule(gate)
    tensors = operands_of(experts, options, x)
    tensors |= {"router": gate.weight, "choice_bias": routing.pop("choice_bias", None)}
    check_tensors(tensors)
    return torch.ops.flashmoe.moe(
        number_of(experts, options, gate.top_k), **tensors, **options.of_operator(), **routing, top_k=gate.top_k
    )


def _with_shared(block: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """y with the results of the shared expert, where the block has one."""
    if hasattr(block, "shared_expert"):
        return y + torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    if hasattr(block, "shared_experts"):
        return y + block.shared_experts(x)
    return y


def _is_watched(gate: torch.nn.Module) -> bool:
    """Whether somebody waits for the router's own results: a hook, or a model's caller who has asked for its logits.
    (Transformers leaves its hooks in place, idle, once they were needed; what is compiled cannot tell.)"""
    hooks = [*gate._forward_hooks.values(), *gate._forward_pre_hooks.values()]
    if not hooks or torch.compiler.is_compiling():
        return bool(hooks)
    from transformers.utils import output_capturing  # such hooks are its

    collected = output_capturing._active_collector.get()
    idle = collected is None or "router_logits" not in collected
    return not (idle and all(hook.__module__ == output_capturing.__name__ for hook in hooks))
