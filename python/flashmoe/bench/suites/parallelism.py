"""Experts that are spread over the ranks in different ways, or chosen unevenly. `spreading.py` measures them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..layer import BOUNDS
from ..plan import Machine, Point, Suite
from ..run import Run
from ..shapes import SHAPES, SMALL

IN_ALL = 8192
"""Tokens of all ranks together, in COMET's figures 12 and 14."""
DEVIATIONS = (0.0, 0.01, 0.02, 0.032, 0.04, 0.05)


def split_points(machine: Machine) -> Iterator[Point]:
    for ranks in machine.several:
        if machine.small:
            yield Point(f"small x{ranks}", ranks, {"shape": "small", "tokens": 64})
        else:
            yield from (
                Point(f"{name} x{ranks}", ranks, {"shape": name, "tokens": IN_ALL // ranks})
                for name in ("mixtral", "paper-E8")
            )


def imbalance_points(machine: Machine) -> Iterator[Point]:
    for ranks in machine.several:
        for spread in (0.0, 0.1) if machine.small else DEVIATIONS:
            shape = "small" if machine.small else "mixtral"
            sizes = {"shape": shape, "tokens": 64 if machine.small else IN_ALL // ranks, "spread": spread}
            yield Point(f"{shape} std {spread:g} x{ranks}", ranks, sizes)


def measured(run: Run, rows: list[dict[str, Any]], label: str) -> dict[str, Any]:
    bound = BOUNDS["exact" if run.engine == "cpu" else "bfloat16"]
    check = run.check(max(row["error"] for row in rows), bound, "a rank's rows of sampled tokens, beside float64's")
    timer = "busy" if run.engine == "cuda" and run.ranks_a_gpu == 1 else "plain"
    samples = {label.format(**row): {timer: row.pop("samples_ms")} for row in rows}
    return {"check": check, "samples": samples, "values": {"rows": rows}}


def splits(run: Run, shape: str, tokens: int) -> dict[str, Any]:
    from .. import spreading

    rows = spreading.splits(shape, (SHAPES | SMALL)[shape], tokens, run.repeats, run.engine)
    return measured(run, rows, "EP {expert_parallel} x TP {tensor_parallel}")


def imbalance(run: Run, shape: str, tokens: int, spread: float) -> dict[str, Any]:
    from .. import spreading

    rows = spreading.imbalance(shape, (SHAPES | SMALL)[shape], tokens, run.repeats, run.engine, [spread])
    return measured(run, rows, "{placement}")


SUITES = (
    Suite("parallelism", "expert times tensor parallelism", ("COMET, figure 12",), split_points, splits, seconds=120.0),
    Suite(
        "imbalance",
        "experts that are chosen unevenly",
        ("COMET, figure 14 (left)",),
        imbalance_points,
        imbalance,
        seconds=120.0,
    ),
)
