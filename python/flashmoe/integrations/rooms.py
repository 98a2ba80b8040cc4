"""`GroupRoom`: a context of a process group, for layers of one shape, made when they are first called."""

from __future__ import annotations

import weakref
from typing import Any

from ..contexts.context import Context
from ..contexts.growing import Shape


class GroupRoom:
    """A context for layers of one shape in a group. All ranks of the group replace it by a larger one at the same
    call."""

    def __init__(self, group: Any, shape: Shape) -> None:
        self.shape = shape
        self._group = group
        self._context: Context | None = None

    def context(self, tokens: int) -> Context:
        """A context with room for `tokens` tokens of a rank. If the present context has no room for so many, or if
        there is none, a new one is made: then all ranks must make the same call, with the same `tokens`."""
        if self._context is None or tokens > self._context.limits["max_tokens"]:
            self._context = None  # freed before the new one is made, because memory may not hold both
            self._context = Context.from_torch(
                self._group, max_tokens=tokens, return_mode="direct", **self.shape._asdict()
            )
        return self._context

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupRoom:
        """The same object, because copies of a layer share it."""
        return self


_rooms: weakref.WeakValueDictionary[tuple[Any, Shape], GroupRoom] = weakref.WeakValueDictionary()


def room_of(group: Any, shape: Shape) -> GroupRoom:
    """The room that the layers of a shape share in a group, as long as one of them lives."""
    found = _rooms.get((group, shape))
    if found is None:
        found = _rooms[group, shape] = GroupRoom(group, shape)
    return found
