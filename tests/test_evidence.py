"""The records of test runs outside of CI: how they are written, and whether the committed ones are of these sources."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import evidence
import pytest
from flashmoe.bench.origin import digest_of

ROOT = Path(__file__).resolve().parents[1]

pytest_plugins = ["pytester"]

SUITE = evidence.TRAINING._replace(sources=("tests/fake_openssl", "tests/model"))
"""A suite with few sources, because each run of pytest computes their digest anew. The digest of all sources takes
nearly a second."""

CONFTEST = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT / "tools")!r}]
import evidence

def pytest_collection_finish(session):
    origin = {{"device": "Fake x2", "commit": "0123456789"}}
    suite = evidence.TRAINING._replace(sources={SUITE.sources!r})
    session.config.pluginmanager.register(evidence.Evidence(suite, Path("results") / "fakex2.json", origin))
"""
FIRST = """
import pytest

@pytest.fixture
def broken():
    raise ValueError

@pytest.fixture
def breaks():
    yield
    raise ValueError

@pytest.mark.parametrize("i", range(3))
def test_right(i): pass
def test_wrong(): assert False
def test_not_set_up(broken): pass
def test_not_taken_down(breaks): pass
def test_skipped(): pytest.skip("no GPU")
@pytest.mark.skip(reason="no GPU")
def test_skipped_before(): pass
"""
SECOND = "def test_right(): pass\n"


@pytest.fixture
def fake(pytester) -> pytest.Pytester:
    """A folder with two files of tests, and a conftest.py that registers the plugin `Evidence`."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_first=FIRST, test_second=SECOND)
    return pytester


def test_a_run_is_counted_by_file(fake):
    done = fake.runpytest_inprocess()
    done.stdout.fnmatch_lines(["recorded in results/fakex2.json: test_first.py, test_second.py"])
    done.stdout.no_fnmatch_line("not recorded*")
    result = json.loads((fake.path / "results" / "fakex2.json").read_text())
    assert result.pop("seconds") >= 0
    assert result == {
        "device": "Fake x2",
        "commit": "0123456789",
        "sources": list(SUITE.sources),
        "sources_sha256": SUITE.digest(),
        "files": {
            "test_first.py": {"passed": 3, "failed": 3, "skipped": 2},
            "test_second.py": {"passed": 1, "failed": 0, "skipped": 0},
        },
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-k", "right"], "-k right selects"),
        (["test_first.py::test_right"], "only a part was selected: test_first.py"),
        (["-x"], "the run was stopped: test_first.py, test_second.py"),
        (["--deselect", "test_first.py::test_wrong"], "an option leaves tests out"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_part_of_the_tests_is_not_recorded(fake, arguments, reason):
    done = fake.runpytest_inprocess(*arguments)
    done.stdout.fnmatch_lines([f"not recorded in results/fakex2.json: {reason}"])
    assert not (fake.path / "results").exists()


ENDS = {
    "interrupted": "raise KeyboardInterrupt",
    "ended": "import pytest; pytest.exit('no time left')",
    "stopped after a failure": "assert False",
    "killed": "import os; os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_is_stopped_leaves_the_files_that_it_ended(fake, end):
    """The run is stopped in the third of four files, in each of the ways in `ENDS`."""
    fake.makepyfile(
        test_third=f"def test_last():\n    {ENDS[end]}\ndef test_behind(): pass\n", test_what="def test(): pass\n"
    )
    done = fake.runpytest_subprocess("--maxfail", "4")  # three tests of the first file fail
    files = json.loads((fake.path / "results" / "fakex2.json").read_text())["files"]
    assert files == {
        "test_first.py": {"passed": 3, "failed": 3, "skipped": 2},
        "test_second.py": {"passed": 1, "failed": 0, "skipped": 0},
    }
    if end != "killed":
        done.stdout.fnmatch_lines(
            [
                "recorded in results/fakex2.json: test_first.py, test_second.py",
                "not recorded in results/fakex2.json: the run was stopped: test_third.py, test_what.py",
            ]
        )


def test_a_file_whose_last_test_stops_the_run_is_whole(fake):
    fake.makepyfile(test_first="def test_wrong(): assert False\n")
    done = fake.runpytest_inprocess("-x")
    done.stdout.fnmatch_lines(
        ["recorded in *: test_first.py", "not recorded in *: the run was stopped: test_second.py"]
    )
    files = json.loads((fake.path / "results" / "fakex2.json").read_text())["files"]
    assert files == {"test_first.py": {"passed": 0, "failed": 1, "skipped": 0}}


def test_a_part_of_one_file_does_not_keep_others_from_being_recorded(fake):
    done = fake.runpytest_inprocess("test_first.py::test_right", "test_second.py")
    done.stdout.fnmatch_lines(
        ["recorded in *: test_second.py", "not recorded in *: only a part was selected: test_first.py"]
    )
    assert json.loads((fake.path / "results" / "fakex2.json").read_text())["files"].keys() == {"test_second.py"}


def test_files_that_cannot_be_collected_are_no_run(fake):
    fake.makepyfile(test_third="raise ValueError\n")
    done = fake.runpytest_inprocess("--continue-on-collection-errors")
    done.stdout.fnmatch_lines(["not recorded in results/fakex2.json: some files could not be collected"])
    assert not (fake.path / "results").exists()


def test_whole_files_add_to_a_run_of_the_same_sources(fake):
    path = fake.path / "results" / "fakex2.json"
    for of in ("test_first.py", "test_second.py"):
        fake.runpytest_inprocess(of)
    assert json.loads(path.read_text())["files"].keys() == {"test_first.py", "test_second.py"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sources_sha256": "0" * 16}))
    fake.runpytest_inprocess("test_second.py")
    assert json.loads(path.read_text())["files"].keys() == {"test_second.py"}


def test_the_digest_is_of_names_and_contents(tmp_path):
    (tmp_path / "include").mkdir()
    file = tmp_path / "include" / "a.h"
    file.write_text("1")
    seen = {digest_of(tmp_path, "include")}
    (tmp_path / "other").write_text("1")
    assert digest_of(tmp_path, "include") in seen
    file.write_text("2")
    seen.add(digest_of(tmp_path, "include"))
    file.rename(file.with_name("b.h"))
    seen.add(digest_of(tmp_path, "include"))
    assert len(seen) == 3


def test_a_run_of_other_sources_or_less_is_named(tmp_path):
    files = {f"tests/{SUITE.tests}/{path.name}": {} for path in (ROOT / "tests" / SUITE.tests).glob("test_*.py")}
    now = {"sources_sha256": SUITE.digest(), "commit": "0123456789", "files": files}
    first = min(files)
    less = now | {"files": {name: of for name, of in files.items() if name != first}}
    for name, run in (("ax1", now), ("bx2", now | {"sources_sha256": "0" * 16}), ("cx1", less)):
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    other, lacking = evidence.outdated(SUITE, sorted(tmp_path.glob("*.json")))
    of = ", ".join(SUITE.sources)
    assert other.startswith(f"bx2.json: the {SUITE.name} ran on {of} {'0' * 16} (0123456), not on ")
    assert lacking == f"cx1.json: {first} has not run"


@pytest.mark.parametrize("suite", [evidence.INTEGRATIONS, evidence.TRAINING], ids=lambda suite: suite.results)
def test_committed_runs_are_of_these_sources(suite):
    """If they are not, pytest's summary has a warning. This is no failure, because whoever changes the sources may be
    unable to run these suites."""
    paths = evidence.committed(suite)
    said = evidence.outdated(suite, paths) if paths else [f"no run of the {suite.name} is recorded"]
    for each in said:
        warnings.warn(f"benchmarks/results/{suite.results}: {each}", stacklevel=1)
