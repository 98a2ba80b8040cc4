"""The records of Python tests that `make nightly` writes, which tests it does not run again, and whether the committed
records are of these sources."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import nightly_evidence
import pytest
from evidence import ROOT
from flashmoe.bench.origin import digest_of
from nightly_evidence import FOLDER, NIGHT, NIGHTLY, last_runs

pytest_plugins = ["pytester"]

SUITE = NIGHTLY._replace(sources=("tests/fake_openssl",))
"""A suite of few sources, because each run of pytest computes their digest. The digest of all takes over a second."""

CONFTEST = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT / "tools")!r}]
import nightly_evidence

def pytest_configure(config):
    nightly_evidence.NIGHTLY = nightly_evidence.NIGHTLY._replace(sources={SUITE.sources!r})
    nightly_evidence.differing = lambda: ""
    nightly_evidence.cpu_model = lambda: "Fake(R) CPU"
    nightly_evidence.head = lambda: "0123456789"
    nightly_evidence.begin(config)
"""
FIRST = """
import os
import pytest

@pytest.mark.parametrize("i", range(3))
def test_right(i): assert "FLASHMOE_NIGHTLY_EVIDENCE" not in os.environ
def test_wrong(): assert os.path.exists("repaired")
@pytest.mark.parametrize("i", range(2))
def test_skipped(i): pytest.skip("no friend")
@pytest.mark.skip(reason="no time")
def test_skipped_before(): pass
@pytest.mark.xfail(reason="not yet")
def test_expected_to_fail(): assert False
"""
SECOND = "def test_right(): pass\ndef test_right_too(): pass\n"
LAST = """
import os
import time
from pathlib import Path

def test_ends_all():
    ended = ("test_first.py", "test_second.py")
    while not all(any(name in path.read_text() for path in Path("results").glob("*")) for name in ended):
        time.sleep(0.1)
    os.kill({parent}, 9)
"""
FIRST_COUNTS = {
    "passed": 3,
    "failed": 1,
    "skipped": 4,
    "skip_reasons": {"no friend": 2, "no time": 1, "not yet": 1},
    "failures": ["tests/test_first.py::test_wrong"],
}
SECOND_COUNTS = {"passed": 2, "failed": 0, "skipped": 0, "skip_reasons": {}, "failures": []}
ALONE, IN_TWO = ["-p", "no:xdist"], ["-n", "2", "--dist", "worksteal"]
PROCESSES = pytest.mark.parametrize("processes", [ALONE, IN_TWO], ids=["alone", "in_two"])


@pytest.fixture
def fake(pytester, monkeypatch) -> pytest.Pytester:
    """A folder with two files of nightly tests, and one in tests/gpu, which is no nightly test."""
    for name in NIGHT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(FOLDER, "results")
    monkeypatch.setenv("FLASHMOE_EXAMPLES", "123")
    pytester.makeini("[pytest]\ntestpaths = tests")
    for name, text in (("conftest", CONFTEST), ("test_first", FIRST), ("test_second", SECOND)):
        write(pytester, f"tests/{name}.py", text)
    write(pytester, "tests/gpu/test_third.py", "def test_right(): pass\n")
    return pytester


def write(fake: pytest.Pytester, path: str, text: str) -> None:
    (fake.path / path).parent.mkdir(parents=True, exist_ok=True)
    (fake.path / path).write_text(text)


def recorded(fake: pytest.Pytester) -> dict[str, dict[str, Any]]:
    """The record of each file, without its seconds."""
    files = json.loads((fake.path / "results" / "fake-r-cpux0-0123456.json").read_text())["files"]
    assert all(each.pop("seconds") >= 0 for each in files.values())
    return files


@PROCESSES
def test_a_night_is_counted_by_file(fake, processes):
    done = fake.runpytest_subprocess(*processes)
    done.stdout.fnmatch_lines(
        ["recorded in results/fake-r-cpux0-0123456.json: tests/test_first.py, tests/test_second.py"]
    )
    done.stdout.no_fnmatch_line("not recorded*")
    assert recorded(fake) == {"tests/test_first.py": FIRST_COUNTS, "tests/test_second.py": SECOND_COUNTS}
    result = json.loads((fake.path / "results" / "fake-r-cpux0-0123456.json").read_text())
    assert result["device"] == "Fake(R) CPU x0" and result["sources_sha256"] == SUITE.digest()
    assert result["environment"] == dict.fromkeys(NIGHT, "") | {"FLASHMOE_EXAMPLES": "123"}


@PROCESSES
def test_a_later_run_leaves_out_what_ended(fake, processes):
    """A later run fails, too, if it leaves out a file in which a test failed with the same sources."""
    fake.runpytest_subprocess(*processes).assert_outcomes(passed=6, failed=1, skipped=3, xfailed=1)
    write(fake, "tests/test_what.py", "def test_right(): pass\n")
    done = fake.runpytest_subprocess(*processes)
    done.stdout.fnmatch_lines(["recorded before, of the same sources: tests/test_first.py, tests/test_second.py"])
    done.stdout.fnmatch_lines(["failed, of these sources: tests/test_first.py::test_wrong"])
    done.assert_outcomes(passed=2)  # the new file, and that in tests/gpu
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    assert recorded(fake).keys() == {f"tests/test_{name}.py" for name in ("first", "second", "what")}


def test_files_that_are_named_run_in_any_case(fake):
    assert fake.runpytest_subprocess(*ALONE, "tests/test_first.py").ret == pytest.ExitCode.TESTS_FAILED
    write(fake, "repaired", "")
    done = fake.runpytest_subprocess(*ALONE, "tests/test_first.py")
    done.assert_outcomes(passed=4, skipped=3, xfailed=1)
    assert done.ret == 0
    assert recorded(fake) == {"tests/test_first.py": FIRST_COUNTS | {"passed": 4, "failed": 0, "failures": []}}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-k", "right"], "-k right selects"),
        (["tests/test_first.py::test_right"], "only a part was selected: tests/test_first.py"),
    ],
    ids=["chosen", "part"],
)
def test_a_part_is_not_recorded_where_other_processes_collect(fake, arguments, reason):
    done = fake.runpytest_subprocess(*IN_TWO, *arguments)
    done.stdout.fnmatch_lines([f"not recorded in *: {reason}"])
    assert not (fake.path / "results").exists()


def test_files_that_cannot_be_collected_are_no_run_where_other_processes_collect(fake):
    write(fake, "tests/test_third.py", "raise ValueError\n")
    fake.runpytest_subprocess(*IN_TWO, "--continue-on-collection-errors")
    assert not (fake.path / "results").exists()


def test_a_process_that_crashes_fails_one_test(fake):
    """The file is recorded all the same, because another process runs its other tests."""
    write(fake, "tests/test_second.py", f"import os\ndef test_crashes(): os.kill(os.getpid(), 9)\n{SECOND}")
    fake.runpytest_subprocess(*IN_TWO)
    assert recorded(fake)["tests/test_second.py"] == SECOND_COUNTS | {
        "failed": 1,
        "failures": ["tests/test_second.py::test_crashes"],
    }


@PROCESSES
def test_a_night_that_is_stopped_leaves_the_files_that_it_ended(fake, processes):
    """A test waits until both files are recorded, and then kills pytest's main process."""
    parent = "os.getppid()" if processes == IN_TWO else "os.getpid()"
    write(fake, "tests/test_what.py", LAST.format(parent=parent))
    fake.runpytest_subprocess(*processes)
    assert recorded(fake) == {"tests/test_first.py": FIRST_COUNTS, "tests/test_second.py": SECOND_COUNTS}


def test_sources_that_change_meanwhile_are_not_recorded(fake):
    write(fake, "tests/test_first.py", "def test_right(): pass\n")
    change = "import nightly_evidence\nnightly_evidence.NIGHTLY = nightly_evidence.NIGHTLY._replace(sources=())\n"
    write(fake, "tests/test_second.py", f"def test_right():\n    {change.replace(chr(10), chr(10) + '    ')}\n")
    done = fake.runpytest_subprocess(*ALONE)
    done.stdout.fnmatch_lines(["not recorded in *: the sources have changed since the run began*"])
    assert recorded(fake).keys() == {"tests/test_first.py"}


def test_an_installed_package_of_other_sources_is_refused(fake):
    write(fake, "tests/conftest.py", CONFTEST.replace('lambda: ""', 'lambda: "python/flashmoe/jit.py"'))
    done = fake.runpytest_subprocess(*ALONE)
    done.stderr.fnmatch_lines(["*the installed package is not of these sources*python/flashmoe/jit.py"])


FAILED = "tests/test_trace.py::test_a"


def record(digest: str, *failures: str, examples: str = "10000") -> str:
    environment = NIGHT | {"FLASHMOE_EXAMPLES": examples}
    files = {"tests/test_trace.py": {"failures": failures}}
    return json.dumps({"sources_sha256": digest, "environment": environment, "files": files})


def test_runs_of_today_count_together(tmp_path, monkeypatch):
    monkeypatch.setattr(nightly_evidence, "NIGHTLY", SUITE)
    now = SUITE.digest()
    for name, text in {
        "a": record(now, FAILED),
        "b": record(now),
        "c": record(now, FAILED),
        "d": record("0" * 16, FAILED, FAILED),
        "e": record(now, FAILED, FAILED, examples="500"),
    }.items():
        (tmp_path / f"{name}.json").write_text(text)
    assert last_runs(tmp_path.glob("[acde].json"), NIGHT) == {"tests/test_trace.py": {"failures": [FAILED]}}
    assert last_runs(tmp_path.glob("*.json"), NIGHT) == {"tests/test_trace.py": {"failures": []}}
    assert last_runs(tmp_path.glob("d.json"), NIGHT) == {}


def test_what_has_not_run_or_failed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(nightly_evidence, "NIGHTLY", SUITE)
    (tmp_path / "a.json").write_text(record(SUITE.digest(), FAILED))
    monkeypatch.setattr(nightly_evidence, "committed", lambda suite: list(tmp_path.glob("*.json")))
    there = len(list((ROOT / "tests").glob("test_*.py")))
    assert nightly_evidence.outdated() == [
        f"{FAILED} failed",
        f"{there - 1} of {there} files have not run of these sources",
    ]


def test_the_digest_is_not_of_what_runs_elsewhere(tmp_path):
    def digest() -> str:
        return digest_of(tmp_path, "tests", without=["tests/gpu"])

    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu.py").write_text("1")
    before = digest()
    (tmp_path / "tests" / "gpu" / "a.py").write_text("1")
    assert digest() == before
    (tmp_path / "tests" / "gpu.py").write_text("2")
    assert digest() != before


def test_the_night_is_what_make_sets():
    found = re.findall(r"^nightly: export (\w+) \??= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert dict(found) == NIGHT | {FOLDER: "benchmarks/results/nightly"}


def test_committed_runs_are_of_these_sources():
    """If not, pytest's summary has a warning and no failure: a night goes by before new sources have run."""
    for each in nightly_evidence.outdated():
        warnings.warn(f"benchmarks/results/{NIGHTLY.results}: {each}", stacklevel=1)
