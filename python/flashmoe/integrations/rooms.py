"""`GroupRoom`: a context of a process group, for layers of one shape, made when they are first called."""

from __future__ import annotations

import weakref
from typing import Any

from ..context import Context
from ..growing import Shape


class GroupRoom:
    """A context for layers of one shape on a group, which all its ranks replace by a larger one at the same call."""

    def __init__(self, group: Any, shape: Shape) -> None:
        self.shape = shape
        self._group = group
        self._context: Context | None = None

    def context(self, tokens: int) -> Context:
        """With room for T tokens of a rank; collective, with the same T on all, where there is none yet."""
        if self._context is None or tokens > self._context.limits["max_tokens"]:
            self._context = None  # first, so that both need not fit into memory
            self._context = Context.from_torch(
                self._group, max_tokens=tokens, return_mode="direct", **self.shape._asdict()
            )
        return self._context

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupRoom:
        """The same: copies of a layer share it."""
        return self


_rooms: weakref.WeakValueDictionary[tuple[Any, Shape], GroupRoom] = weakref.WeakValueDictionary()


def room_of(group: Any, shape: Shape) -> GroupRoom:
    """The one that the layers of a shape share, for as long as one of them lives."""
    found = _rooms.get((group, shape))
    if found is None:
        found = _rooms[group, shape] = GroupRoom(group, shape)
    return found
