"""Runs shards of GPU tests, and leaves a record of each.

Each file of tests runs in a process of its own, so that a file that breaks its process does not disturb others. It also
has a kernel cache of its own, which is empty at first, so that each kernel that it loads is asked of the compiler
(stored_nvcc.py), and can be recorded. Before the first test of a shard, the kernels that its files loaded in their last
runs are compiled into a store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flashmoe import jit
from flashmoe.bench.origin import nvidia_smi, result_path, write

from .collect import file_of
from .digests import ROOT, variant_of
from .plan import Shard, Unit
from .records import PLACES, Evidence

TEST_SECONDS = 300
"""The most seconds that a test may take, unless the test sets its own limit."""
NVCC = Path(__file__).with_name("stored_nvcc.py")


@dataclass
class Session:
    """Runs of tests on this machine. `commit` is that of the sources. At `deadline`, by `time.monotonic`, all runs must
    be over."""

    evidence: Evidence
    results: Path
    commit: str
    deadline: float
    work: Path
    """A folder for files that are deleted after the session: caches, the store of kernels, reports of runs, logs."""
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        gpus = [line.split(", ") for line in nvidia_smi("name,driver_version").splitlines()]
        if not gpus:
            raise RuntimeError("nvidia-smi: expected a GPU, found none")
        self.device, self.driver = gpus[0]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus = visible.split(",") if visible else [str(gpu) for gpu in range(len(gpus))]
        # The compiler that `NVCC` calls. FLASHMOE_TESTS_NVCC comes first: if another session has started this one,
        # jit.find_nvcc() returns `NVCC` itself.
        self.nvcc = os.environ.get("FLASHMOE_TESTS_NVCC") or jit.find_nvcc()
        self.store = Path(os.environ.get("FLASHMOE_TESTS_STORE") or self.work / "store")
        self.store.mkdir(parents=True, exist_ok=True)
        self._sharing, self._files = threading.Lock(), itertools.count()

    def run(self, shards: Sequence[Shard]) -> None:
        """Runs the shards, as far as there is time: first those that need one GPU, on all GPUs at once, then those that
        need several GPUs."""
        free: queue.Queue[str] = queue.Queue()
        for gpu in self.gpus:
            free.put(gpu)

        def on_one(shard: Shard) -> None:
            gpu = free.get()
            try:
                self._run_shard(shard, [gpu])
            finally:
                free.put(gpu)

        with ThreadPoolExecutor(len(self.gpus)) as pool:
            list(pool.map(on_one, (shard for shard in shards if PLACES[shard.place].gpus == 1)))
        for shard in shards:
            if (gpus := PLACES[shard.place].gpus) > 1:
                self._run_shard(shard, self.gpus[:gpus])

    def _run_shard(self, shard: Shard, gpus: list[str]) -> None:
        """Runs one shard. Its record is written again after each file."""
        place = PLACES[shard.place]
        environment = self._environment(shard.place, gpus)
        self._compile(shard, environment)
        record = Record(self, shard.place)

        def run_unit(unit: Unit) -> None:
            if time.monotonic() + unit.seconds > self.deadline:
                print(f"  no time is left for {unit.file}, of {unit.seconds:.0f} s", flush=True)
            elif (ran := self._run_unit(unit, environment))["tests"]:
                record.add(unit.file, ran)

        at_once = max(1, min(place.at_once, (os.cpu_count() or 1) // len(self.gpus) // 2))
        with contextlib.ExitStack() as stack:
            if place.ranks_a_gpu > 1:
                stack.enter_context(self._sharing)  # one shard at a time, because there is only one MPS daemon
                environment |= stack.enter_context(mps(self.work))
            pool = stack.enter_context(ThreadPoolExecutor(at_once))
            list(pool.map(run_unit, sorted(shard.units, key=lambda unit: -unit.seconds)))

    def _compile(self, shard: Shard, environment: dict[str, str]) -> None:
        """Compiles the kernels that the last runs of the shard's files loaded, as many at once as there are cores."""
        names = {name for unit in shard.units for name in self.evidence.kernels_of(unit.file)}
        path = os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
        environment = environment | {"PYTHONPATH": path, "FLASHMOE_TESTS_ASKED": os.devnull} | self._cache("compiled")
        subprocess.run([sys.executable, "-m", "gpu_evidence.compile", *sorted(names)], cwd=ROOT, env=environment)

    def _environment(self, place: str, gpus: list[str]) -> dict[str, str]:
        told = {
            "FLASHMOE_NVCC": str(NVCC),
            "FLASHMOE_PLACE": place,
            "FLASHMOE_SHARE_GPUS": str(PLACES[place].ranks_a_gpu),
            "FLASHMOE_TESTS_NVCC": str(self.nvcc),
            "FLASHMOE_TESTS_STORE": str(self.store),
            # One thread each: the references' matrices are small, and other files and ranks need the cores.
            **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        }
        return {**os.environ, **told}

    def _cache(self, name: str) -> dict[str, str]:
        """The environment variable for a kernel cache with that name."""
        folder = self.work / "caches" / name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return {"FLASHMOE_CACHE": str(folder)}

    def _run_unit(self, unit: Unit, environment: dict[str, str]) -> dict[str, Any]:
        """Runs a unit. Returns the record's entry for its file."""
        name = f"{next(self._files)}-{Path(unit.file).stem}"
        told, asked = (self.work / f"{name}-{what}.jsonl" for what in ("told", "asked"))
        for path in (told, asked):
            path.write_text("")
        own = {"FLASHMOE_TOLD": str(told), "FLASHMOE_TESTS_ASKED": str(asked)} | self._cache(name)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
        whole = set(unit.tests) == set(self.evidence.collected[unit.place][unit.file])
        command += [unit.file] if whole else [f"{unit.file}::{test}" for test in unit.tests]
        began = time.monotonic()
        log = self.work / f"{name}.log"
        why = self._until_the_end(command, environment | own, log)
        seconds = time.monotonic() - began
        ran = file_record(told.read_text().splitlines(), why)
        self._say(unit, ran, seconds)
        if ran["failures"] or why:
            self.failed += [f"{unit.file}::{test}" for test in ran["failures"]]
            self.failed += [f"{unit.file}: {why}"] if why else []
            print("\n".join(log.read_text(errors="replace").splitlines()[-40:]), flush=True)
        variants = {variant_of(json.loads(line)) for line in asked.read_text().splitlines()}
        of = {"sources": self.evidence.sources_of(unit.file), "kernels": self.evidence.tree.kernels(variants)}
        return {**of, "seconds": round(seconds, 1), **ran}

    @staticmethod
    def _say(unit: Unit, ran: dict[str, Any], seconds: float) -> None:
        counts = [sum(test[each] for test in ran["tests"].values()) for each in ("passed", "failed")]
        counts.append(sum(sum(test["skipped"].values()) for test in ran["tests"].values()))
        said = "{} passed, {} failed, {} skipped".format(*counts)
        where = f"{unit.file}, {PLACES[unit.place].title}"
        print(f"  {where}: {said}, {seconds:.0f} s of {unit.seconds:.0f}", flush=True)

    def _until_the_end(self, command: list[str], environment: dict[str, str], log: Path) -> str:
        """Runs pytest. If it ended before its last test, returns why; else an empty text."""
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


class Record:
    """The record of a shard, as far as it has run. The record's file is made when the first unit has run."""

    def __init__(self, session: Session, place: str) -> None:
        gpus = PLACES[place].gpus
        self._said: dict[str, Any] = {
            "device": session.device + (f" x{gpus}" if gpus > 1 else ""),
            "driver": session.driver,
            "torch": version("torch"),
            "place": place,
            "ranks_a_gpu": PLACES[place].ranks_a_gpu,
            "commit": session.commit,
            "command": "make test-gpu",
            "ended": "",
            "seconds": 0,
            "files": {},
        }
        stem = f"{result_path('tests', session.device, gpus).stem}-{session.commit[:7]}"
        self._folder, self._stem, self._path = session.results, stem, None
        self._began, self._lock = time.monotonic(), threading.Lock()

    def add(self, file: str, ran: dict[str, Any]) -> None:
        """Adds the results of a unit, and writes the record. Results of several units of one file are joined."""
        with self._lock:
            if (before := self._said["files"].get(file)) is not None:
                ran = ran | {each: before[each] | ran[each] for each in ("kernels", "tests", "failures")}
                ran["seconds"] = round(before["seconds"] + ran["seconds"], 1)
            self._said["files"][file] = ran
            self._said["seconds"] = round(time.monotonic() - self._began)
            self._said["ended"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self._path = self._path or self._new_path()
            write(self._path, self._said)

    def _new_path(self) -> Path:
        """A path that no other record has, also not one of another session."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = self._folder / f"{self._stem}-{number}.json"
            with contextlib.suppress(FileExistsError):
                path.touch(exist_ok=False)
                break
        return path


@contextlib.contextmanager
def mps(work: Path) -> Iterator[dict[str, str]]:
    """Starts NVIDIA's MPS, under which kernels of ranks that share a GPU run side by side, and yields the environment
    variables for these ranks. Without MPS, their kernels take turns, and there are no variables."""
    if (program := shutil.which("nvidia-cuda-mps-control")) is None:
        yield {}
        return
    told = {f"CUDA_MPS_{name}_DIRECTORY": str(work / f"mps-{name.lower()}") for name in ("PIPE", "LOG")}
    of_all_gpus = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    subprocess.run([program, "-d"], env=of_all_gpus | told, check=True)
    try:
        yield told
    finally:
        subprocess.run([program], input="quit\n", text=True, capture_output=True, env={**os.environ, **told})


def file_record(lines: list[str], why: str) -> dict[str, Any]:
    """The record's entry for what a run has reported (tests/gpu/told.py): the counts of each test whose items have all
    ended or of which one has failed, and each failure. `why`: what ended the run early. Then the first item that has
    not ended counts as failed for this reason, unless the time ran out."""
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
    """A reason for skipping a test, without the parts that differ from run to run: process ids and addresses."""
    return re.sub(r"0x[0-9a-f]+|\bpid \d+", "...", reason)
