"""Random small layers with all of their options, for the tests of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
from flashmoe.spec import GATED

CASES: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "relu": {"activation": "relu", "biases": True},
    "relu2": {"activation": "relu2"},
    "gelu": {"activation": "gelu", "biases": True},
    "silu": {"activation": "silu"},
    "geglu": {"activation": "geglu", "transposed": True},
    "gelu_tanh": {"activation": "gelu_tanh", "biases": True},
    "geglu_tanh": {"activation": "geglu_tanh", "interleaved": True},
    "clamped": {"activation": "clamped_swiglu", "limit": 0.7, "alpha": 1.702, "up_offset": 1.0, "biases": True},
    "gpt-oss": {
        "activation": "clamped_swiglu", "limit": 0.7, "alpha": 1.702, "up_offset": 1.0, "biases": True,
        "interleaved": True, "transposed": True,
    },
    "given routing": {"given": True, "biases": True},
    "given routing, weights on the input": {"given": True, "weights_on_input": True, "biases": True},
    "a capacity": {"capacity_factor": 0.6, "biases": True},
    "not renormalised": {"renormalize": False},
    "DeepSeek-V3": {
        "score": "sigmoid", "choice_bias": True, "groups": 2, "top_groups": 1, "routed_scale": 2.5, "shared": 1,
    },
    "Qwen2-MoE": {"renormalize": False, "shared": 3, "shared_gate": True},
    "Llama 4": {
        "shared": 1, "top_k": 1, "transposed": True, "weights_on_input": True, "score": "sigmoid",
        "renormalize": False,
    },
    "shared, interleaved, transposed": {"shared": 2, "shared_gate": True, "interleaved": True, "transposed": True},
    "shared without a gate": {"shared": 2, "activation": "gelu"},
}  # fmt: skip
"""By name, the options in which a layer differs from a SwiGLU layer with a softmax router."""


def random_call(
    rng: np.random.Generator,
    *,
    tokens: int = 9,
    hidden: int = 12,
    intermediate: int = 7,
    experts: int = 6,
    top_k: int = 3,
    shared: int = 0,
    shared_gate: bool = False,
    biases: bool = False,
    choice_bias: bool = False,
    given: bool = False,
    **options: Any,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The float64 tensors of a call, with all E experts, and the call's options."""
    gated = options.get("activation", "swiglu") in GATED
    rows, order = intermediate * (2 if gated else 1), -1 if options.get("transposed") else 1

    def normal(*shape: int, inputs: int = 1) -> np.ndarray:
        return rng.standard_normal(shape) * inputs**-0.5

    tensors = {
        "x": normal(tokens, hidden),
        "gate_up_proj": normal(experts, *(rows, hidden)[::order], inputs=hidden),
        "down_proj": normal(experts, *(hidden, intermediate)[::order], inputs=intermediate),
    }
    if given:
        chosen = [rng.permutation(experts)[:top_k] for _ in range(tokens)]
        tensors["topk_ids"] = np.array(chosen, np.int32).reshape(tokens, top_k)
        tensors["topk_weights"] = rng.uniform(0.1, 1.0, (tokens, top_k))
    else:
        options["top_k"] = top_k
        tensors["router"] = normal(experts, hidden, inputs=hidden)
    if choice_bias:
        tensors["choice_bias"] = 0.1 * normal(experts)
    if biases:
        tensors |= {"gate_up_bias": normal(experts, rows), "down_bias": normal(experts, hidden)}
        if not given:
            tensors["router_bias"] = normal(experts)
    if shared:
        tensors["shared_gate_up"] = normal(*(shared * rows, hidden)[::order], inputs=hidden)
        tensors["shared_down"] = normal(*(hidden, shared * intermediate)[::order], inputs=shared * intermediate)
    if shared_gate:
        tensors["shared_gate"] = normal(1, hidden, inputs=hidden)
    return tensors, options
