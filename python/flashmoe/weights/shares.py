"""Which parts of the tensors of all experts belong to some experts, or to some slices, for code that reads only these
parts.

`flashmoe.slices.cut` cuts tensors that are completely in memory in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import InvalidArgument
from ..spec import MAX_EXPERTS, bounded, halves_of

Box = tuple[slice, ...]
"""A part of a tensor: for each axis its first element and its end."""


class Share(NamedTuple):
    """A tensor of some experts, made of parts of the tensor of all experts."""

    shape: tuple[int, ...]
    parts: list[tuple[Box, Box]]
    """For each part its place in the share, and its box in the tensor of all experts. What no part covers is 0."""


class Cut(NamedTuple):
    """How experts are cut into slices."""

    slices: int = 1
    activation: str = "swiglu"
    interleaved: bool = False
    transposed: bool = False

    def share(self, name: str, shape: tuple[int, ...], ids: Sequence[int]) -> Share:
        """The share of the experts, or slices, `ids` in a tensor of all experts. `name`: what `flashmoe.moe` calls the
        tensor.

        Raises `InvalidArgument` unless the number of slices divides I.
        """
        axis, halves = self._columns(name)
        rest = [slice(0, size) for size in shape[1:]]
        parts: list[tuple[Box, Box]] = []
        if axis is None:  # the second product's bias, which belongs to the first slice
            of = [(place, *divmod(id, self.slices)) for place, id in enumerate(ids)]
            parts = [((slice(j, j + 1), *rest), (slice(e, e + 1), *rest)) for j, e, n in of if n == 0]
            return Share((len(ids), *shape[1:]), parts)
        width, left = divmod(shape[axis], halves * self.slices)
        if left:
            raise InvalidArgument(f"slices: expected a divisor of I={shape[axis] // halves}, got {self.slices}")
        for place, id in enumerate(ids):
            expert, n = divmod(id, self.slices)
            for half in range(halves):
                to, at = half * width, (half * self.slices + n) * width
                made, read = rest.copy(), rest.copy()
                made[axis - 1], read[axis - 1] = slice(to, to + width), slice(at, at + width)
                parts.append(((slice(place, place + 1), *made), (slice(expert, expert + 1), *read)))
        size = (len(ids), *(halves * width if each == axis else shape[each] for each in range(1, len(shape))))
        return Share(size, parts)

    def _columns(self, name: str) -> tuple[int | None, int]:
        """The tensor's axis of length I (or 2I), and of how many parts that axis consists: two if gate and up lie one
        after the other. None: there is no such axis."""
        if name == "down_bias":
            return None, 1
        if name == "down_proj":
            return (1 if self.transposed else 2), 1
        of = halves_of(self.activation, self.interleaved)
        return (2 if self.transposed and name == "gate_up_proj" else 1), of


def checked_ids(ids: Sequence[int] | None, experts: int, slices: int) -> tuple[int, ...]:
    """`ids` of slices of all experts, as a tuple; None: all slices. Raises `InvalidArgument` unless they ascend."""
    slices = bounded("slices", slices, 1, MAX_EXPERTS)
    if ids is None:
        return tuple(range(experts * slices))
    held = tuple(bounded("held", each, 0, experts * slices - 1) for each in ids)
    if not held or list(held) != sorted(set(held)):
        raise InvalidArgument(f"held: expected ids that ascend, one or more, got {held!r}")
    return held
