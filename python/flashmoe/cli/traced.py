"""What the ranks' processes do for ``flashmoe trace``, and the figures that it reports."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..account import Account, accounts
from ..checkpoint import MoELayer
from ..launch import run_ranks
from ..placement import local_experts
from ..spec import FP8, halves_of
from ..trace import CallTrace
from ..weights.scales import SCALE_OF, parts_of
from . import device
from .workload import Workload

_BUSY_CYCLES = 1_000_000
"""Clock cycles of work, about half a millisecond, behind which calls are launched, so that the GPU waits for no launch.
"""


@dataclass(frozen=True)
class Traced:
    """A rank's part of a group's traced calls."""

    traces: list[CallTrace]
    """A forward pass, and its backward pass if that was asked for."""
    traced_ms: list[float]
    untraced_ms: list[float]
    """These two lists have the times of forward passes, which were traced and untraced in turn."""
    device: str


def traced(workload: Workload, backward: bool, pairs: int, **settings: Any) -> list[Traced]:
    """Every rank's part of the traced calls. `settings`: arguments of `flashmoe.Context` besides those of the
    workload."""
    settings = {**workload.limits, "placement": workload.placement, "engine": workload.engine, **settings}
    arguments = [
        (settings, workload.layer.with_experts(local_experts(workload.placement, rank)), x, backward, pairs)
        for rank, x in enumerate(workload.tokens)
    ]
    return run_ranks(len(arguments), trace_on_rank, arguments)


def accounts_of(of_ranks: Sequence[Traced]) -> list[list[Account]]:
    """For each call, every rank's account."""
    return [accounts(of_call) for of_call in zip(*(each.traces for each in of_ranks), strict=True)]


def summary(workload: Workload, of_ranks: Sequence[Traced]) -> dict[str, Any]:
    """What account.json has, as plain values."""
    calls = [
        {
            "pass": "backward" if of_call[0].backward else "forward",
            "ranks": [
                {
                    "wall_us": each.wall_ns / 1000,
                    "multiprocessors": each.processors,
                    "covered": each.covered,
                    "shares": each.shares(),
                }
                for each in of_call
            ],
        }
        for of_call in accounts_of(of_ranks)
    ]
    # The time of a call is that of its slowest rank.
    ms = {
        name: [max(call) for call in zip(*(getattr(each, f"{name}_ms") for each in of_ranks), strict=True)]
        for name in ("traced", "untraced")
    }
    medians = {f"{name}_ms": statistics.median(times) for name, times in ms.items()}
    layer = workload.layer
    return {
        "device": of_ranks[0].device,
        "layer": workload.title,
        **{name: getattr(layer, name) for name in ("hidden", "intermediate", "experts", "top_k", "activation")},
        "dtype": workload.limits["dtype"],
        "weight_dtype": workload.limits["weight_dtype"],
        "engine": workload.engine,
        "tokens": [len(x) for x in workload.tokens],
        "calls": calls,
        "overhead": {**medians, "ratio": medians["traced_ms"] / medians["untraced_ms"], "pairs": len(ms["traced"])},
        "clock_error_us": [max(trace.error_ns for trace in each.traces) / 1000 for each in of_ranks],
    }


def trace_on_rank(
    rank: int,
    ranks: int,
    name: str,
    settings: dict[str, Any],
    layer: MoELayer | device.SeededLayer,
    x: np.ndarray,
    backward: bool,
    pairs: int,
) -> Traced:
    """In a rank's process: calls with its own experts, traced and untraced in turn."""
    from .. import Context, moe  # loads the engine's library, which only the ranks need

    tensors, settings = device.tensors_of(rank, layer, x, settings)
    tensors = _prepared(tensors, layer, settings, backward)
    with Context(rank=rank, ranks=ranks, name=name, **settings) as context:

        def forward() -> Any:
            return moe(context, **tensors, **layer.rule())

        def step() -> None:
            import torch

            y = forward()
            torch.autograd.grad(y, [each for each in tensors.values() if each.requires_grad], torch.ones_like(y))

        for warm_up in (forward, step) if backward else (forward,):
            warm_up()
            context.trace(warm_up)
        clock = _GpuClock() if settings["engine"] == "cuda" else _HostClock()
        untraced_ms, traced_ms = [], []
        for _ in range(pairs):
            # Each timed call follows an untimed one. All ranks end that one together, and it hides the timed call's
            # launch.
            clock.keep_busy()
            forward()
            untraced_ms.append(clock.read(clock.around(forward)))
            clock.keep_busy()
            forward()
            traces = context.trace(clock.around(forward))
            traced_ms.append(clock.read())
        if backward:
            forward()
            traces = context.trace(step)
        context.synchronize()
        return Traced(traces, traced_ms, untraced_ms, clock.device())


def _prepared(
    tensors: dict[str, Any], layer: MoELayer | device.SeededLayer, settings: dict[str, Any], backward: bool
) -> dict[str, Any]:
    """The arguments of a call. Weights that were made on a GPU are quantised, if FP8 is asked for. With `backward`, all
    tensors but ``choice_bias`` require gradients."""
    if settings["engine"] == "cuda":
        if settings["weight_dtype"] == FP8 and not isinstance(layer, MoELayer):
            halves = halves_of(layer.activation, False)
            for name, of_name in SCALE_OF.items():
                if name in tensors:
                    tensors[name], tensors[of_name] = device.in_fp8(tensors[name], parts_of(name, halves))
    elif backward:
        tensors = {name: device.as_tensor(array) for name, array in tensors.items()}
    if backward:
        for name, tensor in tensors.items():
            tensor.requires_grad_(name != "choice_bias")
    return tensors


class _HostClock:
    """Measures the milliseconds of calls that have finished when they return."""

    def keep_busy(self) -> None: ...

    def around(self, call: Callable[[], Any]) -> Callable[[], None]:
        def timed() -> None:
            begin = time.perf_counter()
            call()
            self._ms = (time.perf_counter() - begin) * 1e3

        return timed

    def read(self, call: Callable[[], None] = lambda: None) -> float:
        """The milliseconds of the last call that `around` has timed. `call`, if given, is called before."""
        call()
        return self._ms

    def device(self) -> str:
        return f"{platform.machine()} x{os.cpu_count()}"


class _GpuClock:
    """Measures the milliseconds of calls on PyTorch's current stream, by CUDA events."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def keep_busy(self) -> None:
        self._cuda._sleep(_BUSY_CYCLES)

    def around(self, call: Callable[[], Any]) -> Callable[[], None]:
        def timed() -> None:
            self._start.record()
            call()
            self._end.record()

        return timed

    def read(self, call: Callable[[], None] = lambda: None) -> float:
        call()
        self._end.synchronize()
        return self._start.elapsed_time(self._end)

    def device(self) -> str:
        return self._cuda.get_device_name()
