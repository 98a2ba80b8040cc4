"""What all methods of the plugin do: check a layer, and take a kernel for its parameters."""

from __future__ import annotations

from typing import Any

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

from ... import __version__
from ...contexts.growing import growing_context
from ..operands import shape_of
from . import recognise
from .experts import FlashMoEExperts, InOneCall
from .group import group_context, replicas_of

logger = init_logger(f"vllm.{__name__}")  # one of vLLM's own loggers, so that its messages are shown


def check_layer(moe: FusedMoEConfig) -> None:
    """Raises `InvalidArgument` for a layer that the operator does not compute, however its weights are stored."""
    recognise.check(moe)
    if envs.VLLM_BATCH_INVARIANT:
        raise recognise.refusal("VLLM_BATCH_INVARIANT", "0", "1")


def take_kernel(method: Any, layer: Any, what: str) -> None:
    """Gives the method a kernel of `FlashMoEExperts` with the layer's parameters."""
    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    weights, moe = layer.w2_weight, method.moe
    shape = shape_of(weights, *weights.shape[1:], moe.experts_per_token, beside=moe.in_dtype)
    if moe.use_ep:
        shape = shape._replace(experts=moe.num_experts)
        context = group_context(shape, moe, layer.expert_map_manager)
    else:
        context = growing_context(shape)
    experts = FlashMoEExperts(moe, method.moe_quant_config, context, replicas_of(moe))
    method.moe_kernel = FusedMoEKernel(InOneCall(), experts)
    of = f", of which this rank has {weights.shape[0]}" if moe.use_ep else ""
    logger.info_once("FlashMoE %s computes the %s: %s%s", __version__, what, shape, of)
