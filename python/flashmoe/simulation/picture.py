"""A picture of how a layer scales over machines in the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..system.drawing import new_figure
from . import Simulated


def write_png(path: str | Path, title: str, nic_gb_s: float, calls: Sequence[Simulated]) -> None:
    """Draw a call's time over the number of machines, the exposed part of it, and the bytes that a GPU sends.

    Raises `FlashMoEError` if matplotlib is not installed.
    """
    machines = [call.machines for call in calls]
    figure = new_figure(figsize=(10, 4.6), layout="constrained")
    times, sent = figure.subplots(1, 2)
    times.plot(machines, [call.call_us / 1e3 for call in calls], marker="o", color="#2c6fbb", label="call")
    times.plot(machines, [call.busy_us / 1e3 for call in calls], marker=".", color="#12406f", label="in GEMM tasks")
    exposed = [call.exposed_us / 1e3 for call in calls]
    times.plot(machines, exposed, marker=".", color="#f28e2b", label="exposed communication")
    times.set_ylabel("ms")
    times.set_ylim(bottom=0)
    sent.plot(machines, [call.nvlink_bytes / 1e6 for call in calls], marker=".", color="#3a9e5c", label="NVLink")
    sent.plot(
        machines, [call.nic_bytes / 1e6 for call in calls], marker="o", color="#d4508b", label="network interface"
    )
    sent.set_ylabel("MB that a GPU sends")
    sent.set_ylim(bottom=0)
    for axes in (times, sent):
        axes.set_xscale("log", base=2)
        axes.set_xticks(machines, [str(n) for n in machines])
        axes.set_xlabel(f"machines of {calls[0].gpus} GPUs")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(
        f"SIMULATED, not measured: {title}, {calls[0].tokens} tokens a GPU, {nic_gb_s:g} GB/s a network interface\n"
        "Several machines: a row crosses once to each, is passed on there, and one sum comes back;\n"
        "messages cost no more than their bytes. No network between GPUs has carried it yet.",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
