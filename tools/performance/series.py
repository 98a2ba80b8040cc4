"""Reads files of results as times by point and call."""

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
"""The scripts of benchmarks/, by name, that time the layer and its bare GEMMs, as the suites `tokens`, `gpus` and
`experts` do."""


@dataclass(frozen=True)
class Time:
    """The times of one call at one point, by one timer, in milliseconds."""

    ranks: int
    point: str
    sizes: dict[str, Any]
    call: str
    timer: str
    lower: float
    median: float
    upper: float
    """`lower` and `upper` enclose what `File.spread` names."""


@dataclass(frozen=True)
class File:
    """A file of one suite's results on one machine."""

    path: Path
    suite: str
    device: str
    commit: str
    points: list[dict[str, Any]]
    """The points that have figures."""
    without: list[dict[str, Any]]
    """The points without figures: they failed, or their check did."""
    spread: str = "middle half of all calls"
    """What `Time.lower` and `Time.upper` enclose."""

    @property
    def name(self) -> str:
        """The file's name as pages cite it: its folder and its name."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def shared(self) -> bool:
        """Whether ranks shared GPUs: a point has more ranks than there are GPUs."""
        gpus = self.device.rpartition(" x")[2]
        return gpus.isdigit() and any(point["ranks"] > int(gpus) for point in self.points)

    def times(self, timer: str | None = None) -> Iterator[Time]:
        """The times by the timer `timer`. None: for each call by "busy", or by "plain" if it has no "busy" times."""
        for point in self.points:
            for call, timers in point.get("samples", {}).items():
                chosen = timer or ("busy" if "busy" in timers else "plain")
                if times := timers.get(chosen):
                    of = (point["ranks"], point["name"], _sizes(point), call, chosen)
                    yield Time(*of, *(times if self.spread == LEAST_MOST else quartiles(times)))

    def absent(self) -> dict[str, str]:
        """The calls that were absent at all points, by name, and why they were."""
        present = {call for point in self.points for call in point.get("samples", {})}
        said = {name: why for point in self.points for name, why in point.get("absent", {}).items()}
        return {name: why for name, why in said.items() if name not in present}


def _sizes(point: dict[str, Any]) -> dict[str, Any]:
    """A point's sizes, with the sizes that its shape implies."""
    sizes = dict(point["sizes"])
    if (shape := sizes.get("shape")) in SHAPES:
        hidden, intermediate, experts, top_k, activation, _ = SHAPES[shape]
        of_shape = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k}
        return {**of_shape, "activation": activation, **sizes}
    return sizes


def files(folder: Path) -> dict[str, list[File]]:
    """The files of results, by suite. Those of the CPU engine are left out, because its small forms of the suites only
    show that the suites work."""
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
    """The last whole runs of benchmarks/fused_gpu.py and fused_group.py, as files of the suites that show the same.
    Their results have no times of single calls."""
    for kind in _OF_PROGRAMS:
        for path in sorted(folder.glob(f"{kind}/*.json")):
            if "-" in path.stem:
                continue  # an earlier run, whose name ends with its commit
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
    """A row of a script's result as a point of a suite. But its samples are only the least, the median and the most."""
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
    """A file's content on one line. The digests of pictures are made from it."""
    return json.dumps(json.loads(path.read_text()), sort_keys=True)
