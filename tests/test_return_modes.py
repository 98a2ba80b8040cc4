"""On GPUs, `return_mode="auto"` takes the mode that was faster in each committed measurement of both modes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from flashmoe.bench.shapes import SHAPES
from flashmoe.contexts.limits import engine_return_mode

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SLOWER = 1.03
"""The mode that `auto` takes may need up to this many times as long as the faster mode. Calls of one shape differ by 1
to 3 %."""
BUILT_IN = "reduced 4"
"""The name, in the results of benchmarks/link_clusters.py, of `reduced` with as many link clusters as the engine
chooses (kLinkClusters of policy.cpp)."""


def measured() -> Iterator[tuple[str, dict[str, float]]]:
    """For each measured shape, number of tokens and number of ranks: its name, and the time of a call in each mode,
    divided by the time of the bare GEMMs in the same run."""
    for file in sorted((RESULTS / "link_clusters").glob("*.json")):
        for row in json.loads(file.read_text())["shapes"]:
            ways = row["busy_over_floor"]
            reduced = min(ratio for way, ratio in ways.items() if way.startswith("reduced"))
            times = {"direct": ways["direct"], "reduced": ways[BUILT_IN], "best": min(ways["direct"], reduced)}
            yield f"{file.stem} {row['shape']} {row['tokens']} x{row['ranks']}", times
    by_point = defaultdict(dict)
    for folder in ("fused_group", "fused_group_reduced"):
        for file in (RESULTS / folder).glob("h200x[24].json"):
            for row in json.loads(file.read_text())["shapes"]:
                by_point[f"{file.stem} {row['shape']} {row['tokens']} x{row['ranks']}"][row["return_mode"]] = row[
                    "ratio"
                ]
    for point, times in sorted(by_point.items()):
        if len(times) == 2:
            yield point, times | {"best": min(times.values())}


MEASURED = dict(measured())


def test_there_are_measurements():
    assert {point.split()[-1] for point in MEASURED} == {"x2", "x4"} and len(MEASURED) >= 6


@pytest.mark.parametrize("point", MEASURED)
def test_auto_takes_the_faster_mode(point):
    _, shape, _, ranks = point.split()
    _, inner, _, top_k, _, _ = SHAPES[shape]
    mode = engine_return_mode("cuda", "auto", int(ranks[1:]), top_k, inner)
    times = MEASURED[point]
    assert times[mode] <= SLOWER * times["best"], f"{point}: {mode} takes {times}"
