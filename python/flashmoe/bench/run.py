"""What a suite's function gets in each rank: the device, and the timers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .clocks import Clocks
from .joining import ranks_a_gpu
from .measure import WARM_UP, group_milliseconds, host_milliseconds, in_turn, slowest
from .plan import Voided

if TYPE_CHECKING:
    import torch

Call = Callable[[int], Any]
"""Makes the i-th call; inputs take turns."""


@dataclass
class Run:
    """One point in one rank. The rank's process group is joined (`group.py`)."""

    engine: str
    rank: int
    ranks: int
    repeats: int
    """The number of timed calls of each kind by each timer; a multiple of 4."""
    clocks: dict[str, Any] = field(default_factory=dict)
    """The clocks while calls were timed."""

    @property
    def device(self) -> str:
        return f"cuda:{self.rank // self.ranks_a_gpu}" if self.engine == "cuda" else "cpu"

    @property
    def ranks_a_gpu(self) -> int:
        """The number of ranks on one GPU. If several ranks share a GPU, they cannot use NCCL."""
        return 1 if self.engine == "cpu" or self.ranks == 1 else ranks_a_gpu(self.ranks)

    @property
    def small(self) -> bool:
        return self.engine == "cpu"

    def samples(self, calls: dict[str, Call], cycles: int | None = None) -> dict[str, dict[str, list[float]]]:
        """Milliseconds of single calls, made in turn; each time is the slowest rank's. There are two timers. ``busy``:
        a call follows work of `cycles` clock cycles on all ranks, so that the time does not include the launch.
        ``plain``: the time includes the launch. CPUs have only ``plain``."""
        if not calls:
            return {}
        with Clocks(self._uuid()) as clocks:
            timed = in_turn(self._timer(cycles), calls, self.repeats)
        self.clocks |= clocks.seen
        samples: dict[str, dict[str, list[float]]] = {name: {} for name in calls}
        for (name, busy), times in timed.items():
            if times:
                samples[name]["busy" if busy else "plain"] = times
        return samples

    def _timer(self, cycles: int | None) -> Callable[[Call, int, bool], list[float]]:
        if self.engine == "cuda":
            further = {} if cycles is None else {"cycles": cycles}
            return lambda call, repeats, busy: group_milliseconds(call, repeats, busy, **further)

        def on_host(call: Call, repeats: int, busy: bool) -> list[float]:
            return [] if busy else slowest(host_milliseconds(call, repeats + WARM_UP), "cpu")[WARM_UP:]

        return on_host

    def _uuid(self) -> str:
        if self.engine == "cpu":
            return ""
        import torch

        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def worst(self, value: float) -> float:
        """The largest of all ranks' values."""
        if self.ranks == 1:
            return value
        import torch
        import torch.distributed as dist

        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.item()

    def check(self, error: float, bound: float, of: str) -> dict[str, Any]:
        """A point's ``check``. Raises `Voided` on all ranks if any rank has an error beyond the bound."""
        error = self.worst(error)
        if not error <= bound:  # also refuses NaN
            raise Voided(f"{of}: expected an error of at most {bound:g}, got {error:g}")
        return {"error": error, "bound": bound, "of": of}


def apart(y: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference between `y` and `expected`, relative to the norm of `expected`."""
    return ((y.double() - expected.double()).norm() / expected.double().norm()).item()


def median(timers: dict[str, list[float]]) -> float:
    """The median of a call's samples in milliseconds: of the ``busy`` samples if there are any, else of ``plain``."""
    return statistics.median(timers.get("busy") or timers["plain"])
