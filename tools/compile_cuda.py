"""Compile every CUDA source for Hopper, and fail for kernels that would give right results but be slow.

    python tools/compile_cuda.py [--every] [--record FOLDER [--minutes M] [--jobs N]]
    python tools/compile_cuda.py [--every] --record FOLDER --list

No GPU is needed. The layer's kernels are compiled as on first use (python/flashmoe/jit.py), with the activations that
differ most: for each type, exact float32, transposed weights, experts in FP8 and MXFP4, few tokens alone and in groups,
forward passes that keep what gradients need, and backward passes. Some are also compiled with traces, some for several
machines, and some with NVSHMEM's puts, with the headers of two releases (tools/nvshmem_headers.py). `--every` compiles
all instances of plain layers, of training and of few tokens, and more of the other kinds: some 1180 compilations of up
to four minutes each, which take 8 cores a night. Four faults leave a kernel's results right but make it far slower, so
each of them is an error here: it spills registers; it keeps a stack frame; ptxas serializes its wgmma instructions; or
it lacks an instruction on which its speed depends (`Unit.required`). Compiled files and the compiler's output go to
build-cuda/.

nvcc is taken from $CUDA_HOME or PATH, else from the PyPI package nvidia-cuda-nvcc in this Python environment. nvdisasm
is taken from the folder of nvcc, else from the PyPI package nvidia-cuda-nvdisasm.
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
"""How much a run with --record lowers its priority, so that the machine's other work goes first."""
INSTALL_NVDISASM = "pip install nvidia-cuda-nvdisasm"

# The symbols that NVSHMEM's nvshmemx_cumodule_init looks for in a kernel's module.
RDMA_SYMBOLS = ("nvshmemi_device_state_d", "nvshmemi_device_lib_version_d")

# ptxas's advisories C7508, C7509, C7510 and similar ones: setmaxnreg is ignored, or wgmma is serialized.
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
    registers: int | None = None  # None: a device function, whose registers its callers' numbers include
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
    """The nvdisasm in the folder of `nvcc`, else the one that pip installed."""
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
    """The kernels' names without mangling, parameters and return type; the symbols as they are if there is no
    c++filt."""
    if not symbols or not shutil.which("c++filt"):
        return symbols
    names = subprocess.run(
        ["c++filt", "--no-params", *symbols], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [name.removeprefix("void ") for name in names]


@dataclass(frozen=True)
class Compiled:
    """The outcome of compiling a unit."""

    log: str
    """nvcc's output."""
    failure: str = ""
    """Which program failed and how; empty: none failed."""
    opcodes: Counter[str] = field(default_factory=Counter)
    """How often each instruction (without its modifiers) occurs in a kernel of the layer."""


def compile_unit(nvcc: Path, nvdisasm: Path, unit: Unit) -> Compiled:
    """Compile a unit. If it is one of the layer's kernels, also disassemble it."""
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
    # Only code, and no analysis of data flow, so that nvdisasm takes only a second or two.
    sass = subprocess.run([str(nvdisasm), "-c", "-ndf", str(output)], capture_output=True, text=True)
    if sass.returncode:
        return Compiled(done.stdout, f"nvdisasm exited with {sass.returncode}: {sass.stderr.strip()}")
    return Compiled(done.stdout, opcodes=Counter(OPCODE.findall(sass.stdout)))


def faults_of(unit: Unit, compiled: Compiled) -> list[str]:
    """What is wrong with a compiled unit; empty: nothing."""
    if compiled.failure:
        return [compiled.failure]
    functions, advisories = parse(compiled.log)
    faults = [f"ptxas: {advisory}" for advisory in advisories]
    faults += [f"no {opcode} instruction" for opcode in unit.required if not compiled.opcodes[opcode]]
    for function, name in zip(functions, readable([f.symbol for f in functions]), strict=True):
        faults += [f"{name} {fault}" for fault in function.faults]
    return faults


def report(unit: Unit, compiled: Compiled) -> int:
    """Print one unit's table and faults. Returns the number of faults."""
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
    """A record's entry for a unit: the most registers and the largest stack of its functions, the sum of their spills,
    and the faults."""
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
    """The programs that compile and disassemble units."""

    nvcc: Path
    nvdisasm: Path

    @property
    def release(self) -> str:
        """The release of nvcc."""
        version = subprocess.run([self.nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"release [^\n]*", version)
        return found[0] if found else "(version unknown)"

    def compile(self, todo: Sequence[Unit], jobs: int, end: float) -> Iterator[tuple[Unit, Compiled]]:
        """Compiles the units, `jobs` at a time. Yields each when it is compiled. After `end`, by `time.monotonic`, no
        further unit is begun."""

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
    """The toolkit of this machine. If a program is missing, prints which, and returns the status to exit with."""
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
    """The units whose headers are there; says which are skipped. None: headers are missing, and in CI that is an
    error."""
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
    """Compiles the units, and reports on them in their order. Returns the number of faults."""
    compiled = dict(tools.compile(todo, jobs, math.inf))
    return sum(report(unit, compiled[unit]) for unit in todo)


def compile_recorded(tools: Toolkit, todo: Sequence[Unit], args: argparse.Namespace) -> int:
    """Compiles the units that the records lack, and reports on each when it is compiled. Returns the number of units
    with faults, also those of earlier runs."""
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
    """Each unit's name in records, and its digest from the sources as they are now."""
    tree = Tree(ROOT)
    return {each: instance(tree, each.of, each.nvshmem) for each in todo}


def said(found: Standing) -> int:
    """Prints what the records have. Returns the number of instances with faults."""
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
