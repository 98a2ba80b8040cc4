"""Code that the benchmarks share, as far as it can be tested without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from flashmoe.bench import measure, origin
from flashmoe.bench.measure import in_turn
from flashmoe.bench.origin import output
from harness import Tree, beside_floor


def test_calls_are_timed_in_turn():
    asked: list[tuple[int, int, bool]] = []

    def timer(call: Callable[[int], int], repeats: int, busy: bool) -> list[float]:
        asked.append((call(0), repeats, busy))
        return [float(len(asked))] * repeats

    timed = in_turn(timer, {"fused": lambda i: 1, "floor": lambda i: 2}, 8)
    there, back = [(1, 2, True), (2, 2, True), (1, 2, False), (2, 2, False)], [(2, 2, True), (1, 2, True)]
    assert asked == [*there, *back, (2, 2, False), (1, 2, False)] * 2
    assert timed["floor", True] == [2, 2, 5, 5, 10, 10, 13, 13]
    assert list(timed) == [("fused", True), ("fused", False), ("floor", True), ("floor", False)]


def test_a_command_that_does_not_end_says_nothing():
    assert output("sleep", "60", seconds=0.1) == output("false") == output("no such command") == ""
    assert output("echo", "something") == "something"


def test_a_layer_stands_beside_its_floor():
    row = beside_floor(
        {
            ("fused", True): [3.0, 2.0, 7.0],
            ("fused", False): [8.0],
            ("floor", True): [2.0, 1.0, 6.0],
            ("floor", False): [4.0],
        }
    )
    assert row == {
        "fused_ms": 3,
        "fused_min_max": [2, 7],
        "floor_ms": 2,
        "floor_min_max": [1, 6],
        "ratio": 1.5,
        "plain_fused_ms": 8,
        "plain_floor_ms": 4,
        "plain_ratio": 2,
    }


ROOT = Path(__file__).resolve().parents[1]
TYPED = {
    "benchmarks/decode.py --repeats 12": "benchmarks/decode.py --repeats 12",
    f"{ROOT}/benchmarks/decode.py --out {ROOT}/build/../out.json": "benchmarks/decode.py --out out.json",
    "fp8.py --out=/x/y/benchmarks/results/fp8/h200x1.json": "fp8.py --out=benchmarks/results/fp8/h200x1.json",
    "bench --out /x/y/benchmarks/results": "bench --out benchmarks/results",
    "bench --out HERE/results": "bench --out results",
    "old_new.py --trees /x/old /x/y/new/ --commits a b": "old_new.py --trees old new --commits a b",
    "check_wheel.py /usr/bin/python3.11": "check_wheel.py python3.11",
}


def test_results_lie_in_the_sources():
    assert origin.result_path("decode", "NVIDIA H200", 2) == ROOT / "benchmarks" / "results" / "decode" / "h200x2.json"


@pytest.mark.parametrize("typed", TYPED)
def test_a_result_says_what_anybody_may_type(monkeypatch, tmp_path: Path, typed: str):
    """A result's command names no folder of the machine that made the result, whatever was typed there."""
    monkeypatch.chdir(tmp_path)
    arguments = typed.replace("HERE", str(tmp_path)).split()
    assert origin.as_typed("python", arguments) == f"python {TYPED[typed]}"


def test_a_tree_is_known_by_its_name(tmp_path: Path):
    (tmp_path / "old" / "flashmoe").mkdir(parents=True)
    (tmp_path / "old" / "flashmoe" / "__init__.py").touch()
    assert Tree.at(tmp_path / "old", "0123456").described()["folder"] == "old"


WORKERS = {
    "timings": "measure = timings.loaded(sys.argv[1]); measure.milliseconds, measure.passes",
    "host_calls": "host_calls.timed",
}
"""Modules that measure other versions of flashmoe; for each, an expression that needs nothing of such a version."""


@pytest.mark.parametrize("worker", WORKERS)
def test_a_worker_measures_any_version(tmp_path: Path, worker: str):
    """For example a version that has no `flashmoe.bench`. The version here is an empty package."""
    pytest.importorskip("torch")
    (tmp_path / "flashmoe").mkdir()
    (tmp_path / "flashmoe" / "__init__.py").touch()
    program = f"import sys, {worker}; {WORKERS[worker]}; import flashmoe; print(flashmoe.__file__)"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'benchmarks'}"}
    command = [sys.executable, "-c", program, measure.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)


@pytest.mark.parametrize("suite", ["splits", "imbalance"])
def test_parallelism_on_the_cpu_engine(tmp_path: Path, suite: str):
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    how = [
        "--engine",
        "cpu",
        "--repeats",
        "2",
        "--spread",
        "0.1",
        "--tokens",
        "128",
        "--out",
        str(tmp_path / "x2.json"),
    ]
    command = [*torchrun, str(ROOT / "benchmarks" / "parallelism.py"), suite, *how]
    subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    rows = json.loads((tmp_path / "x2.json").read_text())["rows"]
    assert all(row["tokens"] == 128 and row["ms"] > 0 for row in rows)
    if suite == "splits":
        assert [(row["expert_parallel"], row["tensor_parallel"]) for row in rows] == [(2, 1), (1, 2)]
        assert rows[1]["rows_sent"] == [256, 256] and rows[1]["difference"] < 1e-5
    else:
        assert [row["placement"] for row in rows] == ["contiguous", "balanced", "EP 1 x TP 2"]
        assert rows[0]["spread_of_load"] == pytest.approx(0.1, abs=0.05)
        assert 1.0 == rows[2]["fullest"] <= rows[1]["fullest"] <= rows[0]["fullest"]
