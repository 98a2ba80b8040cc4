"""How much longer the slowest rank takes than the fastest: in a collective, as FlashDMoE's figure 3.1 defines it, and
in a call of the layer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from .. import baselines
from ..layer import Layer, Sizes
from ..measure import host_milliseconds, own_milliseconds
from ..plan import Machine, Point, Suite
from ..run import Call, Run
from .latency import of_paper


def points(machine: Machine) -> Iterator[Point]:
    return map(partial(of_paper, machine), machine.several)


def measure(run: Run, **sizes: Any) -> dict[str, Any]:
    """For every call, `total` is the slowest rank's time, and `fastest` is the fastest rank's time, which the paper
    calls the actual time. All ranks begin at a barrier: each host makes its call as soon as it has left the barrier."""
    of = Sizes.of(**sizes)
    samples: dict[str, dict[str, list[float]]] = {}
    values: dict[str, Any] = {}
    with Layer(run, of) as layer:
        check = layer.checked()
        calls, absent = {"flashmoe": layer}, {}
        if run.ranks_a_gpu == 1:
            calls["exchange"] = baselines.floors(layer)["exchange"]
        else:
            absent["exchange"] = "NCCL refuses two ranks on one GPU: it needs a GPU for each"
        for name, call in calls.items():
            fastest, total = of_ranks(run, own_times(run, call, 4 * run.repeats))
            samples[name] = {"plain": total}
            samples[f"{name}, fastest rank"] = {"plain": fastest}
            delays = sorted(1 + (b - a) / a for a, b in zip(fastest, total, strict=True))
            values[name] = {
                "slowdown_median": delays[len(delays) // 2],
                "slowdown_p95": delays[len(delays) * 95 // 100],
            }
    return {"check": check, "samples": samples, "absent": absent, "values": values}


def own_times(run: Run, call: Call, repeats: int) -> list[float]:
    if run.engine == "cuda":
        return own_milliseconds(call, repeats, False)
    return host_milliseconds(call, repeats)


def of_ranks(run: Run, times: list[float]) -> tuple[list[float], list[float]]:
    """The least and the most of all ranks' times, for each call."""
    import torch
    import torch.distributed as dist

    least, most = (torch.tensor(times, dtype=torch.float64, device=run.device) for _ in range(2))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return least.tolist(), most.tolist()


SUITE = Suite(
    "stragglers",
    "how much longer the slowest rank takes than the fastest, of a collective and of a call",
    ("FlashDMoE, figure 3.1", "FlashDMoE, figure 3.2"),
    points,
    measure,
)
