"""Compile every CUDA source for Hopper and refuse what would be slow without failing.

    python tools/compile_cuda.py [--every]

No GPU is needed. The fused kernel is compiled as on first use (python/flashmoe/jit.py): for each type, exact float32,
transposed weights, experts in FP8, forward passes that keep what gradients need, and backward passes, with the
activations that differ most; traced; for several machines; for few tokens in groups; and, to put to other ranks, with
NVSHMEM's headers of two releases (tools/nvshmem_headers.py). `--every`: each instance of plain layers, of training and
of few tokens in groups, and more of the other kinds: some 790 compilations of one to four minutes each, a night of 8
cores. A kernel that spills registers, keeps a stack frame, whose wgmma instructions ptxas serializes, or that lacks one
of the instructions it is built on (`Unit.required`) still computes the right result, only far slower; so each of these
is an error here. What is compiled and the compiler's output go to build-cuda/.

nvcc is taken from $CUDA_HOME or PATH, else from the PyPI package nvidia-cuda-nvcc in this Python environment; nvdisasm
from the folder of nvcc, else from the PyPI package nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import nvshmem_headers

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc" / "cuda"
OUTPUT = ROOT / "build-cuda"
FLAGS = [
    *("-gencode", "arch=compute_90a,code=sm_90a"),
    *("-std=c++20", "-O3", "-Xptxas", "-v", "-Werror", "all-warnings"),
    *("-I", str(ROOT / "include"), "-I", str(ROOT / "csrc")),
]
# All of one release: left to itself, pip pairs nvcc with the newest front end, whose PTX its ptxas rejects.
PACKAGES = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
INSTALL = "pip install " + " ".join(f"'{package}==13.0.*'" for package in PACKAGES)
INSTALL_NVDISASM = "pip install nvidia-cuda-nvdisasm"

# Of the fused kernel, by their names in SASS: TMA loads of the weights, cp.async that gathers the tokens' rows, wgmma.
LOADS = ("UTMALDG", "LDGSTS")
WGMMA, WGMMA_FP8, MMA = "HGMMA", "QGMMA", "HMMA"

FP32, BF16 = 0, 1  # as csrc/cuda/entry/moe.cu numbers them
ACTIVATIONS = RELU, GELU, SILU, SWIGLU, GEGLU, RELU2, CLAMPED = range(7)
EXACT, TRACE, RDMA = "-DFLASHMOE_EXACT=1", "-DFLASHMOE_TRACE=1", "-DFLASHMOE_RDMA=1"
TRANSPOSED, QUANTISED, MXFP4 = "-DFLASHMOE_TRANSPOSED=1", "-DFLASHMOE_QUANTISED=1", "-DFLASHMOE_MXFP4=1"
KEEP, BACKWARD, GROUP = "-DFLASHMOE_KEEP=1", "-DFLASHMOE_BACKWARD=1", "-DFLASHMOE_GROUP=1"
ON_INPUT, SLICED = "-DFLASHMOE_ON_INPUT=1", "-DFLASHMOE_SLICED=1"
MACHINES = "-DFLASHMOE_MACHINES=1"
FEW_GROUP = "-DFLASHMOE_FEW_GROUP=1"
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
class Unit:
    """A source and what is defined for it."""

    source: Path
    defines: tuple[str, ...] = ()
    nvshmem: str = ""
    """The release whose headers it is compiled with; empty: with none."""

    @property
    def fused(self) -> bool:
        """Whether it is the fused kernel."""
        return self.source.stem == "moe"

    @property
    def required(self) -> tuple[str, ...]:
        """The instructions that it is built on."""
        if not self.fused:
            return ()
        if MXFP4 in self.defines or FEW_GROUP in self.defines:  # the kernel for a few tokens alone
            return (MMA, *LOADS)
        if QUANTISED in self.defines:
            return (WGMMA, WGMMA_FP8, *LOADS)  # the router's products are of y's type
        if EXACT in self.defines:
            return LOADS
        by_fragments = BACKWARD in self.defines and f"-DFLASHMOE_DTYPE={FP32}" in self.defines
        return (MMA if by_fragments else WGMMA, *LOADS)

    @property
    def title(self) -> str:
        headers = [f"(NVSHMEM {self.nvshmem})"] if self.nvshmem else []
        return " ".join([str(self.source.relative_to(ROOT)), *self.defines, *headers])


def instance(dtype: int, activation: int, *more: str) -> tuple[str, ...]:
    """What is defined for an instance of the fused kernel."""
    return (f"-DFLASHMOE_DTYPE={dtype}", f"-DFLASHMOE_ACTIVATION={activation}", *more)


def instances(every: bool) -> list[tuple[str, ...]]:
    """Those of plain layers. Unless `every` one is asked for, bfloat16 has the activations of most instructions and of
    most registers, with a gate and without one, and is traced; the other types have what differs most from that."""
    found = []
    plain = ((BF16, (SWIGLU, GELU, CLAMPED)), (2, (CLAMPED,)), (0, (GELU, CLAMPED)))
    for dtype, few, *exact in (*plain, (0, (CLAMPED,), EXACT)):
        for activation in ACTIVATIONS if every else few:
            found.append(instance(dtype, activation, *exact))
            if every or (dtype, activation) == (BF16, SWIGLU):
                found.append(instance(dtype, activation, *exact, TRACE))
    return found


def of_16_bits(which: str, traced: tuple[str, ...], every: bool) -> list[tuple[str, ...]]:
    """Of kernels that 16-bit types have; `every` one: with the plain gate, of the other type, and traced too."""
    kinds = [(BF16, GELU), (BF16, CLAMPED), *([(BF16, SWIGLU), (2, SWIGLU)] if every else [])]
    return [*(instance(*kind, which) for kind in kinds), *([traced] if every else [])]


def transposed_instances(every: bool) -> list[tuple[str, ...]]:
    """Of transposed weights, which 16-bit types have: without a gate, and with the one of most registers."""
    return of_16_bits(TRANSPOSED, instance(BF16, CLAMPED, TRANSPOSED, TRACE), every)


def quantised_instances(every: bool) -> list[tuple[str, ...]]:
    """Of experts in FP8: without a gate, and with the one of most registers."""
    return of_16_bits(QUANTISED, instance(BF16, SWIGLU, QUANTISED, TRACE), every)


def mxfp4_instances(every: bool) -> list[tuple[str, ...]]:
    """The same of experts in MXFP4."""
    return [tuple(MXFP4 if define == QUANTISED else define for define in each) for each in quantised_instances(every)]


def training_instances(every: bool) -> list[tuple[str, ...]]:
    """Of forward passes that keep what gradients need, and of backward passes: without a gate, with the one of most
    registers, and of both layouts of weights; among several ranks, with the one of most registers, of layers that have
    the usual kernels, and of such as have others for all reasons there are, in float32 as well. `every` one: of each
    type, layout and activation, for each set of these reasons, alone and among several ranks."""
    if every:
        types = [(dtype, *more) for dtype in (BF16, 2) for more in ((), (TRANSPOSED,))] + [(FP32,), (FP32, EXACT)]
        reasons = ((), (ON_INPUT,), (SLICED,), (ON_INPUT, SLICED))
        return [
            instance(dtype, activation, *more, *why, which, *group)
            for dtype, *more in types
            for activation in ACTIVATIONS
            for why in reasons
            for which in (KEEP, BACKWARD)
            for group in ((), (GROUP,))
        ]
    kinds = [(BF16, GELU), (BF16, CLAMPED), (BF16, CLAMPED, TRANSPOSED)]
    found = [instance(*kind, which) for which in (KEEP, BACKWARD) for kind in kinds]
    found += [instance(BF16, CLAMPED, which, GROUP) for which in (KEEP, BACKWARD)]
    return found + [instance(dtype, CLAMPED, ON_INPUT, SLICED, BACKWARD, GROUP) for dtype in (BF16, FP32)]


def machines_instances(every: bool) -> list[tuple[str, ...]]:
    """Of groups on several machines: with the gate of most registers; `every` one: of each type, and of FP8."""
    kinds: tuple[tuple, ...] = ((BF16, CLAMPED),)
    if every:
        kinds += ((BF16, SWIGLU), (2, CLAMPED), (0, CLAMPED), (BF16, SWIGLU, QUANTISED))
    return [instance(*kind, MACHINES) for kind in kinds]


def few_group_instances(every: bool) -> list[tuple[str, ...]]:
    """Of few tokens in groups, of FP8 as well; `every` one: of each type and activation, and traced."""
    kinds = ((FEW_GROUP,), (QUANTISED, FEW_GROUP))
    if not every:
        return [instance(BF16, CLAMPED, *kind) for kind in kinds]
    found = [instance(dtype, each, *kind) for dtype in (BF16, 2) for each in ACTIVATIONS for kind in kinds]
    return [*found, instance(BF16, SWIGLU, TRACE, FEW_GROUP)]


def rdma_units(source: Path, every: bool) -> list[Unit]:
    """Those that put to other ranks: one of each set of registers with the newest NVSHMEM, which inlines the most; one
    with the oldest, whose calls are all in it, since each takes half a minute of a core."""
    oldest, newest = nvshmem_headers.RELEASES

    def unit(dtype: int, activation: int, release: str, *more: str) -> Unit:
        return Unit(source, instance(dtype, activation, *more, RDMA), release)

    kinds = (
        ((BF16, SWIGLU), (BF16, GELU), (2, SWIGLU), (0, SWIGLU), (0, GELU)) if every else ((BF16, SWIGLU), (0, GELU))
    )
    transposed = unit(BF16, CLAMPED, newest, TRANSPOSED)
    return [unit(BF16, SWIGLU, oldest), *(unit(*kind, newest) for kind in kinds), transposed]


def units(every: bool = False) -> list[Unit]:
    """What is to be compiled: of each kind of kernel what tells whether it fits, or `every` instance that there is."""
    found = []
    for source in sorted(SOURCES.rglob("*.cu")):
        if Unit(source).fused:
            kinds = (
                *instances(every),
                *transposed_instances(every),
                *quantised_instances(every),
                *mxfp4_instances(every),
                *training_instances(every),
                *machines_instances(every),
                *few_group_instances(every),
            )
            found += [Unit(source, defines) for defines in kinds]
            found += rdma_units(source, every)
        else:
            found.append(Unit(source))
    return found


@dataclass(frozen=True)
class Compiled:
    """What became of a unit."""

    log: str
    """nvcc's output."""
    failure: str = ""
    """What failed and how; empty: nothing did."""
    opcodes: Counter[str] = field(default_factory=Counter)
    """Of the fused kernel: how often each instruction occurs, without modifiers."""


def compile_unit(nvcc: Path, nvdisasm: Path, unit: Unit) -> Compiled:
    """Compile one of them, and disassemble the fused kernel."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9=]+", "-", unit.title)
    mode, output = ("-cubin", OUTPUT / f"{name}.cubin") if unit.fused else ("-c", OUTPUT / f"{name}.o")
    folders = ["-isystem", str(nvshmem_headers.folder(unit.nvshmem))] if unit.nvshmem else []
    command = [str(nvcc), *FLAGS, *unit.defines, *folders, mode, str(unit.source), "-o", str(output)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (OUTPUT / f"{name}.log").write_text(done.stdout)
    if done.returncode:
        return Compiled(done.stdout, f"nvcc exited with {done.returncode}")
    if not unit.fused:
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


def report(unit: Unit, compiled: Compiled) -> int:
    """Print one unit's table; returns the number of faults."""
    print(f"\n{unit.title}")
    if compiled.failure:
        print(compiled.log.rstrip())
        print(f"  FAILED: {compiled.failure}")
        return 1
    functions, advisories = parse(compiled.log)
    faults = [f"ptxas: {advisory}" for advisory in advisories]
    faults += [f"no {opcode} instruction" for opcode in unit.required if not compiled.opcodes[opcode]]
    if functions:
        print(f"  {'registers':>9} {'smem':>7} {'stack':>6} {'spills':>7}  kernel")
    for function, name in zip(functions, readable([f.symbol for f in functions]), strict=True):
        registers = "-" if function.registers is None else function.registers
        print(f"  {registers:>9} {function.smem:>7} {function.stack:>6} {function.spills:>7}  {name}")
        faults += [f"{name} {fault}" for fault in function.faults]
    if unit.required:
        print("  " + ", ".join(f"{compiled.opcodes[opcode]} {opcode}" for opcode in unit.required))
    for fault in faults:
        print(f"  FAILED: {fault}")
    return len(faults)


def main() -> int:
    todo = units("--every" in sys.argv[1:])
    nvcc = find_nvcc()
    if nvcc is None:
        names = ", ".join(unit.title for unit in todo)
        if os.environ.get("CI"):
            print(f"FAILED: no nvcc to compile {names}. Install one:\n    {INSTALL}", file=sys.stderr)
            return 1
        print(f"SKIPPED, no nvcc: {names}. To compile them:\n    {INSTALL}")
        return 0

    nvdisasm = find_nvdisasm(nvcc)
    if nvdisasm is None:
        print(f"FAILED: no nvdisasm to look at the kernels with. Install one:\n    {INSTALL_NVDISASM}", file=sys.stderr)
        return 1

    without = [unit for unit in todo if unit.nvshmem and not nvshmem_headers.folder(unit.nvshmem).exists()]
    if without:
        what = f"no headers of NVSHMEM for {', '.join(unit.title for unit in without)}. To fetch them:"
        what += "\n    python tools/nvshmem_headers.py"
        if os.environ.get("CI"):
            print(f"FAILED: {what}", file=sys.stderr)
            return 1
        print(f"SKIPPED, {what}")
        todo = [unit for unit in todo if unit not in without]
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release [^\n]*", version)
    print(f"nvcc {release[0] if release else '(version unknown)'}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda unit: compile_unit(nvcc, nvdisasm, unit), todo))
    faults = sum(report(unit, compiled) for unit, compiled in zip(todo, results, strict=True))
    print(f"\ncompiled for sm_90a: {len(todo)}, faults: {faults}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
