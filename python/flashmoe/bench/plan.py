"""What a suite is: points, and a function that measures one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import FlashMoEError

ENGINES = ("cuda", "cpu")


@dataclass(frozen=True)
class Machine:
    """What points are made for."""

    engine: str
    gpus: int
    """0 with the CPU engine."""
    shared: bool = False
    """Whether ranks may share a GPU: FLASHMOE_SHARE_GPUS."""

    @property
    def small(self) -> bool:
        """With the CPU engine every suite has a form of seconds: it shows that the suite works, not how fast a GPU
        is."""
        return self.engine == "cpu"

    @property
    def groups(self) -> list[int]:
        """Numbers of ranks to measure: 1, 2, 4, ... as far as there are GPUs; of CPUs 1 and 2."""
        most = 2 if self.small else self.gpus
        return [ranks for ranks in (1, 2, 4, 8, 16, 32) if ranks <= most]

    @property
    def several(self) -> list[int]:
        """Those of more than one rank; with one GPU two that share it, where they may."""
        return self.groups[1:] or [2] * self.shared


@dataclass(frozen=True)
class Point:
    """One measurement."""

    name: str
    """Among those of its suite."""
    ranks: int
    """0: it needs neither ranks nor a GPU, and is measured in the command's own process."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """What the suite's function is called with."""
    kills: bool = False
    """Whether it kills ranks: it starts its own, from the command's process."""


@dataclass(frozen=True)
class Suite:
    """Points, and how one is measured."""

    name: str
    shows: str
    """In one line."""
    figures: tuple[str, ...]
    """What of the papers it regenerates."""
    points: Callable[[Machine], Iterable[Point]]
    measure: Callable[..., dict[str, Any]]
    """``measure(run, **sizes)``, which every rank calls; rank 0's answer counts. It has ``check``: ``error``, the
    ``bound`` that this may not exceed, and what it is of; ``samples``: milliseconds of every call, the slowest rank's,
    by what was called and by timer; ``values``: all else, in ``figures`` those that say most, by name. What was not to
    be had is in ``absent``, by name."""
    variants: tuple[dict[str, bool], ...] = ({},)
    """The kernels of a point's layer, each by what it has besides its type and activation (`flashmoe.jit.Variant`):
    they are compiled before ranks wait for one another."""
    seconds: float = 600.0
    """The most that a point may take: then its ranks are killed."""


class Voided(FlashMoEError):
    """A check failed before a time was taken: the point has no figures."""
