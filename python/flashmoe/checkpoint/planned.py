"""Plans of arrays that are to be read from tensors or parts of tensors, and the code that reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..contexts.memory import format_bytes, machine_bytes
from ..errors import CheckpointError
from ..spec import ENCODINGS, STORED_AS
from ..system.foreign import checkpoint_error
from ..weights.scales import SCALE_OF
from ..weights.shares import Box, Cut
from ..weights.tensor_file import READ, Stored
from .files import expecting
from .layer import OF_EXPERTS


@dataclass(frozen=True)
class Planned:
    """An array that is to be read."""

    dtype: np.dtype
    shape: tuple[int, ...]
    parts: list[tuple[tuple[int | slice, ...], Stored, Box | None]]
    """For each tensor that goes into the array: its place in the array, the tensor, and which part of the tensor is
    read; None: all of it."""
    repeats: int = 1
    """How often each row is repeated after reading."""

    @classmethod
    def of(cls, stored: Stored, axes: int = 0) -> Planned:
        """The plan to read a whole tensor. If it has fewer than `axes` axes, axes of length 1 are added at the end."""
        shape = stored.shape + (1,) * (axes - len(stored.shape))
        return cls(READ[stored.dtype], shape, [((), stored, None)])

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The array's shape, counted in numbers (a packed element has several)."""
        dtype = STORED_AS.get(self.dtype.name)
        return self.shape if dtype is None else ENCODINGS[dtype].numbers(self.shape)

    def share(self, name: str, how: Cut, ids: Sequence[int]) -> Planned:
        """The part of a layer's field `name` that belongs to the experts, or slices, `ids`; the whole array if the
        field is none of `OF_EXPERTS`."""
        if name not in OF_EXPERTS:
            return self
        if name in SCALE_OF.values():  # scales have few bytes: they are read for whole experts, and cut in memory
            return self.of_experts(sorted({id // how.slices for id in ids}))
        share = how.share(name, self.shape, ids)
        by_expert: dict[int | None, list[tuple[tuple[int | slice, ...], Stored]]] = {}
        for place, stored, _ in self.parts:
            by_expert.setdefault(place[0] if place else None, []).append((place, stored))
        parts = []
        for to, box in share.parts:
            for place, stored in by_expert.get(None) or by_expert[box[0].start]:
                if place:  # a tensor of one expert, which makes up some rows of the array
                    first = place[1].start if len(place) > 1 else 0
                    if not first <= box[1].start < first + stored.shape[0]:
                        continue
                    mine = (slice(box[1].start - first, box[1].stop - first), *box[2:])
                    parts.append(((to[0].start, *to[1:]), stored, mine))
                else:
                    parts.append((to, stored, box))
        return replace(self, shape=share.shape, parts=parts)

    def of_experts(self, ids: Sequence[int]) -> Planned:
        """The part that belongs to the experts `ids`, which are not cut."""
        parts: list[tuple[tuple[int | slice, ...], Stored, Box | None]] = []
        for place, stored, _ in self.parts:
            if place:
                parts += [((at, *place[1:]), stored, None) for at, id in enumerate(ids) if id == place[0]]
                continue
            rest = [slice(0, size) for size in stored.shape[1:]]
            parts += [((slice(at, at + 1),), stored, (slice(id, id + 1), *rest)) for at, id in enumerate(ids)]
        return replace(self, shape=(len(ids), *self.shape[1:]), parts=parts)

    def of_first(self) -> Planned:
        """The array without its first axis, which must have length 1."""
        return replace(self, shape=self.shape[1:], parts=[(place[1:], *rest) for place, *rest in self.parts])

    @property
    def repeated(self) -> tuple[int, ...]:
        """The shape after rows are repeated."""
        return (*self.shape[:-2], self.shape[-2] * self.repeats, self.shape[-1])


def read_planned(plan: dict[str, Planned]) -> dict[str, np.ndarray]:
    """Reads the arrays, after checking that there is memory for all of them."""
    largest = max(plan.values(), key=lambda planned: planned.bytes)
    needed, has = sum(planned.bytes for planned in plan.values()), machine_bytes()
    if needed > has:
        raise _no_memory(largest, f"the {format_bytes(has)} that this machine has, of {format_bytes(needed)} in all")
    arrays = {name: _allocated(planned) for name, planned in plan.items()}
    for name, planned in plan.items():
        for place, stored, box in planned.parts:
            with expecting(f"a complete safetensors file at {stored.path}"):
                if box is None:
                    stored.read_into(arrays[name][place])
                else:
                    stored.read_box_into(arrays[name][place], box)
    return arrays


def _allocated(planned: Planned) -> np.ndarray:
    try:
        return np.zeros(planned.shape, planned.dtype)  # zeros: only an expert's first slice has a part of down_bias
    except (MemoryError, ValueError) as error:  # ValueError: more than can be addressed
        raise _no_memory(planned, "none") from error


def _no_memory(planned: Planned, got: str) -> CheckpointError:
    _, first, _ = planned.parts[0]
    many = f" and {len(planned.parts) - 1} more" if len(planned.parts) > 1 else ""
    size = f"{format_bytes(planned.bytes)} ({planned.bytes} bytes)"
    return checkpoint_error(f"{first.name}{many}", f"memory for {size} of {first.path}", got)
