"""Functions whose argument `ctx` may be left out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ..contexts.context import Context

D = TypeVar("D")


def ctx_may_be_left_out(*required: str) -> Callable[[D], D]:
    """Decorates a function: a caller may leave out `ctx`, which is then None, although `ctx` comes before the
    parameters `required`, and these may be given by position. If a caller gives all of `required`, and something that
    is no context in the place of `ctx`, the function gets this, and must refuse it."""

    def decorate(function: D) -> D:
        place = list(inspect.signature(function).parameters).index("ctx")  # 1 where self or cls comes first

        @functools.wraps(function)
        def with_ctx(*args: Any, **given: Any) -> Any:
            if len(args) > place and isinstance(args[place], Context):
                return function(*args, **given)
            others = len(args) - place + sum(name in given for name in required)
            if others <= len(required) and "ctx" not in given:
                args = (*args[:place], None, *args[place:])
            return function(*args, **given)

        return with_ctx

    return decorate
