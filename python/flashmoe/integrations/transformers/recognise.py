"""What an experts module of Transformers computes, in the words of `flashmoe.moe`.

A module shows what it computes by three things: the attributes that ``use_experts_implementation`` has given it,
`act_fn`, and `_apply_gate`. Transformers' own implementations (``grouped_mm``, ``batched_mm``) read these, too.
The configuration's name of the activation is not enough: gpt-oss has ``hidden_act="silu"`` and clamps in its own
`_apply_gate`. An `_apply_gate` that is not Transformers' default is recognised by its class (`_OWN_GATES`).
Llama 4's experts have no such attributes, and are recognised by their class. Anything unknown is refused, by class and
attribute, because a result that is only nearly right would be taken for right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.activations import (
    AccurateGELUActivation,
    FastGELUActivation,
    GELUActivation,
    GELUTanh,
    NewGELUActivation,
    ReLUSquaredActivation,
    SiLUActivation,
)
from transformers.integrations import moe as interface
from transformers.integrations.finegrained_fp8 import FP8Experts

from ...errors import InvalidArgument
from ...pytorch.watched import found_on, is_touched
from ...spec import BY_GATE, ENCODINGS, FP8, MXFP4, Options
from .attributes import remembered, tensor_of

_KINDS: dict[str, tuple[Any, ...]] = {
    "silu": (torch.nn.SiLU, SiLUActivation, torch.nn.functional.silu),
    "gelu": (GELUActivation, torch.nn.functional.gelu),  # by erf; torch.nn.GELU may be either of the two
    "gelu_tanh": (GELUTanh, NewGELUActivation, FastGELUActivation, AccurateGELUActivation),
    "relu": (torch.nn.ReLU, torch.nn.functional.relu, torch.relu),
    "relu2": (ReLUSquaredActivation,),
}
UNGATED = {kind: name for name, kinds in _KINDS.items() for kind in kinds}
"""The operator's activation if only `act_fn`, by its function or module class, lies between the two products."""

GATED = {kind: BY_GATE[name] for kind, name in UNGATED.items() if name in BY_GATE}
"""The operator's activation if `act_fn` is applied to the gate, and the result is multiplied by up."""

_BLOCKS = ENCODINGS[MXFP4].suffixes[0]
"""What follows the name of a matrix in the name of its elements in MXFP4."""
FLAGS = {
    "has_post_expert_norm": (False, "False"),
    "_is_expert_parallel": (
        False,
        "False; for experts spread over ranks see flashmoe.integrations.transformers.parallelize, or from Transformers "
        'release 5.23 on DistributedConfig(ep_implementation="flashmoe")',
    ),
}
"""Attributes for which the operator supports only one value: that value, and the expectation in words. Not every
release of Transformers has each of them; a module without one counts as having that value."""


@dataclass(frozen=True)
class ExpertsOptions:
    """What an experts module computes, and the names of its tensors; None for a tensor that it does not have."""

    how: Options
    """What the module computes, as options of `flashmoe.moe`."""
    gate_up: str
    """[E, 2I, H], or [E, I, H] without a gate; transposed [E, H, 2I or I]."""
    down: str
    """[E, H, I]; transposed [E, I, H]."""
    gate_up_bias: str | None
    """[E, 2I], or [E, I] without a gate."""
    down_bias: str | None
    """[E, H]"""
    gate_up_scale: str | None = None
    """For experts in FP8 or MXFP4, as is the next field."""
    down_scale: str | None = None

    def sizes(self, module: torch.nn.Module) -> tuple[int, int]:
        """H and I."""
        shape = tensor_of(module, self.down).shape
        if self.down.endswith(_BLOCKS):
            shape = ENCODINGS[MXFP4].numbers(shape)
        _, first, second = shape
        return (second, first) if self.how.transposed else (first, second)


_OF_FP8 = ("gate_softcap", "activation_scheme")
_OF_CLAMP = ("limit", "alpha", "swiglu_limit", "swiglu_alpha")
_READ = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", *FLAGS, *_OF_CLAMP, *_OF_FP8)
"""The attributes of a module that its recognition reads, except `act_fn`, which may be a module."""


def recognise(module: torch.nn.Module, *, is_share: bool = False) -> ExpertsOptions:
    """What the module computes. Raises `InvalidArgument` if the operator does not compute it. `is_share`: the caller
    knows that the module's tensors are those of this rank's experts, and calls it with ids among all experts."""
    if torch.compiler.is_compiling():
        return _recognised(module, is_share)
    kind, own, act = type(module), module.__dict__, module._modules.get("act_fn")
    approximate = None if act is None else act.__dict__.get("approximate")
    if act is not None and is_touched(act):
        raise _refusal(module, "act_fn", "a module without hooks or a forward of its own", found_on(act))
    gate = getattr(kind, "_apply_gate", None)
    blocks = f"down_proj{_BLOCKS}" in module._parameters
    made_of = (is_share, kind, blocks, gate, own.get("act_fn"), act, approximate, *map(own.get, _READ))
    return remembered(module, "_flashmoe_recognised", made_of, lambda: _recognised(module, is_share))


def _recognised(module: torch.nn.Module, is_share: bool) -> ExpertsOptions:
    for name, (value, expected) in FLAGS.items():
        got = getattr(module, name, value)
        if got is not value and not (is_share and name == "_is_expert_parallel"):
            raise _refusal(module, name, expected, got)
    if is_of_llama4(module, "Llama4TextExperts"):
        activation, names = _activation(module, GATED), ("gate_up_proj", "down_proj", None, None)
        return ExpertsOptions(Options(activation=activation, transposed=True, weights_on_input=True), *names)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    gate = _gate(module) if module.has_gate else {"activation": _activation(module, UNGATED)}
    quantised = isinstance(module, FP8Experts)
    if quantised and (scheme := getattr(module, "activation_scheme", "dynamic")) != "dynamic":
        raise _refusal(module, "activation_scheme", "dynamic", scheme)
    blocks = f"down_proj{_BLOCKS}" in module._parameters  # as the module .mxfp4 has left it
    elements, scale = ENCODINGS[MXFP4 if blocks else FP8].suffixes
    return ExpertsOptions(
        Options(transposed=bool(getattr(module, "is_transposed", False)) and not blocks, **gate),
        gate_up=first + elements,
        down="down_proj" + elements,
        gate_up_bias=f"{first}_bias" if module.has_bias else None,
        down_bias="down_proj_bias" if module.has_bias else None,
        gate_up_scale=first + scale if quantised or blocks else None,
        down_scale="down_proj" + scale if quantised or blocks else None,
    )


def is_of_llama4(module: torch.nn.Module, name: str) -> bool:
    """Whether `module` is of Llama 4's class of that name."""
    kind = type(module)
    return kind.__name__ == name and kind.__module__ == "transformers.models.llama4.modeling_llama4"


def _gate(module: torch.nn.Module) -> dict[str, Any]:
    """What the module's `_apply_gate` computes."""
    function = None if "_apply_gate" in vars(module) else type(module)._apply_gate
    if function is interface._default_apply_gate:
        gate = _plain_gate(module)
    elif (own := _OWN_GATES.get(_place_of(function))) is not None:
        gate = own(module)
    elif function is getattr(FP8Experts, "_apply_gate", None):
        gate = _gate_of_fp8(module)
    else:
        known = "the default of Transformers, act_fn(gate) * up, or one of a known class"
        raise _refusal(module, "_apply_gate", known, "another function")
    halves = getattr(module, "is_concatenated", True)
    if halves is gate.get("interleaved", False):  # the flag contradicts what the gate does with the weights
        raise _refusal(module, "is_concatenated", str(not halves), halves)
    return gate


def _place_of(function: Any) -> tuple[str, str]:
    """The module of a function, and its name there. So a function that somebody has put on a class is not taken for the
    class's own."""
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", "")


def _plain_gate(module: torch.nn.Module) -> dict[str, Any]:
    return {"activation": _activation(module, GATED)}


def _clamped(limit: float, **others: Any) -> dict[str, Any]:
    """SwiGLU whose gate is at most the limit, and whose up lies within plus and minus the limit."""
    return {"activation": "clamped_swiglu", "limit": limit, **others}


def _with_alpha(limit: float, alpha: float, **others: Any) -> dict[str, Any]:
    """gpt-oss's gate: clamped, with its own slope of the sigmoid, and 1 added to up."""
    return _clamped(limit, alpha=alpha, up_offset=1.0, **others)


def _clamped_silu(module: torch.nn.Module) -> dict[str, Any]:
    """DeepSeek-V4's gate, which clamps before its `act_fn`."""
    if (activation := _activation(module, GATED)) != "swiglu":
        raise _refusal(module, "act_fn", "SiLU with a limit", activation)
    return _clamped(module.limit)


def _own_gate(folder: str, experts: str) -> tuple[str, str]:
    return f"transformers.models.{folder}.modeling_{folder}", f"{experts}._apply_gate"


_OWN_GATES: dict[tuple[str, str], Callable[[Any], dict[str, Any]]] = {
    _own_gate("beam", "BeamExperts"): _plain_gate,  # in float32, as the operator does
    _own_gate("deepseek_v4", "DeepseekV4Experts"): _clamped_silu,
    _own_gate("glm5_next", "Glm5NextTextExperts"): lambda module: _clamped(module.swiglu_limit),
    _own_gate("gpt_oss", "GptOssExperts"): lambda module: _with_alpha(module.limit, module.alpha, interleaved=True),
    _own_gate("hy_v4", "HYV4Experts"): lambda module: _clamped(module.swiglu_limit),
    _own_gate("hy_v4_vl", "HYV4VLExperts"): lambda module: _clamped(module.swiglu_limit),
    _own_gate("minimax_m3_vl", "MiniMaxM3VLExperts"): lambda module: _with_alpha(
        module.swiglu_limit, module.swiglu_alpha
    ),
    _own_gate("openai_privacy_filter", "OpenAIPrivacyFilterExperts"): lambda module: _with_alpha(
        module.limit, module.alpha
    ),
}
"""What the `_apply_gate` functions compute that single classes of experts have, by their place in Transformers."""


def _gate_of_fp8(module: torch.nn.Module) -> dict[str, Any]:
    """What the gate of `FP8Experts` computes. Transformers uses this one class for the experts of all models in FP8."""
    if (softcap := getattr(module, "gate_softcap", None)) is not None:
        raise _refusal(module, "gate_softcap", "None", softcap)
    activation, limit = _activation(module, GATED), getattr(module, "limit", None)
    alpha = getattr(module, "swiglu_alpha", None)
    if limit is None and alpha is None:
        return {"activation": activation}
    if activation != "swiglu":
        raise _refusal(module, "act_fn", "SiLU with a limit", activation)
    return _clamped(limit) if alpha is None else _with_alpha(limit, alpha)


def _activation(module: torch.nn.Module, known: dict[Any, str]) -> str:
    act = module.act_fn
    kind = type(act) if isinstance(act, torch.nn.Module) else act
    if kind is torch.nn.GELU:
        kind = {"none": GELUActivation, "tanh": GELUTanh}.get(act.approximate, kind)
    if kind not in known:
        names = ", ".join(dict.fromkeys(each.__name__ for each in known))
        raise _refusal(module, "act_fn", f"one of {names}", getattr(kind, "__name__", repr(kind)))
    return known[kind]


def _refusal(module: torch.nn.Module, attribute: str, expected: str, got: object) -> InvalidArgument:
    return InvalidArgument(
        f"{type(module).__name__}.{attribute}: expected {expected}, got {got}; FlashMoE does not compute these "
        "experts, choose another experts_implementation"
    )
