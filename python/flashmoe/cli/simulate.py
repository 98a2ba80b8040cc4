"""``flashmoe simulate``: how long a call would take on machines that are not at hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .. import models, simulation
from ..simulation import Simulated
from ..simulation.picture import write_png
from ..system import drawing
from .console import console
from .render import show_simulated

SCALING = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of machines that the picture shows."""


def command(
    model: Annotated[str, typer.Option(help="Shape of a published model, such as qwen3-30b-a3b.")],
    machines: Annotated[int, typer.Option(help="Machines of the group.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of a machine.")] = 8,
    nic: Annotated[float, typer.Option(help="What a GPU's network interface carries each way, in GB/s.")] = 50.0,
    tokens: Annotated[int, typer.Option(help="Tokens per GPU.")] = 8192,
    json_: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    png: Annotated[
        Path | None, typer.Option(help="Also simulate 1, 2, 4, .. 64 machines (minutes), and draw how the call scales.")
    ] = None,
) -> int:
    """Simulate one call of a layer on a group of GPUs: its time, what communication is exposed, the bytes of each link.

    The actors that run on a GPU run here on a virtual clock, with the times of tasks that were traced on one H100 and
    links as fast as they were measured. No GPU is used. docs/simulation.md says how far to trust it.
    """
    shape = models.find(model)
    if png is not None:
        drawing.require()  # fails before the minutes of simulation

    def simulated(count: int) -> Simulated:
        return simulation.simulate(shape, tokens=tokens, machines=count, gpus=gpus, nic_gb_s=nic)

    def write_figures(calls: list[Simulated]) -> None:
        if json_ is None:
            return
        figures = {"simulated": True, "model": shape.name, "nic_gb_s": nic, "calls": [asdict(call) for call in calls]}
        json_.write_text(json.dumps(figures, indent=1) + "\n")
        console.print(f"wrote {json_}")

    calls = [simulated(machines)]
    show_simulated(shape.name, nic, calls[0])
    write_figures(calls)  # written now, because the further simulations take minutes
    if png is not None:
        calls = [calls[0] if count == machines else simulated(count) for count in SCALING]
        for call in calls:
            show_simulated(shape.name, nic, call)
        write_png(png, shape.name, nic, calls)
        console.print(f"wrote {png}")
        write_figures(calls)
    return 0
