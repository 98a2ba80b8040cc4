"""What runs of GPU tests left, and what of it is of today's sources.

A record is of a shard: some files of tests at one place, on one day. Of each file it has the digests that it was of,
the kernels that its ranks loaded, and of each test, with all its parameters, how many passed, failed and were skipped,
why, and seconds.
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
    """Where tests run."""

    gpus: int
    ranks_a_gpu: int
    at_once: int
    """How many files, on a machine with cores enough."""
    title: str


PLACES = {
    "alone": Place(1, 1, 8, "one GPU"),
    "undisturbed": Place(1, 1, 1, "one GPU, nothing beside it"),
    "shared": Place(1, 4, 1, "ranks that share a GPU"),
    "own": Place(2, 1, 1, "a GPU for each rank"),
}
"""Tests without several ranks run `alone`, several files at once, since most of their time is the CPU's; those of
several ranks where they share a GPU, and where each has its own. tests/gpu/told.py says which is for where."""

OTHERS = {"tests": "the tests", "python": "Python", "host": "the host's C++"}
"""What the digests of a file are of."""

Collected = Mapping[str, Mapping[str, tuple[str, ...]]]
"""By place and file: the tests that are there, with all their parameters, or one name for each part of them."""


@dataclass(frozen=True)
class Ran:
    """A test's last run at a place."""

    passed: int
    failed: int
    skipped: dict[str, int]
    """By reason."""
    seconds: float
    sources: dict[str, str]
    kernels: dict[str, str]
    start: float
    """Seconds that its file took beside its tests."""
    device: str
    commit: str
    ended: str


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The records there, the newest last."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda record: record["ended"])


def last_runs(records: list[dict[str, Any]]) -> dict[tuple[str, str, str], Ran]:
    """By place, file and test."""
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
    """Which tests there are, how each ended last, and whether that is of the sources in a tree."""

    def __init__(self, collected: Collected, records: list[dict[str, Any]], tree: Tree) -> None:
        self.collected, self.runs, self.tree = collected, last_runs(records), tree
        self._records = records
        self._sources: dict[str, dict[str, str]] = {}
        self._kernels: dict[str, str | None] = {}

    def of(self, tree: Tree) -> Evidence:
        """The same tests and runs, beside other sources."""
        return Evidence(self.collected, self._records, tree)

    def stale(self) -> Iterator[tuple[str, str, str, str]]:
        """Place, file and name of each test that is to run, and why."""
        for place, files in self.collected.items():
            for file, tests in files.items():
                yield from ((place, file, test, why) for test in tests if (why := self.why(place, file, test)))

    def why(self, place: str, file: str, test: str) -> str:
        """Why a test is to run; empty: it need not."""
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
        """By name, with its digest now: what the file's runs have loaded, as far as there still is such a kernel."""
        names = {name for (_, of, _), run in self.runs.items() if of == file for name in run.kernels}
        return {name: digest for name in sorted(names) if (digest := self._kernel(name)) is not None}

    def _kernel(self, name: str) -> str | None:
        if name not in self._kernels:
            self._kernels[name] = self.tree.kernel(name)
        return self._kernels[name]
