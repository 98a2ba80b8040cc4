"""The errors FlashMoE raises. Every message names what was expected and what was got."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any


class FlashMoEError(RuntimeError):
    """Base of every error raised by this package."""


class InvalidArgument(FlashMoEError, ValueError):
    """An argument is outside its documented domain: wrong shape, dtype, range, option or placement.

    What a rank sees before it begins a call (shapes, types, options) leaves the context usable, and the other ranks
    waiting for the call. What only values show (an expert id, a router logit that is not finite) ends the call on every
    rank, and the context with it.
    """


class CheckpointError(FlashMoEError):
    """A checkpoint file is missing, truncated, or does not hold the MoE layer that was asked for."""


class HeapError(FlashMoEError):
    """The symmetric heap cannot be allocated, or is too small for the call."""


class LimitExceeded(InvalidArgument, HeapError):
    """An argument is more than the context was made for: an `InvalidArgument` of the call, for which the memory that
    the context has is too small."""


class UnknownOption(InvalidArgument, TypeError):
    """A keyword argument has a name that there is not."""


class GroupError(FlashMoEError):
    """The ranks of a group do not meet: one is missing, or they disagree on what they are computing."""


class PeerTimeout(GroupError):
    """A bounded wait expired. The message names the rank that was awaited and what it should have sent."""


def refuse_unknown(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises `UnknownOption` for the first keyword of `given` that is none of `known`, with the one that is most alike,
    also where it is written in one word or with other capitals."""
    for name in given:
        if name in known:
            continue
        plain = {each.replace("_", ""): each for each in known}
        near = difflib.get_close_matches(name.lower().replace("_", "").replace("-", ""), plain, 1)
        meant = f"; did you mean {plain[near[0]]!r}?" if near else ""
        raise UnknownOption(f"{function}() got an unexpected keyword argument {name!r}{meant}")


def with_known_options(*more: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function whose unknown keyword arguments are refused by `refuse_unknown`. `more`: typed dictionaries of those
    that it takes besides the named ones."""

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
