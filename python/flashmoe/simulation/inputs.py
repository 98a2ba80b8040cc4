"""The inputs of the simulation: times that were measured on one GPU, and the speeds of links.

Nothing here is fitted to a call of several GPUs. ``task_times.json`` beside this file is
``benchmarks/results/task_times/h100x1.json`` (``benchmarks/task_times.py``: traces of one H100).
"""

from __future__ import annotations

import functools
import json
import math
from importlib import resources
from typing import Any

from ..models import ModelShape
from ..spec import GATED

ELEMENT_BYTES = 2
STAGE_BYTES = 128
"""Bytes of a row of either operand in a stage of the pipeline (kRowBytes, sm90/geometry.h)."""
FULL_ROWS = 256

GPU = {
    # A word from one block to another of the same GPU takes 0.6 us: the store takes half of this time, and the load
    # that finds the word the other half. A word to a peer takes 1.4 us. An atomic's answer takes 0.6 us
    # (docs/protocol.md).
    "load_us": 0.3,
    "store_us": 0.3,
    "atomic_us": 0.6,
    "peer_store_us": 1.1,
    # The instructions between two meetings of a warp (operations that all its lanes make together): the scheduler
    # publishes 32 tasks in 0.32 us, and its warp meets eight times in that time (docs/measured.md, the protocol alone).
    "meeting_us": 0.04,
    # What code that runs for the first time in a call adds (docs/measured.md, before the first task): 10 us for a
    # former, 6 us for the first band, 4 us for a clerk, then 3 us until data is there. In task_times.json, it takes 28
    # to 34 us altogether from packets to the first task.
    "first_former_us": 10.0,
    "first_os_us": 6.0,
    "first_task_us": 4.0,
    "fill_us": 3.0,
    # From the choice of experts to the signal of the rank's own packet (docs/measured.md; task_times.json: 8 to 10 us
    # from gate to packets).
    "packets_us": 9.0,
    # The sums of one H100 after the last task: in Qwen3's layer, 302 MB of rows are read and results written in 115 us.
    # A piece is the sum of two rows (task_times.json).
    "memory_gb_s": 2600.0,
    "sum_piece_us": 2.7,
    # The time of such a piece while the block computes tasks (docs/measured.md, several H200s).
    "sum_beside_tasks_us": 26.0,
    # Beginning and end of a launch: the time of a call of 1024 tokens, minus the span of its trace (task_times.json).
    "launch_us": 3.0,
    "blocks": 132,
    # One way between two H200s over NVLink, if at least 8 blocks send. Four H200s at once each send 347 GB/s
    # (docs/protocol.md).
    "nvlink_gb_s": 350.0,
}
NETWORK_US = 5.0
"""The latency of one way to another machine. This is an assumption: no network has carried a call yet."""

GATE_FIRST_US, GATE_GB_S = 6.0, 2600.0
"""The time of the gate's first stage, and the speed at which the gate reads tokens. The gate of Qwen3's layer takes
16.6 us with 1024 tokens, and 27.8 us with 8192 (task_times.json)."""
CHOICE_US = 1.0
"""The choice of K experts takes K + 1 times this: 3 us for 2 of 8 experts, 9 us for 8 of 128 (docs/measured.md)."""

TaskTime = list[float]
"""The product, the rows of a tile, microseconds of a stage, microseconds of the epilogue."""


@functools.cache
def traced() -> dict[str, Any]:
    """The figures of the traces; see ``benchmarks/task_times.py``."""
    file = resources.files(__package__).joinpath("task_times.json")
    return json.loads(file.read_text())


# H and I of each traced layer, and whether its activation has a gate.
_LAYERS = {"paper-E64": (2048, 2048, False), "qwen3-30b": (2048, 768, True), "mixtral": (4096, 14336, True)}


def stages(columns: int) -> int:
    """The stages of a product that sums over this number of columns."""
    return math.ceil(columns * ELEMENT_BYTES / STAGE_BYTES)


def task_times(shape: ModelShape) -> list[TaskTime]:
    """The times of tasks of each product, by the tile's number of rows. For each product they are those of the traced
    layer whose number of stages is nearest; for GEMM 0, only among layers that also have a gate, or also have none.
    """
    gated = shape.activation in GATED
    rows: list[TaskTime] = []
    for product, axis in enumerate((shape.hidden, shape.intermediate)):

        def contracted(name: str, product: int = product) -> int:
            return stages(_LAYERS[name][product])

        def distance(name: str, product: int = product, axis: int = axis) -> tuple[bool, float]:
            other_epilogue = product == 0 and _LAYERS[name][2] != gated
            return other_epilogue, abs(math.log(contracted(name) / stages(axis)))

        rows += product_times(min(_LAYERS, key=distance), product, contracted(min(_LAYERS, key=distance)))
    return rows


def product_times(name: str, product: int, contracted: int) -> list[TaskTime]:
    """The times of a traced layer's product that sums over `contracted` stages.

    A GPU's clock depends on the power that calls take. So the few traced calls may have run at another clock than the
    many calls that were timed in the same run without a trace. The times of traced calls are scaled by the ratio of
    both.
    """
    kind, layer = f"gemm{product}", traced()["layers"][name]
    timed = layer["routed"][0]["ms"] * 1e3 / layer["routed"][0]["call_ends"]
    rows = []
    for call in layer["by_rows"]:
        figures = call["last"] or call["full"]
        task, epilogue = timed * figures[kind], timed * figures[f"{kind}_epilogue"]
        rows.append([product, call["last_rows"], (task - epilogue) / contracted, epilogue])
    return rows


def gate_us(shape: ModelShape, tokens: int) -> float:
    """Microseconds from the beginning of a call until a token block's experts are chosen."""
    read = tokens * shape.hidden * ELEMENT_BYTES / (GATE_GB_S * 1e3)
    return GATE_FIRST_US + read + CHOICE_US * (1 + shape.top_k)
