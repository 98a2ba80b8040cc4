"""Small calls under NVIDIA's compute-sanitizer. Each of its tools has its own file of tests, so that it can be run by
itself, because all of them together take more than ten minutes. Options of pytest select a part of a tool's tests:
``-k "racecheck and alone"``, ``-k "racecheck and 2ranks"``."""

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
"""PYTHONPATH of sanitized.py: it imports modules of tests/ that the tests of the CPU engine use too."""
FOUND = 86
"""The exit status of compute-sanitizer if the tool has found an error."""
LIMIT = 1800
"""Timeout of a run, in seconds. racecheck makes a kernel a thousand times slower, and sometimes much slower than that
if warps wait long."""
GLOBAL_MEMORY = ("memcheck", "initcheck")
"""The tools that check global memory. They get two calls of each context, because the second call finds there what the
first has left. The other tools check shared memory, which no launch leaves to the next, so they get one call."""
RELEASING = ("bfloat16", "float32", "exact", "fp8", "few", "few_fp8", "backward")
"""The parts that racecheck checks in a build of its own (see `releasing`). In their kernels, threads themselves read
the stages. Those with the kernel for a few tokens need more stages than a block has, so that stages are overwritten."""
PARTS = [(kind, 1) for kind in (*KINDS, *OTHERS)] + [(way, 2) for way in (*WAYS, *FEW)]
every_part = pytest.mark.parametrize(
    "part, ranks",
    [pytest.param(*of, marks=[pytest.mark.parts, *[pytest.mark.own_gpus] * (of[1] > 1)]) for of in PARTS],
    ids=[f"{part}-{'alone' if n == 1 else f'{n}ranks'}" for part, n in PARTS],
)
"""Parametrises a test by `part`, which a tool checks in one run (a kind of layer if there is one rank, otherwise a way
or one of FEW), and by `ranks`, the number of ranks."""


def sanitizer() -> str | None:
    """The path of compute-sanitizer, in PATH or in a CUDA toolkit; None: there is none."""
    if found := shutil.which("compute-sanitizer"):
        return found
    roots = [Path(os.environ["CUDA_HOME"])] if "CUDA_HOME" in os.environ else []
    roots += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    places = [root / folder / "compute-sanitizer" for root in roots for folder in ("bin", "compute-sanitizer")]
    return next((str(place) for place in places if place.is_file()), None)


@functools.cache
def releasing() -> dict[str, str]:
    """Environment variables with which kernels are compiled with the option `racecheck` (spec/build.h), into a cache of
    their own: each thread says for itself that it has read a stage."""
    cache = tempfile.mkdtemp(prefix="flashmoe-racecheck-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    return {"NVCC_APPEND_FLAGS": "-DFLASHMOE_RACECHECK=1", "FLASHMOE_CACHE": cache}


def sanitize(tool: str, part: str, ranks: int) -> None:
    """Runs the part under the tool on all ranks. Fails with the end of a rank's output if the tool finds an error or a
    result is wrong; skips the test if the tool cannot run on this machine."""
    program = sanitizer()
    if program is None:
        pytest.skip(f"{tool}: no compute-sanitizer on this machine")
    if (here := torch.cuda.device_count() * RANKS_A_GPU) < ranks:
        pytest.skip(f"{tool}: room for {ranks} ranks needed, {here} here")
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND)]
    if tool != "initcheck":  # omits PyTorch's kernels, which would be slow; initcheck must see how they write x
        command += ["--kernel-regex", "kns=flashmoe_"]
    if tool == "memcheck" and ranks > 1:  # NVSHMEM asks the driver for symbols that a module may lack: no errors
        command += ["--report-api-errors", "no"]
    command += [sys.executable, str(SCRIPT), part, "2" if tool in GLOBAL_MEMORY else "1"]
    # Without PyTorch's cache, each tensor is an allocation of its own, so the tool sees an access beyond a tensor.
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
