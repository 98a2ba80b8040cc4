"""A module's attributes, and what follows from them, at little of the host's time, which bounds eager decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def tensor_of(module: torch.nn.Module, name: str) -> Tensor:
    """The module's attribute `name`. (`getattr` looks among its parameters last.)"""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


class Remembered:
    """A result, and what it was made of. Copies of the module begin without: this holds its own submodules."""

    __slots__ = ("made_of", "result")

    def __init__(self, made_of: tuple[Any, ...] = (), result: Any = None) -> None:
        self.made_of = made_of
        self.result = result

    def __reduce__(self) -> Any:
        return Remembered, ()


def remembered(module: torch.nn.Module, name: str, made_of: tuple[Any, ...], make: Callable[[], Result]) -> Result:
    """``make()``, where `made_of` is all that it reads, and no tensor. The module holds it under `name`."""
    held = module.__dict__.get(name)
    if held is None or held.made_of != made_of:
        held = module.__dict__[name] = Remembered(made_of, make())
    return held.result
