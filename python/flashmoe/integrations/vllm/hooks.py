"""What the plugin puts in place of vLLM's classes."""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from ... import __version__
from ...contexts.growing import growing_context
from ..operands import shape_of
from . import recognise
from .experts import FlashMoEExperts, OneRank

logger = init_logger(f"vllm.{__name__}")  # one of vLLM's own loggers, so that its messages are shown


class FlashMoEMethod(UnquantizedFusedMoEMethod):
    """Unquantised experts: vLLM's parameters, as they are loaded, with `FlashMoEExperts`.

    Raises `InvalidArgument` when the model is built, for a layer that the operator does not compute.
    """

    def __init__(self, moe: FusedMoEConfig) -> None:
        super(UnquantizedFusedMoEMethod, self).__init__(moe)  # its own __init__ looks for a fitting kernel of vLLM's
        recognise.check(moe)
        _refuse_batch_invariance()
        self.unquantized_backend = UnquantizedMoeBackend.OOT  # weights stay as they are loaded
        self.experts_cls = FlashMoEExperts
        self.supports_pre_processed_weights = True

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        if self.moe_kernel is None:
            self._init_moe_kernel(layer)

    def _init_moe_kernel(self, layer: Any) -> None:
        _take_kernel(self, layer, "unquantised experts")


class FlashMoEFp8Method(Fp8MoEMethod):
    """Experts in FP8 with scales of blocks: vLLM's parameters, as they are loaded, with `FlashMoEExperts`.

    Raises `InvalidArgument` when the model is built, for a layer that the operator does not compute.
    """

    def __init__(self, quant_config: Fp8Config, layer: RoutedExperts) -> None:
        super(Fp8MoEMethod, self).__init__(layer.moe_config)  # its own __init__ looks for a kernel of vLLM's
        recognise.check(self.moe)
        recognise.check_fp8(quant_config)
        _refuse_batch_invariance()
        self.quant_config = quant_config
        self.weight_block_size = self.moe_block_shape = quant_config.weight_block_size
        self.block_quant, self.weight_scale_name, self.weight_scale_refine = True, "weight_scale_inv", None
        self.experts_cls = FlashMoEExperts

    def process_weights_after_loading(self, layer: Any) -> None:
        self._init_moe_kernel(layer)  # weights keep their layout

    def _init_moe_kernel(self, layer: Any) -> None:
        _take_kernel(self, layer, "experts in FP8")

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        return fp8_w8a8_moe_quant_config(
            w1_scale=layer.w13_weight_scale_inv,
            w2_scale=layer.w2_weight_scale_inv,
            w1_bias=getattr(layer, "w13_bias", None),
            w2_bias=getattr(layer, "w2_bias", None),
            block_shape=self.moe_block_shape,
            gemm1_alpha=getattr(layer, "swiglu_alpha", None),
            gemm1_beta=getattr(layer, "swiglu_beta", None),
            gemm1_clamp_limit=getattr(layer, "swiglu_limit", None),
        )


class FlashMoEFp8Config(Fp8Config):
    """vLLM's configuration, with `FlashMoEFp8Method` for experts; linear layers and caches stay as they are."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts) and not is_layer_skipped(
            prefix=prefix,
            ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping,
            match_mode=self.ignored_layers_match_mode,
        ):
            return FlashMoEFp8Method(self, layer)
        return super().get_quant_method(layer, prefix)


class FlashMoERunner(MoERunner):
    """vLLM's runner, but it refuses two things that the methods here do not see: experts that are quantised in another
    way, which vLLM would compute itself; and zero experts, which have no weights and return a token's row as it is.
    vLLM names expert 0 in place of each zero expert, so a token might have expert 0 more than once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not isinstance(self._quant_method, (FlashMoEMethod, FlashMoEFp8Method)):
            got = type(self._quant_method).__name__
            raise recognise.refusal(self.layer_name, "experts that are not quantised, or in FP8", got)
        if isinstance(self.router, ZeroExpertRouter):
            raise recognise.refusal(self.layer_name, "a router without zero experts", type(self.router).__name__)


def _refuse_batch_invariance() -> None:
    if envs.VLLM_BATCH_INVARIANT:
        raise recognise.refusal("VLLM_BATCH_INVARIANT", "0", "1")


def _take_kernel(method: FlashMoEMethod | FlashMoEFp8Method, layer: Any, what: str) -> None:
    """Gives the method a kernel of `FlashMoEExperts` with the layer's parameters."""
    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    weights = layer.w2_weight
    shape = shape_of(weights, *weights.shape[1:], method.moe.experts_per_token, beside=method.moe.in_dtype)
    experts = FlashMoEExperts(method.moe, method.moe_quant_config, growing_context(shape))
    method.moe_kernel = FusedMoEKernel(OneRank(), experts)
    logger.info_once("FlashMoE %s computes the %s: %s", __version__, what, shape)


REPLACED = {UnquantizedFusedMoEMethod: FlashMoEMethod, MoERunner: FlashMoERunner}


def install() -> None:
    """Registers all replacements. Idempotent."""
    for theirs, ours in REPLACED.items():
        found = op_registry_oot.get(theirs.__name__)
        if found is None:
            theirs.register_oot(ours)
        elif found is not ours:
            raise recognise.refusal(
                theirs.__name__, "no other plugin in its place", f"{found.__module__}.{found.__name__}"
            )
    name = Fp8Config.get_name()
    found = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.setdefault(name, FlashMoEFp8Config)
    if found is not FlashMoEFp8Config:
        raise recognise.refusal(
            Fp8Config.__name__, "no other plugin in its place", f"{found.__module__}.{found.__name__}"
        )
    # vLLM keeps compiled models on disk, by a hash of its options and of these variables, but not of what plugins
    # replace. Without this variable it would use a model compiled with FlashMoE without it, and the other way round, or
    # with another version.
    envs.environment_variables["FLASHMOE_VERSION"] = lambda: __version__
