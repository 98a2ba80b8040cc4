"""What scripts of this folder share in addition to `flashmoe.bench`: results, their rows, and versions of the package.

PyTorch is imported only inside functions, because scripts that measure the CPU engine need no PyTorch. A worker that
measures another version of the package may not import this file, because it imports `flashmoe.bench`. Results are
written to `result_path`: there is a folder for each kind of run, and in it a file for each machine. Files of earlier
runs that pages of docs/ cite have their commit behind the name.
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
"""The shapes of whole layers that fit on one GPU in bf16, together with what they are compared with. DeepSeek's are not
among them: their experts are in FP8."""
NVCC = ["nvcc", "-gencode", "arch=compute_90a,code=sm_90a", "-std=c++20", "-O3", f"-I{ROOT / 'include'}"]


# ---- where a figure comes from ---------------------------------------------------------------------------------------


def described(commit: str, ranks: int | None = None) -> dict[str, str]:
    """Where a result comes from. `ranks`: how many ranks torchrun has started; None if there is no group."""
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
    """Where a result of the CPU engine comes from."""
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
    """Milliseconds of each call if so many calls of its kind are queued behind each other, so that the GPU has the
    clocks that it keeps under such work. The keys are the call's name and None. The kinds take turns. One more call
    goes first, and is not counted."""
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
    """Each call's median time and, except by the plain timer, its smallest and largest time, in milliseconds.
    `prefixes`: how the keys begin. True: the GPU was kept busy with other work; False: it was not (the plain timer);
    None: it was kept busy with calls of the same kind."""
    row: dict[str, Any] = {}
    for (call, busy), times in timed.items():
        row[f"{prefixes[busy]}{call}_ms"] = statistics.median(times)
        if busy is not False:
            row[f"{prefixes[busy]}{call}_min_max"] = [min(times), max(times)]
    return row


def beside_floor(timed: dict[tuple[str, bool], list[float]]) -> dict[str, Any]:
    """The part of a row that says how long a layer ("fused") and its "floor" took, and their ratio. `timed` is what
    `in_turn` returns."""
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
    """The profile that the option --profile gives as a list of name=value, see flashmoe.Context."""
    return {name: int(value) for name, value in (each.split("=") for each in settings)}


# ---- CUDA programs of this folder ------------------------------------------------------------------------------------


def result_of_program(source: str, suite: str, described: str | None) -> dict[str, Any]:
    """Builds the program `source` of this folder with nvcc and runs it on one GPU. Returns the result that it prints,
    with what is needed to reproduce it, and writes this to --out, by default to the suite's folder. `described`: the
    script's docstring."""
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
    """The commit of the sources from which the tree was made; empty if it is not known."""
    digest: str
    """A digest of the package's files. It tells trees apart even if the given commits are wrong."""

    @classmethod
    def at(cls, folder: pathlib.Path, commit: str = "") -> Tree:
        folder = folder.resolve()
        package = folder / "flashmoe"
        if not (package / "__init__.py").is_file():
            raise SystemExit(f"--trees: expected a folder that holds flashmoe/__init__.py, got {folder}")
        return cls(folder, commit, digest_of(package, "."))

    def environment(self) -> dict[str, str]:
        """The environment of processes that import this tree's package. Its compiled kernels have a folder of their
        own, apart from those of other versions."""
        caches = pathlib.Path(tempfile.gettempdir()) / f"flashmoe-kernels-{os.getuid()}" / self.digest
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        return {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "FLASHMOE_CACHE": str(caches),
            "FLASHMOE_PROFILES": str(caches / "none.json"),  # no such file: the built-in order of tasks
            "OPENBLAS_NUM_THREADS": "1",
        }

    def described(self) -> dict[str, str]:
        return {"folder": without_machine(str(self.folder)), "commit": self.commit, "package_sha256": self.digest}


def compile_kernels(trees: Sequence[Tree], variants: Sequence[Sequence[str]]) -> None:
    """Runs `flashmoe compile` with each of these lists of arguments for each tree, as many at once as there are
    cores."""
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
