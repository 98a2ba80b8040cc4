"""Timers, and the calls of a layer that they time.

Of the package, this file imports only `flashmoe` itself, and only inside a function, because benchmarks/timings.py
loads this file beside another version of the package and measures that version.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BUSY_CYCLES = 1_000_000  # about half a millisecond: longer than any of the timed calls takes to launch
AUTOGRAD_CYCLES = 10_000_000  # some 5 ms: autograd and what follows the kernel take the host longer than a launch
WARM_UP = 3
"""Calls that are not timed."""


def milliseconds(call: Callable[[int], Any], repeats: int, busy: bool = True, cycles: int = BUSY_CYCLES) -> list[float]:
    """Times of single calls, by CUDA events. With `busy`, each call is queued behind work of `cycles` clock cycles, so
    that the GPU does not wait for the launch; else the time includes the launch."""
    return [span(call, i, busy, cycles) for i in range(repeats + WARM_UP)][WARM_UP:]


def span(call: Callable[[int], Any], i: int, busy: bool, cycles: int = BUSY_CYCLES) -> float:
    """Milliseconds of `call(i)`, by CUDA events."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if busy:
        torch.cuda._sleep(cycles)
    start.record()
    call(i)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def in_turn(
    timer: Callable[[Callable[[int], Any], int, bool], list[float]],
    calls: dict[str, Callable[[int], Any]],
    repeats: int,
) -> dict[tuple[str, bool], list[float]]:
    """Milliseconds of each call by `timer`. The keys are the call's name, and whether the GPU was kept busy. The calls
    are made in four rounds, every other round in reverse order, so that changing clocks affect all calls alike."""
    timed: dict[tuple[str, bool], list[float]] = {(name, busy): [] for name in calls for busy in (True, False)}
    for turn in range(4):
        for busy in (True, False):
            for name, call in list(calls.items())[:: -1 if turn % 2 else 1]:
                timed[name, busy] += timer(call, repeats // 4, busy)
    return timed


def gpu_operations(call: Callable[[int], Any], calls: int = 10) -> int:
    """The number of GPU operations (kernels, copies) that the profiler counts in so many calls."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()
    return sum(1 for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA)


def slowest(times: list[float], device: str | torch.device = "cuda") -> list[float]:
    """Each iteration's time on its slowest rank. `times` are this rank's times, one for each iteration."""
    import torch
    import torch.distributed as dist

    all_times = torch.tensor(times, device=device)
    dist.all_reduce(all_times, op=dist.ReduceOp.MAX)
    return all_times.tolist()


def group_milliseconds(call: Callable[[int], Any], repeats: int, busy: bool, cycles: int = BUSY_CYCLES) -> list[float]:
    """Times of single calls, each on its slowest rank."""
    return slowest(own_milliseconds(call, repeats, busy, cycles))


def own_milliseconds(call: Callable[[int], Any], repeats: int, busy: bool, cycles: int = BUSY_CYCLES) -> list[float]:
    """This rank's times of single calls."""
    return [own_span(call, i, busy, cycles) for i in range(repeats + WARM_UP)][WARM_UP:]


def own_span(call: Callable[[int], Any], i: int, busy: bool, cycles: int = BUSY_CYCLES) -> float:
    """This rank's milliseconds of `call(i)`, by CUDA events. All ranks begin together, after a barrier of the hosts.
    With `busy`, the GPUs also meet: in an all-reduce behind other work, which the timed call follows without a gap."""
    import torch
    import torch.distributed as dist

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    meeting = torch.zeros(1, device="cuda")
    dist.barrier()
    if busy:
        torch.cuda._sleep(cycles)
        dist.all_reduce(meeting)
    start.record()
    call(i)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def host_milliseconds(call: Callable[[int], Any], repeats: int) -> list[float]:
    """This rank's times of single calls of the CPU engine, by the host's clock. All ranks begin at a barrier."""
    import torch.distributed as dist

    times = []
    for i in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call(i)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def passes(layer: Any, exact: bool = False) -> dict[str, Any]:
    """The calls that are timed of a layer under autograd, by name. `layer` is a `Layer`, or has the attributes that are
    used here. `exact` must be the same as in the layer's own calls."""
    import torch

    import flashmoe

    x = layer.xs[0].requires_grad_()
    matrices = [layer.w1.requires_grad_(), layer.w2.requires_grad_()]
    router, dy = layer.router.requires_grad_(), torch.randn_like(x)
    ids = torch.rand(len(x), layer.experts, device=x.device).topk(layer.top_k).indices.int()
    weights = torch.rand(len(x), layer.top_k, device=x.device).requires_grad_()
    y = layer(0)
    how = {"activation": layer.activation, "exact": exact}
    y_given = flashmoe.moe(layer.context, x, *matrices, topk_ids=ids, topk_weights=weights, **how)

    def inference(_: int) -> torch.Tensor:
        with torch.no_grad():
            return layer(0)

    def backward(_: int) -> Any:
        return torch.autograd.grad(y, [x, router, *matrices], dy, retain_graph=True)

    def given(_: int) -> Any:
        return torch.autograd.grad(y_given, [x, weights, *matrices], dy, retain_graph=True)

    return {"backward": backward, "given": given, "keeps": lambda _: layer(0), "inference": inference}
