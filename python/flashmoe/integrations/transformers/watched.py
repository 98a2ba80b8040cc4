"""Whether a fused block may compute without calling its own modules, or whether something, such as a hook, relies on
these calls."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import output_capturing

from ...pytorch.watched import found_on, hooks_of, hooks_of_all, is_touched, name_of
from .experts import experts_forward

NAME_IN_MODEL = "_flashmoe_name"
"""The attribute of a fused block that has the block's name in the model."""

ROUTER = "_flashmoe_router"
"""The attribute of a fused block that has the name of its router's attribute, and the name of the router's class."""
_SAID = "_flashmoe_said"
"""The attribute of a block that has the warnings given so far."""
_FOLDERS = tuple(str(Path(each.__file__).parent) for each in (transformers, torch))
_LOGITS = "the router's logits, which a model's caller has asked for"

_usual: set[tuple[Any, ...]] = set()
"""Classes and their forwards that have been found to be those of Transformers or PyTorch."""


def are_usual(*kinds: type) -> bool:
    """Whether these classes of modules have the forward that Transformers or PyTorch gives them."""
    if torch.compiler.is_compiling():
        return not any(map(_forward_of_class, kinds))
    looked_at = (*kinds, *[kind.forward for kind in kinds])
    if looked_at not in _usual:
        if any(map(_forward_of_class, kinds)):
            return False
        _usual.add(looked_at)
    return True


def is_watched(block: Any, calls_router: bool = False) -> bool:
    """Whether a fused block's router or its experts must be called by themselves. Warns once of each reason. One reason
    gives no warning: a model's caller has asked for the router's logits. It is no reason at all if the block
    `calls_router`."""
    modules, (attribute, router) = block._modules, block.__dict__[ROUTER]
    gate, experts = modules[attribute], modules["experts"]
    touched = is_touched(gate) or is_touched(experts) or hooks_of_all()
    if not touched and type(gate).__name__ == router and are_usual(type(gate), type(experts)):
        return False
    found = _found(gate, experts, attribute, router)
    if found is None:
        return False
    if found[1] is _LOGITS:
        return not calls_router
    if not torch.compiler.is_compiling():
        _say(block, *found)
    return True


def _found(gate: torch.nn.Module, experts: torch.nn.Module, attribute: str, router: str) -> tuple[str, str] | None:
    """The first thing found that relies on calls of the block's modules: its place, and what it is, in words; None:
    nothing does."""
    if (found := own_forward(experts) or found_on(experts)) is not None:
        return "experts", found
    of_router = own_forward(gate) or _found_on_router(gate)
    if of_router is not None and of_router is not _LOGITS:
        return attribute, of_router
    if type(gate).__name__ != router:
        return attribute, f"{type(gate).__name__} instead of {router}"
    if hooks_of_all():
        return "every module", "a hook of all modules"
    return None if of_router is None else (attribute, of_router)


def _found_on_router(gate: torch.nn.Module) -> str | None:
    """As `found_on`, but without hooks of Transformers. These stay in place, idle, once a caller has asked for the
    router's logits. (Compiled code cannot tell whether they are idle.)"""
    own, captured = [], False
    for words, hook in hooks_of(gate):
        of_transformers = getattr(hook, "__module__", None) == output_capturing.__name__
        captured = captured or of_transformers
        own += [] if of_transformers else [f"{words}, {name_of(hook)}"]
    if own or not captured:
        return own[0] if own else found_on(gate)
    if torch.compiler.is_compiling():
        return _LOGITS
    collected = output_capturing._active_collector.get()
    return None if collected is None or "router_logits" not in collected else _LOGITS


def own_forward(module: torch.nn.Module, ours: Any = experts_forward) -> str | None:
    """A forward of the module or its class, in words, if it is neither `ours` nor the one of Transformers or
    PyTorch."""
    return found_on(module) if "forward" in module.__dict__ else _forward_of_class(type(module), ours)


def _forward_of_class(kind: type, ours: Any = experts_forward) -> str | None:
    file = getattr(getattr(kind.forward, "__code__", None), "co_filename", "")
    if kind.forward in (ours, experts_forward) or file.startswith(_FOLDERS):
        return None
    return f"{kind.__name__}.forward, {name_of(kind.forward)}"


def names_of(kind: type) -> tuple[str, str]:
    """The folder in Transformers of a module's class, and the class's name."""
    parts = kind.__module__.split(".")
    return (parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else kind.__module__), kind.__name__


def _say(block: Any, where: str, found: str) -> None:
    """Warns of what was found, once."""
    said = block.__dict__.setdefault(_SAID, set())
    if (where, found) in said:
        return
    said.add((where, found))
    warnings.warn(
        f"{block.__dict__.get(NAME_IN_MODEL) or type(block).__name__}: {where} has {found}; the block runs as "
        "Transformers has it, not as one call of FlashMoE",
        stacklevel=2,
    )
