"""Decorators of functions whose keyword arguments tables list: unknown ones are refused, and help shows the tables."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from ..errors import UnknownOption
from ..spec.options import OPTIONS, TYPES, type_name
from ..spec.tensors import OPTIONAL

D = TypeVar("D")


def refuse_unknown(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises `UnknownOption` for the first keyword of `given` that is not in `known`. The message suggests the known
    keyword that is most similar, if there is one; underscores and capitals do not count."""
    for name in given:
        if name in known:
            continue
        plain = {each.replace("_", ""): each for each in known}
        near = difflib.get_close_matches(name.lower().replace("_", "").replace("-", ""), plain, 1)
        meant = f"; did you mean {plain[near[0]]!r}?" if near else ""
        raise UnknownOption(f"{function}() got an unexpected keyword argument {name!r}{meant}")


def with_known_options(*tables: type) -> Callable[[D], D]:
    """Decorates a function: it refuses unknown keyword arguments (`refuse_unknown`), and shows `tables` (`shows`)."""

    def decorate(function: D) -> D:
        shows(*tables)(function)
        known = frozenset(inspect.signature(function).parameters)
        called = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            refuse_unknown(called, options, known)
            return function(*args, **options)

        return checked

    return decorate


def shows(*tables: type) -> Callable[[D], D]:
    """Decorates a function that takes ``**options: Unpack[..]``: its signature and help then show each option of
    `tables`, the typed dictionaries that list them (`flashmoe.spec.options`, `flashmoe.spec.tensors`)."""
    named = _names(tables)

    def decorate(function: D) -> D:
        signature = inspect.signature(function)
        own = {name: each for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
        more = [_parameter(name) for name in named if name not in own]
        function.__signature__ = signature.replace(parameters=[*own.values(), *more])
        return described(*tables)(function)

    return decorate


def described(*tables: type) -> Callable[[D], D]:
    """Decorates a function or a class: in its docstring, descriptions of what `tables` list replace the line
    ``{options}``."""

    def decorate(each: D) -> D:
        if each.__doc__:
            each.__doc__ = re.sub(
                r"^( *)\{options\}$", lambda at: _texts(_names(tables), at[1]), each.__doc__, flags=re.M
            )
        return each

    return decorate


def _names(tables: Iterable[type]) -> dict[str, None]:
    return dict.fromkeys(name for table in tables for name in table.__annotations__)


def _parameter(name: str) -> inspect.Parameter:
    """The parameter of an option or of a tensor."""
    option = OPTIONS.get(name)
    default, kind = (None, Any) if option is None else (option.default, TYPES[name])
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _texts(names: Iterable[str], indent: str) -> str:
    """What the tables say of these options and tensors, in the form of a docstring's parameters."""
    lines = []
    for name in names:
        if name in OPTIONS:
            kind, default, text = type_name(TYPES[name]), OPTIONS[name].default, OPTIONS[name].text
        else:
            kind, default, text = "tensor or None", None, OPTIONAL[name].text
        text = textwrap.fill(text, 108 - len(indent))
        lines += [f"{indent}{name}: {kind}, default {default!r}", textwrap.indent(text, indent + "    ")]
    return "\n".join(lines)
