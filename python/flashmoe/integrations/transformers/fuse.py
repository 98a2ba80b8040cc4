"""Whole Mixture-of-Experts blocks of Transformers' models as one call of `flashmoe.moe`, including the router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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

M = TypeVar("M", bound=torch.nn.Module)

Rule = Callable[[torch.nn.Module], dict[str, Any] | None]
"""The arguments of `flashmoe.moe` that a router's attributes give; None: the router itself is to choose."""


def _softmax(gate: torch.nn.Module) -> dict[str, Any]:
    """The rule of a router that takes the K largest of a float32 softmax, and may divide them by their sum. The logits
    come from a linear layer of the model's type."""
    rounded = tensor_of(gate, "weight").dtype != torch.float32
    return {"renormalize": vars(gate).get("norm_topk_prob", True), "round_logits": rounded}


def _grouped_sigmoid(gate: torch.nn.Module) -> dict[str, Any]:
    """The rule of DeepSeek-V3's router, whose logits are float32."""
    bias = gate.e_score_correction_bias.float()  # usually float32 already
    return {"score": "sigmoid", "choice_bias": bias, **_of_groups(gate)}


def _of_groups(gate: torch.nn.Module) -> dict[str, Any]:
    return {
        "groups": gate.num_group,
        "top_groups": gate.topk_group,
        "renormalize": vars(gate).get("norm_topk_prob", True),
        "routed_scale": gate.routed_scaling_factor,
    }


def _grouped_softmax(gate: torch.nn.Module) -> dict[str, Any] | None:
    """The rule of Mistral 4's router, whose softmax is of the model's type. The operator computes the softmax in
    float32, so with a narrower type it might choose other experts than the model: then the router itself must
    choose."""
    return _of_groups(gate) if tensor_of(gate, "weight").dtype is torch.float32 else None


Forward = Callable[[Any, Tensor], Any]
"""A function of a block and hidden states that computes what the block returns."""


def softmax_forward(block: Any, hidden_states: Tensor) -> Tensor:
    """Computes a block whose router takes the K largest of a softmax, as one call of the operator."""
    return _forward(block, hidden_states, _softmax)


def grouped_forward(block: Any, hidden_states: Tensor) -> Tensor:
    """Computes a block with DeepSeek-V3's router, as one call of the operator."""
    return _forward(block, hidden_states, _grouped_sigmoid)


def grouped_softmax_forward(block: Any, hidden_states: Tensor) -> Tensor:
    """Computes a block with Mistral 4's router, as one call of the operator."""
    return _forward(block, hidden_states, _grouped_softmax)


def float32_grouped_softmax_forward(block: Any, hidden_states: Tensor) -> Tensor:
    """Computes a block with the router of Mistral Large 4, whose logits are float32, as one call of the operator."""
    return _forward(block, hidden_states, _of_groups)


def _forward(block: Any, hidden_states: Tensor, rule: Rule) -> Tensor:
    if block.training or is_watched(block):
        return unpatched(type(block)).forward(block, hidden_states)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    return _one_call_of(block, x, rule).reshape(hidden_states.shape)


_BY_FORWARD: dict[Forward | None, tuple[tuple[str, str, str], ...]] = {
    softmax_forward: (
        ("flex_olmo", "FlexOlmoSparseMoeBlock", "FlexOlmoTopKRouter"),
        ("mellum", "MellumSparseMoeBlock", "MellumTopKRouter"),
        ("minimax", "MiniMaxSparseMoeBlock", "MiniMaxTopKRouter"),
        ("mixtral", "MixtralSparseMoeBlock", "MixtralTopKRouter"),
        ("olmoe", "OlmoeSparseMoeBlock", "OlmoeTopKRouter"),
        ("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeTopKRouter"),
        ("qwen3_5_moe", "Qwen3_5MoeSparseMoeBlock", "Qwen3_5MoeTopKRouter"),
        ("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter"),
        ("qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextTopKRouter"),
        ("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextSparseMoeBlock", "Qwen3OmniMoeThinkerTextTopKRouter"),
        ("qwen3_vl_moe", "Qwen3VLMoeTextSparseMoeBlock", "Qwen3VLMoeTextTopKRouter"),
        ("qwen4_exp", "Qwen4ExpTextSparseMoeBlock", "Qwen4ExpTextTopKRouter"),
    ),
    grouped_forward: (
        ("bailing_hybrid", "BailingHybridMoE", "BailingHybridTopkRouter"),
        ("deepseek_v3", "DeepseekV3MoE", "DeepseekV3TopkRouter"),
        ("deepseek_v32", "DeepseekV32MoE", "DeepseekV32TopkRouter"),
        ("dots1", "Dots1MoE", "Dots1TopkRouter"),
        ("dots3_note", "Dots3NoteTextMoE", "Dots3NoteTextTopkRouter"),
        ("exaone_moe", "ExaoneMoeSparseMoEBlock", "ExaoneMoeTopkRouter"),
        ("glm4_moe", "Glm4MoeMoE", "Glm4MoeTopkRouter"),
        ("glm4_moe_lite", "Glm4MoeLiteMoE", "Glm4MoeLiteTopkRouter"),
        ("glm4v_moe", "Glm4vMoeTextMoE", "Glm4vMoeTextTopkRouter"),
        ("glm5_next", "Glm5NextTextMoE", "Glm5NextTextTopkRouter"),
        ("glm_moe_dsa", "GlmMoeDsaMoE", "GlmMoeDsaTopkRouter"),
        ("hy_v4", "HYV4MoE", "HYV4TopkRouter"),
        ("kimi_linear", "KimiLinearMoE", "KimiLinearTopkRouter"),
        ("mimo_v2_flash", "MiMoV2FlashMoE", "MiMoV2FlashTopkRouter"),
        ("solar_open", "SolarOpenMoE", "SolarOpenTopkRouter"),
    ),
    grouped_softmax_forward: (("mistral4", "Mistral4MoE", "Mistral4TopkRouter"),),
    float32_grouped_softmax_forward: (("mistral_large4", "MistralLarge4TextMoE", "MistralLarge4TextTopkRouter"),),
    block_forward: (("llama4", "Llama4TextMoe", "Llama4Router"),),
    None: (
        ("gemma4", "Gemma4TextDecoderLayer", "Gemma4TextRouter"),
        ("gpt_oss", "GptOssMLP", "GptOssTopKRouter"),
        ("phimoe", "PhimoeSparseMoeBlock", "PhimoeTopKRouter"),
    ),
}
BLOCKS: dict[tuple[str, str], tuple[str, Forward | None]] = {
    (folder, block): (router, forward) for forward, rows in _BY_FORWARD.items() for folder, block, router in rows
}
"""The blocks that are known. Key: a model's folder in Transformers and the class of its block. Value: the class of the
block's router, and the function that computes the block by `flashmoe.moe`. None: the block stays as it is, because the
operator does not compute its router, or because the block returns what its router makes. A router has no flags to
recognise it by, as experts have, so its class must be known."""


def fuse(model: M) -> M:
    """Makes every Mixture-of-Experts block of `model` one call of `flashmoe.moe`. Returns `model` itself.

    Parameters stay where they are, under their names: the model is saved as it was loaded, and the next call sees
    weights that change in place. In training, and if a model is asked for its router's logits, the block runs as
    before, with its experts by FlashMoE. The block also runs as before, with one warning for each reason, if a call
    finds a hook, another forward or another module in place of its router or its experts. A shared expert with such a
    change computes by itself. Some blocks always call their router: those of Llama 4 and gpt-oss, which return what it
    makes; those of Phi-3.5 and Gemma 4, and of Mistral 4 in 16-bit types, whose router the operator does not compute;
    and those whose router has another type than x. All experts must be on this rank: see
    `parallelize` for other cases.

    Combine weights stay float32, whereas models of a narrower type round them to that type.

    Raises
    ------
    InvalidArgument
        The class of a block, of its router or of its experts is not among those that are known (`BLOCKS`, `recognise`),
        or has another forward than Transformers gives it. Nothing is changed then.

    Examples
    --------
    >>> import torch, transformers
    >>> import flashmoe.integrations.transformers
    >>> with torch.device("meta"):
    ...     model = transformers.AutoModelForCausalLM.from_config(transformers.OlmoeConfig(num_hidden_layers=1))
    >>> flashmoe.integrations.transformers.fuse(model) is model
    True
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
        if forward is not None:
            expected, _ = BLOCKS[names_of(type(block))]
            vars(block).update({NAME_IN_MODEL: names[id(block)], ROUTER: (_router_of(block), expected)})
            block.__class__ = computed_by(type(block), forward)
        if hasattr(block.experts, "config"):
            block.experts.config._experts_implementation = NAME
    return model


def _forward_of(block: torch.nn.Module) -> Forward | None:
    """The function that is to compute the block; None: its own. Raises `InvalidArgument` if the block is not known, or
    if it would not use the function."""
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
    experts, gate = block._modules["experts"], block._modules["gate"]  # faster than reading them as attributes
    options, rule_of_gate, top_k = recognise(experts), rule(gate), gate.top_k
    weight = tensor_of(gate, "weight")
    if rule_of_gate is not None and weight.dtype is x.dtype:
        router = {"router": weight, "choice_bias": rule_of_gate.pop("choice_bias", None)}
        routing = rule_of_gate | {"top_k": top_k}
    else:  # for example a float32 router and x of 16 bits: the operator does not multiply these two types
        router, routing = chosen_by(gate, x), {}
    shared = shared_operands(block, options, x, top_k)
    tensors = operands_of(experts, options, x, **router, **shared)
    number = number_of(experts, options, top_k, shared["shared_down"].shape[1] if shared else 0)
    y = call(number, tensors, options_of(experts, options, **routing))
    return y if shared else _with_shared(block, x, y)


def chosen_by(gate: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The ids and weights that the model's own router chooses for x [T, H], as the operator takes them."""
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
