"""What a run of tests in frameworks, or of a night, leaves: how many of each file passed, failed or were skipped, on
what, of which sources. (For GPU tests: tools/gpu_evidence.)

`make test-integrations` names the folder in FLASHMOE_EVIDENCE. A file is recorded as soon as all its tests are over, so
that a run which is stopped, or killed, leaves those that it came to the end of. A run of some whole files
(`PYTEST_FLAGS=tests/integrations/test_vllm.py`) adds to what is there, if that is of the same sources on the same
machine; less than a whole file is not recorded.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from flashmoe.bench.origin import digest_of, write
from gpu_evidence.collect import file_of
from gpu_evidence.digests import code_of

ROOT = Path(__file__).resolve().parents[1]

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
    without: tuple[str, ...] = ()
    """Folders in them that it is not of."""

    def digest(self) -> str:
        """Of code without comments and docstrings, which no test runs."""
        return digest_of(ROOT, *self.sources, without=self.without, read=code_of)

    def digest_of_all(self) -> str:
        """Of everything: quick to compute."""
        return digest_of(ROOT, *self.sources, without=self.without)


INTEGRATIONS = Suite("tests in frameworks", "integrations", "integrations", ("include", "csrc", "python"))
TRAINING = Suite(
    "tests in training frameworks",
    "integrations/training",
    "integrations_training",
    ("include", "csrc", "python"),
)


class Evidence:
    """A plugin of pytest that counts, and writes `path`. `origin`: what it says besides, as the device."""

    def __init__(self, suite: Suite, path: Path, origin: dict[str, Any]) -> None:
        sources = {"sources": list(suite.sources), "sources_sha256": suite.digest()}
        self._path, self._origin = path, {**origin, **sources}
        self._start = time.monotonic()
        self._seconds, self._files = recorded(path, self._origin)
        self._reason: str | None = "the run was stopped"
        self._in_part: set[str] = set()  # files
        self._left: Counter[str] = Counter()  # tests of a file that are not over
        self._outcomes: dict[str, dict[str, str]] = {}  # by the file, and the test's id

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        self._session = session
        # With pytest-xdist its processes collect the tests.
        if not session.config.pluginmanager.has_plugin("dsession"):
            self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Each process has the same tests; so has one that follows on another which crashed."""
        if not self._left:
            self._begin(ids)

    def _begin(self, tests: Sequence[str]) -> None:
        self._reason = partial(self._session)
        self._in_part = selected_in_part(self._session, tests)
        self._left = Counter(map(file_of, tests))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has three parts; it failed if one of them did, and was skipped before it or in it. One whose process
        crashed ends with a part of no name."""
        file = file_of(report.nodeid)
        outcomes = self._outcomes.setdefault(file, {})
        parts = {outcomes.get(report.nodeid, "passed"), report.outcome}
        outcomes[report.nodeid] = next(each for each in ("failed", "skipped", "passed") if each in parts)
        if report.when not in ("setup", "call"):
            self._left[file] -= 1
            if self._left[file] == 0 and self._reason is None and file not in self._in_part:
                self._record(file)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        say = session.config.pluginmanager.get_plugin("terminalreporter").write_line
        if self._reason is not None:
            say(f"\nnot recorded in {self._path}: {self._reason}")
            return
        stopped = [file for file, left in self._left.items() if left and file not in self._in_part]
        whole = [file for file in self._left if file not in self._in_part and file not in stopped]
        if whole:
            say(f"\nrecorded in {self._path}: {', '.join(whole)}")
        for files, reason in ((stopped, "the run was stopped"), (sorted(self._in_part), "only a part was selected")):
            if files:
                say(f"\nnot recorded in {self._path}: {reason}: {', '.join(files)}")

    def _counts(self, file: str) -> dict[str, Any]:
        """What is said of a file whose tests are over."""
        counts = Counter(self._outcomes[file].values())
        return {each: counts[each] for each in OUTCOMES}

    def _record(self, file: str) -> None:
        self._files[file] = self._counts(file)
        seconds = self._seconds + round(time.monotonic() - self._start)
        write(self._path, {**self._origin, "seconds": seconds, "files": dict(sorted(self._files.items()))})


def recorded(path: Path, origin: dict[str, Any]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Seconds and files of the run in `path`, if it is of this origin; else none."""
    said = json.loads(path.read_text()) if path.exists() else {}
    if any(said.get(name) != value for name, value in origin.items()):
        return 0, {}
    return said["seconds"], said["files"]


def partial(session: pytest.Session) -> str | None:
    """Why no file's tests are known to be all there; None if they are."""
    option = session.config.option
    if session.testsfailed:
        return "some files could not be collected"
    if option.keyword:
        return f"-k {option.keyword} selects"
    if getattr(option, "lf", False) or option.deselect or option.ignore or option.ignore_glob:
        return "an option leaves tests out"
    return None


def selected_in_part(session: pytest.Session, tests: Sequence[str]) -> set[str]:
    """The files that the command line names some of these tests of."""
    start = session.config.invocation_params.dir
    named = {(start / each.partition("::")[0]).resolve() for each in session.config.args if "::" in each}
    return {file for file in map(file_of, tests) if (session.config.rootpath / file).resolve() in named}


def committed(suite: Suite) -> list[Path]:
    """The files of earlier runs."""
    return sorted((ROOT / "benchmarks" / "results" / suite.results).glob("*.json"))


def outdated(suite: Suite, paths: Sequence[Path]) -> list[str]:
    """What is to be said of those that are of other sources than there are now, or lack a file of tests."""
    now = suite.digest()
    tests = {f"tests/{suite.tests}/{path.name}" for path in (ROOT / "tests" / suite.tests).glob("test_*.py")}
    said = []
    for path in paths:
        run = json.loads(path.read_text())
        if run["sources_sha256"] != now:
            of = f"{', '.join(suite.sources)} {run['sources_sha256']} ({run['commit'][:7]})"
            said.append(f"{path.name}: the {suite.name} ran on {of}, not on {now}")
        said += [f"{path.name}: {test} has not run" for test in sorted(tests - run["files"].keys())]
    return said
