"""Small calls under NVIDIA's compute-sanitizer. Each of its tools has a file of tests, which can be run by itself:
together they take more than ten minutes. A part of one: ``-k "racecheck and alone"``, ``-k "racecheck and 2ranks"``."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ranks import RANKS_A_GPU, WAYS
from sanitized import FEW, KINDS, OTHERS

SCRIPT = Path(__file__).resolve().parent / "sanitized.py"
MODULES = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
"""Where it finds what it shares with the tests of the CPU engine."""
FOUND = 86
"""Exit status for what a tool found."""
LIMIT = 1800
"""Seconds; racecheck slows a kernel a thousandfold, and where warps wait long, now and then much more."""
GLOBAL_MEMORY = ("memcheck", "initcheck")
"""The tools that look at global memory, where a context's second call finds what its first has left behind. The others
look at shared memory, which no launch leaves to the next: they are shown one call."""
RELEASING = ("bfloat16", "float32", "exact", "fp8", "few", "few_fp8", "backward")
"""What racecheck looks at in a build of its own: threads load from the stages, not the tensor cores for all of them,
and of few tokens more stages than a block has room for."""
PARTS = [(kind, 1) for kind in (*KINDS, *OTHERS)] + [(way, 2) for way in (*WAYS, *FEW)]
every_part = pytest.mark.parametrize(
    "part, ranks",
    [pytest.param(*of, marks=[pytest.mark.parts, *[pytest.mark.own_gpus] * (of[1] > 1)]) for of in PARTS],
    ids=[f"{part}-{'alone' if n == 1 else f'{n}ranks'}" for part, n in PARTS],
)
"""What each run of a tool looks at, and on how many ranks."""


def sanitizer() -> str | None:
    """compute-sanitizer of PATH or of a toolkit."""
    if found := shutil.which("compute-sanitizer"):
        return found
    roots = [Path(os.environ["CUDA_HOME"])] if "CUDA_HOME" in os.environ else []
    roots += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    places = [root / folder / "compute-sanitizer" for root in roots for folder in ("bin", "compute-sanitizer")]
    return next((str(place) for place in places if place.is_file()), None)


@functools.cache
def releasing() -> dict[str, str]:
    """Variables for kernels whose threads release stages as racecheck knows it (racecheck, spec/build.h)."""
    cache = tempfile.mkdtemp(prefix="flashmoe-racecheck-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    return {"NVCC_APPEND_FLAGS": "-DFLASHMOE_RACECHECK=1", "FLASHMOE_CACHE": cache}


def sanitize(tool: str, part: str, ranks: int) -> None:
    """Fails with what the tool has found; skips where it cannot run."""
    program = sanitizer()
    if program is None:
        pytest.skip(f"{tool}: no compute-sanitizer on this machine")
    if (here := torch.cuda.device_count() * RANKS_A_GPU) < ranks:
        pytest.skip(f"{tool}: room for {ranks} ranks needed, {here} here")
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND)]
    if tool != "initcheck":  # PyTorch's own kernels are none of ours, and slow; initcheck must see them write x
        command += ["--kernel-regex", "kns=flashmoe_"]
    if tool == "memcheck" and ranks > 1:  # NVSHMEM asks the driver for symbols that a module need not have
        command += ["--report-api-errors", "no"]
    command += [sys.executable, str(SCRIPT), part, "2" if tool in GLOBAL_MEMORY else "1"]
    # Without PyTorch's cache, an access beyond a tensor is one beyond its allocation.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool in GLOBAL_MEMORY else {}
    environment = {
        **os.environ,
        "PYTHONPATH": MODULES,
        **uncached,
        **(releasing() if tool == "racecheck" and part in RELEASING else {}),
    }

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        of_group = [] if ranks == 1 else [str(rank), str(ranks), f"sanitized-{os.getpid()}"]
        return subprocess.run(
            [*command, *of_group],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT,
        )

    with ThreadPoolExecutor(ranks) as pool:
        done = list(pool.map(run, range(ranks)))
    if any("Device not supported" in each.stdout for each in done):
        pytest.skip(f"{tool}: compute-sanitizer does not support this machine's device")
    for rank, each in enumerate(done):
        tail = f"rank {rank}:\n" + "\n".join(each.stdout.splitlines()[-60:])
        assert each.returncode == 0, tail
        assert "all calls are right" in each.stdout, tail
