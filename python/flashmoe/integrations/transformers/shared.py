"""The shared expert of a block of Transformers as `flashmoe.moe` takes it: gate and up as halves of one matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...spec import MAX_CUDA_EXPERTS, MAX_CUDA_TOP_K
from .experts import is_of_group
from .recognise import GATED, ExpertsOptions

MODULES = ("Qwen2MoeMLP", "Qwen3NextMLP", "DeepseekV3MLP", "Glm4MoeMLP")
"""Classes that compute ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""
_LINEAR = ("gate_proj", "up_proj", "down_proj")


def shared_operands(block: torch.nn.Module, options: ExpertsOptions, x: Tensor, top_k: int) -> dict[str, Tensor | None]:
    """The tensors of the block's shared expert by the operator's names, if they can go with its routed experts in one
    call; nothing where there is none, or where its own module is to compute it: so it is in what is compiled, where it
    is watched by hooks or no such module as it seems, where its width is no multiple of the experts', and in groups.

    Gate and up become views of one matrix when this is first asked for, and again if something has moved them since.
    """
    shared = getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
    if shared is None or torch.compiler.is_compiling() or is_of_group(block.experts) or not _is_plain(shared, x):
        return {}
    gate = getattr(block, "shared_expert_gate", None)
    if gate is not None and not _is_linear(gate, x):
        return {}
    width, (_, intermediate) = shared.down_proj.weight.shape[1], options.sizes(block.experts)
    slices = width // intermediate
    alike = GATED.get(shared.act_fn) or GATED.get(type(shared.act_fn))
    biased = options.gate_up_bias or options.down_bias
    if width % intermediate or biased or options.transposed or options.interleaved or alike != options.activation:
        return {}
    on_gpu = x.device.type == "cuda"
    if on_gpu and (top_k + slices > MAX_CUDA_TOP_K or block.experts.num_experts + slices > MAX_CUDA_EXPERTS):
        return {}
    return {
        "shared_gate_up": _merged(shared.gate_proj, shared.up_proj),
        "shared_down": shared.down_proj.weight,
        "shared_gate": None if gate is None else gate.weight,
    }


def _is_plain(shared: torch.nn.Module, x: Tensor) -> bool:
    """Whether it computes what its class says, of tensors where x is."""
    return (
        type(shared).__name__ in MODULES
        and type(shared).__module__.startswith("transformers.models.")
        and not _is_watched(shared)
        and all(_is_linear(getattr(shared, name), x) for name in _LINEAR)
    )


def _is_linear(module: Any, x: Tensor) -> bool:
    """Whether it is a linear layer as it comes, without a bias, of x's type and place."""
    if type(module) is not torch.nn.Linear or module.bias is not None or _is_watched(module):
        return False
    weight = module.weight
    return type(weight) is torch.nn.Parameter and (weight.dtype, weight.device) == (x.dtype, x.device)


def _is_watched(module: torch.nn.Module) -> bool:
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def _merged(gate: torch.nn.Linear, up: torch.nn.Linear) -> Tensor:
    """[2Is, H]: both weights in one matrix, of which they are the halves."""
    rows, hidden = gate.weight.shape
    behind = gate.weight.data_ptr() + gate.weight.numel() * gate.weight.element_size()
    same = gate.weight.untyped_storage().data_ptr() == up.weight.untyped_storage().data_ptr()
    if not (same and up.weight.data_ptr() == behind and gate.weight.is_contiguous() and up.weight.is_contiguous()):
        with torch.no_grad():
            both = torch.cat([gate.weight, up.weight])
        gate.weight.data, up.weight.data = both[:rows], both[rows:]
    return gate.weight.detach().as_strided((2 * rows, hidden), (hidden, 1))
