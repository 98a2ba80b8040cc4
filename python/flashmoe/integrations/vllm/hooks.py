"""What the plugin puts in place of vLLM's classes."""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from ... import __version__
from ...errors import InvalidArgument
from . import recognise
from .experts import FlashMoEExperts
from .fp8 import FlashMoECompressedConfig, FlashMoECompressedFp8Method, FlashMoEFp8Config, FlashMoEFp8Method
from .kernel import check_layer, take_kernel


class FlashMoEMethod(UnquantizedFusedMoEMethod):
    """Unquantised experts: vLLM's parameters, as they are loaded, with `FlashMoEExperts`.

    Raises `InvalidArgument` when the model is built, for a layer that the operator does not compute.
    """

    def __init__(self, moe: FusedMoEConfig) -> None:
        super(UnquantizedFusedMoEMethod, self).__init__(moe)  # its own __init__ looks for a fitting kernel of vLLM's
        check_layer(moe)
        self.unquantized_backend = UnquantizedMoeBackend.OOT  # weights stay as they are loaded
        self.experts_cls = FlashMoEExperts
        self.supports_pre_processed_weights = True

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        if self.moe_kernel is None:
            self._init_moe_kernel(layer)

    def _init_moe_kernel(self, layer: Any) -> None:
        take_kernel(self, layer, "unquantised experts")


class FlashMoERunner(MoERunner):
    """vLLM's runner, but it refuses two things that the methods here do not see: experts that are quantised in another
    way, which vLLM would compute itself; and zero experts, which have no weights and return a token's row as it is.
    vLLM names expert 0 in place of each zero expert, so a token might have expert 0 more than once.

    Compiled code calls the layer as one operator, also on CPUs, where vLLM would compile what is in it. The number of
    tokens that a rank brings depends on T in a way that vLLM's compiled code, which is made once for all T, gets wrong.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        recognise.check_engine(get_current_vllm_config().parallel_config)
        if not isinstance(self._quant_method, OURS):
            got = type(self._quant_method).__name__
            raise recognise.refusal(self.layer_name, "experts that are not quantised, or in FP8", got)
        if isinstance(self.router, ZeroExpertRouter):
            raise recognise.refusal(self.layer_name, "a router without zero experts", type(self.router).__name__)

    def _select_forward(self) -> Any:
        return torch.ops.vllm.moe_forward if self._shared_experts is None else torch.ops.vllm.moe_forward_shared


OURS = (FlashMoEMethod, FlashMoEFp8Method, FlashMoECompressedFp8Method)
REPLACED = {UnquantizedFusedMoEMethod: FlashMoEMethod, MoERunner: FlashMoERunner}
CONFIGURATIONS = {"fp8": FlashMoEFp8Config, "compressed-tensors": FlashMoECompressedConfig}
"""By vLLM's name of a format: the configuration that takes the place of vLLM's, of which it is a subclass."""


def install() -> None:
    """Registers all replacements. Idempotent."""
    for theirs, ours in REPLACED.items():
        found = op_registry_oot.get(theirs.__name__)
        if found is None:
            theirs.register_oot(ours)
        elif found is not ours:
            raise _refusal_of_another(theirs, found)
    for name, ours in CONFIGURATIONS.items():
        found = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.setdefault(name, ours)
        if found is not ours:
            raise _refusal_of_another(ours.__base__, found)
    # vLLM keeps compiled models on disk, by a hash of its options and of these variables, but not of what plugins
    # replace. Without this variable it would use a model compiled with FlashMoE without it, and the other way round, or
    # with another version.
    envs.environment_variables["FLASHMOE_VERSION"] = lambda: __version__


def _refusal_of_another(theirs: type, found: type) -> InvalidArgument:
    return recognise.refusal(theirs.__name__, "no other plugin in its place", f"{found.__module__}.{found.__name__}")
