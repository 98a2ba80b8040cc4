"""What a fused layer of vLLM computes, in the words of `flashmoe.moe`, read from its configuration.

Nothing here imports vLLM: its classes are read by their attributes. Anything unknown is refused by name, because with
the plugin loaded no layer may silently be computed by something else.
"""

from __future__ import annotations

from typing import Any

from ...errors import InvalidArgument
from ...spec import BY_GATE, DTYPES, SCALE_BLOCK

ADVICE = "set VLLM_PLUGINS to the plugins that are to be loaded, without flashmoe"
"""How to use vLLM without this plugin."""

PARALLEL = ("tp_size", "dp_size", "pcp_size", "ep_size", "sp_size")
"""Attributes of a layer's `moe_parallel_config`: the number of ranks over which tensors, batches, experts and sequences
are spread."""

FLAGS = {"moe_backend": "auto", "is_lora_enabled": False}
"""Attributes of a layer's `FusedMoEConfig` for which the operator supports only this value."""

FP8_FLAGS = {
    "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
    "activation_scheme": "dynamic",
    "store_dtype": None,
    "is_checkpoint_fp8_serialized": True,
}
"""Attributes of vLLM's `Fp8Config` for which the operator supports only this value. (Checkpoints with one scale for
each matrix are refused, too. In these, gate and up have a scale each. vLLM makes one matrix of the two and quantises it
again, so that it has one scale.)"""

ACTIVATIONS = (*BY_GATE, "swigluoai", "swigluoai_uninterleave")
"""Values of vLLM's `MoEActivation` that the operator supports."""


def check(moe: Any) -> None:
    """Raises `InvalidArgument` for a layer that the operator does not compute. `moe`: vLLM's `FusedMoEConfig`."""
    for name in PARALLEL:
        if (got := getattr(moe.moe_parallel_config, name)) != 1:
            raise refusal(name, "1", got)
    if moe.moe_parallel_config.enable_eplb:
        raise refusal("enable_eplb", "False", True)
    for name, value in FLAGS.items():
        if (got := getattr(moe, name)) != value:
            raise refusal(name, repr(value), repr(got))
    if moe.num_local_experts != moe.num_experts:
        raise refusal("num_local_experts", f"all {moe.num_experts} experts", moe.num_local_experts)
    dtype = str(moe.in_dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise refusal("in_dtype", f"one of {', '.join(DTYPES)}", dtype)
    activation_of(moe.activation.value, moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)


def check_fp8(config: Any) -> None:
    """Raises `InvalidArgument` for experts in FP8 that the operator does not compute. `config`: vLLM's `Fp8Config`."""
    for name, value in FP8_FLAGS.items():
        if (got := getattr(config, name)) != value:
            raise refusal(name, repr(value), repr(got))


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


def refusal(name: str, expected: str, got: object) -> InvalidArgument:
    return InvalidArgument(
        f"{name}: expected {expected}, got {got}; FlashMoE does not compute these experts in vLLM, {ADVICE}"
    )
