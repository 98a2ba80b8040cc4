"""What GPU tests depend on, which of them are stale, and how their runs are planned and recorded. Needs no GPU."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plant
import pytest
import stale
from flashmoe.jit import Variant
from gpu_evidence import collect, records
from gpu_evidence.digests import Tree, variant_named, variant_of, without_comments, without_words
from gpu_evidence.page import Page, digest
from gpu_evidence.plan import SHARD_SECONDS, shards, units
from gpu_evidence.records import PLACES, Evidence
from gpu_evidence.session import file_record

ROOT = Path(__file__).resolve().parents[1]

pytest_plugins = ["pytester"]

FEW, OTHER = "tests/gpu/test_few.py", "tests/gpu/test_training_gpu.py"
HEADER = Path("include/flashmoe/sm90/decode/tasks.cuh")


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    """A copy of all that GPU tests depend on."""
    to = tmp_path_factory.mktemp("sources")
    for folder in ("include", "csrc", "python", "tests/gpu", "benchmarks"):
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    for path in (ROOT / "tests").glob("*.py"):
        shutil.copy(path, to / "tests")
    return to


@pytest.fixture(scope="module")
def ran(copied) -> list[dict[str, Any]]:
    """The record of a run with the unchanged copy."""
    return [record(Tree(copied), RAN)]


@pytest.fixture
def sources(copied) -> Iterator[Path]:
    """The copy; files that `append` has changed are restored after the test."""
    yield copied
    for path, content in _changed.items():
        path.write_bytes(content)
    _changed.clear()


_changed: dict[Path, bytes] = {}


def append(path: Path, text: str) -> None:
    _changed.setdefault(path, path.read_bytes())
    path.write_text(path.read_text() + text)


def record(tree: Tree, files: dict[str, list[Variant]], **more: Any) -> dict[str, Any]:
    """The record of a run of one test in each of `files`; a file maps to the kernels that its test loaded."""
    test = {"test_it": {"passed": 3, "failed": 0, "skipped": {}, "seconds": 30.0}}
    of = {
        file: {
            "sources": tree.sources_of(Path(file)),
            "kernels": tree.kernels(variants),
            "seconds": 40.0,
            "tests": test,
            "failures": {},
        }
        for file, variants in files.items()
    }
    named = {"place": "alone", "device": "A", "commit": "0" * 40, "ended": "2026-01-01T00:00:00Z"}
    return named | {"files": of} | more


RAN = {FEW: [Variant(), Variant(few=True)], OTHER: [Variant(keeps=True), Variant(backward=True)]}
THERE = {"alone": {FEW: ("test_it",), OTHER: ("test_it",)}}


def stale_in(root: Path, ran: list[dict[str, Any]], there: Any = THERE) -> dict[str, str]:
    """The stale files, each with the reason why it is stale."""
    return {file: why for _, file, _, why in Evidence(there, ran, Tree(root)).stale()}


# ---- digests -----------------------------------------------------------------------------------------------------


def test_words_of_python_are_no_code():
    code = 'def f(x):\n    return "# no comment", x  # one\n'
    told = '"""A page."""\n\n# A comment.\ndef f(x):\n    """What it\n    does: ä."""\n    return "# no comment", x\n\n'
    assert without_words(code) == without_words(told) == 'def f(x):\n    return "# no comment", x'
    assert without_words(code) != without_words(code.replace("no comment", "none"))


def test_comments_of_cpp_are_no_code():
    code = 'auto f = "// no /* comment */";  // one\n\n/* two\n   lines */ int x = \'"\';\n'
    assert without_comments(code).split("\n") == ['auto f = "// no /* comment */";', "  int x = '\"';"]


def test_every_option_of_a_kernel_is_in_its_name_and_its_flags():
    for variant in (
        Variant(),
        Variant("float32", "gelu", exact=True, keeps=True, group=True),
        Variant(mxfp4=True, few=True),
    ):
        (name,) = Tree().kernels([variant])
        assert variant_named(name) == variant == variant_of(variant.flags)


@pytest.mark.parametrize(
    ("path", "change", "expected"),
    [
        (HEADER, "// changed\n", {FEW: "bfloat16 swiglu few changed"}),
        ("csrc/cuda/entry/moe_backward.cu", "// changed\n", {OTHER: "bfloat16 swiglu backward changed"}),
        ("csrc/cuda/launch.cpp", "// changed\n", {}),
        ("csrc/cuda/launch.cpp", "int changed;\n", dict.fromkeys(RAN, "the host's C++ changed")),
        ("csrc/cpu/gemm.cpp", "int changed;\n", {}),
        ("csrc/network/socket.cpp", "int changed;\n", {}),
        ("python/flashmoe/calls/moe.py", "# changed\n", {}),
        ("python/flashmoe/calls/moe.py", "changed = 1\n", dict.fromkeys(RAN, "Python changed")),
        ("python/flashmoe/gradient_tolerance.py", "changed = 1\n", {OTHER: "Python changed"}),
        ("python/flashmoe/cli/run.py", "changed = 1\n", {}),
        ("tests/gpu/leaves.py", "changed = 1\n", {OTHER: "the tests changed"}),
        ("tests/gpu/test_few.py", "changed = 1\n", {FEW: "the tests changed"}),
        ("tests/gpu/test_few.py", "# changed\n", {}),
        ("tests/gpu/told.py", "changed = 1\n", {}),
    ],
    ids=str,
)
def test_what_a_change_makes_stale(sources, ran, path, change, expected):
    append(sources / path, change)
    assert stale_in(sources, ran) == expected


def test_what_has_not_changed_is_not_stale(sources, ran):
    assert stale_in(sources, ran) == {}


def test_a_kernel_that_is_no_more_is_a_changed_one(sources, ran):
    ran = copy.deepcopy(ran)
    ran[0]["files"][FEW]["kernels"]["bfloat16 of_old few"] = "0" * 16
    assert stale_in(sources, ran) == {FEW: "bfloat16 of_old few changed"}


def test_a_changed_comment_in_a_header_of_few_tokens_makes_their_files_stale_and_no_other(sources):
    """By the committed records, exactly the files that loaded a kernel for few tokens become stale, at each place."""
    ran = [each for each in records.read() if not any(of["failures"] for of in each["files"].values())]
    there: dict[str, dict[str, tuple[str, ...]]] = {}
    for each in ran:
        for file, of in each["files"].items():
            there.setdefault(each["place"], {})[file] = tuple(of["tests"])
    before = {(place, file) for place, file, _, _ in Evidence(there, ran, Tree(sources)).stale()}
    append(sources / HEADER, "// changed\n")
    evidence = Evidence(there, ran, Tree(sources))
    added = {(place, file) for place, file, _, _ in evidence.stale()} - before
    loaded = {
        (place, file)
        for (place, file, _), run in evidence.runs.items()
        if any(variant_named(name).few for name in run.kernels)
    }
    assert added == loaded - before


@pytest.mark.parametrize("fault", plant.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_that_is_planted_makes_its_kernels_stale(sources, ran, fault):
    text = (sources / fault.file).read_text()
    assert text.count(fault.old) == 1
    append(sources / fault.file, "")
    (sources / fault.file).write_text(text.replace(fault.old, fault.new))
    few = "decode" in fault.file
    assert set(stale_in(sources, ran)) == ({FEW} if few else set(RAN))


# ---- what is stale, and the plan ---------------------------------------------------------------------------------


def test_what_never_ran_and_what_failed_is_stale(sources):
    ran = [record(Tree(sources), {FEW: []})]
    assert stale_in(sources, ran) == {OTHER: "it never ran"}
    ran[0]["files"][FEW]["tests"]["test_it"]["failed"] = 1
    assert stale_in(sources, ran)[FEW] == "it failed"
    later = record(Tree(sources), {FEW: []}, ended="2026-01-02T00:00:00Z")
    assert stale_in(sources, [*ran, later]) == {OTHER: "it never ran"}
    assert stale_in(sources, [later, *ran])[FEW] == "it failed"
    more = {"alone": {FEW: ("test_it", "test_new")}, "own": {FEW: ("test_it",)}}
    assert list(Evidence(more, [later], Tree(sources)).stale()) == [
        ("alone", FEW, "test_new", "it never ran"),
        ("own", FEW, "test_it", "it never ran"),
    ]


def test_a_shard_is_of_one_place_and_of_eight_minutes(sources):
    tests = tuple(f"test_{i}" for i in range(200))
    files = sorted(path.relative_to(sources).as_posix() for path in (sources / "tests" / "gpu").glob("test_*.py"))[:3]
    there = {place: dict.fromkeys(files, tests) for place in PLACES}
    planned = shards(units(Evidence(there, [], Tree(sources))))
    assert all(0 < shard.seconds <= SHARD_SECONDS for shard in planned)
    assert all({unit.place for unit in shard.units} == {shard.place} for shard in planned)
    assert [shard.place for shard in planned] == sorted((shard.place for shard in planned), key=list(PLACES).index)
    ran = [(unit.place, unit.file, test) for shard in planned for unit in shard.units for test in unit.tests]
    assert len(ran) == len(set(ran)) == len(PLACES) * 3 * 200  # each test is planned once
    assert any(len(unit.tests) < 200 for shard in planned for unit in shard.units)


def test_seconds_are_those_of_the_last_run(sources):
    ran = [record(Tree(sources), {FEW: []})]
    append(sources / FEW, "changed = 1\n")
    (unit,) = units(Evidence({"alone": {FEW: ("test_it",)}}, ran, Tree(sources)))
    assert (unit.seconds, unit.why) == (40.0, "the tests changed")


def test_what_is_stale_is_said(monkeypatch, capsys):
    monkeypatch.setattr(stale, "read", list)
    monkeypatch.setattr(stale, "collected", lambda: {"alone": {FEW: ("test_of_nothing",)}})
    stale.main()
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        "  tests/gpu/test_few.py: it never ran (17 s)",
        "GPU tests to run again: 1 of 1, in 1 shards, 0 minutes",
    ]


# ---- runs --------------------------------------------------------------------------------------------------------

TESTS = """
import pytest

@pytest.fixture(params=[1, 2])
def pool(request):
    return request.param

@pytest.mark.parametrize("i", range(3))
def test_right(i): pass
def test_wrong(): assert False, "as it is"
def test_skipped(): pytest.skip("no such GPU")
def test_of_ranks(pool): pass
@pytest.mark.group
def test_of_a_group(): pass
@pytest.mark.own_gpus
def test_killed(pool): pass
@pytest.mark.undisturbed
def test_of_times(): pass
@pytest.mark.parametrize("i", [pytest.param(i, marks=pytest.mark.parts) for i in range(2)])
def test_of_parts(i): pass
"""
OF_PLACES = {
    "alone": ["test_right", "test_wrong", "test_skipped", "test_of_parts[0]", "test_of_parts[1]"],
    "undisturbed": ["test_of_times"],
    "shared": ["test_of_ranks", "test_of_a_group"],
    "own": ["test_of_ranks", "test_of_a_group", "test_killed"],
}


@pytest.fixture
def fake(pytester) -> pytest.Pytester:
    """A folder with a file of tests, and with the plugin that writes how they ended to the file `told`."""
    pytester.makeconftest(
        f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tests" / "gpu")!r})
from told import Told

def pytest_configure(config):
    for mark in ("group", "own_gpus", "undisturbed", "parts"):
        config.addinivalue_line("markers", mark)
    config.pluginmanager.register(Told(Path("told"), os.environ.get("FLASHMOE_PLACE")))
"""
    )
    pytester.makepyfile(test_it=TESTS)
    return pytester


def told(fake: pytest.Pytester) -> list[str]:
    return (fake.path / "told").read_text().splitlines()


def test_each_place_has_its_tests(fake):
    fake.runpytest_subprocess("--collect-only")
    there = collect.by_place(json.loads(told(fake)[0])["collected"])
    assert {place: list(files["test_it.py"]) for place, files in there.items()} == OF_PLACES


@pytest.mark.parametrize("place", OF_PLACES)
def test_a_run_has_the_tests_of_its_place_alone(fake, monkeypatch, place):
    monkeypatch.setenv("FLASHMOE_PLACE", place)
    fake.runpytest_subprocess()
    assert list(file_record(told(fake), "")["tests"]) == OF_PLACES[place]


def test_a_run_is_counted_by_test(fake, monkeypatch):
    monkeypatch.setenv("FLASHMOE_PLACE", "alone")
    fake.runpytest_subprocess()
    ran = file_record(told(fake), "")
    counts = {name: (test["passed"], test["failed"], test["skipped"]) for name, test in ran["tests"].items()}
    assert counts == {
        "test_right": (3, 0, {}),
        "test_wrong": (0, 1, {}),
        "test_skipped": (0, 0, {"no such GPU": 1}),
        "test_of_parts[0]": (1, 0, {}),
        "test_of_parts[1]": (1, 0, {}),
    }
    assert list(ran["failures"]) == ["test_wrong"] and "as it is" in ran["failures"]["test_wrong"]


def test_a_run_that_ends_early_has_what_is_over(fake, monkeypatch):
    """If pytest died, the test that was running has failed. If the time was over, that test is not recorded."""
    monkeypatch.setenv("FLASHMOE_PLACE", "alone")
    fake.makepyfile(test_it=TESTS.replace("assert False", "import os; os.kill(os.getpid(), 9); assert False"))
    fake.runpytest_subprocess()
    ran = file_record(told(fake), "pytest ended with status -9")
    assert list(ran["tests"]) == ["test_right", "test_wrong"]
    assert ran["failures"] == {"test_wrong": "pytest ended with status -9"}
    ran = file_record(told(fake), "no time was left")
    assert list(ran["tests"]) == ["test_right"] and ran["failures"] == {}
    assert file_record([], "pytest ended with status 4") == {"tests": {}, "failures": {}}


def test_the_tests_there_are_can_be_collected():
    there = collect.collected()
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {file for of in there.values() for file in of} == files
    assert "test_a_rank_that_dies_is_named" in there["own"]["tests/gpu/test_group.py"]
    assert "test_a_rank_that_dies_is_named" not in there["shared"]["tests/gpu/test_group.py"]
    assert "test_racecheck[fp8-alone]" in there["alone"]["tests/gpu/test_racecheck.py"]


# ---- the store of kernels ----------------------------------------------------------------------------------------

NVCC = """#!/bin/sh
case "$*" in *--version*) echo nvcc 13; exit;; esac
echo compiled >> {log}
while [ "$1" != -o ]; do shift; done
echo code > "$2"
echo "0 bytes spill stores, 8 bytes spill loads"
"""


def test_a_kernel_is_compiled_once_and_each_question_is_written_down(tmp_path):
    nvcc, log, store, asked = (tmp_path / name for name in ("nvcc", "log", "store", "asked"))
    nvcc.write_text(NVCC.format(log=log))
    nvcc.chmod(0o755)
    store.mkdir()
    environment = os.environ | {
        "FLASHMOE_TESTS_NVCC": str(nvcc),
        "FLASHMOE_TESTS_STORE": str(store),
        "FLASHMOE_TESTS_ASKED": str(asked),
    }
    program = ROOT / "tools" / "gpu_evidence" / "stored_nvcc.py"

    def run(name: str, **more: str) -> str:
        output = tmp_path / f"{name}.0123.tmp" / "kernel.cubin"
        output.parent.mkdir(exist_ok=True)
        command = [program, *Variant(few=True).flags, "source.cu", "-o", output]
        done = subprocess.run(command, env=environment | more, capture_output=True, text=True, check=True)
        assert output.read_text() == "code\n"
        output.unlink()
        return done.stdout

    first = run("one")
    # The stand-in takes a kernel that spills from the store, too: its caller has to judge what the compiler said.
    assert run("one") == first == "0 bytes spill stores, 8 bytes spill loads\n"
    assert log.read_text().splitlines() == ["compiled"]
    run("two")
    run("two", NVCC_APPEND_FLAGS="-DFLASHMOE_RACECHECK=1")
    assert log.read_text().splitlines() == ["compiled"] * 3
    told = [variant_of(json.loads(line)) for line in asked.read_text().splitlines()]
    assert told == [Variant(few=True)] * 4
    version = subprocess.run([program, "--version"], env=environment, capture_output=True, text=True)
    assert version.stdout == "nvcc 13\n"


# ---- the page ----------------------------------------------------------------------------------------------------


def test_the_page_is_of_the_records_that_are_committed():
    made = Page(records.RESULTS.parent, records.read()).text()
    assert (ROOT / "docs" / "evidence.md").read_text() == made, "run python tools/evidence_page.py"


NAMED = "test_a_tokens_bits_do_not_depend_on_the_others"
"""A GPU test that a promise of tools/gpu_evidence/promises.py names."""


def test_the_page_says_where_a_test_ran_last(ran):
    text = Page(records.RESULTS.parent, ran).text()
    run = records.last_runs(ran)["alone", FEW, "test_it"]
    (row,) = (line for line in text.splitlines() if line.startswith("| `gpu/test_few.py` |"))
    assert row == f"| `gpu/test_few.py` | one GPU | 3 | 0 | 0 | 40 | A, 2026-01-01, 0000000, `{digest(run)}` |"
    assert f"`gpu/test_few.py::{NAMED}`: **GPU**, never" in text
    renamed = copy.deepcopy(ran)
    tests = renamed[0]["files"][FEW]["tests"]
    tests[f"{NAMED}[part]"] = tests.pop("test_it") | {"failed": 2}
    text = Page(records.RESULTS.parent, renamed).text()
    assert f"`gpu/test_few.py::{NAMED}`: **GPU**, one GPU `{digest(run)}`, 2 failed" in text
