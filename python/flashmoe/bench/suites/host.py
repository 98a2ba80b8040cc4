"""What a layer costs the host: the operations that it launches, and the functions that it calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from .. import baselines
from ..layer import Layer, Sizes
from ..measure import gpu_operations
from ..plan import Machine, Point, Suite
from ..run import Call, Run
from .latency import small

CALLS = 4


def points(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups:
        if machine.small:
            yield Point(f"small x{ranks}", ranks, small())
            continue
        for name in ("paper-E64", "qwen3-30b"):
            yield Point(f"{name} 8192 x{ranks}", ranks, {"shape": name, "tokens": 8192})


def launches(run: Run, **sizes: Any) -> dict[str, Any]:
    with Layer(run, Sizes.of(**sizes)) as layer:
        check = layer.checked()
        calls, absent = baselines.of_layer(layer)
        count = on_gpu if run.engine == "cuda" else operators
        values = {name: count(call) for name, call in {"flashmoe": layer, **calls}.items()}
    return {"check": check, "absent": absent, "values": values}


def on_gpu(call: Call) -> float:
    """The number of kernels, copies and memory clears in a call."""
    return gpu_operations(call, CALLS) / CALLS


def operators(call: Call) -> float:
    """The number of PyTorch's operators in a call on CPUs, where nothing is launched."""
    return sum(event.count for event in profiled(call, False) if event.key.startswith("aten::")) / CALLS


def profiled(call: Call, gpu: bool) -> Any:
    """The profiler's averages by name."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call(0)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
    if gpu:
        torch.cuda.synchronize()
    with profile(activities=activities) as recorded:
        for i in range(CALLS):
            call(i)
        if gpu:
            torch.cuda.synchronize()
    return recorded.key_averages()


def trace_api(run: Run, **sizes: Any) -> dict[str, Any]:
    """For each call: how often the host calls the CUDA API, by name, and for how many microseconds. On CPUs these are
    operators of PyTorch."""
    gpu = run.engine == "cuda"
    # cudaDeviceSynchronize is called by this profile, not by the layer.
    prefixes = ("cuda", "cuLaunch", "cuMem", "cuStream", "cuEvent") if gpu else ("aten::",)
    values: dict[str, Any] = {}
    with Layer(run, Sizes.of(**sizes)) as layer:
        check = layer.checked()
        calls, absent = baselines.of_layer(layer, ("pytorch",))
        for name, call in {"flashmoe": layer, **calls}.items():
            count, us = Counter[str](), 0.0
            for event in profiled(call, gpu):
                if event.key.startswith(prefixes) and event.key != "cudaDeviceSynchronize":
                    count[event.key] += event.count
                    us += event.self_cpu_time_total
            calls_of = {key: each / CALLS for key, each in count.most_common()}
            values[name] = {"calls": sum(calls_of.values()), "us": us / CALLS, "by_name": calls_of}
    return {"check": check, "absent": absent, "values": values}


LAUNCHES = Suite(
    "launches",
    "GPU operations of a forward pass, as the profiler counts them",
    ("FlashDMoE, table 1.1",),
    points,
    launches,
)
TRACE_API = Suite("trace-api", "what the host calls in a forward pass", ("FlashDMoE, figure 3.3",), points, trace_api)
