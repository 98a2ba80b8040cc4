"""Records of runs of GPU tests, and which of the runs were of today's sources.

A record is of a shard: some files of tests at one place, on one day. For each file it has the digests of its sources,
and the kernels that its ranks loaded, with their digests. For each test, with all its parameters, it has how many of
pytest's items passed, failed and were skipped, the reasons, and the seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .digests import ROOT, Tree

RESULTS = ROOT / "benchmarks" / "results" / "tests"


class Place(NamedTuple):
    """A place where tests run."""

    gpus: int
    ranks_a_gpu: int
    at_once: int
    """The most files that run at once. On a machine with few cores, fewer files do."""
    title: str


PLACES = {
    "alone": Place(1, 1, 8, "one GPU"),
    "undisturbed": Place(1, 1, 1, "one GPU, nothing beside it"),
    "shared": Place(1, 4, 1, "ranks that share a GPU"),
    "own": Place(2, 1, 1, "a GPU for each rank"),
}
"""Tests without several ranks run `alone`, several files at once, because they spend most of their time on the CPU;
those that look at times or at free memory run `undisturbed`. Tests of several ranks run at two places: where the ranks
share a GPU, and where each has its own. tests/gpu/told.py says which tests run where."""

OTHERS = {"tests": "the tests", "python": "Python", "host": "the host's C++"}
"""The names of the three digests of a file of tests (digests.py), and the words for them in the reason of a stale
test."""

Collected = Mapping[str, Mapping[str, tuple[str, ...]]]
"""The names of the tests, by place and file. A test has one name for all its parameters; a test with the mark `parts`
has a name for each set of them."""


@dataclass(frozen=True)
class Ran:
    """A test's last run at a place."""

    passed: int
    failed: int
    skipped: dict[str, int]
    """How many were skipped, by reason."""
    seconds: float
    sources: dict[str, str]
    kernels: dict[str, str]
    start: float
    """The seconds that its file took in addition to its tests."""
    device: str
    commit: str
    ended: str


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The records in a folder, the newest last."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda record: record["ended"])


def last_runs(records: list[dict[str, Any]]) -> dict[tuple[str, str, str], Ran]:
    """The last runs, by place, file and test. `records`: the newest last."""
    found = {}
    for record in records:
        for file, of in record["files"].items():
            start = max(0.0, of["seconds"] - sum(test["seconds"] for test in of["tests"].values()))
            shared = {name: of[name] for name in ("sources", "kernels")} | {"start": start}
            shared |= {name: record[name] for name in ("device", "commit", "ended")}
            for name, test in of["tests"].items():
                found[record["place"], file, name] = Ran(**test, **shared)
    return found


class Evidence:
    """Which tests there are, how each ended in its last run, and whether that run was of the sources in a tree."""

    def __init__(self, collected: Collected, records: list[dict[str, Any]], tree: Tree) -> None:
        self.collected, self.runs, self.tree = collected, last_runs(records), tree
        self._records = records
        self._sources: dict[str, dict[str, str]] = {}
        self._kernels: dict[str, str | None] = {}

    def of(self, tree: Tree) -> Evidence:
        """The same tests and runs, compared with other sources."""
        return Evidence(self.collected, self._records, tree)

    def stale(self) -> Iterator[tuple[str, str, str, str]]:
        """The place, file and name of each test that is to run, and why it is."""
        for place, files in self.collected.items():
            for file, tests in files.items():
                yield from ((place, file, test, why) for test in tests if (why := self.why(place, file, test)))

    def why(self, place: str, file: str, test: str) -> str:
        """Why a test is to run; empty: it need not run."""
        run = self.runs.get((place, file, test))
        if run is None:
            return "it never ran"
        changed = [OTHERS[name] for name, digest in self.sources_of(file).items() if run.sources.get(name) != digest]
        kernels = [name for name, digest in run.kernels.items() if self._kernel(name) != digest]
        if kernels:
            changed.append(kernels[0] if len(kernels) == 1 else f"{kernels[0]} and {len(kernels) - 1} other kernels")
        if changed:
            return f"{', '.join(changed)} changed"
        return "it failed" if run.failed else ""

    def sources_of(self, file: str) -> dict[str, str]:
        if file not in self._sources:
            self._sources[file] = self.tree.sources_of(Path(file))
        return self._sources[file]

    def kernels_of(self, file: str) -> dict[str, str]:
        """The kernels that the file's last runs have loaded, with their digests of now, by name. Kernels that no longer
        exist are left out."""
        names = {name for (_, of, _), run in self.runs.items() if of == file for name in run.kernels}
        return {name: digest for name in sorted(names) if (digest := self._kernel(name)) is not None}

    def _kernel(self, name: str) -> str | None:
        if name not in self._kernels:
            self._kernels[name] = self.tree.kernel(name)
        return self._kernels[name]
