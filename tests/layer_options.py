"""Options of layers besides plain SwiGLU, most of them from published models, for the tests of both engines."""

from __future__ import annotations

from typing import Any

CLAMPED = {"activation": "clamped_swiglu", "limit": 0.75, "alpha": 1.702, "up_offset": 1.0}

EXPERTS: dict[str, dict[str, Any]] = {
    "geglu": {"activation": "geglu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "geglu_tanh": {"activation": "geglu_tanh"},
    "relu2": {"activation": "relu2"},
    "clamped": CLAMPED,
    "clamped, no limit": {"activation": "clamped_swiglu", "alpha": 0.5},
    "interleaved": {"interleaved": True},
    "weights on the input": {"weights_on_input": True},
}

WITH_SHARED: dict[str, dict[str, Any]] = {
    "one slice": {"shared": 1},
    "five slices": {"shared": 5},
    "Qwen2-MoE": {"shared": 4, "shared_gate": True, "renormalize": False},
    "DeepSeek-V3": {
        "shared": 1,
        "score": "sigmoid",
        "choice_bias": True,
        "groups": 4,
        "top_groups": 2,
        "routed_scale": 2.5,
    },
    "Llama 4": {
        "shared": 1,
        "top_k": 1,
        "transposed": True,
        "weights_on_input": True,
        "score": "sigmoid",
        "renormalize": False,
    },
    "no gate in the experts": {"shared": 3, "activation": "gelu"},
    "interleaved": {"shared": 3, "interleaved": True, **CLAMPED},
    "interleaved, transposed": {"shared": 2, "shared_gate": True, "interleaved": True, "transposed": True, **CLAMPED},
    "a capacity": {"shared": 2, "capacity_factor": 0.5, "skew": 3.0},
}
"""Options of layers of 16 experts with a shared expert, which is `shared` times as wide as an expert."""
