"""The inputs of the simulation: times that were measured on one GPU, and what links carry.

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
    # Words and warps. A word between two blocks of one GPU takes 0.6 us one way; the store takes half of it, and the
    # load that finds the word the other half. To a peer it takes 1.4 us. An atomic's answer takes 0.6 us
    # (docs/protocol.md).
    "load_us": 0.3,
    "store_us": 0.3,
    "atomic_us": 0.6,
    "peer_store_us": 1.1,
    # Instructions between two meetings of a warp: the scheduler publishes 32 tasks in 0.32 us, and meets eight times in
    # that time (docs/measured.md, the protocol alone).
    "meeting_us": 0.04,
    # Code that runs for the first time in a call (docs/measured.md, before the first task): 10 us for a former, 6 for
    # the first band, 4 for a clerk, then 3 until data is there. Altogether it takes 28 to 34 us from packets to the
    # first task, in task_times.json.
    "first_former_us": 10.0,
    "first_os_us": 6.0,
    "first_task_us": 4.0,
    "fill_us": 3.0,
    # From choices to the signal of the rank's own packet (docs/measured.md; task_times.json: 8 to 10 from gate to
    # packets).
    "packets_us": 9.0,
    # The final sums of one H100: 302 MB of rows read and results written in the 115 us after the last task of Qwen3's
    # layer, and the pieces of two rows (task_times.json).
    "memory_gb_s": 2600.0,
    "sum_piece_us": 2.7,
    # The same sums while the block computes (docs/measured.md, several H200s).
    "sum_beside_tasks_us": 26.0,
    # A launch and its end: the time of a call of 1024 tokens, less the span of its trace (task_times.json).
    "launch_us": 3.0,
    "blocks": 132,
    # One way between H200s over NVLink, from 8 blocks up; 347 out of each of four H200s at once (docs/protocol.md).
    "nvlink_gb_s": 350.0,
}
NETWORK_US = 5.0
"""One way to another machine. This is an assumption: no network has carried a call yet."""

GATE_FIRST_US, GATE_GB_S = 6.0, 2600.0
"""The time of the gate's first stage, and how fast the gate reads tokens. Qwen3's layer takes 16.6 us with 1024 tokens,
27.8 with 8192 (task_times.json)."""
CHOICE_US = 1.0
"""The time for each of a token's K experts, and once more: 3 us for 2 of 8, 9 for 8 of 128 (docs/measured.md)."""

TaskTime = list[float]
"""The product, the rows of a tile, microseconds of a stage, microseconds of the epilogue."""


@functools.cache
def traced() -> dict[str, Any]:
    """The figures of the traces; see ``benchmarks/task_times.py``."""
    file = resources.files(__package__).joinpath("task_times.json")
    return json.loads(file.read_text())


# Of each traced layer: H, I and whether there is a gate.
_LAYERS = {"paper-E64": (2048, 2048, False), "qwen3-30b": (2048, 768, True), "mixtral": (4096, 14336, True)}


def stages(columns: int) -> int:
    """The stages of a product that sums over this number of columns."""
    return math.ceil(columns * ELEMENT_BYTES / STAGE_BYTES)


def task_times(shape: ModelShape) -> list[TaskTime]:
    """The times of each product and number of rows, from the traced layer whose tasks are most like this one's. For
    GEMM 0 that is a layer with the same kind of epilogue; for both products, the one with the nearest number of stages.
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

    The clock follows the power that calls take. A few traced calls need not have the clock of the many calls that were
    timed beside them in the same run. So the times of traced calls are scaled by the ratio of timed to traced calls.
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
    """From a call's begin until a token block's experts are chosen."""
    read = tokens * shape.hidden * ELEMENT_BYTES / (GATE_GB_S * 1e3)
    return GATE_FIRST_US + read + CHOICE_US * (1 + shape.top_k)
