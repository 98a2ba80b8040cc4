"""vLLM's experts in FP8: those of its own format, and those of compressed-tensors, with vLLM's parameters.

A matrix has a scale for each block of 128 x 128, for each row (a channel), or for gate, up and down each (a tensor).
Scales of tensors are written out for rows. vLLM's own kernels want one scale for gate and up together, so vLLM
quantises the two once more; here their elements stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig, fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    CompressedTensorsMoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.utils import replace_parameter

from . import recognise
from .experts import FlashMoEExperts
from .kernel import check_layer, take_kernel


class _Fp8Experts:
    """What the two methods share: parameters of vLLM's make, whose matrices keep their layout."""

    weight_scale_name: str

    def _begin(self, moe: FusedMoEConfig) -> None:
        check_layer(moe)
        self.experts_cls = FlashMoEExperts

    def process_weights_after_loading(self, layer: Any) -> None:
        for matrix in ("w13", "w2"):
            name = f"{matrix}_{self.weight_scale_name}"
            scale = getattr(layer, name)
            if scale.ndim < 3:  # of tensors, unless a reload has come this way before
                replace_parameter(layer, name, _of_rows(scale, getattr(layer, f"{matrix}_weight")))
        self._init_moe_kernel(layer)

    def _init_moe_kernel(self, layer: Any) -> None:
        take_kernel(self, layer, "experts in FP8")

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        return fp8_w8a8_moe_quant_config(
            w1_scale=getattr(layer, f"w13_{self.weight_scale_name}"),
            w2_scale=getattr(layer, f"w2_{self.weight_scale_name}"),
            w1_bias=getattr(layer, "w13_bias", None),
            w2_bias=getattr(layer, "w2_bias", None),
            gemm1_alpha=getattr(layer, "swiglu_alpha", None),
            gemm1_beta=getattr(layer, "swiglu_beta", None),
            gemm1_clamp_limit=getattr(layer, "swiglu_limit", None),
        )


def _of_rows(scale: Tensor, matrices: Tensor) -> Tensor:
    """Scales [E, rows, 1] of `matrices` [E, rows, .], from one for each of their equal parts, [E, parts] or [E]."""
    parts = scale.data.reshape(len(scale), -1, 1)
    return parts.repeat_interleave(matrices.shape[1] // parts.shape[1], dim=1).contiguous()


class FlashMoEFp8Method(_Fp8Experts, Fp8MoEMethod):
    """Experts of vLLM's own format, with scales of blocks or of tensors.

    Raises `InvalidArgument` when the model is built, for a layer that the operator does not compute.
    """

    def __init__(self, quant_config: Fp8Config, layer: RoutedExperts) -> None:
        super(Fp8MoEMethod, self).__init__(layer.moe_config)  # its own __init__ looks for a kernel of vLLM's
        self._begin(self.moe)
        recognise.check_fp8(quant_config)
        self.quant_config = quant_config
        self.weight_block_size = self.moe_block_shape = quant_config.weight_block_size
        self.block_quant, self.weight_scale_refine = self.weight_block_size is not None, None
        self.weight_scale_name = "weight_scale_inv" if self.block_quant else "weight_scale"


class FlashMoECompressedFp8Method(_Fp8Experts, CompressedTensorsW8A8Fp8MoEMethod):
    """Experts of compressed-tensors in FP8, with scales of blocks, channels or tensors.

    Raises `InvalidArgument` when the model is built, for a layer that the operator does not compute.
    """

    weight_scale_name = "weight_scale"

    def __init__(self, weights: Any, activations: Any, moe: FusedMoEConfig) -> None:
        super(CompressedTensorsMoEMethod, self).__init__(moe)  # the next __init__ looks for a kernel of vLLM's
        self._begin(moe)
        recognise.check_compressed(weights, activations)
        self.weight_quant, self.input_quant = weights, activations
        self.static_input_scales = False
        self.weight_block_size = weights.block_structure if weights.strategy == "block" else None
        self.block_quant = self.weight_block_size is not None


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


class FlashMoECompressedConfig(CompressedTensorsConfig):
    """vLLM's configuration, with `FlashMoECompressedFp8Method` for experts in FP8; everything else stays as it is."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            # The configuration names experts as the linear layers of which the checkpoint's model consists. vLLM looks
            # a layer of experts up by these names.
            self._add_fused_moe_to_target_scheme_map()
            names = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
            first, *others = (self.get_scheme_dict(layer, f"{prefix}.0.{name}") or {} for name in names)
            said = first.get("weights"), first.get("input_activations")
            if all(other == first for other in others) and self._is_fp8_w8a8(*said):
                return FlashMoECompressedFp8Method(*said, layer.moe_config)
        return super().get_quant_method(layer, prefix)
