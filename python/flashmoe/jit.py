"""The CUDA kernel, compiled once per machine, dtype and activation, and kept in a cache folder.

The kernel's sources travel with the package. What `kernel` returns for them, the compiler and the options is always
the same file, so that a cached start reads a few small files and runs nothing. Any number of processes may ask at
once: one of them compiles, under a lock that ends with its process, and moves the whole result into place.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import nvshmem
from .errors import FlashMoEError
from .spec import ACTIVATIONS, DTYPES

FLAGS = ("-cubin", "-gencode", "arch=compute_90a,code=sm_90a", "-std=c++20", "-O3")

# All of one release: left to itself, pip pairs nvcc with the newest front end, whose PTX its ptxas rejects.
_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
INSTALL = "pip install " + " ".join(f"'{package}==13.0.*'" for package in _PACKAGES)
_LOG_LINES = 15  # of a failed compilation, in the error


@dataclass(frozen=True)
class Variant:
    """What is fixed when the kernel is compiled."""

    dtype: str = "bfloat16"
    activation: str = "swiglu"
    trace: bool = False
    """Whether it records what it does when."""
    exact: bool = False
    """float32 products in float32, without the tensor cores."""
    rdma: bool = False
    """For ranks that reach one another by NVSHMEM's puts."""

    @property
    def title(self) -> str:
        """For messages, such as ``bf16 SwiGLU``."""
        dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[self.dtype]
        activation = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "swiglu": "SwiGLU"}[self.activation]
        return " ".join(["exact"] * self.exact + [dtype, activation] + ["traced"] * self.trace + ["RDMA"] * self.rdma)

    @property
    def flags(self) -> list[str]:
        """nvcc's options, but for the folders."""
        return [
            *FLAGS,
            f"-DFLASHMOE_DTYPE={DTYPES.index(self.dtype)}",
            f"-DFLASHMOE_ACTIVATION={ACTIVATIONS.index(self.activation)}",
            f"-DFLASHMOE_TRACE={int(self.trace)}",
            f"-DFLASHMOE_EXACT={int(self.exact)}",
            *["-DFLASHMOE_RDMA=1"] * self.rdma,
        ]


@dataclass(frozen=True)
class Compiled:
    """A kernel in the cache."""

    path: Path
    seconds: float | None
    """What it took to compile; None: it was there."""


_known: dict[Variant, Path] = {}  # of this process


def kernel(variant: Variant) -> Path:
    """The cubin of `variant`, compiled if it is not in the cache; see `compile_kernel`."""
    path = _known.get(variant)
    if path is None or not path.exists():
        path = _known[variant] = compile_kernel(variant).path
    return path


def compile_kernel(variant: Variant) -> Compiled:
    """Find `variant` in the cache, or compile it.

    Raises `FlashMoEError` if there is no compiler, if it fails, or if the cache cannot be written.
    """
    root, nvcc, cache = source_root(), find_nvcc(), cache_folder()
    name = f"{variant.title.replace(' ', '-').lower()}-{_key(root, nvcc, cache, variant)}"
    cubin = cache / f"{name}.cubin"
    if cubin.exists():
        return Compiled(cubin, None)
    with _locked(cache / f"{name}.lock", variant) as alone:
        if cubin.exists():  # another process has compiled it meanwhile
            return Compiled(cubin, None)
        if alone:
            for abandoned in cache.glob(f"{name}.*.tmp"):  # by a process that was killed
                shutil.rmtree(abandoned, ignore_errors=True)
        _say(f"compiling the {variant.title} kernel for sm_90a (once, about 30 s) ...")
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=cache, prefix=f"{name}.", suffix=".tmp") as folder:
            made = Path(folder) / "kernel.cubin"
            _run_nvcc(nvcc, root, variant, made, cache / f"{name}.log")
            os.replace(made, cubin)
        return Compiled(cubin, time.monotonic() - start)


def source_root() -> Path:
    """The folder with include/ and csrc/: the package's own, or that of a development tree."""
    here = Path(__file__).resolve()
    for root in (here.parent / "cuda", here.parents[2]):
        if (root / "csrc" / "cuda" / "entry" / "moe.cu").exists():
            return root
    raise FlashMoEError(f"kernel: expected its sources in {here.parent / 'cuda'}; install flashmoe again")


def cache_folder() -> Path:
    """Where compiled kernels are kept: $FLASHMOE_CACHE, $XDG_CACHE_HOME/flashmoe or ~/.cache/flashmoe; made if
    missing."""
    if given := os.environ.get("FLASHMOE_CACHE"):
        folder = Path(given)
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashmoe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def find_nvcc() -> Path:
    """The CUDA compiler. Raises `FlashMoEError` if there is none."""
    if given := os.environ.get("FLASHMOE_NVCC"):
        if not _is_program(Path(given)):
            raise FlashMoEError(f"FLASHMOE_NVCC: expected the path of nvcc, got {given!r}")
        return Path(given)
    if nvcc := next(filter(_is_program, _candidates()), None):
        return nvcc
    raise FlashMoEError(
        "nvcc: expected the CUDA compiler as $FLASHMOE_NVCC, in $CUDA_HOME/bin, in PATH, in /usr/local/cuda*/bin or "
        f"from the Python package nvidia-cuda-nvcc, found none; to install it: {INSTALL}"
    )


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "bin" / "nvcc"
    if found := shutil.which("nvcc"):
        yield Path(found)
    # By version, newest first; the link that names none points to one of them.
    installed = Path("/usr/local").glob("cuda*/bin/nvcc")
    yield from sorted(installed, key=lambda path: [int(n) for n in _digits(path.parts[3])], reverse=True)
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or ():
        yield from sorted(Path(folder).glob("*/bin/nvcc"), reverse=True)


def _digits(text: str) -> list[str]:
    return "".join(c if c.isdigit() else " " for c in text).split()


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _key(root: Path, nvcc: Path, cache: Path, variant: Variant) -> str:
    """Names the result: a digest of all that it depends on."""
    digest = hashlib.sha256()
    parts = [(str(path.relative_to(root)), path.read_bytes()) for path in _sources(root)]
    parts += [("flags", " ".join(variant.flags).encode()), ("nvcc", _version(nvcc, cache).encode())]
    if variant.rdma:
        parts.append(("nvshmem", (nvshmem.headers() / nvshmem.VERSION_HEADER).read_bytes()))
    for name, content in parts:
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:24]


def _sources(root: Path) -> list[Path]:
    headers = [*(root / "include").rglob("*.h"), *(root / "include").rglob("*.cuh")]
    return sorted([root / "csrc" / "cuda" / "entry" / "moe.cu", *headers])


def _version(nvcc: Path, cache: Path) -> str:
    """What ``nvcc --version`` prints, remembered until the file changes."""
    status = nvcc.stat()
    stamp = f"{nvcc} {status.st_size} {status.st_mtime_ns}"
    memory = cache / f"nvcc-{hashlib.sha256(stamp.encode()).hexdigest()[:24]}.txt"
    with contextlib.suppress(OSError):
        return memory.read_text()
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise FlashMoEError(f"nvcc: {nvcc} --version failed: {error}") from error
    with contextlib.suppress(OSError):  # then it is asked for again
        with tempfile.NamedTemporaryFile("w", dir=cache, suffix=".tmp", delete=False) as file:
            file.write(done.stdout)
        os.replace(file.name, memory)
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path, variant: Variant) -> Iterator[bool]:
    """Hold the lock file `path`; the kernel releases it when this process dies, however it does. Yields whether the
    lock is held: where a file system has none, several processes may compile, each in a folder of its own."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            _say(f"waiting for another process, which compiles the {variant.title} kernel ...")
            fcntl.flock(file, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(file)


def _run_nvcc(nvcc: Path, root: Path, variant: Variant, cubin: Path, log: Path) -> None:
    folders = ["-I", root / "include"]
    if variant.rdma:
        folders += ["-isystem", nvshmem.headers()]
    command = [nvcc, *variant.flags, *folders, root / "csrc" / "cuda" / "entry" / "moe.cu", "-o", cubin]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        raise FlashMoEError(f"nvcc: cannot run {nvcc}: {error.strerror}") from error
    if done.returncode == 0 and cubin.exists():
        return
    log.write_text(" ".join(map(str, command)) + "\n" + done.stdout)
    tail = "\n".join(done.stdout.splitlines()[-_LOG_LINES:])
    raise FlashMoEError(
        f"nvcc: cannot compile the {variant.title} kernel (exit status {done.returncode}); full log: {log}\n{tail}"
    )


def _unwritable(folder: Path, error: OSError) -> FlashMoEError:
    return FlashMoEError(
        f"cache: cannot write to {folder}: {error.strerror}; set FLASHMOE_CACHE to a folder that can be"
    )


def _say(what: str) -> None:
    print(f"flashmoe: {what}", file=sys.stderr, flush=True)
