"""Facts of the kernel: registers, spills, shared memory and the instructions on it, lines, time to compile."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import FlashMoEError
from ...jit import FLAGS, Variant, compile_kernel, entry_of, find_nvcc, source_root
from .. import counters
from ..plan import Machine, Point, Suite
from ..run import Run

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32 as TF32": "float32"}
_USED = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"\b(LDS|STS|LDSM|STSM|ATOMS|UBLKCP|UTMALDG|UTMASTG|UBLKRED|LDGSTS)\b")
"""SASS instructions that read or write shared memory, or that make the copy engine (TMA) do so."""
COUNTED = (
    "smsp__sass_inst_executed_op_shared.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    counters.DURATION,
)


def points(machine: Machine) -> Iterator[Point]:
    yield Point("lines", 0, {"dtype": None})
    if not machine.small:  # each of these compiles a kernel, for minutes
        yield from (Point(name, 0, {"dtype": dtype}) for name, dtype in DTYPES.items())


def shared_points(machine: Machine) -> Iterator[Point]:
    if machine.small:
        yield Point("counters", 0, {"dtype": "float32", "counted": True})
        return
    yield from (Point(name, 0, {"dtype": dtype}) for name, dtype in DTYPES.items())
    for name, dtype in DTYPES.items() if machine.gpus else ():
        yield Point(f"{name}, counters x1", 1, {"dtype": dtype, "counted": True})


def lines() -> int:
    """The number of lines in the package's `include` and `csrc` folders, without empty lines."""
    root = source_root()
    files = [path for folder in ("include", "csrc") for path in (root / folder).rglob("*") if path.is_file()]
    return sum(bool(line.strip()) for path in files for line in path.read_text().splitlines())


def compiled(dtype: str, cubin: Path) -> tuple[str, float]:
    """What ptxas prints about the kernel for SwiGLU, and the seconds that compiling took."""
    root, variant = source_root(), Variant(dtype)
    command = [str(find_nvcc()), *variant.flags, "-Xptxas", "-v", f"-I{root / 'include'}", f"-I{root / 'csrc'}"]
    start = time.monotonic()
    done = subprocess.run([*command, str(entry_of(root, variant)), "-o", str(cubin)], capture_output=True, text=True)
    if done.returncode != 0:
        raise FlashMoEError(f"nvcc: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}")
    return done.stderr, time.monotonic() - start


def metrics(run: Run, dtype: str | None) -> dict[str, Any]:
    if dtype is None:
        count = lines()
        return {"check": run.check(float(count == 0), 0.0, "there are lines"), "values": {"lines": count}}
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        said, seconds = compiled(dtype, cubin)
        size = cubin.stat().st_size
    registers = [int(each) for each in _USED.findall(said)]
    stack, stores, loads = (sum(map(int, each)) for each in zip(*_STACK.findall(said), strict=True))
    values = {"registers": max(registers), "stack_bytes": stack, "spill_store_bytes": stores, "spill_load_bytes": loads}
    values |= {"kernels": len(registers), "seconds": seconds, "cubin_bytes": size, "flags": " ".join(FLAGS)}
    return {"check": run.check(stores + loads, 0.0, "bytes spilled"), "values": values}


def shared_memory(run: Run, dtype: str, counted: bool = False) -> dict[str, Any]:
    """Counts instructions on shared memory in the code of the kernel for SwiGLU. With `counted`, hardware counters
    count the instructions that are executed in a call of FlashDMoE's sizes."""
    return executed(run, dtype) if counted else in_code(run, dtype)


def executed(run: Run, dtype: str) -> dict[str, Any]:
    if run.engine == "cpu":
        found: list[dict[str, float]] | str = "hardware counters of a GPU: there is none"
    else:
        found = counters.read("flashmoe", {"shape": "paper-E64", "tokens": 8192, "dtype": dtype}, COUNTED)
    if isinstance(found, str):
        return {"check": run.check(0.0, 0.0, "nothing is measured"), "absent": {"counters": found}, "values": {}}
    kernel = max(found, key=lambda each: each[counters.DURATION])
    return {"check": run.check(float(len(found) != 1), 0.0, "one kernel a call"), "values": {"executed": kernel}}


def find_nvdisasm() -> Path | None:
    """nvdisasm, beside nvcc or from the PyPI package nvidia-cuda-nvdisasm."""
    beside = find_nvcc().resolve().with_name("nvdisasm")
    packages = importlib.util.find_spec("nvidia")
    folders = (packages and packages.submodule_search_locations) or ()
    installed = [path for folder in folders for path in Path(folder).glob("*/bin/nvdisasm")]
    return next((path for path in (beside, *installed) if path.is_file()), None)


def in_code(run: Run, dtype: str) -> dict[str, Any]:
    if (disassembler := find_nvdisasm()) is None:
        absent = {"instructions": "nvdisasm: not installed"}
        return {"check": run.check(0.0, 0.0, "nothing is measured"), "absent": absent, "values": {}}
    command = [str(disassembler), "-c", str(compile_kernel(Variant(dtype)).path)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    count = Counter(_SHARED.findall(sass))
    check = run.check(float(not count), 0.0, "there are such instructions")
    return {"check": check, "values": {"instructions": dict(count), "in_all": count.total()}}


METRICS = Suite(
    "metrics",
    "the kernel's registers, stack, spills, lines, seconds to compile, size; needs nvcc, but no GPU",
    ("FlashDMoE, table 6.1",),
    points,
    metrics,
)
SHARED_MEMORY = Suite(
    "shared-memory",
    "instructions on shared memory, of each type; needs nvcc and nvdisasm, but no GPU",
    ("FlashDMoE, figure A.1",),
    shared_points,
    shared_memory,
)
