"""What a run of GPU tests tells tools/gpu_evidence, line by line, so that one which is killed has told what it ended:
first which tests there are and where each is to run, then how each ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def places_of(item: pytest.Item) -> list[str]:
    """By its marks, and whether it has a pool of ranks: see PLACES in tools/gpu_evidence/records.py."""
    if item.get_closest_marker("own_gpus"):
        return ["own"]
    if item.get_closest_marker("group") or "pool" in item.fixturenames:
        return ["shared", "own"]
    return ["undisturbed" if item.get_closest_marker("undisturbed") else "alone"]


def test_of(item: pytest.Item) -> str:
    """What is recorded, and run again, by itself: a test with all its parameters, or where these are parts, with one
    set of them."""
    name = item.nodeid.partition("::")[2]
    return name if item.get_closest_marker("parts") else name.partition("[")[0]


class Told:
    """A plugin of pytest that writes to `path`. `place`: of the run; None: it only collects."""

    def __init__(self, path: Path, place: str | None) -> None:
        self._path, self._place = path, place
        self._told: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves those of other places out."""
        if self._place is not None:
            others = [item for item in items if self._place not in places_of(item)]
            items[:] = [item for item in items if self._place in places_of(item)]
            config.hook.pytest_deselected(items=others)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write({"collected": {item.nodeid: [test_of(item), *places_of(item)] for item in session.items}})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has three parts; it failed if one of them did, and was skipped before it or in it."""
        told = self._told.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
        told["seconds"] += report.duration
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            told |= {"outcome": "failed", "why": str(crash.message if crash else report.longrepr)[:500]}
        elif report.skipped and told["outcome"] != "failed":
            _, _, why = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
            told |= {"outcome": "skipped", "why": why.removeprefix("Skipped: ")}
        if report.when == "teardown":
            self._write(self._told.pop(report.nodeid))

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
