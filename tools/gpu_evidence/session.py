"""Runs shards of GPU tests, and leaves a record of each.

Each file of tests has a process of its own, so that what one breaks no other sees, and a kernel cache of its own, which
says at the end what it has loaded. The kernels that its last run loaded are compiled before the first test.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flashmoe import jit
from harness import nvidia_smi, result_path, write

from .collect import file_of
from .digests import ROOT, variant_of
from .plan import Shard, Unit
from .records import PLACES, Evidence

TEST_SECONDS = 300
"""One test's limit, unless it has its own."""
NVCC = Path(__file__).with_name("stored_nvcc.py")


@dataclass
class Session:
    """The runs of one machine. `commit`: of the sources; `deadline`: by `time.monotonic`, when all is to be over."""

    evidence: Evidence
    results: Path
    commit: str
    deadline: float
    work: Path
    """A folder for what goes with this session: caches, the store of kernels, what runs tell."""
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        gpus = [line.split(", ") for line in nvidia_smi("name,driver_version").splitlines()]
        if not gpus:
            raise RuntimeError("nvidia-smi: expected a GPU, found none")
        self.device, self.driver = gpus[0]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus = visible.split(",") if visible else [str(gpu) for gpu in range(len(gpus))]
        self.nvcc = jit.find_nvcc()
        self.store = Path(os.environ.get("FLASHMOE_TESTS_STORE") or self.work / "store")
        self.store.mkdir(parents=True, exist_ok=True)

    def run(self, shard: Shard) -> None:
        """What of it there is time for. Its record is written behind each file."""
        place = PLACES[shard.place]
        self._compile(shard)
        record = {
            "device": self.device + (f" x{place.gpus}" if place.gpus > 1 else ""),
            "driver": self.driver,
            "torch": version("torch"),
            "place": shard.place,
            "ranks_a_gpu": place.ranks_a_gpu,
            "commit": self.commit,
            "command": "make test-gpu",
            "ended": "",
            "seconds": 0,
            "files": {},
        }
        path: Path | None = None
        began, written = time.monotonic(), threading.Lock()

        def run_one(unit: Unit) -> None:
            nonlocal path
            if time.monotonic() + unit.seconds > self.deadline:
                print(f"  no time is left for {unit.file}, of {unit.seconds:.0f} s", flush=True)
                return
            ran = self._run(unit)
            with written:
                if ran["tests"]:
                    record["files"][unit.file] = ran
                    record["seconds"] = round(time.monotonic() - began)
                    record["ended"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                    path = path or self._new_path(place.gpus)
                    write(path, record)

        at_once = max(1, min(place.at_once, (os.cpu_count() or 1) // 4))
        with self._sharing(shard.place), ThreadPoolExecutor(at_once) as pool:
            list(pool.map(run_one, sorted(shard.units, key=lambda unit: -unit.seconds)))

    def _new_path(self, gpus: int) -> Path:
        """Of a record, which no other session has."""
        stem = f"{result_path('tests', self.device, gpus).stem}-{self.commit[:7]}"
        self.results.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = self.results / f"{stem}-{number}.json"
            with contextlib.suppress(FileExistsError):
                path.touch(exist_ok=False)
                break
        return path

    def _compile(self, shard: Shard) -> None:
        """What the last runs of these files have loaded, as many at once as there are cores."""
        names = {name for unit in shard.units for name in self.evidence.kernels_of(unit.file)}
        environment = self._environment(shard.place, "compiled") | {"FLASHMOE_TESTS_ASKED": os.devnull}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
        subprocess.run([sys.executable, "-m", "gpu_evidence.compile", *sorted(names)], cwd=ROOT, env=environment)

    def _environment(self, place: str, cache: str) -> dict[str, str]:
        folder = self.work / "caches" / cache
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        told = {
            "FLASHMOE_NVCC": str(NVCC),
            "FLASHMOE_CACHE": str(folder),
            "FLASHMOE_SHARE_GPUS": str(PLACES[place].ranks_a_gpu),
            "FLASHMOE_TESTS_NVCC": str(self.nvcc),
            "FLASHMOE_TESTS_STORE": str(self.store),
            # The references are of small matrices, and the cores are for other files and for ranks.
            **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus[: PLACES[place].gpus]),
        }
        return {**os.environ, **told}

    @contextlib.contextmanager
    def _sharing(self, place: str) -> Iterator[None]:
        """Where ranks share a GPU, NVIDIA's MPS has their kernels run side by side."""
        program = shutil.which("nvidia-cuda-mps-control")
        if PLACES[place].ranks_a_gpu == 1 or program is None:
            yield
            return
        for name in ("PIPE", "LOG"):
            os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = str(self.work / f"mps-{name.lower()}")
        everywhere = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        subprocess.run([program, "-d"], env=everywhere, check=True)
        try:
            yield
        finally:
            subprocess.run([program], input="quit\n", text=True, capture_output=True)
            for name in ("PIPE", "LOG"):
                del os.environ[f"CUDA_MPS_{name}_DIRECTORY"]

    def _run(self, unit: Unit) -> dict[str, Any]:
        """The file's part of the record."""
        name = f"{Path(unit.file).stem}-{unit.place}"
        told, asked = (self.work / f"{name}-{what}.jsonl" for what in ("told", "asked"))
        for path in (told, asked):
            path.write_text("")
        shutil.rmtree(self.work / "caches" / name, ignore_errors=True)
        environment = self._environment(unit.place, name) | {
            "FLASHMOE_TOLD": str(told),
            "FLASHMOE_PLACE": unit.place,
            "FLASHMOE_TESTS_ASKED": str(asked),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
        whole = set(unit.tests) == set(self.evidence.collected[unit.place][unit.file])
        command += [unit.file] if whole else [f"{unit.file}::{test}" for test in unit.tests]
        began = time.monotonic()
        log = self.work / f"{name}.log"
        why = self._until_the_end(command, environment, log)
        seconds = time.monotonic() - began
        ran = file_record(told.read_text().splitlines(), why)
        variants = {variant_of(json.loads(line)) for line in asked.read_text().splitlines()}
        kernels = self.evidence.tree.kernels(variants)
        counts = {each: sum(test[each] for test in ran["tests"].values()) for each in ("passed", "failed")}
        skipped = sum(sum(test["skipped"].values()) for test in ran["tests"].values())
        print(
            f"  {unit.file}, {PLACES[unit.place].title}: {counts['passed']} passed, {counts['failed']} failed, "
            f"{skipped} skipped, {seconds:.0f} s of {unit.seconds:.0f}",
            flush=True,
        )
        if ran["failures"] or why:
            self.failed += [*ran["failures"], *([f"{unit.file}: {why}"] if why else [])]
            print("\n".join(log.read_text(errors="replace").splitlines()[-40:]), flush=True)
        sources = self.evidence.sources_of(unit.file)
        return {"sources": sources, "kernels": kernels, "seconds": round(seconds, 1), **ran}

    def _until_the_end(self, command: list[str], environment: dict[str, str], log: Path) -> str:
        """Runs pytest; says what ended it before its last test, if anything did."""
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(timeout=max(1.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return "no time was left"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return "" if status in (0, 1) else f"pytest ended with status {status}"


def file_record(lines: list[str], why: str) -> dict[str, Any]:
    """Of what a run told (tests/gpu/told.py): counts of each test whose every item is over, and each failure. `why`:
    what ended the run early, which is the failure of the first item that is not over, unless that is the time."""
    told = [json.loads(line) for line in lines]
    test_of = {item: test for item, (test, *_) in told[0]["collected"].items()} if told else {}
    over = {line["test"]: line for line in told[1:]}
    left = [item for item in test_of if item not in over]
    if left and why and not why.startswith("no time"):
        over[left[0]] = {"outcome": "failed", "seconds": 0.0, "why": why}
    unfinished = {test for item, test in test_of.items() if item not in over}
    unfinished -= {test_of[item] for item, line in over.items() if line["outcome"] == "failed"}
    tests: dict[str, dict[str, Any]] = {}
    failures = {}
    for item, line in over.items():
        if (name := test_of[item]) in unfinished:
            continue
        test = tests.setdefault(name, {"passed": 0, "failed": 0, "skipped": {}, "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + line["seconds"], 2)
        if line["outcome"] == "skipped":
            reason = without_figures(line["why"])
            test["skipped"][reason] = test["skipped"].get(reason, 0) + 1
        else:
            test[line["outcome"]] += 1
        if line["outcome"] == "failed":
            failures[item.removeprefix(f"{file_of(item)}::")] = line["why"]
    return {"tests": tests, "failures": failures}


def without_figures(reason: str) -> str:
    """A reason to skip without what differs from run to run: process ids and addresses."""
    return re.sub(r"0x[0-9a-f]+|\bpid \d+", "...", reason)
