"""What a suite is: points, and a function that measures one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import FlashMoEError

ENGINES = ("cuda", "cpu")


@dataclass(frozen=True)
class Machine:
    """The machine that points are made for."""

    engine: str
    gpus: int
    """The number of GPUs; 0 with the CPU engine."""
    shared: bool = False
    """Whether ranks may share a GPU: FLASHMOE_SHARE_GPUS."""

    @property
    def small(self) -> bool:
        """Whether suites are short. With the CPU engine every suite has a form that takes seconds: it shows that the
        suite works, not how fast a GPU is."""
        return self.engine == "cpu"

    @property
    def groups(self) -> list[int]:
        """The numbers of ranks to measure: 1, 2, 4, ..., up to the number of GPUs; on CPUs 1 and 2."""
        most = 2 if self.small else self.gpus
        return [ranks for ranks in (1, 2, 4, 8, 16, 32) if ranks <= most]

    @property
    def several(self) -> list[int]:
        """The numbers of ranks above 1. With one GPU: two ranks that share it, if ranks may do so; else none."""
        return self.groups[1:] or [2] * self.shared


@dataclass(frozen=True)
class Point:
    """One measurement."""

    name: str
    """The point's name, unique in its suite."""
    ranks: int
    """0: the point needs neither ranks nor a GPU, and is measured in the command's own process."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """The keyword arguments of the suite's function (`Suite.measure`)."""
    kills: bool = False
    """Whether the point kills ranks. Then it starts its own ranks, from the command's process."""


@dataclass(frozen=True)
class Suite:
    """Points, and how one of them is measured."""

    name: str
    shows: str
    """What the suite shows, in one line."""
    figures: tuple[str, ...]
    """The tables and figures of the papers that it regenerates."""
    points: Callable[[Machine], Iterable[Point]]
    measure: Callable[..., dict[str, Any]]
    """``measure(run, **sizes)``, which every rank calls; the answer of rank 0 counts. Its keys are: ``check``, the
    ``error``, the ``bound`` that the error may not exceed, and what the error is of. ``samples``, milliseconds of every
    call on its slowest rank, by call and by timer. ``values``, everything else; the most telling values are in
    ``figures`` there, by name. ``absent``, why something could not be measured, by name."""
    variants: tuple[dict[str, bool], ...] = ({},)
    """The kernels of a point's layer. Each is given by the fields of its `flashmoe.jit.Variant`, except element type
    and activation. They are compiled before ranks wait for one another."""
    seconds: float = 600.0
    """The most seconds that a point may take; after them its ranks are killed."""


class Voided(FlashMoEError):
    """A check failed before a time was taken: the point has no figures."""
