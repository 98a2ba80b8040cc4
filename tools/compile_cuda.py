"""Compile every CUDA source for Hopper and refuse what would be slow without failing.

    python tools/compile_cuda.py [--every] [--record FOLDER [--minutes M] [--jobs N]]
    python tools/compile_cuda.py [--every] --record FOLDER --list

No GPU is needed. The layer's kernels are compiled as on first use (python/flashmoe/jit.py): for each type, exact
float32, transposed weights, experts in FP8 and MXFP4, few tokens alone and in groups, forward passes that keep what
gradients need, and backward passes, with the activations that differ most; traced; for several machines; and, to put to
other ranks, with NVSHMEM's headers of two releases (tools/nvshmem_headers.py). `--every`: each instance of plain
layers, of training and of few tokens, and more of the other kinds: some 1180 compilations of up to four minutes each, a
night of 8 cores. A kernel that spills registers, keeps a stack frame, whose wgmma instructions ptxas serializes, or
that lacks one of the instructions it is built on (`Unit.required`) still computes the right result, only far slower; so
each of these is an error here. What is compiled and the compiler's output go to build-cuda/.

nvcc is taken from $CUDA_HOME or PATH, else from the PyPI package nvidia-cuda-nvcc in this Python environment; nvdisasm
from the folder of nvcc, else from the PyPI package nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nvshmem_headers
from cuda_units import Unit, units
from flashmoe import jit
from flashmoe.bench.origin import as_typed, commit_option, cpu_model, result_path
from gpu_evidence.digests import Tree
from instance_records import Instance, Record, Standing, instance, read, standing

ROOT = Path(__file__).resolve().parent.parent

OUTPUT = ROOT / "build-cuda"
CHECKS = [
    *("-Xptxas", "-v", "-Werror", "all-warnings"),
    *("-I", str(ROOT / "include"), "-I", str(ROOT / "csrc")),
]
NICE = 10
"""What is recorded runs behind the machine's other work."""
INSTALL_NVDISASM = "pip install nvidia-cuda-nvdisasm"

# What nvshmemx_cumodule_init looks for in a module, by these names.
RDMA_SYMBOLS = ("nvshmemi_device_state_d", "nvshmemi_device_lib_version_d")

# C7508, C7509, C7510 and their kin: setmaxnreg ignored, wgmma serialized.
ADVISORY = re.compile(r"\(C75\d\d\).*|Potential Performance Loss.*")
PROPERTIES = re.compile(r"Function properties for (\S+)")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SMEM = re.compile(r"(\d+) bytes smem")
OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", re.MULTILINE)


@dataclass
class Function:
    """What ptxas reports of one kernel, or of one device function that was not inlined."""

    symbol: str
    registers: int | None = None  # None: a device function, counted in its callers
    smem: int = 0  # static shared memory
    stack: int = 0
    spills: int = 0  # bytes stored and loaded

    @property
    def faults(self) -> list[str]:
        faults = []
        if self.spills:
            faults.append(f"spills {self.spills} bytes")
        if self.stack:
            faults.append(f"keeps a stack frame of {self.stack} bytes")
        return faults


def find_nvcc() -> Path | None:
    """The machine's nvcc, else the one that pip installed."""
    if home := os.environ.get("CUDA_HOME"):
        return Path(home) / "bin" / "nvcc"
    if found := shutil.which("nvcc"):
        return Path(found)
    return installed("nvcc")


def find_nvdisasm(nvcc: Path) -> Path | None:
    """That of the toolkit which `nvcc` belongs to, else the one that pip installed."""
    beside = nvcc.resolve().with_name("nvdisasm")
    return beside if beside.exists() else installed("nvdisasm")


def installed(program: str) -> Path | None:
    """A program of one of NVIDIA's PyPI packages."""
    return next(Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/bin/{program}"), None)


def parse(log: str) -> tuple[list[Function], list[str]]:
    """Functions and advisories in the output of `ptxas -v`."""
    functions: list[Function] = []
    advisories = []
    for line in log.splitlines():
        if match := ADVISORY.search(line):
            advisories.append(match[0])
        elif match := PROPERTIES.search(line):
            functions.append(Function(match[1]))
        elif functions and (match := STACK.search(line)):
            functions[-1].stack = int(match[1])
            functions[-1].spills = int(match[2]) + int(match[3])
        elif functions and (match := USED.search(line)):
            functions[-1].registers = int(match[1])
            if smem := SMEM.search(line):
                functions[-1].smem = int(smem[1])
    return functions, advisories


def readable(symbols: list[str]) -> list[str]:
    """Kernel names without mangling, parameters and return type, where c++filt is there to help."""
    if not symbols or not shutil.which("c++filt"):
        return symbols
    names = subprocess.run(
        ["c++filt", "--no-params", *symbols], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [name.removeprefix("void ") for name in names]


@dataclass(frozen=True)
class Compiled:
    """What became of a unit."""

    log: str
    """nvcc's output."""
    failure: str = ""
    """What failed and how; empty: nothing did."""
    opcodes: Counter[str] = field(default_factory=Counter)
    """Of a layer's kernel: how often each instruction occurs, without modifiers."""


def compile_unit(nvcc: Path, nvdisasm: Path, unit: Unit) -> Compiled:
    """Compile one of them, and disassemble a layer's kernel."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9=]+", "-", unit.title)
    if unit.variant:
        flags, output = unit.variant.flags, OUTPUT / f"{name}.cubin"
    else:
        flags, output = ["-c", *(flag for flag in jit.FLAGS if flag != "-cubin")], OUTPUT / f"{name}.o"
    folders = ["-isystem", str(nvshmem_headers.folder(unit.nvshmem))] if unit.nvshmem else []
    command = [str(nvcc), *flags, *CHECKS, *folders, str(unit.source), "-o", str(output)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (OUTPUT / f"{name}.log").write_text(done.stdout)
    if done.returncode:
        return Compiled(done.stdout, f"nvcc exited with {done.returncode}")
    if unit.variant is None:
        return Compiled(done.stdout)
    image = output.read_bytes()
    lacking = [name for name in RDMA_SYMBOLS if unit.nvshmem and f"\0{name}\0".encode() not in image]
    if lacking:
        return Compiled(done.stdout, f"no symbol {' and no '.join(lacking)}")
    # Code alone and without data flow analysis: a second or two.
    sass = subprocess.run([str(nvdisasm), "-c", "-ndf", str(output)], capture_output=True, text=True)
    if sass.returncode:
        return Compiled(done.stdout, f"nvdisasm exited with {sass.returncode}: {sass.stderr.strip()}")
    return Compiled(done.stdout, opcodes=Counter(OPCODE.findall(sass.stdout)))


def faults_of(unit: Unit, compiled: Compiled) -> list[str]:
    """Why a unit is refused; empty: it is not."""
    if compiled.failure:
        return [compiled.failure]
    functions, advisories = parse(compiled.log)
    faults = [f"ptxas: {advisory}" for advisory in advisories]
    faults += [f"no {opcode} instruction" for opcode in unit.required if not compiled.opcodes[opcode]]
    for function, name in zip(functions, readable([f.symbol for f in functions]), strict=True):
        faults += [f"{name} {fault}" for fault in function.faults]
    return faults


def report(unit: Unit, compiled: Compiled) -> int:
    """Print one unit's table; returns the number of faults."""
    print(f"\n{unit.title}")
    functions, _ = parse(compiled.log)
    if compiled.failure:
        print(compiled.log.rstrip())
    elif functions:
        print(f"  {'registers':>9} {'smem':>7} {'stack':>6} {'spills':>7}  kernel")
        for function, name in zip(functions, readable([f.symbol for f in functions]), strict=True):
            registers = "-" if function.registers is None else function.registers
            print(f"  {registers:>9} {function.smem:>7} {function.stack:>6} {function.spills:>7}  {name}")
    if unit.required and not compiled.failure:
        print("  " + ", ".join(f"{compiled.opcodes[opcode]} {opcode}" for opcode in unit.required))
    faults = faults_of(unit, compiled)
    for fault in faults:
        print(f"  FAILED: {fault}")
    return len(faults)


def entry(unit: Unit, compiled: Compiled, digest: str) -> dict[str, Any]:
    """What a record has of a unit: the most registers and the largest stack of its functions, and all their spills."""
    functions, _ = parse(compiled.log)
    return {
        "digest": digest,
        "registers": max((each.registers for each in functions if each.registers is not None), default=None),
        "spills": sum(each.spills for each in functions),
        "stack": max((each.stack for each in functions), default=0),
        "faults": faults_of(unit, compiled),
    }


@dataclass(frozen=True)
class Toolkit:
    """What units are compiled and looked at with."""

    nvcc: Path
    nvdisasm: Path

    @property
    def release(self) -> str:
        """Of nvcc."""
        version = subprocess.run([self.nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"release [^\n]*", version)
        return found[0] if found else "(version unknown)"

    def compile(self, todo: Sequence[Unit], jobs: int, end: float) -> Iterator[tuple[Unit, Compiled]]:
        """Each as it ends, so many at a time. `end`: by `time.monotonic`, when none is begun any more."""

        def one(unit: Unit) -> Compiled | None:
            return compile_unit(self.nvcc, self.nvdisasm, unit) if time.monotonic() < end else None

        with ThreadPoolExecutor(jobs) as pool:
            begun = {pool.submit(one, unit): unit for unit in todo}
            try:
                for future in as_completed(begun):
                    if (compiled := future.result()) is not None:
                        yield begun[future], compiled
            finally:
                pool.shutdown(cancel_futures=True)


def toolkit(todo: Sequence[Unit]) -> Toolkit | int:
    """That of this machine; without one, the status that this ends with, which it has said why."""
    nvcc = find_nvcc()
    if nvcc is None:
        names = ", ".join(unit.title for unit in todo)
        if os.environ.get("CI"):
            print(f"FAILED: no nvcc to compile {names}. Install one:\n    {jit.INSTALL}", file=sys.stderr)
            return 1
        print(f"SKIPPED, no nvcc: {names}. To compile them:\n    {jit.INSTALL}")
        return 0
    nvdisasm = find_nvdisasm(nvcc)
    if nvdisasm is None:
        print(f"FAILED: no nvdisasm to look at the kernels with. Install one:\n    {INSTALL_NVDISASM}", file=sys.stderr)
        return 1
    return Toolkit(nvcc, nvdisasm)


def with_headers(todo: Sequence[Unit]) -> list[Unit] | None:
    """Those that can be compiled; None where all have to be."""
    without = [unit for unit in todo if unit.nvshmem and not nvshmem_headers.folder(unit.nvshmem).exists()]
    if not without:
        return list(todo)
    what = f"no headers of NVSHMEM for {', '.join(unit.title for unit in without)}. To fetch them:"
    what += "\n    python tools/nvshmem_headers.py"
    if os.environ.get("CI"):
        print(f"FAILED: {what}", file=sys.stderr)
        return None
    print(f"SKIPPED, {what}")
    return [unit for unit in todo if unit not in without]


def compile_all(tools: Toolkit, todo: Sequence[Unit], jobs: int) -> int:
    """Says of each, in this order, what became of it; the number of faults."""
    compiled = dict(tools.compile(todo, jobs, math.inf))
    return sum(report(unit, compiled[unit]) for unit in todo)


def compile_recorded(tools: Toolkit, todo: Sequence[Unit], args: argparse.Namespace) -> int:
    """Compiles what the records lack, and says of each as it ends; the number of those with faults, of earlier runs
    too."""
    os.nice(NICE)
    instances = instances_of(todo)
    unit_of = {each.name: unit for unit, each in instances.items()}
    left = standing(instances.values(), read(args.record), tools.release).todo
    device = f"{cpu_model()} x0"
    path = args.record / f"{result_path(args.record.name, cpu_model(), 0).stem}-{args.commit[:7]}.json"
    origin = {"device": device, "commit": args.commit, "nvcc": tools.release}
    record = Record(path, origin, as_typed("python", sys.argv))
    end = time.monotonic() + 60 * args.minutes
    for unit, compiled in tools.compile([unit_of[name] for name in left], args.jobs, end):
        report(unit, compiled)
        if instances_of([unit])[unit] == instances[unit]:
            record.add(instances[unit].name, entry(unit, compiled, instances[unit].digest))
        else:
            print("  not recorded: its sources have changed since this began")
        sys.stdout.flush()
    return said(standing(instances.values(), read(args.record), tools.release))


def instances_of(todo: Sequence[Unit]) -> dict[Unit, Instance]:
    """Of the sources as they are now."""
    tree = Tree(ROOT)
    return {each: instance(tree, each.of, each.nvshmem) for each in todo}


def said(found: Standing) -> int:
    """Prints it; the number of instances with faults."""
    for name, faults in found.faulty.items():
        print(f"FAILED: {name}: {'; '.join(faults)}")
    print(found)
    return len(found.faulty)


def asked(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true", help="all instances, not those alone that tell most")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="go on with its records, and leave one there")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after so many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many are compiled at a time")
    parser.add_argument("--list", action="store_true", help="say what the records have, and compile nothing")
    commit_option(parser)
    args = parser.parse_args(arguments)
    if args.record is None and (args.list or args.minutes < math.inf):
        parser.error("--list and --minutes: expected --record with it")
    if args.record and not args.list and not args.commit:
        parser.error("--commit: expected the commit, which git does not tell here")
    return args


def main(arguments: Sequence[str] = ()) -> int:
    args = asked(arguments)
    todo = units(args.every)
    if args.list:
        return 1 if said(standing(instances_of(todo).values(), read(args.record))) else 0
    tools = toolkit(todo)
    if isinstance(tools, int):
        return tools
    there = with_headers(todo)
    if there is None:
        return 1
    print(f"nvcc {tools.release}")
    if args.record:
        return 1 if compile_recorded(tools, there, args) else 0
    faults = compile_all(tools, there, args.jobs)
    print(f"\ncompiled for sm_90a: {len(there)}, faults: {faults}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
