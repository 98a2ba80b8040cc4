"""The shared expert of a block of Transformers, as `flashmoe.moe` takes it: its parameters, unchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...pytorch.watched import is_touched
from ...spec import MAX_CUDA_EXPERTS, MAX_CUDA_TOP_K
from .experts import is_of_group
from .recognise import GATED, ExpertsOptions
from .watched import are_usual

MODULES = (
    "BailingHybridMLP",
    "DeepseekV3MLP",
    "DeepseekV32MLP",
    "Dots1MLP",
    "Dots3NoteTextMLP",
    "ExaoneMoeMLP",
    "Glm4MoeLiteMLP",
    "Glm4MoeMLP",
    "Glm4vMoeTextMLP",
    "GlmMoeDsaMLP",
    "KimiLinearMLP",
    "Mistral4MLP",
    "MistralLarge4TextMLP",
    "Qwen2MoeMLP",
    "Qwen3NextMLP",
    "Qwen3_5MoeMLP",
    "Qwen4ExpTextMLP",
    "SolarOpenMLP",
)
"""Classes that compute ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""


def shared_operands(block: torch.nn.Module, options: ExpertsOptions, x: Tensor, top_k: int) -> dict[str, Tensor | None]:
    """The tensors of the block's shared expert, by the operator's names, if it can be computed with the block's routed
    experts in one call.

    Empty if there is no shared expert, or if its own module must compute it: in compiled code, in groups, if its width
    is no multiple of the experts' width, if somebody has put a hook or another forward on the module, or if the module
    is not of a known kind.
    """
    if torch.compiler.is_compiling():
        return {}
    of_block = block._modules
    shared = of_block.get("shared_expert") or of_block.get("shared_experts")
    if shared is None or is_of_group(of_block["experts"]):
        return {}
    kind, act = type(shared), shared._modules.get("act_fn")
    if kind.__name__ not in MODULES or not kind.__module__.startswith("transformers.models."):
        return {}
    if is_touched(shared) or (act is not None and is_touched(act)) or not are_usual(kind, torch.nn.Linear):
        return {}
    gate, up, down = (_weight_of(shared._modules.get(name), x) for name in ("gate_proj", "up_proj", "down_proj"))
    if gate is None or up is None or down is None:
        return {}
    of_gate = of_block.get("shared_expert_gate")
    shared_gate = None if of_gate is None else _weight_of(of_gate, x)
    if of_gate is not None and shared_gate is None:
        return {}
    if not _go_together(of_block["experts"], options, shared.act_fn, down.shape[1], x, top_k):
        return {}
    return {"shared_gate_up": gate, "shared_up": up, "shared_down": down, "shared_gate": shared_gate}


def _go_together(
    experts: torch.nn.Module, options: ExpertsOptions, act_fn: Any, width: int, x: Tensor, top_k: int
) -> bool:
    """Whether the operator computes a shared expert with that activation and width beside the block's experts."""
    _, intermediate = options.sizes(experts)
    slices = width // intermediate
    alike = GATED.get(act_fn) or GATED.get(type(act_fn))
    biased = options.gate_up_bias or options.down_bias
    how = options.how
    if width % intermediate or biased or how.transposed or how.interleaved or alike != how.activation:
        return False
    on_gpu = x.device.type == "cuda"
    return not on_gpu or (top_k + slices <= MAX_CUDA_TOP_K and experts.num_experts + slices <= MAX_CUDA_EXPERTS)


def _weight_of(module: Any, x: Tensor) -> torch.nn.Parameter | None:
    """The weight of a plain linear layer without a bias, contiguous, with x's type and device; None for anything
    else."""
    if type(module) is not torch.nn.Linear or module._parameters.get("bias") is not None or is_touched(module):
        return None
    weight = module._parameters.get("weight")
    if type(weight) is not torch.nn.Parameter or weight.dtype is not x.dtype or weight.device != x.device:
        return None
    if not weight.is_contiguous():
        return None
    return weight
