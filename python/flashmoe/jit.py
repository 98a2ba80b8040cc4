"""The CUDA kernels, compiled once per machine, dtype and activation, and kept in a cache folder.

The kernels' sources are part of the package. A kernel's name is made from sources, compiler and options, so a process
that finds its kernels in the cache only reads a few small files, and runs no compiler. Any number of processes may ask
for a kernel at once: one of them compiles it, under a lock that ends with its process, and moves the whole result into
place.

A released package carries common kernels, compiled from the sources beside them. Their names are made in the same way
but without the compiler, so no compiler is needed to find them. All other kernels are compiled. If the driver is too
old for the carried kernels, all kernels are compiled.

The name of a kernel's file ends with a digest of the content. If a file was cut short or renamed, it does not match its
digest, and the kernel is compiled again. `storage` makes sure that no other user has put the file there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from . import nvshmem
from .errors import FlashMoEError
from .spec import ACTIVATIONS, DTYPES, TITLES
from .system import driver
from .system.storage import Folder

FLAGS = ("-cubin", "-gencode", "arch=compute_90a,code=sm_90a", "-std=c++20", "-O3")

# All packages are of one release: left to itself, pip pairs nvcc with the newest front end, whose PTX its ptxas
# rejects.
_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
INSTALL = "pip install " + " ".join(f"'{package}==13.0.*'" for package in _PACKAGES)
_TELLS = ("-Xptxas", "-v")
"""Options that make ptxas print what each function spills. They change no code, so they are not part of a kernel's
name."""
_SPILLS = re.compile(r"([0-9]+) bytes spill stores, ([0-9]+) bytes spill loads")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_LOG_LINES = 15  # lines of a failed compilation's output in the error

TRANSPOSED = ("bfloat16", "float16")
"""The types of weights that kernels read transposed. Tensor cores take transposed operands only of 16 bits."""

TRAINED = ("bfloat16", "float16", "float32")
"""The types of layers whose gradients have kernels."""

BESIDE_QUANTISED = ("bfloat16", "float16")
"""The types of y that have kernels, where experts are in FP8 or MXFP4."""

NVCC_SECONDS = 900.0
"""How long a compilation may take. One to four minutes are usual."""
LOCK_SECONDS = NVCC_SECONDS + 60.0
"""How long to wait for another process that compiles the same kernel."""
_VERSION_SECONDS = 60.0
_REMEDY = "set FLASHMOE_CACHE to a folder of your own"


_FIRST, _BETWEEN, _LAST = range(3)
"""The places of a word in a kernel's title: before type and activation, after them, or at the end."""


def _told(word: str, place: int = _BETWEEN) -> Any:
    """A field of `Variant` for an option of the build. The macro is named like the field. `word` stands in the kernel's
    title if the option is on."""
    return field(default=False, metadata={"word": word, "place": place})


@dataclass(frozen=True)
class Variant:
    """What is fixed when the kernel is compiled: its source, and the macros defined for it, which
    include/flashmoe/spec/build.h reads."""

    dtype: str = "bfloat16"
    activation: str = "swiglu"
    trace: bool = _told("traced", _LAST)
    """The kernel records when its actors do what."""
    exact: bool = _told("exact", _FIRST)
    """float32 products in float32, without the tensor cores."""
    rdma: bool = _told("RDMA", _LAST)
    """For ranks that reach one another by NVSHMEM's puts."""
    transposed: bool = _told("transposed")
    """The experts' matrices are [El, H, 2I or I] and [El, I, H]."""
    quantised: bool = _told("FP8", _FIRST)
    """The experts' matrices, and the rows that they multiply, are in e4m3."""
    mxfp4: bool = _told("MXFP4", _FIRST)
    """The experts' matrices are in mxfp4; only for a few tokens."""
    keeps: bool = _told("keeping")
    """The kernel keeps what the layer's gradients need."""
    backward: bool = _told("backward")
    """The kernel computes the layer's gradients."""
    group: bool = _told("group")
    """For several ranks: a kernel with `keeps` or `backward`, or one for a few tokens."""
    on_input: bool = _told("weights on the input")
    """A kernel with `keeps` or `backward`, of a layer with `weights_on_input`. (Other kernels are the same with and
    without.)"""
    sliced: bool = _told("sliced")
    """A kernel with `keeps` or `backward`, of a layer with a shared expert or with experts in slices."""
    machines: bool = _told("machines", _LAST)
    """For ranks on several machines: each row crosses to each machine only once."""
    few: bool = _told("few tokens")
    """For a few tokens; otherwise for any number."""

    def __post_init__(self) -> None:
        if self.mxfp4 and not self.few:
            raise ValueError("mxfp4: expected few=True, since only the kernel for a few tokens has it, got few=False")
        if self.few and (other := [name for name in _NOT_FEW if getattr(self, name)]):
            raise ValueError(f"few: expected only options that the kernel for a few tokens has, got {other}")

    @property
    def entry(self) -> str:
        """The name of the kernel's source in csrc/cuda/entry/, without its suffix."""
        if self.few:
            return "decode" + "_fp8" * self.quantised + "_mxfp4" * self.mxfp4 + "_group" * self.group
        if self.rdma:
            return "moe_by_puts"
        if self.keeps:
            return "moe_keeping" + "_group" * self.group
        return "moe_backward" if self.backward else "moe"

    @property
    def title(self) -> str:
        """The kernel's name in messages, such as ``bf16 SwiGLU``."""
        dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[self.dtype]
        words = [*self._words(_FIRST), dtype, TITLES[self.activation], *self._words(_BETWEEN)]
        title = " ".join(words + self._words(_LAST))
        return title.replace("group few tokens", "few tokens of a group")

    def _words(self, place: int) -> list[str]:
        told = [each for each in fields(self) if getattr(self, each.name) and each.metadata.get("place") == place]
        return [each.metadata["word"] for each in told]

    @property
    def flags(self) -> list[str]:
        """nvcc's options, without the folders."""
        return [
            *FLAGS,
            f"-DFLASHMOE_DTYPE={DTYPES.index(self.dtype)}",
            f"-DFLASHMOE_ACTIVATION={ACTIVATIONS.index(self.activation)}",
            *(f"-D{macro}=1" for name, macro in OPTIONS.items() if getattr(self, name)),
        ]


OPTIONS = {each.name: f"FLASHMOE_{each.name.upper()}" for each in fields(Variant) if each.metadata}
"""The macro that a build defines, by the name of its field in `Variant`."""

_NOT_FEW = ("rdma", "transposed", "keeps", "backward", "on_input", "sliced", "machines")
"""Fields of `Variant` that no kernel for a few tokens has."""


def variants_alone(dtype: str = "bfloat16", activation: str = "swiglu", **options: bool) -> list[Variant]:
    """The kernels for layers of a rank that is alone, without gradients: the kernel for any number of tokens, and the
    kernel for a few, as far as both exist."""
    general = [] if options.get("mxfp4") else [Variant(dtype, activation, **options)]
    few = [] if options.get("transposed") else [Variant(dtype, activation, **options, few=True)]
    return general + few


COMMON = (
    *(each for dtype in DTYPES for each in variants_alone(dtype)),
    *(Variant(dtype, each, transposed=True) for dtype in TRANSPOSED for each in ("swiglu", "clamped_swiglu")),
    *variants_alone(quantised=True),
    *variants_alone(activation="clamped_swiglu", mxfp4=True),
    *(Variant(dtype, few=True, group=True) for dtype in TRANSPOSED),
    Variant(quantised=True, few=True, group=True),
    *(Variant(**{which: True}, group=group) for which in ("keeps", "backward") for group in (False, True)),
    *variants_alone(trace=True),
)
"""The kernels that a release carries: those for the layers of nearly all published models (docs/models.md), for layers
of Llama 4 and gpt-oss as they are stored, for checkpoints in FP8 and for gpt-oss's in MXFP4; those for training with
SwiGLU in bfloat16; and those for traced calls, as ``flashmoe run`` makes them. A plain call may use one of two kernels,
and in a group one more for few tokens. Published weights are in bfloat16, or quantised from it, so no further kernels
for float16 are carried. Nor are those for other activations, because few models have them, and each kernel for any
number of tokens takes some 800 KB, compressed in the wheel a fifth of a megabyte."""

RELEASED_CUDA = (13, 0)
"""The CUDA release whose nvcc compiles what a release carries; kernels are measured with this nvcc. Drivers of an older
major release cannot load these cubins (NVIDIA's minor version compatibility)."""


@dataclass(frozen=True)
class Compiled:
    """A kernel in the cache, or in the package."""

    path: Path
    seconds: float | None
    """Seconds that the compilation took; None: the kernel was already there."""


_known: dict[Variant, int] = {}  # descriptors of the files that this process has checked, which stay open


def kernel(variant: Variant) -> Path:
    """The cubin of `variant`, compiled if it is not in the cache; see `compile_kernel`.

    The path leads to the very file that was checked, because this process keeps that file open. A file or folder that
    is put in its place later is not read.
    """
    if variant not in _known:
        _, descriptor = _obtain(variant)
        if _known.setdefault(variant, descriptor) != descriptor:  # another thread was first
            os.close(descriptor)
    return Path(f"/proc/self/fd/{_known[variant]}")


def kernels(variants: Sequence[Variant]) -> list[Path]:
    """The cubins of all `variants`. Those that this process has not asked for before are looked up, or compiled, in
    parallel."""
    new = [each for each in variants if each not in _known]
    if len(new) < 2:
        return [kernel(each) for each in variants]
    with ThreadPoolExecutor(len(variants)) as pool:
        return list(pool.map(kernel, variants))


def compile_kernel(variant: Variant) -> Compiled:
    """Find `variant` in the package or in the cache, or compile it.

    Raises `FlashMoEError` if there is no compiler, if it fails, if the cache cannot be written or others can write to
    it, or if another process takes too long to compile the same kernel.
    """
    compiled, descriptor = _obtain(variant)
    os.close(descriptor)
    return compiled


def compiled_kernels() -> tuple[Path, int]:
    """The cache folder, and how many whole kernels it has. Raises `FlashMoEError` as `compile_kernel` does."""
    with _cache() as cache:
        whole = 0
        for name in cache.names():
            if name.endswith(".cubin") and (descriptor := _open(cache, name)) is not None:
                os.close(descriptor)
                whole += 1
        return cache.path, whole


def shipped_kernels() -> list[Path]:
    """The kernels that the package carries, if this machine's driver can load them. Only packages of releases carry
    kernels."""
    return [] if refused_by_driver() else _carried()


def refused_by_driver() -> str:
    """Why this machine's driver cannot load the kernels that the package carries; empty if the driver can, or if there
    are no such kernels."""
    here = _older_driver()
    if not here or not _carried():
        return ""
    return f"the package's own need a driver for CUDA {RELEASED_CUDA[0]}, this machine's is for {here}"


def _older_driver() -> str:
    """The CUDA release of this machine's driver, such as "12.4", if the driver is too old for kernels that nvcc of
    `RELEASED_CUDA` compiles; else empty."""
    release = driver.cuda_release()
    return "" if release is None or release[0] >= RELEASED_CUDA[0] else ".".join(map(str, release))


def _carried() -> list[Path]:
    return sorted((source_root() / "kernels").glob("*.cubin"))


def ship(variant: Variant, folder: Path) -> Path:
    """Put `variant` into a folder, under the name by which a package finds it among its `shipped_kernels`. Raises as
    `compile_kernel` does."""
    content, stem = kernel(variant).read_bytes(), _stem(source_root(), variant)
    path = folder / f"{stem}-{_digest(stem, content)}.cubin"
    path.write_bytes(content)
    return path


def _shipped(variant: Variant) -> tuple[Compiled, int] | None:
    """The kernel that the package carries, and its open file. The file is trusted as the package's Python code is."""
    if variant not in COMMON or not (carried := shipped_kernels()):
        return None
    stem = _stem(source_root(), variant)
    for path in carried:
        if path.name.startswith(f"{stem}-"):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if _is_whole(descriptor, path.name):
                return Compiled(path, None), descriptor
            os.close(descriptor)
    return None


def _obtain(variant: Variant) -> tuple[Compiled, int]:
    """As `compile_kernel`, but also returns the descriptor of the checked file, which is open."""
    if (found := _shipped(variant)) is not None:
        return found
    root, nvcc = source_root(), find_nvcc(variant)
    with _cache() as cache:
        stem = _stem(root, variant, _version(nvcc, cache))
        if (found := _find(cache, stem)) is not None:
            return found
        with cache.locked(f"{stem}.lock", LOCK_SECONDS, lambda: _say_who_waits(variant)) as alone:
            if (found := _find(cache, stem)) is not None:  # another process has compiled it meanwhile
                return found
            if alone:
                cache.sweep(f"{stem}.")
                _remove_damaged(cache, stem)
            _say(f"compiling the {variant.title} kernel for sm_90a (once, one to four minutes) ...")
            start = time.monotonic()
            content = _run_nvcc(nvcc, root, variant, cache, stem)
            cache.replace(f"{stem}-{_digest(stem, content)}.cubin", content)
            seconds = time.monotonic() - start
            if (found := _find(cache, stem)) is None:
                raise FlashMoEError(f"cache: the kernel just written to {cache.path} cannot be read back")
            return replace(found[0], seconds=seconds), found[1]


def _find(cache: Folder, stem: str) -> tuple[Compiled, int] | None:
    """The whole kernel with that name, and its open file."""
    for name in _candidate_names(cache, stem):
        if (descriptor := _open(cache, name)) is not None:
            return Compiled(cache.path / name, None), descriptor
    return None


def _candidate_names(cache: Folder, stem: str) -> list[str]:
    return [name for name in cache.names() if name.startswith(f"{stem}-") and name.endswith(".cubin")]


def _open(cache: Folder, name: str) -> int | None:
    """The open file of a cubin with the right content; None if its content is wrong, or if others may have written
    it."""
    try:
        descriptor = cache.open(name)
    except (FileNotFoundError, FlashMoEError):
        return None
    if _is_whole(descriptor, name):
        return descriptor
    os.close(descriptor)
    return None


def _is_whole(descriptor: int, name: str) -> bool:
    """Whether a file's content matches the digest in the file's name."""
    stem, _, digest = name.removesuffix(".cubin").rpartition("-")
    with open(descriptor, "rb", closefd=False) as file:
        return _digest(stem, file.read()) == digest


def _remove_damaged(cache: Folder, stem: str) -> None:
    """Removes damaged kernels. Its caller holds the lock, and has found no whole kernel."""
    for name in _candidate_names(cache, stem):
        _say(f"{cache.path / name} is not what was compiled")
        cache.remove(name)


def _digest(stem: str, content: bytes) -> str:
    """A digest of a kernel's content and of the stem of its name, which stands for what it was compiled from."""
    return hashlib.sha256(f"{stem}\n".encode() + content).hexdigest()[:32]


def source_root() -> Path:
    """The folder with include/ and csrc/: the package's own folder, or the one of a development tree."""
    here = Path(__file__).resolve()
    for root in (here.parent / "cuda", here.parents[2]):
        if entry_of(root, Variant()).exists():
            return root
    raise FlashMoEError(f"kernel: expected its sources in {here.parent / 'cuda'}; install flashmoe again")


def entry_of(root: Path, variant: Variant) -> Path:
    """The source in that folder that nvcc compiles."""
    return root / "csrc" / "cuda" / "entry" / f"{variant.entry}.cu"


def cache_folder() -> Path:
    """Where compiled kernels are kept: $FLASHMOE_CACHE, $XDG_CACHE_HOME/flashmoe or ~/.cache/flashmoe."""
    if given := os.environ.get("FLASHMOE_CACHE"):
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashmoe"
    except RuntimeError as error:
        raise FlashMoEError(f"cache: user {os.getuid()} has no home folder; {_REMEDY}") from error


def _cache() -> contextlib.AbstractContextManager[Folder]:
    return Folder.at(cache_folder(), "cache", _REMEDY)


def find_nvcc(variant: Variant | None = None) -> Path:
    """The CUDA compiler. Raises `FlashMoEError` if there is none; the message names the kernel that needs it."""
    if given := os.environ.get("FLASHMOE_NVCC"):
        if not _is_program(Path(given)):
            raise FlashMoEError(f"FLASHMOE_NVCC: expected the path of nvcc, got {given!r}")
        return Path(given)
    if nvcc := next(filter(_is_program, _candidates()), None):
        return nvcc
    purpose = f", for the {variant.title} kernel," if variant is not None else ""
    raise FlashMoEError(
        f"nvcc: expected the CUDA compiler{purpose} as $FLASHMOE_NVCC, in $CUDA_HOME/bin, in PATH, in "
        "/usr/local/cuda*/bin or from the Python package nvidia-cuda-nvcc, found none; to install: " + remedy()
    )


def remedy() -> str:
    """What to install if there is no nvcc. For an older driver this is an older nvcc, because the driver refuses
    kernels of the newest."""
    if not (here := _older_driver()):
        return INSTALL
    also = ", which also loads the kernels that the package carries" if _carried() else ""
    older = here.partition(".")[0]
    return f"an nvcc of CUDA {older}, as the driver is ({here}), or a driver for CUDA {RELEASED_CUDA[0]}{also}"


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "bin" / "nvcc"
    if found := shutil.which("nvcc"):
        yield Path(found)
    # By version, newest first. The folder without a version is a link to one of them.
    installed = Path("/usr/local").glob("cuda*/bin/nvcc")
    yield from sorted(installed, key=lambda path: [int(n) for n in _digits(path.parts[3])], reverse=True)
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or ():
        yield from sorted(Path(folder).glob("*/bin/nvcc"), reverse=True)


def _digits(text: str) -> list[str]:
    return "".join(c if c.isdigit() else " " for c in text).split()


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _stem(root: Path, variant: Variant, compiler: str | None = None) -> str:
    """A kernel's name up to the digest of its content: its title, and a digest of all that its content depends on.
    `compiler`: what ``nvcc --version`` prints."""
    digest = hashlib.sha256()
    parts = [(str(path.relative_to(root)), content) for path, content in sources_of(root, variant).items()]
    parts.append(("flags", " ".join(variant.flags).encode()))
    if compiler is not None:
        parts.append(("nvcc", compiler.encode()))
    if variant.rdma:
        parts.append(("nvshmem", (nvshmem.headers() / nvshmem.VERSION_HEADER).read_bytes()))
    for name, content in parts:
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return f"{variant.title.replace(' ', '-').lower()}-{digest.hexdigest()[:24]}"


def sources_of(root: Path, variant: Variant) -> dict[Path, bytes]:
    """The files from which `variant` is compiled, sorted, each with its content: its source, and all headers of this
    project that it includes. No such header includes another one under a condition (tests/test_build_options.py), so
    these are the files that ``nvcc -M`` finds."""
    found: dict[Path, bytes] = {}
    todo = [entry_of(root, variant)]
    while todo:
        if (path := todo.pop()) in found:
            continue
        found[path] = path.read_bytes()
        for name in _INCLUDE.findall(found[path].decode()):
            candidates = (path.parent / name, root / "include" / name)
            todo += [each for each in candidates if each.is_file()]  # NVSHMEM's headers are in neither folder
    return dict(sorted(found.items()))


def _version(nvcc: Path, cache: Folder) -> str:
    """What ``nvcc --version`` prints. The cache keeps it until nvcc's file changes."""
    status = nvcc.stat()
    stamp = f"{nvcc} {status.st_size} {status.st_mtime_ns}"
    memory = f"nvcc-{hashlib.sha256(stamp.encode()).hexdigest()[:24]}.txt"
    with contextlib.suppress(FileNotFoundError, FlashMoEError):
        return cache.read(memory).decode(errors="replace")
    try:
        done = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, errors="replace", check=True, timeout=_VERSION_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise FlashMoEError(f"nvcc: {nvcc} --version failed: {error}") from error
    with contextlib.suppress(FlashMoEError):  # if it cannot be kept, the next process asks nvcc again
        cache.replace(memory, done.stdout.encode())
    return done.stdout


def _run_nvcc(nvcc: Path, root: Path, variant: Variant, cache: Folder, stem: str) -> bytes:
    """The cubin that nvcc makes. Raises `FlashMoEError` if nvcc makes none, and for a kernel that spills registers.
    (Kernels that trace may spill: they do so by design.) nvcc's output is then kept in the cache."""
    folders = ["-I", root / "include"]
    if variant.rdma:
        folders += ["-isystem", nvshmem.headers()]
    with cache.temporary(f"{stem}.") as folder:
        source, output = entry_of(root, variant), folder.path / "kernel.cubin"
        command = [nvcc, *variant.flags, *folders, source, "-o", output, *_TELLS]
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                umask=0o077,
                timeout=NVCC_SECONDS,
            )
        except OSError as error:
            raise FlashMoEError(f"nvcc: cannot run {nvcc}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise FlashMoEError(
                f"nvcc: expected the {variant.title} kernel within {NVCC_SECONDS:g} s, got none from {nvcc}"
            ) from error
        content = b""
        with contextlib.suppress(FileNotFoundError):
            content = folder.read("kernel.cubin")
    spilled = 0 if variant.trace else sum(int(each) for found in _SPILLS.findall(done.stdout) for each in found)
    if done.returncode == 0 and content and not spilled:
        return content
    log, kept = f"{stem}.log", ""
    with contextlib.suppress(FlashMoEError):
        cache.replace(log, (" ".join(map(str, command)) + "\n" + done.stdout).encode())
        kept = f"; full log: {cache.path / log}"
    if done.returncode == 0 and content:
        release = ".".join(map(str, RELEASED_CUDA))
        raise FlashMoEError(
            f"nvcc: expected the {variant.title} kernel without spilled registers, got {spilled} bytes of spills from "
            f"{nvcc}{kept}; its results would be right, but it would be slow: kernels are measured with nvcc {release}"
        )
    tail = "\n".join(done.stdout.splitlines()[-_LOG_LINES:])
    raise FlashMoEError(
        f"nvcc: cannot compile the {variant.title} kernel (exit status {done.returncode}){kept}\n{tail}"
    )


def _say_who_waits(variant: Variant) -> None:
    _say(f"waiting for another process, which compiles the {variant.title} kernel ...")


def _say(what: str) -> None:
    print(f"flashmoe: {what}", file=sys.stderr, flush=True)
