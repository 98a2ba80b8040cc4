"""vLLM's modular kernel, with the operator computing its experts."""

from __future__ import annotations

from typing import Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import PassThroughPrepareAndFinalize
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform

from ...contexts.growing import GrowingContext
from ...pytorch.operator import call  # importing it registers the operator
from ...pytorch.replicated import Replicas
from ...spec import Options
from ...spec.tensors import Tensors
from ..operands import as_taken
from . import recognise


class InOneCall(PassThroughPrepareAndFinalize):
    """Does nothing before the experts, and nothing after them."""

    def output_is_reduced(self) -> bool:
        """False: vLLM reduces the output over the ranks of a tensor-parallel group, together with that of shared
        experts. See `FlashMoEExperts.apply` for what this rank's output is."""
        return False


class FlashMoEExperts(mk.FusedMoEExpertsModular):
    """The experts that a rank holds, which also weigh and sum. Their calls take memory from `context`: of a rank alone,
    or of vLLM's expert-parallel group.

    vLLM calls the static methods only of its own kernels, to choose among them; here they state what `recognise`
    checks.
    """

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        context: GrowingContext,
        replicas: Replicas | None,
    ) -> None:
        super().__init__(moe_config, quant_config)
        given = (quant_config.gemm1_clamp_limit, quant_config.gemm1_alpha, quant_config.gemm1_beta)
        usual = (moe_config.swiglu_limit, moe_config.swiglu_alpha, moe_config.swiglu_beta)
        numbers = (of_model if own is None else own for own, of_model in zip(given, usual, strict=True))
        self._context = context
        self._replicas = replicas
        self._options = recognise.activation_of(moe_config.activation.value, *numbers)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Fills `output` [T, H]; T > 0. `w1` and `w2` are gate_up_proj and down_proj of `flashmoe.moe`. If these are in
        FP8, `flashmoe.moe` quantises x itself.

        Where experts are spread over ranks, `topk_ids` are ids among all of them, and the context knows what
        `expert_map` says. Ranks that hold the same tokens each bring a share of them: a rank's output has the results
        of its share, and zeros elsewhere, and vLLM's sum over these ranks is the whole.
        """
        if expert_map is not None and not self.moe_config.use_ep:
            raise recognise.refusal("expert_map", "None without expert parallelism", "a map of experts to ranks")
        if activation is not self.moe_config.activation:
            raise recognise.refusal("activation", self.moe_config.activation.value, activation)
        tokens, replicas = len(hidden_states), self._replicas
        mine = slice(0, tokens) if replicas is None else replicas.share(tokens)
        weights = as_taken(topk_weights, hidden_states.dtype)
        tensors = Tensors(
            hidden_states[mine].contiguous(),
            w1,
            w2,
            gate_up_bias=self.w1_bias,
            down_bias=self.w2_bias,
            gate_up_scale=self.w1_scale,
            down_scale=self.w2_scale,
            topk_ids=topk_ids[mine].contiguous(),
            topk_weights=weights[mine].contiguous(),
        )
        options = Options(weights_on_input=apply_router_weight_on_input, **self._options)
        y = call(self._context.number, tensors, options)
        if replicas is None:
            output.copy_(y)
        else:
            output.zero_()
            output[mine].copy_(y)

    def workspace_shapes(self, M: int, N: int, K: int, *others: Any) -> tuple[tuple[int, ...], ...]:
        """No workspace for the products: the context has memory of its own."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu() or current_platform.is_cuda()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.value in recognise.ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return recognise.unsupported_parallelism(moe_parallel_config) is None
