"""Records a run of the tests in frameworks, or of the nightly tests: for each test file, how many tests passed, failed
or were skipped, on which machine, of which sources. (tools/gpu_evidence does this for GPU tests.)

`make test-integrations` names the folder of records in FLASHMOE_EVIDENCE. A file is recorded as soon as all its tests
are over, so that a run which is stopped or killed leaves the files that it has completed. A run of some whole files
(`PYTEST_FLAGS=tests/integrations/test_vllm.py`) adds to an earlier record, if this is of the same sources on the same
machine. A file is not recorded if only a part of it was selected.
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
    """A suite of tests that is run outside of CI, so that its runs are recorded."""

    name: str
    tests: str
    """The tests' folder in `tests/`."""
    results: str
    """The folder in `benchmarks/results/` for the records of runs."""
    sources: tuple[str, ...]
    """The folders whose files the digest covers."""
    without: tuple[str, ...] = ()
    """Folders inside of `sources` that the digest leaves out."""

    def digest(self) -> str:
        """The digest of the sources without comments and docstrings, because these do not change what tests run."""
        return digest_of(ROOT, *self.sources, without=self.without, read=code_of)

    def digest_of_all(self) -> str:
        """The digest of the sources with comments and docstrings. It is quicker to compute."""
        return digest_of(ROOT, *self.sources, without=self.without)


INTEGRATIONS = Suite("tests in frameworks", "integrations", "integrations", ("include", "csrc", "python"))
TRAINING = Suite(
    "tests in training frameworks",
    "integrations/training",
    "integrations_training",
    ("include", "csrc", "python"),
)


class Evidence:
    """A plugin of pytest that counts outcomes of tests, and writes them to `path`. `origin`: what else the file says,
    such as the device."""

    def __init__(self, suite: Suite, path: Path, origin: dict[str, Any]) -> None:
        sources = {"sources": list(suite.sources), "sources_sha256": suite.digest()}
        self._path, self._origin = path, {**origin, **sources}
        self._start = time.monotonic()
        self._seconds, self._files = recorded(path, self._origin)
        self._reason: str | None = "the run was stopped"
        self._in_part: set[str] = set()  # files of which only a part was selected
        self._left: Counter[str] = Counter()  # by file: how many of its tests are not over
        self._outcomes: dict[str, dict[str, str]] = {}  # by file, and by the test's id

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        self._session = session
        # With pytest-xdist, its processes collect the tests, and report them to the hook below.
        if not session.config.pluginmanager.has_plugin("dsession"):
            self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Takes the tests from the first process that reports them: all processes report the same tests, and so does
        a process that replaces a crashed one."""
        if not self._left:
            self._begin(ids)

    def _begin(self, tests: Sequence[str]) -> None:
        self._reason = partial(self._session)
        self._in_part = selected_in_part(self._session, tests)
        self._left = Counter(map(file_of, tests))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts one part of a test: its setup, its call or its teardown. A test failed if one of its parts failed;
        otherwise it was skipped if a part was skipped. If the process of a test crashes, the test's last report has
        none of these names."""
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
        """What the record says of a file whose tests are over."""
        counts = Counter(self._outcomes[file].values())
        return {each: counts[each] for each in OUTCOMES}

    def _record(self, file: str) -> None:
        self._files[file] = self._counts(file)
        seconds = self._seconds + round(time.monotonic() - self._start)
        write(self._path, {**self._origin, "seconds": seconds, "files": dict(sorted(self._files.items()))})


def recorded(path: Path, origin: dict[str, Any]) -> tuple[int, dict[str, dict[str, Any]]]:
    """The seconds and the files of the record in `path`, if the record has this origin; otherwise 0 and no files."""
    said = json.loads(path.read_text()) if path.exists() else {}
    if any(said.get(name) != value for name, value in origin.items()):
        return 0, {}
    return said["seconds"], said["files"]


def partial(session: pytest.Session) -> str | None:
    """Why the run may lack tests of any of its files. None if no option leaves tests out."""
    option = session.config.option
    if session.testsfailed:
        return "some files could not be collected"
    if option.keyword:
        return f"-k {option.keyword} selects"
    if getattr(option, "lf", False) or option.deselect or option.ignore or option.ignore_glob:
        return "an option leaves tests out"
    return None


def selected_in_part(session: pytest.Session, tests: Sequence[str]) -> set[str]:
    """The files of `tests` of which the command line names parts (`FILE::TEST`)."""
    start = session.config.invocation_params.dir
    named = {(start / each.partition("::")[0]).resolve() for each in session.config.args if "::" in each}
    return {file for file in map(file_of, tests) if (session.config.rootpath / file).resolve() in named}


def committed(suite: Suite) -> list[Path]:
    """The paths of the records that earlier runs of the suite have left."""
    return sorted((ROOT / "benchmarks" / "results" / suite.results).glob("*.json"))


def outdated(suite: Suite, paths: Sequence[Path]) -> list[str]:
    """A message for each record that is of other sources than today's, and for each test file that a record lacks."""
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
