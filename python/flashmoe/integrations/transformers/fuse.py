"""Whole Mixture-of-Experts blocks of Transformers' models as one call of `flashmoe.moe`, including the router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgument
from ...pytorch.operator import call
from ..operands import as_taken
from .attributes import computed_by, tensor_of, unpatched
from .experts import NAME, experts_modules, number_of, operands_of, options_of
from .llama4 import block_forward
from .recognise import recognise
from .shared import shared_operands
from .watched import NAME_IN_MODEL, ROUTER, is_watched, names_of, own_forward

Rule = Callable[[torch.nn.Module], dict[str, Any]]
"""The arguments of `flashmoe.moe` that a router's attributes give."""


def _softmax(gate: torch.nn.Module) -> dict[str, Any]:
    """A linear layer of the model's type, then the largest of a float32 softmax, divided by their sum or not."""
    rounded = tensor_of(gate, "weight").dtype != torch.float32
    return {"renormalize": vars(gate).get("norm_topk_prob", True), "round_logits": rounded}


def _grouped_sigmoid(gate: torch.nn.Module) -> dict[str, Any]:
    """DeepSeek-V3's router, whose logits are float32."""
    return {
        "score": "sigmoid",
        "choice_bias": gate.e_score_correction_bias.float(),  # usually float32 already
        "groups": gate.num_group,
        "top_groups": gate.topk_group,
        "renormalize": gate.norm_topk_prob,
        "routed_scale": gate.routed_scaling_factor,
    }


Forward = Callable[[Any, Tensor], Any]
"""What a block computes from hidden states."""


def softmax_forward(block: Any, hidden_states: Tensor) -> Tensor:
    """Computes a block whose router takes the largest of a softmax, as one call of the operator."""
    return _forward(block, hidden_states, _softmax)


def grouped_forward(block: Any, hidden_states: Tensor) -> Tensor:
    """Computes a block with DeepSeek-V3's router, as one call of the operator."""
    return _forward(block, hidden_states, _grouped_sigmoid)


def _forward(block: Any, hidden_states: Tensor, rule: Rule) -> Tensor:
    if block.training or is_watched(block):
        return unpatched(type(block)).forward(block, hidden_states)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    return _one_call_of(block, x, rule).reshape(hidden_states.shape)


BLOCKS: dict[tuple[str, str], tuple[str, Forward]] = {
    ("mixtral", "MixtralSparseMoeBlock"): ("MixtralTopKRouter", softmax_forward),
    ("qwen2_moe", "Qwen2MoeSparseMoeBlock"): ("Qwen2MoeTopKRouter", softmax_forward),
    ("qwen3_moe", "Qwen3MoeSparseMoeBlock"): ("Qwen3MoeTopKRouter", softmax_forward),
    ("olmoe", "OlmoeSparseMoeBlock"): ("OlmoeTopKRouter", softmax_forward),
    ("qwen3_next", "Qwen3NextSparseMoeBlock"): ("Qwen3NextTopKRouter", softmax_forward),
    ("deepseek_v3", "DeepseekV3MoE"): ("DeepseekV3TopkRouter", grouped_forward),
    ("glm4_moe", "Glm4MoeMoE"): ("Glm4MoeTopkRouter", grouped_forward),
    ("llama4", "Llama4TextMoe"): ("Llama4Router", block_forward),
}
"""The blocks that are known. Key: a model's folder in Transformers and the class of its block. Value: the class of the
block's router, and the function that computes the block by `flashmoe.moe`. A router has no flags to recognise it by, as
experts have, so its class must be known."""


def fuse(model: torch.nn.Module) -> torch.nn.Module:
    """Makes every Mixture-of-Experts block of `model` one call of `flashmoe.moe`. Returns `model` itself.

    Parameters stay where they are, under their names: the model is saved as it was loaded, and the next call sees
    weights that change in place. In training, and if a model is asked for its router's logits, the block runs as
    before, with its experts by FlashMoE. The block also runs as before, with one warning for each reason, if a call
    finds a hook, another forward or another module in place of its router or its experts. A shared expert with such a
    change computes by itself. Two kinds of block always call their router: a block of Llama 4, which returns its
    router's logits, and a block whose router has another type than x. All experts must be on this rank: see
    `parallelize` for other cases.

    Weights of a token's experts stay float32, where models of a narrower type round them to that type.

    Raises
    ------
    InvalidArgument
        The class of a block, of its router or of its experts is not among those that are known (`BLOCKS`, `recognise`),
        or has another forward than Transformers gives it. Nothing is changed then.
    """
    owners = [block for block in model.modules() if isinstance(getattr(block, "experts", None), torch.nn.Module)]
    known = {id(experts) for experts in experts_modules(model)}
    blocks = [block for block in owners if id(block.experts) in known or names_of(type(block)) in BLOCKS]
    if not blocks:
        raise InvalidArgument(f"{type(model).__name__}: expected Mixture-of-Experts blocks, got none")
    forwards = [_forward_of(block) for block in blocks]
    for block in blocks:
        recognise(block.experts)
    names = {id(module): name for name, module in model.named_modules()}
    for block, forward in zip(blocks, forwards, strict=True):
        expected, _ = BLOCKS[names_of(type(block))]
        vars(block).update({NAME_IN_MODEL: names[id(block)], ROUTER: (_router_of(block), expected)})
        block.__class__ = computed_by(type(block), forward)
        if hasattr(block.experts, "config"):
            block.experts.config._experts_implementation = NAME
    return model


def _forward_of(block: torch.nn.Module) -> Forward:
    """The function that is to compute the block. Raises `InvalidArgument` if there is none, or if the block would not
    use it."""
    names = names_of(type(block))
    if names not in BLOCKS:
        known = ", ".join(name for _, name in BLOCKS)
        raise InvalidArgument(f"{names[1]}: expected a block that can be fused, one of {known}")
    expected, forward = BLOCKS[names]
    attribute = _router_of(block)
    router = getattr(block, attribute, None)
    if names_of(type(router)) != (names[0], expected):
        raise InvalidArgument(
            f"{names[1]}.{attribute}: expected {expected} of Transformers, got {type(router).__name__}"
        )
    for name, module in (("", block), (f".{attribute}", router), (".experts", block.experts)):
        if (found := own_forward(module, forward)) is not None:
            raise InvalidArgument(
                f"{names[1]}{name}: expected the forward that Transformers has for it, got {found}; fuse the model "
                "before something wraps it, or not at all"
            )
    return forward


def _router_of(block: torch.nn.Module) -> str:
    """The attribute that holds the block's router."""
    return "router" if hasattr(block, "router") else "gate"


def _one_call_of(block: torch.nn.Module, x: Tensor, rule: Rule) -> Tensor:
    """[T, H]: what the block computes from x [T, H]."""
    experts, gate = block._modules["experts"], block._modules["gate"]  # not as attributes: PyTorch looks there last
    options, routing, top_k = recognise(experts), rule(gate), gate.top_k
    weight, choice_bias = tensor_of(gate, "weight"), routing.pop("choice_bias", None)
    if weight.dtype is x.dtype:
        router, routing = {"router": weight, "choice_bias": choice_bias}, routing | {"top_k": top_k}
    else:  # for example float32 beside x of 16 bits: the operator does not multiply these
        router, routing = chosen_by(gate, x), {}
    shared = shared_operands(block, options, x, top_k)
    tensors = operands_of(experts, options, x, **router, **shared)
    number = number_of(experts, options, top_k, shared["shared_down"].shape[1] if shared else 0)
    y = call(number, tensors, options_of(experts, options, **routing))
    return y if shared else _with_shared(block, x, y)


def chosen_by(gate: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What the model's own router chooses for x [T, H], as the operator takes it."""
    _, weights, index = gate(x)
    return {"topk_ids": index.contiguous(), "topk_weights": as_taken(weights, x.dtype).contiguous()}


def _with_shared(block: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """y plus the results of the shared expert, if the block has one."""
    modules = block._modules
    if "shared_expert" in modules:
        return y + torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    if "shared_experts" in modules:
        return y + block.shared_experts(x)
    return y
