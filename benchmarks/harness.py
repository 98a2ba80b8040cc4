"""What the scripts share beside `flashmoe.bench`: whole results, their rows, and versions of the package.

PyTorch is imported where it is used: what measures the CPU engine needs none. A worker that measures another version of
the package may not import this, which imports `flashmoe.bench`. What a run measured goes to `result_path`: a folder for
each kind of run, in it a file for each machine; an earlier run that docs/ cite has its commit behind the name.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashmoe.bench.origin import (
    ROOT,
    as_typed,
    commit_option,
    cpu_model,
    digest_of,
    nvidia_smi,
    result_path,
    without_machine,
    write,
)
from flashmoe.bench.shapes import SHAPES

WHOLE = tuple(name for name in SHAPES if not name.endswith("-slice") and not name.startswith("deepseek"))
"""Those that one GPU has room for beside what is compared with them, in bf16: DeepSeek's experts are in FP8."""
NVCC = ["nvcc", "-gencode", "arch=compute_90a,code=sm_90a", "-std=c++20", "-O3", f"-I{ROOT / 'include'}"]


# ---- where a figure comes from ---------------------------------------------------------------------------------------


def described(commit: str, ranks: int | None = None) -> dict[str, str]:
    """Where a result comes from; `ranks`: of the group that torchrun has started, None where there is none."""
    import torch

    group, launcher = "", "python"
    if ranks is not None:
        group, launcher = f" x{ranks}", f"torchrun --nproc-per-node {ranks}"
    return {
        "device": torch.cuda.get_device_name() + group,
        "torch": torch.__version__,
        "commit": commit,
        "command": as_typed(launcher, sys.argv),
    }


def described_on_cpu(commit: str) -> dict[str, str]:
    """The same of a result of the CPU engine."""
    import torch

    return {
        "device": f"{cpu_model()} x0",
        "torch": torch.__version__,
        "commit": commit,
        "command": as_typed("python", sys.argv),
    }


# ---- times and rows --------------------------------------------------------------------------------------------------


def sustained(
    calls: dict[str, Callable[[int], Any]], repeats: int, behind_each_other: int = 8
) -> dict[tuple[str, bool | None], list[float]]:
    """Milliseconds of each call where so many of the same are queued behind each other, by its name and None: at the
    clocks that the GPU keeps under such work, in turn. The first of a queue is not counted."""
    import torch

    timed: dict[tuple[str, bool | None], list[float]] = {(name, None): [] for name in calls}
    for turn in range(repeats):
        for name, call in list(calls.items())[:: -1 if turn % 2 else 1]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call(0)
            start.record()
            for i in range(behind_each_other):
                call(i)
            end.record()
            end.synchronize()
            timed[name, None].append(start.elapsed_time(end) / behind_each_other)
    return timed


def medians_and_spread(
    timed: Mapping[tuple[str, bool | None], list[float]], prefixes: Mapping[bool | None, str]
) -> dict[str, Any]:
    """Of each call its median and, but by the plain timer, its least and most, in milliseconds. `prefixes`: how keys
    begin, by whether the GPU was kept busy; None: with calls of the same kind."""
    row: dict[str, Any] = {}
    for (call, busy), times in timed.items():
        row[f"{prefixes[busy]}{call}_ms"] = statistics.median(times)
        if busy is not False:
            row[f"{prefixes[busy]}{call}_min_max"] = [min(times), max(times)]
    return row


def beside_floor(timed: dict[tuple[str, bool], list[float]]) -> dict[str, Any]:
    """The part of a row that says how long a layer, "fused", and its "floor" took `in_turn`."""
    median = {key: statistics.median(times) for key, times in timed.items()}
    row: dict[str, Any] = {}
    for name in ("fused", "floor"):
        row[f"{name}_ms"] = median[name, True]
        row[f"{name}_min_max"] = [min(timed[name, True]), max(timed[name, True])]
    row["ratio"] = median["fused", True] / median["floor", True]
    row |= {f"plain_{name}_ms": median[name, False] for name in ("fused", "floor")}
    row["plain_ratio"] = median["fused", False] / median["floor", False]
    return row


def profile_of(settings: list[str]) -> dict[str, int]:
    """What --profile says: name=value each, see flashmoe.Context."""
    return {name: int(value) for name, value in (each.split("=") for each in settings)}


# ---- programs of their own -------------------------------------------------------------------------------------------


def result_of_program(source: str, suite: str, described: str | None) -> dict[str, Any]:
    """What the program `source` of this folder prints on one GPU, with what is needed to reproduce it. It is built with
    nvcc, and the result is written to --out, else to the suite's folder. `described`: the script's docstring."""
    parser = argparse.ArgumentParser(description=described)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        binary = f"{folder}/program"
        subprocess.run([*NVCC, str(ROOT / "benchmarks" / source), "-o", binary], check=True)
        result = json.loads(subprocess.run([binary], check=True, capture_output=True, text=True).stdout)
    clocks = "clocks.sm,clocks.mem,clocks.max.sm,driver_version"
    result |= {
        "commit": args.commit,
        "command": as_typed("python", sys.argv),
        "nvidia_smi": {clocks: nvidia_smi(clocks)},
    }
    write(args.out or result_path(suite, result["device"], 1), result)
    return result


# ---- two versions of the package -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """A folder that holds an importable `flashmoe`: a site-packages, or what a wheel was unpacked into."""

    folder: pathlib.Path
    commit: str
    """Empty where nobody knows."""
    digest: str
    """Of the package's files: tells trees apart whatever is said of their commits."""

    @classmethod
    def at(cls, folder: pathlib.Path, commit: str = "") -> Tree:
        folder = folder.resolve()
        package = folder / "flashmoe"
        if not (package / "__init__.py").is_file():
            raise SystemExit(f"--trees: expected a folder that holds flashmoe/__init__.py, got {folder}")
        return cls(folder, commit, digest_of(package, "."))

    def environment(self) -> dict[str, str]:
        """For processes that are to import this tree's package, and keep its kernels apart from any other's."""
        caches = pathlib.Path(tempfile.gettempdir()) / f"flashmoe-kernels-{os.getuid()}" / self.digest
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        return {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "FLASHMOE_CACHE": str(caches),
            "FLASHMOE_PROFILES": str(caches / "none.json"),  # the built-in order, whatever this machine has stored
            "OPENBLAS_NUM_THREADS": "1",
        }

    def described(self) -> dict[str, str]:
        return {"folder": without_machine(str(self.folder)), "commit": self.commit, "package_sha256": self.digest}


def compile_kernels(trees: Sequence[Tree], variants: Sequence[Sequence[str]]) -> None:
    """Runs `flashmoe compile` with each of these arguments for each tree, all at once up to the cores there are."""
    from concurrent.futures import ThreadPoolExecutor

    script = "import sys; from flashmoe.cli import main; sys.exit(main(sys.argv[1:]))"

    def compile_one(job: tuple[Tree, Sequence[str]]) -> None:
        tree, arguments = job
        command = [sys.executable, "-c", script, "compile", *arguments]
        done = subprocess.run(command, env=tree.environment(), capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"flashmoe compile {' '.join(arguments)}, {tree.folder}: {done.stdout}{done.stderr}")

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, [(tree, arguments) for tree in trees for arguments in variants]))
