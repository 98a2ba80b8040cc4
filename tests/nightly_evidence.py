"""Records the Python tests of `make nightly`: for each test file, how many tests passed, failed or were skipped, why
they were skipped, and in how many seconds; also the number of examples and the sources.

`make nightly` names the folder of records in FLASHMOE_NIGHTLY_EVIDENCE. The tests may be spread over several runs: a
file is recorded as soon as all its tests are over, and a later run of the same sources with as many examples leaves the
file out, whatever its commit. A file with a failed test is left out too, because the test might pass by chance with
other random examples; the later run then fails as well. Files that the command line names are run in any case, and if
such a file passes, it counts as passed.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from evidence import ROOT, Evidence, Suite, committed
from flashmoe.bench.origin import cpu_model, head, result_path
from gpu_evidence.collect import file_of
from gpu_evidence.digests import differing

FOLDER = "FLASHMOE_NIGHTLY_EVIDENCE"
NIGHTLY = Suite(
    "nightly tests", "", "nightly", ("include", "csrc", "python", "tests"), without=("tests/gpu", "tests/integrations")
)
NIGHT = {"FLASHMOE_EXAMPLES": "10000", "FLASHMOE_PROGRAMS": "1000", "FLASHMOE_LONG_TESTS": "1"}
"""The environment variables that `make nightly` sets."""


class Nightly(Evidence):
    """Evidence of those tests that the digest covers, with seconds, reasons for skips, and failures."""

    def __init__(self, path: Path, origin: dict[str, Any]) -> None:
        super().__init__(NIGHTLY, path, origin)
        self._all = NIGHTLY.digest_of_all()
        self._took: Counter[str] = Counter()  # seconds, by file
        self._reasons: dict[str, Counter[str]] = defaultdict(Counter)

    def _begin(self, tests: Sequence[str]) -> None:
        super()._begin([test for test in tests if is_nightly(test)])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not is_nightly(report.nodeid):
            return
        file = file_of(report.nodeid)
        self._took[file] += report.duration
        if report.skipped:
            self._reasons[file][why_skipped(report)] += 1
        super().pytest_runtest_logreport(report)

    def _counts(self, file: str) -> dict[str, Any]:
        return {
            **super()._counts(file),
            "seconds": round(self._took[file], 1),
            "skip_reasons": dict(sorted(self._reasons[file].items())),
            "failures": sorted(test for test, outcome in self._outcomes[file].items() if outcome == "failed"),
        }

    def _record(self, file: str) -> None:
        if NIGHTLY.digest_of_all() == self._all:
            super()._record(file)
        else:
            self._reason = "the sources have changed since the run began; what it had ended is recorded"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        super().pytest_sessionfinish(session)
        files = last_runs(self._path.parent.glob("*.json"), self._origin["environment"])
        if failures := [test for each in files.values() for test in each["failures"]]:
            say = session.config.pluginmanager.get_plugin("terminalreporter").write_line
            say(f"\nfailed, of these sources: {', '.join(failures)}")
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


class GoesOn:
    """A plugin of pytest that leaves out the test files in `ended`, also in each process of pytest-xdist."""

    def __init__(self, ended: Iterable[str]) -> None:
        self._ended = sorted(ended)

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """True: the file is left out. None: other plugins decide."""
        return os.path.relpath(collection_path, config.rootpath) in self._ended or None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["ended"] = self._ended

    def pytest_report_header(self) -> str | None:
        return f"recorded before, of the same sources: {', '.join(self._ended)}" if self._ended else None


def begin(config: pytest.Config) -> None:
    """If FLASHMOE_NIGHTLY_EVIDENCE names a folder, has this run recorded there, and leaves out the files that the
    folder's records have."""
    if (worker := getattr(config, "workerinput", None)) is not None:
        if "ended" in worker:
            config.pluginmanager.register(GoesOn(worker["ended"]))
        return
    folder = os.environ.pop(FOLDER, "")  # so that processes that tests start record nothing
    if not folder or config.option.collectonly:
        return
    if other := differing():
        raise pytest.UsageError(f"the installed package is not of these sources, install it again: {other}")
    environment = {name: os.environ.get(name, "") for name in NIGHT}
    origin = {
        "device": f"{cpu_model()} x0",
        **{name: version(name) for name in ("torch", "hypothesis")},
        "commit": head(),
        "command": "make nightly",
        "environment": environment,
    }
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    files = last_runs(Path(folder).glob("*.json"), environment)
    config.pluginmanager.register(GoesOn(files if everything else ()))
    path = Path(folder) / f"{result_path('nightly', cpu_model(), 0).stem}-{head()[:7]}.json"
    config.pluginmanager.register(Nightly(path, origin))


def is_nightly(test: str) -> bool:
    return not test.startswith(tuple(f"{folder}/" for folder in NIGHTLY.without))


def why_skipped(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return getattr(report, "wasxfail", str(report.longrepr))


def last_runs(paths: Iterable[Path], environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """By test file, what the records of today's sources and of this environment say of the file. If several records
    have the file, one in which it passed is taken."""
    now, files = NIGHTLY.digest(), {}
    for record in map(json.loads, map(Path.read_text, sorted(paths))):
        if (record["sources_sha256"], record["environment"]) == (now, environment):
            files |= {name: each for name, each in record["files"].items() if name not in files or not each["failures"]}
    return files


def outdated() -> list[str]:
    """Messages about the committed records: which tests failed, and how many files have no record of these sources."""
    files = last_runs(committed(NIGHTLY), NIGHT)
    failed = [f"{test} failed" for _, each in sorted(files.items()) for test in each["failures"]]
    there = {f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py")}
    left = len(there - files.keys())
    return failed + ([f"{left} of {len(there)} files have not run of these sources"] if left else [])
