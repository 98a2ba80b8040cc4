"""Compile every CUDA source for Hopper and refuse what would be slow without failing.

    python tools/compile_cuda.py [--every]

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

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import nvshmem_headers
from flashmoe import jit
from flashmoe.jit import Variant
from flashmoe.spec import ACTIVATIONS

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (*(ROOT / "csrc" / "cuda" / "entry").glob("*.cu"), *(ROOT / "benchmarks").glob("*.cu"))
OUTPUT = ROOT / "build-cuda"
CHECKS = [
    *("-Xptxas", "-v", "-Werror", "all-warnings"),
    *("-I", str(ROOT / "include"), "-I", str(ROOT / "csrc")),
]
INSTALL_NVDISASM = "pip install nvidia-cuda-nvdisasm"

# Of the layer's kernels, by their names in SASS: TMA loads of the weights and cp.async that gathers the tokens' rows,
# wgmma and mma.sync.
LOADS = ("UTMALDG", "LDGSTS")
WGMMA, WGMMA_FP8, MMA = "HGMMA", "QGMMA", "HMMA"

CLAMPED = "clamped_swiglu"  # of most registers

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
    """A kernel's build, or a source without options."""

    of: Variant | Path
    nvshmem: str = ""
    """The release whose headers it is compiled with; empty: with none."""

    @property
    def variant(self) -> Variant | None:
        """None: it is not one of the layer's kernels."""
        return self.of if isinstance(self.of, Variant) else None

    @property
    def source(self) -> Path:
        return jit.entry_of(ROOT, self.of) if isinstance(self.of, Variant) else self.of

    @property
    def required(self) -> tuple[str, ...]:
        """The instructions that it is built on."""
        variant = self.variant
        if variant is None:
            return ()
        if variant.exact or (variant.few and variant.dtype == "float32"):  # whose few rows are multiplied exactly
            return LOADS
        if variant.few:
            return (MMA, *LOADS)
        if variant.quantised:
            return (WGMMA, WGMMA_FP8, *LOADS)  # the router's products are of y's type
        by_fragments = variant.backward and variant.dtype == "float32"
        return (MMA if by_fragments else WGMMA, *LOADS)

    @property
    def title(self) -> str:
        defines = [flag for flag in self.variant.flags if flag.startswith("-D")] if self.variant else []
        headers = [f"(NVSHMEM {self.nvshmem})"] if self.nvshmem else []
        return " ".join([str(self.source.relative_to(ROOT)), *defines, *headers])


def plain_variants(every: bool) -> list[Variant]:
    """Those of plain layers. Unless `every` one is asked for, bfloat16 has the activations of most instructions and of
    most registers, with a gate and without one, and is traced; the other types have what differs most from that."""
    found = []
    plain = (("bfloat16", ("swiglu", "gelu", CLAMPED)), ("float16", (CLAMPED,)), ("float32", ("gelu", CLAMPED)))
    for dtype, least, *exact in (*plain, ("float32", (CLAMPED,), True)):
        for activation in ACTIVATIONS if every else least:
            untraced = Variant(dtype, activation, exact=bool(exact))
            found.append(untraced)
            if every or (dtype, activation) == ("bfloat16", "swiglu"):
                found.append(replace(untraced, trace=True))
    return found


def of_16_bits(which: str, traced: str, every: bool) -> list[Variant]:
    """Of kernels that 16-bit types have; `every` one: with the plain gate, of the other type, and traced too."""
    kinds = [("bfloat16", "gelu"), ("bfloat16", CLAMPED)]
    if every:
        kinds += [("bfloat16", "swiglu"), ("float16", "swiglu")]
    found = [Variant(*kind, **{which: True}) for kind in kinds]
    return [*found, Variant(activation=traced, trace=True, **{which: True})] if every else found


def transposed_variants(every: bool) -> list[Variant]:
    """Of transposed weights, which 16-bit types have: without a gate, and with the one of most registers."""
    return of_16_bits("transposed", CLAMPED, every)


def quantised_variants(every: bool) -> list[Variant]:
    """Of experts in FP8: without a gate, and with the one of most registers."""
    return of_16_bits("quantised", "swiglu", every)


def few_variants(every: bool) -> list[Variant]:
    """Of a few tokens: of a rank alone what plain layers and experts in FP8 have of any number, and of experts in MXFP4
    as of those in FP8; of groups with the gate of most registers. `every` one: of each type, weights and activation."""
    encodings: tuple[dict[str, bool], ...] = ({}, {"quantised": True}, {"mxfp4": True})
    if not every:
        alone = [*plain_variants(False), *quantised_variants(False)]
        found = [replace(each, few=True) for each in alone]
        found += [replace(each, quantised=False, mxfp4=True, few=True) for each in quantised_variants(False)]
        return found + [Variant(activation=CLAMPED, **of, few=True, group=True) for of in encodings[:2]]
    kinds = [
        ({"dtype": dtype} | of, (False, True)[: 1 + ("mxfp4" not in of)])
        for dtype in jit.BESIDE_QUANTISED
        for of in encodings
    ]
    kinds += [({"dtype": "float32", "exact": exact}, (False,)) for exact in (False, True)]
    return [
        Variant(**of, activation=activation, trace=trace, few=True, group=group)
        for of, groups in kinds
        for activation in ACTIVATIONS
        for trace in (False, True)
        for group in groups
    ]


def training_variants(every: bool) -> list[Variant]:
    """Of forward passes that keep what gradients need, and of backward passes: without a gate, with the one of most
    registers, and of both layouts of weights; among several ranks, with the one of most registers, of layers that have
    the usual kernels, and of such as have others for all reasons there are, in float32 as well. `every` one: of each
    type, layout and activation, for each set of these reasons, alone and among several ranks."""
    passes: tuple[dict[str, bool], ...] = ({"keeps": True}, {"backward": True})
    if every:
        types = [{"dtype": dtype, "transposed": each} for dtype in jit.TRANSPOSED for each in (False, True)]
        types += [{"dtype": "float32", "exact": each} for each in (False, True)]
        return [
            Variant(**of, activation=activation, on_input=on_input, sliced=sliced, **which, group=group)
            for of in types
            for activation in ACTIVATIONS
            for on_input in (False, True)
            for sliced in (False, True)
            for which in passes
            for group in (False, True)
        ]
    kinds = ({"activation": "gelu"}, {"activation": CLAMPED}, {"activation": CLAMPED, "transposed": True})
    found = [Variant(**kind, **which) for which in passes for kind in kinds]
    found += [Variant(activation=CLAMPED, group=True, **which) for which in passes]
    others = {"on_input": True, "sliced": True, "backward": True, "group": True}
    return found + [Variant(dtype, CLAMPED, **others) for dtype in ("bfloat16", "float32")]


def machines_variants(every: bool) -> list[Variant]:
    """Of groups on several machines: with the gate of most registers; `every` one: of each type, and of FP8."""
    found = [Variant(activation=CLAMPED, machines=True)]
    if every:
        found += [Variant(machines=True), Variant(quantised=True, machines=True)]
        found += [Variant(dtype, CLAMPED, machines=True) for dtype in ("float16", "float32")]
    return found


def rdma_units(every: bool) -> list[Unit]:
    """Those that put to other ranks: one of each set of registers with the newest NVSHMEM, which inlines the most; one
    with the oldest, whose calls are all in it, since each takes half a minute of a core."""
    oldest, newest = nvshmem_headers.RELEASES
    kinds = [("bfloat16", "swiglu"), ("float32", "gelu")]
    if every:
        kinds += [("bfloat16", "gelu"), ("float16", "swiglu"), ("float32", "swiglu")]
    found = [*(Variant(*kind, rdma=True) for kind in kinds), Variant(activation=CLAMPED, rdma=True, transposed=True)]
    return [Unit(Variant(rdma=True), oldest), *(Unit(each, newest) for each in found)]


KINDS = (
    plain_variants,
    transposed_variants,
    quantised_variants,
    few_variants,
    training_variants,
    machines_variants,
)
"""Of kernels that nothing else is needed for."""


def units(every: bool = False) -> list[Unit]:
    """What is to be compiled: of each kind of kernel what tells whether it fits, or `every` instance that there is; and
    each source that has no instances."""
    found = [Unit(each) for of_kind in KINDS for each in of_kind(every)] + rdma_units(every)
    entries = {unit.source for unit in found}
    return found + [Unit(source) for source in sorted(SOURCES) if source not in entries]


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
            print(f"FAILED: no nvcc to compile {names}. Install one:\n    {jit.INSTALL}", file=sys.stderr)
            return 1
        print(f"SKIPPED, no nvcc: {names}. To compile them:\n    {jit.INSTALL}")
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
