"""Reads a module's attributes, and remembers what follows from them, so that a call takes little of the host's time:
the host's time limits the speed of eager decoding. Also makes classes whose modules compute by another function."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def tensor_of(module: torch.nn.Module, name: str) -> Tensor:
    """The module's attribute `name`, looked up among its parameters first. (`getattr` first looks elsewhere.)"""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


class Remembered:
    """A result, and what it was made of. A copy of the module that keeps this begins with an empty one, because the
    result refers to submodules of the module that was copied."""

    __slots__ = ("made_of", "result")

    def __init__(self, made_of: tuple[Any, ...] = (), result: Any = None) -> None:
        self.made_of = made_of
        self.result = result

    def __reduce__(self) -> Any:
        return Remembered, ()


def remembered(module: torch.nn.Module, name: str, made_of: tuple[Any, ...], make: Callable[[], Result]) -> Result:
    """The result of ``make()``, which reads only `made_of`, and no tensor. The module keeps the result under `name`."""
    held = module.__dict__.get(name)
    if held is None or held.made_of != made_of:
        held = module.__dict__[name] = Remembered(made_of, make())
    return held.result


@cache
def computed_by(kind: type, forward: Callable[..., Any]) -> type:
    """A class like `kind`, whose calls run `forward`, a function of a module. Its modules can be copied and pickled."""
    if vars(kind).get("_flashmoe_computes"):
        return kind
    own = {"forward": forward, "_flashmoe_computes": (kind, forward), "__reduce_ex__": _reduced}
    return type(kind.__name__, (kind,), {**own, "__module__": kind.__module__})


def unpatched(kind: type) -> type:
    """The class that `computed_by` was given for `kind`, also if other classes were derived since, as FSDP2 does."""
    return kind._flashmoe_computes[0]


def _reduced(module: torch.nn.Module, protocol: int) -> Any:
    made = vars(type(module)).get("_flashmoe_computes")
    return object.__reduce_ex__(module, protocol) if made is None else (_made, made, vars(module))


def _made(kind: type, forward: Callable[..., Any]) -> Any:
    made = computed_by(kind, forward)
    return made.__new__(made)
