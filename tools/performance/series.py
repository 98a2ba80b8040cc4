"""What files of results hold, as times by point and call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe.bench.compare import quartiles
from flashmoe.bench.shapes import SHAPES
from flashmoe.bench.store import PREFIX, read

LEAST_MOST = "least and most of all calls"
_OF_PROGRAMS = ("fused_gpu", "fused_group")
"""Whose results are of the layer beside its GEMMs, as `tokens`, `gpus` and `experts` are."""


@dataclass(frozen=True)
class Time:
    """Of one call at one point, by one timer; milliseconds."""

    ranks: int
    point: str
    sizes: dict[str, Any]
    call: str
    timer: str
    lower: float
    median: float
    upper: float
    """The middle half of all calls."""


@dataclass(frozen=True)
class File:
    """Of one suite, from one machine."""

    path: Path
    suite: str
    device: str
    commit: str
    points: list[dict[str, Any]]
    """Those that have figures."""
    without: list[dict[str, Any]]
    """Those that were voided, or failed."""
    spread: str = "middle half of all calls"
    """What lower and upper are."""

    @property
    def name(self) -> str:
        """As documents cite it."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def shared(self) -> bool:
        """Whether more ranks than GPUs were measured."""
        gpus = self.device.rpartition(" x")[2]
        return gpus.isdigit() and any(point["ranks"] > int(gpus) for point in self.points)

    def times(self, timer: str | None = None) -> Iterator[Time]:
        """`timer`: None for ``busy`` where there is that."""
        for point in self.points:
            for call, timers in point.get("samples", {}).items():
                chosen = timer or ("busy" if "busy" in timers else "plain")
                if times := timers.get(chosen):
                    of = (point["ranks"], point["name"], _sizes(point), call, chosen)
                    yield Time(*of, *(times if self.spread == LEAST_MOST else quartiles(times)))

    def absent(self) -> dict[str, str]:
        """What stood beside no point, by name, and why."""
        present = {call for point in self.points for call in point.get("samples", {})}
        said = {name: why for point in self.points for name, why in point.get("absent", {}).items()}
        return {name: why for name, why in said.items() if name not in present}


def _sizes(point: dict[str, Any]) -> dict[str, Any]:
    """With those of its shape."""
    sizes = dict(point["sizes"])
    if (shape := sizes.get("shape")) in SHAPES:
        hidden, intermediate, experts, top_k, activation, _ = SHAPES[shape]
        of_shape = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k}
        return {**of_shape, "activation": activation, **sizes}
    return sizes


def files(folder: Path) -> dict[str, list[File]]:
    """By suite; those of the CPU engine's small forms left out, which show no more than that suites work."""
    found: dict[str, list[File]] = {}
    for path in sorted(folder.glob(f"{PREFIX}*/*.json")):
        result = read(path)
        if result["engine"] == "cpu":
            continue
        bad = [point for point in result["points"] if "voided" in point or "failed" in point]
        good = [point for point in result["points"] if point not in bad]
        file = File(path, result["suite"], result["device"], result["commit"], good, bad)
        found.setdefault(result["suite"], []).append(file)
    for file in of_programs(folder):
        found.setdefault(file.suite, []).append(file)
    return found


def of_programs(folder: Path) -> Iterator[File]:
    """The last whole runs of benchmarks/fused_gpu.py and fused_group.py, which kept no single times, as files of the
    suites that show the same."""
    for kind in _OF_PROGRAMS:
        for path in sorted(folder.glob(f"{kind}/*.json")):
            if "-" in path.stem:
                continue  # an earlier run, of the commit behind it
            result = json.loads(path.read_text())
            points = [_point(row) for row in result["shapes"]]
            of_suite = {
                "tokens": [each for each in points if each["sizes"]["tokens"] > 1024],
                "gpus": [each for each in points if each["name"].startswith("paper-E64 16384")],
                "experts": [each for each in points if each["sizes"]["shape"].startswith("paper-")],
            }
            for suite, chosen in of_suite.items():
                if chosen:
                    yield File(path, suite, result["device"], result["commit"], chosen, [], LEAST_MOST)


def _point(row: dict[str, Any]) -> dict[str, Any]:
    """As a suite would have it, but that times are least, median and most."""
    ranks = row.get("ranks", 1)
    samples = {}
    for call, name in (("flashmoe", "fused"), ("gemms", "floor")):
        least, most = row[f"{name}_min_max"]
        samples[call] = {"busy": [least, row[f"{name}_ms"], most]}
    return {
        "name": f"{row['shape']} {row['tokens']} x{ranks}",
        "ranks": ranks,
        "sizes": {"shape": row["shape"], "tokens": row["tokens"]},
        "samples": samples,
        "check": {"error": row["error"]},
    }


def text(path: Path) -> str:
    """A file's content, on one line: what pictures carry a digest of."""
    return json.dumps(json.loads(path.read_text()), sort_keys=True)
