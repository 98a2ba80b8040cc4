"""The share of the time in which a GPU's multiprocessors have work."""

from __future__ import annotations

import statistics
from typing import Any

from .. import baselines, counters
from ..layer import Layer, Sizes
from ..plan import Suite
from ..run import Call, Run
from .latency import gpus

ACTIVE = "sm__cycles_active.avg.pct_of_peak_sustained_elapsed"
COUNTED = ("flashmoe", "pytorch")


def measure(run: Run, **sizes: Any) -> dict[str, Any]:
    """Measures three shares. ``with_tasks``: the share of the processors' time in which they have a task, from a traced
    call. ``with_kernels``: the share of a call's time, including launches, in which some kernel runs, by the profiler.
    ``sm_active`` is the paper's figure, from hardware counters that ncu reads: the share of SM cycles with a warp in
    flight. ncu gives this share for each kernel; here each is weighted by the kernel's time, and their sum is divided
    by the call's time, including launches."""
    of = Sizes.of(**sizes)
    values: dict[str, Any] = {}
    with Layer(run, of) as layer:
        check = layer.checked()
        calls, absent = baselines.of_layer(layer, ("pytorch", "pytorch_graph"))
        calls = {"flashmoe": layer, **calls}
        samples = run.samples(calls)
        layer(0, trace=True)
        layer.context.synchronize()
        values["with_tasks"] = {"flashmoe": 1.0 - layer.context.last_call.idle_share}
        if run.engine == "cuda":
            plain = {name: statistics.median(samples[name]["plain"]) for name in calls}
            values["with_kernels"] = {name: min(1.0, kernel_ms(call) / plain[name]) for name, call in calls.items()}
    if run.engine == "cpu":
        absent["sm_active"] = "hardware counters of a GPU: there is none"
    elif run.ranks > 1:
        absent["sm_active"] = "ncu holds kernels up one by one, and ranks wait for one another"
    else:
        for name in (each for each in COUNTED if each in plain):
            kernels = counters.read(name, sizes, (ACTIVE, counters.DURATION))
            if isinstance(kernels, str):
                absent["sm_active"] = kernels
                break
            active_ms = sum(kernel[ACTIVE] / 100 * kernel[counters.DURATION] * 1e-6 for kernel in kernels)
            values.setdefault("sm_active", {})[name] = active_ms / plain[name]
    return {"check": check, "samples": samples, "absent": absent, "values": values}


def kernel_ms(call: Call, calls: int = 8) -> float:
    """The milliseconds of a call in which at least one kernel or copy runs."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()
    on_gpu = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in on_gpu)
    covered, end = 0.0, float("-inf")
    for begin, stop in spans:
        covered += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return covered / calls * 1e-3


UTILIZATION = Suite(
    "utilization",
    "the share of time in which processors have work",
    ("FlashDMoE, figure 6.2", "FlashDMoE, figure 1.4a"),
    gpus,
    measure,
    variants=({}, {"trace": True}),
)
