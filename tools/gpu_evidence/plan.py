"""Plans which GPU tests are to run, in shards that are expected to take at most eight minutes, each at one place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .records import PLACES, Evidence

SHARD_SECONDS = 480.0
UNKNOWN_START, UNKNOWN_TEST = 12.0, 5.0
"""Seconds that are expected where there is no record: from the start of a process to its first test, and for a test
with all its parameters."""


@dataclass(frozen=True)
class Unit:
    """Tests of one file that one process runs at one place."""

    place: str
    file: str
    tests: tuple[str, ...]
    seconds: float
    """How long it is expected to take."""
    why: str
    """Why its first test is stale."""


@dataclass
class Shard:
    place: str
    units: list[Unit] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it is expected to take, if as many files run at once as the place allows."""
        each = [unit.seconds for unit in self.units]
        return max(sum(each) / PLACES[self.place].at_once, max(each, default=0.0))


def units(evidence: Evidence) -> Iterator[Unit]:
    """The stale tests, as a unit for each place and file. A file that takes longer than a shard has several units."""
    stale: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for place, file, test, why in evidence.stale():
        stale[place, file].append((test, why))
    for (place, file), tests in sorted(stale.items(), key=lambda each: (list(PLACES).index(each[0][0]), each[0][1])):
        start = max((run.start for (_, of, _), run in evidence.runs.items() if of == file), default=UNKNOWN_START)
        part: list[str] = []
        seconds, whys = start, []
        for test, why in tests:
            expected = expected_seconds(evidence, place, file, test)
            if part and seconds + expected > SHARD_SECONDS:
                yield Unit(place, file, tuple(part), seconds, whys[0])
                part, seconds, whys = [], start, []
            part.append(test)
            whys.append(why)
            seconds += expected
        yield Unit(place, file, tuple(part), seconds, whys[0])


def expected_seconds(evidence: Evidence, place: str, file: str, test: str) -> float:
    """The seconds that the test took there in its last run, else those that it took at another place."""
    for where in (place, *PLACES):
        if (run := evidence.runs.get((where, file, test))) is not None:
            return run.seconds
    return UNKNOWN_TEST


def shards(of: Iterable[Unit]) -> list[Shard]:
    """Shards of these units, in their order. Each shard takes as many units as fit into its time, but at least one."""
    found: list[Shard] = []
    for unit in of:
        if found and found[-1].place == unit.place:
            longer = Shard(unit.place, [*found[-1].units, unit])
            if longer.seconds <= SHARD_SECONDS:
                found[-1] = longer
                continue
        found.append(Shard(unit.place, [unit]))
    return found
