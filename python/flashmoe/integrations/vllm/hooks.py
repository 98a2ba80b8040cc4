"""What the plugin puts in the place of vLLM's classes."""

from __future__ import annotations

from typing import Any

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from ... import __version__
from ...growing import growing_context
from ..operands import shape_of
from . import recognise
from .experts import FlashMoEExperts, OneRank

logger = init_logger(f"vllm.{__name__}")  # of vLLM's own loggers, so that it is heard


class FlashMoEMethod(UnquantizedFusedMoEMethod):
    """Unquantised experts: vLLM's parameters, as they are loaded, and `FlashMoEExperts`.

    Raises `InvalidArgument` for a layer that is not computed, when the model is built.
    """

    def __init__(self, moe: FusedMoEConfig) -> None:
        super(UnquantizedFusedMoEMethod, self).__init__(moe)  # its own looks for a kernel of vLLM's that fits
        recognise.check(moe)
        if envs.VLLM_BATCH_INVARIANT:
            raise recognise.refusal("VLLM_BATCH_INVARIANT", "0", "1")
        self.unquantized_backend = UnquantizedMoeBackend.OOT  # weights stay as they are loaded
        self.experts_cls = FlashMoEExperts
        self.supports_pre_processed_weights = True

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        if self.moe_kernel is None:
            self._init_moe_kernel(layer)

    def _init_moe_kernel(self, layer: Any) -> None:
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        weights = layer.w2_weight
        shape = shape_of(weights, *weights.shape[1:], self.moe.experts_per_token)
        experts = FlashMoEExperts(self.moe, self.moe_quant_config, growing_context(shape))
        self.moe_kernel = FusedMoEKernel(OneRank(), experts)
        logger.info_once("FlashMoE %s computes the unquantised experts: %s", __version__, shape)


class FlashMoERunner(MoERunner):
    """vLLM's, which refuses what `FlashMoEMethod` does not see: quantised experts, which vLLM would compute by itself,
    and zero experts, in whose place a token may have expert 0 once more."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not isinstance(self._quant_method, FlashMoEMethod):
            raise recognise.refusal(self.layer_name, "unquantised experts", type(self._quant_method).__name__)
        if isinstance(self.router, ZeroExpertRouter):
            raise recognise.refusal(self.layer_name, "a router without zero experts", type(self.router).__name__)


REPLACED = {UnquantizedFusedMoEMethod: FlashMoEMethod, MoERunner: FlashMoERunner}


def install() -> None:
    """Registers both. Idempotent."""
    for theirs, ours in REPLACED.items():
        found = op_registry_oot.get(theirs.__name__)
        if found is None:
            theirs.register_oot(ours)
        elif found is not ours:
            raise recognise.refusal(
                theirs.__name__, "no other plugin in its place", f"{found.__module__}.{found.__name__}"
            )
    # vLLM keeps compiled models on disk by a hash of its options and of these, and not of what plugins replace: without
    # a row of ours it would take one for the other when FlashMoE is installed, removed or another version.
    envs.environment_variables["FLASHMOE_VERSION"] = lambda: __version__
