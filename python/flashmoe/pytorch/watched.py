"""What somebody has put on a module to run with its forward pass: a hook, or another forward.

Code that reads a module's parameters without calling the module looks here first, because a hook or another forward
would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
"""The attributes of a module that hold its hooks, and what the hooks are called."""

hooks_of_all = torch.nn.modules.module._has_any_global_hook
"""Whether there are hooks that run with every module's call."""


def is_touched(module: torch.nn.Module) -> bool:
    """Whether the module has hooks, or a forward that was set on it alone."""
    own = module.__dict__  # one expression, because every call looks at this
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    )


def hooks_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """All hooks of the module, each with its kind in words."""
    for attribute, words in _HOOKS.items():
        for hook in module.__dict__[attribute].values():
            yield words, hook


def found_on(module: torch.nn.Module) -> str | None:
    """The forward that was set on the module alone, or one of its hooks, in words; None: there is neither."""
    if (forward := module.__dict__.get("forward")) is not None:
        return f"a forward of its own, {name_of(forward)}"
    return next((f"{words}, {name_of(hook)}" for words, hook in hooks_of(module)), None)


def name_of(function: Any) -> str:
    """A function's name, with its module."""
    function = getattr(function, "func", function)  # the function of a functools.partial
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
