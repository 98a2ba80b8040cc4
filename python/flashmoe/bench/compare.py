"""Where two files of one suite differ by more than the spread of their times."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidArgument
from .store import read


@dataclass(frozen=True)
class Difference:
    """The difference of one call at one point, by one timer."""

    point: str
    call: str
    timer: str
    before: tuple[float, float, float]
    """Quartiles, in milliseconds."""
    after: tuple[float, float, float]

    @property
    def ratio(self) -> float:
        """The ratio of the medians, after over before."""
        return self.after[1] / self.before[1]

    @property
    def beyond_spread(self) -> bool:
        """Whether the ranges between the quartiles, before and after, do not overlap."""
        return self.after[0] > self.before[2] or self.after[2] < self.before[0]


def quartiles(times: list[float]) -> tuple[float, float, float]:
    if len(times) < 2:
        return (times[0],) * 3
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return lower, median, upper


def differences(before: Path, after: Path) -> list[Difference]:
    """The differences of all calls that both files have. Raises `InvalidArgument` if there are none, or if the files
    are of different suites."""
    a, b = read(before), read(after)
    if a["suite"] != b["suite"]:
        raise InvalidArgument(f"--compare: expected files of one suite, got {a['suite']} and {b['suite']}")
    theirs = {point["name"]: point for point in b["points"]}
    found = [
        Difference(point["name"], call, timer, quartiles(times), quartiles(others))
        for point in a["points"]
        for call, timers in point.get("samples", {}).items()
        for timer, times in timers.items()
        if (others := theirs.get(point["name"], {}).get("samples", {}).get(call, {}).get(timer))
    ]
    if not found:
        raise InvalidArgument("--compare: expected files that have times of some call in common, got none")
    return found
