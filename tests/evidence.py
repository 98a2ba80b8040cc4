"""What a run of tests that CI does not run leaves: how many of each file passed, failed or were skipped, on what, of
which sources.

`make test-gpu` and `make test-integrations` name the folder in FLASHMOE_EVIDENCE. A run of some whole files
(`PYTEST_FLAGS=tests/gpu/test_few.py`) adds to what is there, if that is of the same sources on the same machine; a run
of less than whole files is not recorded.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from harness import digest_of, write  # noqa: E402

OUTCOMES = ("passed", "failed", "skipped")


class Suite(NamedTuple):
    """Tests that run where CI does not."""

    name: str
    tests: str
    """Their folder in `tests/`."""
    results: str
    """The folder in `benchmarks/results/` for what runs leave."""
    sources: tuple[str, ...]
    """The folders that the digest is of."""


GPU = Suite("GPU tests", "gpu", "tests", ("include", "csrc"))
"""Of what runs on the GPU, and what launches it."""
INTEGRATIONS = Suite("tests in frameworks", "integrations", "integrations", ("include", "csrc", "python"))


class Evidence:
    """A plugin of pytest that counts, and writes `path` at the end. `origin`: what it says besides, as the device."""

    def __init__(self, suite: Suite, path: Path, origin: dict[str, Any]) -> None:
        self._suite, self._path, self._origin = suite, path, origin
        self._start = time.monotonic()
        self._outcomes: dict[str, str] = {}  # by the test's id

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has three parts; it failed if one of them did, and was skipped before it or in it."""
        parts = {self._outcomes.get(report.nodeid, "passed"), report.outcome}
        self._outcomes[report.nodeid] = next(each for each in ("failed", "skipped", "passed") if each in parts)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        say = session.config.pluginmanager.get_plugin("terminalreporter").write_line
        if reason := partial(session, exitstatus):
            say(f"\nnot recorded in {self._path}: {reason}")
            return
        by_file: dict[str, Counter[str]] = {}
        for test, outcome in self._outcomes.items():
            by_file.setdefault(test.partition("::")[0], Counter())[outcome] += 1
        sources = self._suite.sources
        origin = {**self._origin, "sources": list(sources), "sources_sha256": digest_of(ROOT, *sources)}
        seconds, files = recorded(self._path, origin)
        files |= {file: {each: counts[each] for each in OUTCOMES} for file, counts in by_file.items()}
        seconds += round(time.monotonic() - self._start)
        write(self._path, {**origin, "seconds": seconds, "files": dict(sorted(files.items()))})
        say(f"\nrecorded in {self._path}")


def recorded(path: Path, origin: dict[str, Any]) -> tuple[int, dict[str, dict[str, int]]]:
    """Seconds and files of the run in `path`, if it is of this origin; else none."""
    said = json.loads(path.read_text()) if path.exists() else {}
    if any(said.get(name) != value for name, value in origin.items()):
        return 0, {}
    return said["seconds"], said["files"]


def partial(session: pytest.Session, exitstatus: int) -> str | None:
    """Why this is not a run of whole files to their end; None if it is."""
    option, config = session.config.option, session.config
    if session.shouldstop or session.shouldfail or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return "the run was stopped"
    if option.keyword:
        return f"-k {option.keyword} selects"
    if getattr(option, "lf", False) or option.deselect or option.ignore or option.ignore_glob:
        return "an option leaves tests out"
    return next((f"{each} is not a whole file" for each in config.args if "::" in each), None)


def committed(suite: Suite) -> list[Path]:
    """The files of earlier runs."""
    return sorted((ROOT / "benchmarks" / "results" / suite.results).glob("*.json"))


def outdated(suite: Suite, paths: Sequence[Path]) -> list[str]:
    """What is to be said of those that are of other sources than there are now, or lack a file of tests."""
    now = digest_of(ROOT, *suite.sources)
    tests = {f"tests/{suite.tests}/{path.name}" for path in (ROOT / "tests" / suite.tests).glob("test_*.py")}
    said = []
    for path in paths:
        run = json.loads(path.read_text())
        if run["sources_sha256"] != now:
            of = f"{', '.join(suite.sources)} {run['sources_sha256']} ({run['commit'][:7]})"
            said.append(f"{path.name}: the {suite.name} ran on {of}, not on {now}")
        said += [f"{path.name}: {test} has not run" for test in sorted(tests - run["files"].keys())]
    return said
