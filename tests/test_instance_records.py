"""The records of tools/compile_cuda.py: what it records, what it does not compile again, and whether the committed
records have all instances."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import compile_cuda
import instance_records
import pytest
from cuda_units import Unit, units
from flashmoe.jit import Variant
from gpu_evidence.digests import ROOT, Tree
from instance_records import Instance, Record, instance, read, standing

GENERAL, FEW, SOURCE = (Unit(Variant()), Unit(Variant(few=True)), Unit(ROOT / "benchmarks" / "protocol.cu"))
NAMES = {"bfloat16 swiglu", "bfloat16 swiglu few", "benchmarks/protocol.cu"}
LOG = """\
ptxas info    : Function properties for {name}
    {stack} bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads
ptxas info    : Used {registers} registers, used 16 barriers, 2048 bytes smem
"""
COMMIT = "0123456789abcdef"


def log(registers: int, spilled: int = 0, stack: int = 0, name: str = "kernel") -> str:
    return LOG.format(registers=registers, spilled=spilled, stack=stack, name=name)


class Compiler:
    """Stands in for nvcc and nvdisasm: remembers the units that it was given, and answers as a test has set."""

    def __init__(self) -> None:
        self.given: list[Unit] = []
        self.answers: dict[Unit, Any] = {}
        """For some units, the log that is answered, or the exception that is raised."""

    def __call__(self, nvcc: Path, nvdisasm: Path, unit: Unit) -> compile_cuda.Compiled:
        self.given.append(unit)
        answer = self.answers.get(unit, log(168))
        if not isinstance(answer, str):
            raise answer
        return compile_cuda.Compiled(answer, opcodes=compile_cuda.Counter(unit.required))


@pytest.fixture
def compiler(monkeypatch) -> Compiler:
    """The stand-in; compile_cuda.py has three units to compile."""
    compiler = Compiler()
    monkeypatch.setattr(compile_cuda, "units", lambda every: [GENERAL, FEW, SOURCE])
    monkeypatch.setattr(compile_cuda, "compile_unit", compiler)
    monkeypatch.setattr(compile_cuda, "find_nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr(compile_cuda, "find_nvdisasm", lambda nvcc: Path("nvdisasm"))
    monkeypatch.setattr(compile_cuda.Toolkit, "release", "release 13.0")
    monkeypatch.setattr(compile_cuda.os, "nice", lambda by: by)
    monkeypatch.setattr(compile_cuda, "cpu_model", lambda: "Fake(R) CPU")
    monkeypatch.setattr(compile_cuda.sys, "argv", ["/x/tools/compile_cuda.py", "--every"])
    return compiler


def run(folder: Path, *options: str, commit: str = COMMIT) -> int:
    return compile_cuda.main(["--record", str(folder), "--jobs", "1", "--commit", commit, *options])


def test_a_run_is_recorded_and_not_repeated(compiler, tmp_path, capsys):
    compiler.answers[FEW] = log(96, name="one") + log(128, name="two")
    assert run(tmp_path) == 0
    [path] = tmp_path.iterdir()
    assert path.name == "fake-r-cpux0-0123456.json"
    result = json.loads(path.read_text())
    instances = result.pop("instances")
    assert result.pop("seconds") >= 0 and result.pop("ended")
    assert result == {
        "device": "Fake(R) CPU x0",
        "commit": COMMIT,
        "nvcc": "release 13.0",
        "command": "python compile_cuda.py --every",
    }
    assert {name: each["digest"] for name, each in instances.items()} == dict(
        instance(Tree(), unit.of) for unit in (GENERAL, FEW, SOURCE)
    )
    assert {(name, each["registers"]) for name, each in instances.items()} == {
        ("bfloat16 swiglu", 168),
        ("bfloat16 swiglu few", 128),
        ("benchmarks/protocol.cu", 168),
    }
    assert all((each["spills"], each["stack"], each["faults"]) == (0, 0, []) for each in instances.values())
    assert len(path.read_text().splitlines()) < 20  # one line for each instance
    assert "instances: 3 current, 0 faulty, 0 stale, 0 never compiled" in capsys.readouterr().out
    assert run(tmp_path) == 0
    assert compiler.given == [GENERAL, FEW, SOURCE]


def test_what_has_faults_ends_nothing_and_is_compiled_again(compiler, tmp_path, capsys):
    compiler.answers[GENERAL] = log(168, spilled=4, stack=8)
    assert run(tmp_path) == 1
    [record] = read(tmp_path)
    entry = record["instances"]["bfloat16 swiglu"]
    assert (entry["spills"], entry["stack"]) == (8, 8)
    assert entry["faults"] == ["kernel spills 8 bytes", "kernel keeps a stack frame of 8 bytes"]
    assert record["instances"].keys() == NAMES
    assert "FAILED: bfloat16 swiglu: kernel spills 8 bytes; kernel keeps" in capsys.readouterr().out
    assert run(tmp_path, "--list") == 1
    del compiler.answers[GENERAL]
    assert run(tmp_path) == 0
    assert compiler.given == [GENERAL, FEW, SOURCE, GENERAL]
    assert run(tmp_path, "--list") == 0


def test_when_the_time_is_over_nothing_is_begun(compiler, tmp_path, capsys):
    assert run(tmp_path, "--minutes", "0") == 0
    assert compiler.given == [] and list(tmp_path.iterdir()) == []
    assert "0 current, 0 faulty, 0 stale, 3 never compiled" in capsys.readouterr().out


def test_a_run_that_is_stopped_leaves_what_it_ended(compiler, tmp_path):
    """The next run of the same commit adds the rest to the same record."""
    compiler.answers[FEW] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    [path] = tmp_path.iterdir()
    assert "bfloat16 swiglu" in json.loads(path.read_text())["instances"]
    assert "bfloat16 swiglu few" not in json.loads(path.read_text())["instances"]
    del compiler.answers[FEW]
    assert run(tmp_path) == 0
    assert [path] == list(tmp_path.iterdir())
    assert json.loads(path.read_text())["instances"].keys() == NAMES
    assert compiler.given.count(GENERAL) == 1


def test_records_of_several_commits_count_together(compiler, tmp_path):
    compiler.answers[SOURCE] = log(255, spilled=4)
    assert run(tmp_path) == 1
    del compiler.answers[SOURCE]
    assert run(tmp_path, commit="f" * 40) == 0
    first, second = read(tmp_path)
    assert first["instances"].keys() == NAMES and second["instances"].keys() == {"benchmarks/protocol.cu"}


def test_another_nvcc_compiles_all_again(compiler, tmp_path, monkeypatch, capsys):
    assert run(tmp_path) == 0
    monkeypatch.setattr(compile_cuda.Toolkit, "release", "release 13.5")
    assert run(tmp_path, "--minutes", "0") == 0
    assert "0 current, 0 faulty, 3 stale, 0 never compiled" in capsys.readouterr().out
    assert run(tmp_path) == 0 and len(compiler.given) == 6


def test_what_is_left_is_said_without_a_compiler(compiler, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compile_cuda, "find_nvcc", lambda: pytest.fail("it looks for nvcc"))
    assert run(tmp_path, "--list") == 0
    assert capsys.readouterr().out == "instances: 0 current, 0 faulty, 0 stale, 3 never compiled\n"


def test_sources_that_change_meanwhile_are_not_recorded(compiler, tmp_path, monkeypatch, capsys):
    of_now = compile_cuda.instances_of

    def changing(todo: list[Unit]) -> dict[Unit, Instance]:
        found = of_now(todo)
        return {
            unit: each._replace(digest="new") if compiler.given and unit == FEW else each
            for unit, each in found.items()
        }

    monkeypatch.setattr(compile_cuda, "instances_of", changing)
    assert run(tmp_path) == 0
    [record] = read(tmp_path)
    assert record["instances"].keys() == NAMES - {"bfloat16 swiglu few"}
    assert "2 current, 0 faulty, 0 stale, 1 never compiled" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--list"], ["--minutes", "5"], ["--record", "x", "--commit", ""]], ids=" ".join)
def test_options_without_a_meaning_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        compile_cuda.main(options)
    assert "expected" in capsys.readouterr().err


def entry(digest: str, *faults: str) -> dict[str, Any]:
    return {"digest": digest, "faults": list(faults)}


def test_the_last_compilation_of_todays_sources_counts():
    """It also counts if other sources have been compiled since."""
    wanted = [Instance(name, "now") for name in ("a", "b", "c", "d")]
    records = [
        {"nvcc": "13.0", "instances": {"a": entry("now"), "b": entry("now", "spills"), "c": entry("now")}},
        {"nvcc": "13.0", "instances": {"a": entry("then", "spills"), "b": entry("now"), "c": entry("now", "spills")}},
    ]
    found = standing(wanted, records)
    assert (found.current, found.faulty, found.stale, found.missing) == (["a", "b"], {"c": ["spills"]}, [], ["d"])
    assert found.todo == ["d", "c"]


def test_the_digest_is_of_all_that_is_compiled_and_of_the_flags(tmp_path):
    for folder in ("include", "csrc/cuda/entry", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("results"))
    wanted = (Variant(), Variant(few=True), Variant(activation="gelu", few=True), tmp_path / "benchmarks/protocol.cu")

    def digests() -> list[str]:
        return [instance(Tree(tmp_path), each).digest for each in wanted]

    def changed(path: str) -> list[bool]:
        before = digests()
        with (tmp_path / path).open("a") as file:
            file.write("static_assert(true);\n")
        return [one != other for one, other in zip(before, digests(), strict=True)]

    assert len(set(digests())) == len(wanted)
    assert changed("csrc/cuda/entry/moe_backward.cu") == [False, False, False, False]
    assert changed("csrc/cuda/entry/decode.cu") == [False, True, True, False]
    assert changed("include/flashmoe/sm90/roles/clerk.cuh") == [True, False, False, False]
    assert changed("include/flashmoe/protocol/packet.h")[-1]
    assert changed("benchmarks/protocol.cu") == [False, False, False, True]


def test_every_instance_has_a_name_of_its_own():
    tree, every = Tree(), units(True)
    names = {instance(tree, each.of, each.nvshmem).name for each in every}
    assert len(names) == len(every)
    assert {name for name in names if "NVSHMEM 3.4" in name} == {"bfloat16 swiglu rdma (NVSHMEM 3.4.5)"}


def test_a_record_of_another_nvcc_or_machine_is_not_gone_on_with(tmp_path):
    path = tmp_path / "x0.json"
    Record(path, {"device": "a", "nvcc": "13.0"}, "").add("bfloat16 swiglu", entry("now"))
    assert Record(path, {"device": "a", "nvcc": "13.0"}, "").instances == {"bfloat16 swiglu": entry("now")}
    assert Record(path, {"device": "a", "nvcc": "13.5"}, "").instances == {}


def test_committed_records_have_every_instance():
    """Missing instances give a warning in pytest's summary and no failure: a night goes by before they are compiled."""
    tree = Tree()
    found = standing([instance(tree, each.of, each.nvshmem) for each in units(True)], read())
    if found.todo:
        warnings.warn(f"{instance_records.RESULTS.relative_to(ROOT)}: {found}", stacklevel=1)
