"""What a fused layer of vLLM computes, in the words of `flashmoe.moe`, read from its configuration.

Nothing here imports vLLM: its classes are read by their attributes. Anything unknown is refused by name, because with
the plugin loaded no layer may silently be computed by something else.
"""

from __future__ import annotations

from typing import Any

from ...errors import InvalidArgument
from ...spec import BY_GATE, DTYPES, SCALE_BLOCK

ADVICE = "unset FLASHMOE_VLLM to leave all experts to vLLM"
"""How to use vLLM without this plugin."""

BACKENDS = ("allgather_reducescatter", "passthrough")
"""Values of vLLM's ``--all2all-backend`` beside which this package sends the tokens: the default, and the one that says
that experts send them by themselves. Another value asks for another library's sending."""

FLAGS = {"moe_backend": "auto", "is_lora_enabled": False}
"""Attributes of a layer's `FusedMoEConfig` for which the operator supports only this value."""

FP8_FLAGS = {
    "activation_scheme": "dynamic",
    "store_dtype": None,
    "is_checkpoint_fp8_serialized": True,
}
"""Attributes of vLLM's `Fp8Config` for which the operator supports only this value."""

BLOCK = [SCALE_BLOCK, SCALE_BLOCK]
"""Rows and columns of a matrix that share a scale, where scales are of blocks."""

ACTIVATIONS = (*BY_GATE, "swigluoai", "swigluoai_uninterleave")
"""Values of vLLM's `MoEActivation` that the operator supports."""


def check(moe: Any) -> None:
    """Raises `InvalidArgument` for a layer that the operator does not compute. `moe`: vLLM's `FusedMoEConfig`."""
    if (found := unsupported_parallelism(moe.moe_parallel_config)) is not None:
        raise refusal(*found)
    for name, value in FLAGS.items():
        if (got := getattr(moe, name)) != value:
            raise refusal(name, repr(value), repr(got))
    if not moe.moe_parallel_config.use_ep and moe.num_local_experts != moe.num_experts:
        raise refusal("num_local_experts", f"all {moe.num_experts} experts", moe.num_local_experts)
    dtype = str(moe.in_dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise refusal("in_dtype", f"one of {', '.join(DTYPES)}", dtype)
    activation_of(moe.activation.value, moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)


def unsupported_parallelism(parallel: Any) -> tuple[str, str, object] | None:
    """What of vLLM's `FusedMoEParallelConfig` the operator does not compute: its name, what is expected, and what is
    there. None: it computes all."""
    if parallel.pcp_size != 1:
        return "pcp_size", "1", parallel.pcp_size
    if parallel.use_ep:
        if parallel.all2all_backend not in BACKENDS:
            return "all2all_backend", f"one of {', '.join(BACKENDS)}", parallel.all2all_backend
        return None
    if parallel.dp_size != 1:
        return "dp_size", "1 without --enable-expert-parallel", parallel.dp_size
    if parallel.enable_eplb:
        return "enable_eplb", "False without --enable-expert-parallel", True
    return None


def check_engine(parallel: Any) -> None:
    """Raises `InvalidArgument` for a way to run ranks that the operator does not support. `parallel`: vLLM's
    `ParallelConfig`."""
    for name in ("enable_elastic_ep", "use_ubatching"):
        if getattr(parallel, name):
            raise refusal(name, "False", True)


def check_fp8(config: Any) -> None:
    """Raises `InvalidArgument` for experts in FP8 that the operator does not compute. `config`: vLLM's `Fp8Config`."""
    for name, value in FP8_FLAGS.items():
        if (got := getattr(config, name)) != value:
            raise refusal(name, repr(value), repr(got))
    if config.weight_block_size not in (None, BLOCK):
        raise refusal("weight_block_size", f"None or {BLOCK}", config.weight_block_size)


def check_compressed(weights: Any, activations: Any) -> None:
    """Raises `InvalidArgument` for experts of compressed-tensors in FP8 that the operator does not compute. `weights`
    and `activations`: what compressed-tensors says of their quantisation."""
    if not activations.dynamic:
        raise refusal("input_activations.dynamic", "True", activations.dynamic)
    if weights.num_bits != 8:
        raise refusal("weights.num_bits", "8", weights.num_bits)
    if weights.strategy == "block" and list(weights.block_structure) != BLOCK:
        raise refusal("weights.block_structure", BLOCK, list(weights.block_structure))


def activation_of(name: str, limit: float | None, alpha: float | None, beta: float | None) -> dict[str, Any]:
    """The operator's options for a value of `MoEActivation` and its parameters; None stands for vLLM's default."""
    if name not in ACTIVATIONS:
        raise refusal("activation", f"one of {', '.join(ACTIVATIONS)}", name)
    if name == "silu" and limit is not None:
        return {"activation": "clamped_swiglu", "limit": limit}
    if name in BY_GATE:
        if limit is not None:
            raise refusal("swiglu_limit", f"None with {name}", limit)
        return {"activation": BY_GATE[name]}
    if name == "swigluoai":  # gpt-oss's activation, with parameters built into vLLM's kernels
        built_in = (7.0, 1.702, 1.0)
        got = tuple(own if given is None else given for given, own in zip((limit, alpha, beta), built_in, strict=True))
        if got != built_in:
            raise refusal("swiglu_limit, swiglu_alpha, swiglu_beta", f"{built_in} with swigluoai", got)
        return {"activation": "clamped_swiglu", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "interleaved": True}
    if limit is None:
        raise refusal("swiglu_limit", "a number with swigluoai_uninterleave", None)
    alpha, beta = 1.0 if alpha is None else alpha, 0.0 if beta is None else beta
    return {"activation": "clamped_swiglu", "limit": limit, "alpha": alpha, "up_offset": beta}


def refusal(name: str, expected: object, got: object) -> InvalidArgument:
    return InvalidArgument(
        f"{name}: expected {expected}, got {got}; FlashMoE does not compute these experts in vLLM, {ADVICE}"
    )
