"""Functions whose context may be left out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..contexts.context import Context

P, R = ParamSpec("P"), TypeVar("R")


def ctx_may_be_left_out(*required: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose parameter `ctx` is None where it is left out, although it comes before the parameters
    `required`, which may be given by position. What is given in its place, with all the others, is for the function to
    refuse."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        place = list(inspect.signature(function).parameters).index("ctx")  # 1 where self or cls comes first

        @functools.wraps(function)
        def with_ctx(*args: P.args, **given: P.kwargs) -> R:
            if len(args) > place and isinstance(args[place], Context):
                return function(*args, **given)
            others = len(args) - place + sum(name in given for name in required)
            if others <= len(required) and "ctx" not in given:
                args = (*args[:place], None, *args[place:])
            return function(*args, **given)

        return with_ctx

    return decorate
