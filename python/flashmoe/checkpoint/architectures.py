"""How `flashmoe.moe` computes the Mixture-of-Experts layers of published models: one row for each ``model_type`` of a
``config.json``.

A row says which keys of the configuration decide on the layer, and what is the same in all models of its kind. A row
names only those tensors that not all kinds of models have. The others `flashmoe.checkpoint` finds by their usual names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..spec import BY_GATE, FP8, MXFP4
from ..system.foreign import checkpoint_error, is_count, shown

UNGATED = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}
"""The operator's activation for experts without a gate, by Transformers' name."""

GATED = {name: BY_GATE[plain] for name, plain in UNGATED.items() if plain in BY_GATE}
"""The operator's activation for experts with a gate, by Transformers' name of the function that is applied to the gate.
"""


@dataclass(frozen=True)
class Architecture:
    """How the layers of one kind of model route and compute."""

    name: str
    width: str = "moe_intermediate_size"
    """The configuration's key for I."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `flashmoe.moe` that have the same value in all models of the kind."""
    keys: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Arguments of `flashmoe.moe` that the configuration gives: for each its key in the configuration, and the value if
    the key is missing."""
    only: Mapping[str, str] = field(default_factory=dict)
    """Keys of the configuration whose value must be this one, because the operator computes no other."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Names of further tensors in the model's block, by the arguments of `flashmoe.moe`. Every layer has all of them.
    """
    own_router: str = ""
    """The rule of the router, if the operator does not compute this rule."""
    top_k: str = "num_experts_per_tok"
    """The configuration's key for K."""
    quantised: tuple[str, ...] = (FP8,)
    """Element types of weights in quantised checkpoints of the kind. Matrices in MXFP4 are never transposed, whatever
    `options` say, because blocks lie along the dimension that a product sums over."""


_NORMALISED = {"renormalize": ("norm_topk_prob", True)}
_NOT_NORMALISED = {"renormalize": ("norm_topk_prob", False)}
_LINEAR = {"round_logits": True}  # the router is a linear layer of the model's type, so its logits have that type
_GROUPS = {"groups": ("n_group", 1), "top_groups": ("topk_group", 1), "routed_scale": ("routed_scaling_factor", 1.0)}
_OF_CHOICE = {
    "options": {"score": "sigmoid"},  # no `round_logits`: the logits are float32
    "keys": _NORMALISED | _GROUPS,
    "only": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "tensors": {"choice_bias": "gate.e_score_correction_bias"},
}

ARCHITECTURES = {
    "mixtral": Architecture("Mixtral", "intermediate_size", {"renormalize": True, **_LINEAR}),
    "qwen2_moe": Architecture("Qwen2-MoE", options=_LINEAR, keys=_NOT_NORMALISED),
    "qwen3_moe": Architecture("Qwen3-MoE", options=_LINEAR, keys=_NOT_NORMALISED),
    "olmoe": Architecture("OLMoE", "intermediate_size", _LINEAR, _NOT_NORMALISED),
    "phimoe": Architecture("Phi-3.5-MoE", "intermediate_size", own_router="sparsemixer"),
    "deepseek_v3": Architecture("DeepSeek-V3", **_OF_CHOICE),
    "glm4_moe": Architecture("GLM-4.5", **_OF_CHOICE),
    "gpt_oss": Architecture(
        "gpt-oss",
        "intermediate_size",
        {
            "renormalize": True,
            "activation": "clamped_swiglu",
            "up_offset": 1.0,
            "interleaved": True,
            "transposed": True,
            **_LINEAR,
        },
        {"limit": ("swiglu_limit", 7.0), "alpha": ("swiglu_alpha", 1.702)},
        tensors={
            "router_bias": "router.bias",
            "gate_up_bias": "experts.gate_up_proj_bias",
            "down_bias": "experts.down_proj_bias",
        },
        quantised=(MXFP4,),
    ),
    "llama4_text": Architecture(
        "Llama 4",
        "intermediate_size",
        {"renormalize": False, "score": "sigmoid", "transposed": True, "weights_on_input": True, **_LINEAR},
        quantised=(),
    ),
    "qwen3_next": Architecture("Qwen3-Next", options=_LINEAR, keys=_NORMALISED),
    "qwen3_5_moe_text": Architecture("Qwen3.5", options={"renormalize": True, **_LINEAR}),
    "qwen3_vl_moe_text": Architecture("Qwen3-VL", options={"renormalize": True, **_LINEAR}),
    "flex_olmo": Architecture("FlexOlmo", "intermediate_size", _LINEAR, _NOT_NORMALISED),
    "mellum": Architecture("Mellum", options=_LINEAR, keys=_NOT_NORMALISED),
    "minimax": Architecture("MiniMax", "intermediate_size", {"renormalize": True, **_LINEAR}),
    "deepseek_v32": Architecture("DeepSeek-V3.2", **_OF_CHOICE),
    "dots1": Architecture("dots1", **_OF_CHOICE),
    "glm4_moe_lite": Architecture("GLM-4 lite", **_OF_CHOICE),
    "glm_moe_dsa": Architecture("GLM-MoE-DSA", **_OF_CHOICE),
    "kimi_linear": Architecture(
        "Kimi-Linear",
        options={"score": "sigmoid"},
        keys={**_GROUPS, "renormalize": ("moe_renormalize", True), "groups": ("num_expert_group", 1)},
        only={"moe_router_activation_func": "sigmoid"},
        tensors={"choice_bias": "gate.e_score_correction_bias"},
        top_k="num_experts_per_token",
    ),
    "mimo_v2_flash": Architecture("MiMo-V2-Flash", **_OF_CHOICE),
    "solar_open": Architecture("Solar", **_OF_CHOICE),
    "mistral4": Architecture("Mistral 4", options=_LINEAR, keys=_NORMALISED | _GROUPS),
}

PLAIN = Architecture("a plain layer", keys=_NOT_NORMALISED)
"""The row for a configuration that names no model."""


def architecture_of(config: dict[str, Any] | None) -> Architecture:
    """The row for a configuration; `PLAIN` if there is none, or if it names no model. Raises `CheckpointError` for a
    model that has no row, and for a value that the row's `only` excludes."""
    kind = (config or {}).get("model_type")
    if kind is None:
        return PLAIN
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise checkpoint_error("model_type", f"one of {', '.join(ARCHITECTURES)} in config.json", shown(kind))
    row = ARCHITECTURES[kind]
    for key, value in row.only.items():
        if config.get(key, value) != value:
            raise checkpoint_error(key, f"{value!r} in config.json, all that is computed", shown(config[key]))
    return row


def rule_of(
    row: Architecture,
    config: dict[str, Any] | None,
    *,
    gated: bool,
    experts: int,
    top_k: int | None,
    renormalize: bool | None,
    activation: str | None,
) -> dict[str, Any]:
    """The arguments of `flashmoe.moe` that are not tensors, for a layer with this number of experts, with a gate or
    without. `top_k`, `renormalize` and `activation` take precedence over the configuration. Raises `CheckpointError`.
    """
    rule = dict(row.options)
    for option, (key, default) in row.keys.items():
        rule[option] = _checked(option, default if config is None else config.get(key, default), key)
    if renormalize is not None:
        rule["renormalize"] = _checked("renormalize", renormalize)
    elif config is None:
        rule["renormalize"] = True
    rule["top_k"] = _top_k(top_k, config, row.top_k, experts)
    rule["activation"] = _activation(rule.get("activation"), activation, config, gated)
    return rule


def _checked(option: str, value: Any, key: str | None = None) -> Any:
    """`value`, if the option accepts it. Raises `CheckpointError`."""
    kinds = {
        "renormalize": ("true or false", lambda: isinstance(value, bool)),
        "groups": ("an integer of at least 1", lambda: is_count(value) and value > 0),
        "top_groups": ("an integer of at least 1", lambda: is_count(value) and value > 0),
        "routed_scale": ("a finite number", lambda: _is_finite(value)),
        "limit": ("a finite number > 0", lambda: _is_finite(value) and value > 0),
        "alpha": ("a finite number > 0", lambda: _is_finite(value) and value > 0),
    }
    expected, fits = kinds[option]
    if not fits():
        where = f" in config.json's {key}" if key else ""
        raise checkpoint_error(option, expected + where, shown(value))
    return value


def _is_finite(value: Any) -> bool:
    """Whether `value` is a number that float32 can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**127


def _top_k(top_k: int | None, config: dict[str, Any] | None, key: str, experts: int) -> int:
    if top_k is None:
        top_k = (config or {}).get(key)
    if top_k is None:
        raise checkpoint_error("top_k", f"{key} in a config.json, or the argument", "neither")
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= experts:
        raise checkpoint_error("top_k", f"an integer from 1 to the {experts} experts", shown(top_k))
    return top_k


def _activation(fixed: str | None, given: str | None, config: dict[str, Any] | None, gated: bool) -> str:
    """The operator's activation: the first that is there of the architecture's own activation, the argument `given`,
    the config's hidden_act, and SwiGLU for gated experts."""
    known, experts = (GATED, "gated") if gated else (UNGATED, "ungated")
    if given is None and fixed is None:
        name = (config or {}).get("hidden_act", "silu" if gated else None)
        if not isinstance(name, str) or name not in known:
            raise checkpoint_error(
                "activation", f"{' or '.join(known)} for {experts} experts", f"hidden_act {shown(name)}"
            )
        return known[name]
    allowed = list(dict.fromkeys(known.values())) if fixed is None else [fixed]
    if given not in (None, *allowed):
        raise checkpoint_error("activation", f"{' or '.join(allowed)} for {experts} experts", shown(given))
    return given or fixed
