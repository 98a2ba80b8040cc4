"""Refuses models with experts that the operator does not compute, before the weights are loaded.

Transformers gives the name of an implementation only to experts that are on its experts interface. For a model with
other experts it accepts the name and ignores it. So the two methods by which a model takes the name are wrapped here:
`post_init`, at the end of every model's ``__init__``, and `set_experts_implementation`. A third method is wrapped, too:
`HfQuantizer.preprocess_model`, which may replace modules of a model after ``__init__`` and before weights are loaded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from ...errors import InvalidArgument
from .experts import NAME, experts_modules, is_share
from .fuse import BLOCKS
from .recognise import is_of_llama4, recognise
from .watched import names_of

_NAME_OF_EXPERTS = re.compile(r"(?<!Shared)(Experts|MoE|Moe|M[Oo][Ee]Block|MoELayer)$")
"""Matches the names of classes that hold routed experts, in Transformers and in models that bring their own code."""


def check(model: torch.nn.Module) -> None:
    """Checks that `flashmoe.moe` computes all routed experts of `model`, which may be on ``meta``.

    Raises `InvalidArgument` for experts that `flashmoe.integrations.transformers.recognise` does not take, for experts
    that are not on Transformers' experts interface, and for a model without experts. The message has a line for each
    class. Experts in blocks that `flashmoe.integrations.transformers.fuse` has patched are on no interface, but are
    computed.

    Examples
    --------
    >>> import torch, transformers
    >>> import flashmoe.integrations.transformers
    >>> with torch.device("meta"):
    ...     model = transformers.AutoModelForCausalLM.from_config(transformers.OlmoeConfig(num_hidden_layers=1))
    >>> flashmoe.integrations.transformers.check(model)
    """
    _check_experts(model)
    if not experts_modules(model):
        raise InvalidArgument(f"{type(model).__name__}: expected a model with experts, got one without")


def _check_experts(model: torch.nn.Module) -> None:
    refusals = [*_not_recognised(model), *_not_on_the_interface(model)]
    if refusals:
        raise InvalidArgument("\n".join(dict.fromkeys(refusals)))


def _not_recognised(model: torch.nn.Module) -> Iterator[str]:
    for module in experts_modules(model):
        try:
            recognise(module, is_share=is_share(module))
        except InvalidArgument as error:
            yield str(error)


def _not_on_the_interface(model: torch.nn.Module) -> Iterator[str]:
    """Refusals of the outermost modules that hold experts, if none of these experts are on Transformers' interface."""
    on_interface = {id(each) for each in experts_modules(model) if not is_of_llama4(each, "Llama4TextExperts")}
    within: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in within:
            continue
        if hasattr(type(module), "_flashmoe_computes"):
            within.update(map(id, module.modules()))
        elif _holds_experts(name, module) and on_interface.isdisjoint(map(id, module.modules())):
            within.update(map(id, module.modules()))
            yield _not_computed(module)


def _holds_experts(name: str, module: torch.nn.Module) -> bool:
    if isinstance(module, PreTrainedModel):
        return False
    return name.rpartition(".")[2] == "experts" or _NAME_OF_EXPERTS.search(type(module).__name__) is not None


def _not_computed(module: torch.nn.Module) -> str:
    advice = ""
    if names_of(type(module)) in BLOCKS:
        advice = "flashmoe.integrations.transformers.fuse patches these blocks; else "
    elif type(module).__name__ == "Mxfp4GptOssExperts":
        advice = (
            "flashmoe.integrations.transformers.load_mxfp4 leaves these experts in MXFP4, and "
            "quantization_config=Mxfp4Config(dequantize=True) makes them bfloat16; else "
        )
    return (
        f"{type(module).__name__}: expected experts on Transformers' experts interface, got a class that computes its "
        f"experts itself, whatever the name; {advice}choose another experts_implementation"
    )


def register_check() -> None:
    """Makes Transformers' models check themselves when they take the name ``"flashmoe"``, and again when a quantiser
    has replaced modules. Idempotent."""
    _wrap(PreTrainedModel, "post_init", _checked_when_made)
    _wrap(PreTrainedModel, "set_experts_implementation", _checked_when_set)
    _wrap(HfQuantizer, "preprocess_model", _checked_when_quantised)


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    method = getattr(owner, name)
    if getattr(method, "_flashmoe_checks", False):
        return

    @functools.wraps(method)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        return wrapper(method, self, *arguments, **options)

    checked._flashmoe_checks = True
    setattr(owner, name, checked)


def _checked_when_made(method: Callable[..., Any], model: PreTrainedModel) -> None:
    """A part of a larger model, such as its vision encoder, may have no experts. So a model without experts is not
    refused here."""
    if getattr(model.config, "_experts_implementation", None) == NAME:
        _check_experts(model)
    method(model)


def _checked_when_set(method: Callable[..., Any], model: PreTrainedModel, experts_implementation: Any) -> None:
    chosen = experts_implementation.values() if isinstance(experts_implementation, dict) else [experts_implementation]
    if NAME in chosen:
        check(model)
    method(model, experts_implementation)


def _checked_when_quantised(
    method: Callable[..., Any], quantiser: HfQuantizer, model: PreTrainedModel, *arguments: Any, **options: Any
) -> None:
    """FlashMoE would compute the model's experts, but a quantiser may put modules in their place that take no
    implementation."""
    method(quantiser, model, *arguments, **options)
    if getattr(model.config, "_experts_implementation", None) == NAME:
        _check_experts(model)
