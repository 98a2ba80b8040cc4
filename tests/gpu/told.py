"""What a run of GPU tests writes for tools/gpu_evidence: first a line with all tests and the places where each is to
run, then a line for each test that has ended. So a run that is killed has reported the tests that it had completed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def places_of(item: pytest.Item) -> list[str]:
    """A test's places, by its marks and whether it uses a pool of ranks: PLACES in tools/gpu_evidence/records.py."""
    if item.get_closest_marker("own_gpus"):
        return ["own"]
    if item.get_closest_marker("group") or "pool" in item.fixturenames:
        return ["shared", "own"]
    return ["undisturbed" if item.get_closest_marker("undisturbed") else "alone"]


def test_of(item: pytest.Item) -> str:
    """The name under which a test is recorded and run again: one for all its parameters, or with the mark `parts` one
    for each set of them."""
    name = item.nodeid.partition("::")[2]
    return name if item.get_closest_marker("parts") else name.partition("[")[0]


class Told:
    """A plugin of pytest that writes the lines to `path`. `place`: where the run is; None if it only collects tests."""

    def __init__(self, path: Path, place: str | None) -> None:
        self._path, self._place = path, place
        self._told: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselects the tests that do not run at this place."""
        if self._place is not None:
            others = [item for item in items if self._place not in places_of(item)]
            items[:] = [item for item in items if self._place in places_of(item)]
            config.hook.pytest_deselected(items=others)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write({"collected": {item.nodeid: [test_of(item), *places_of(item)] for item in session.items}})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has a setup, a call and a teardown. It fails if one of them fails; setup or call may skip it."""
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
