"""Refuses unknown keyword arguments, and names the known one that is most alike."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ..errors import UnknownOption


def refuse_unknown(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises `UnknownOption` for the first keyword of `given` that is not in `known`. The message names the known one
    that is most alike; underscores and capitals do not count."""
    for name in given:
        if name in known:
            continue
        plain = {each.replace("_", ""): each for each in known}
        near = difflib.get_close_matches(name.lower().replace("_", "").replace("-", ""), plain, 1)
        meant = f"; did you mean {plain[near[0]]!r}?" if near else ""
        raise UnknownOption(f"{function}() got an unexpected keyword argument {name!r}{meant}")


def with_known_options(*more: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function whose unknown keyword arguments `refuse_unknown` refuses. `more`: typed dictionaries of the keyword
    arguments that the function takes besides its named ones."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
        known = {name for name, each in inspect.signature(function).parameters.items() if each.kind not in kinds}
        known |= {name for each in more for name in each.__annotations__}
        called = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            refuse_unknown(called, options, known)
            return function(*args, **options)

        return checked

    return decorate
