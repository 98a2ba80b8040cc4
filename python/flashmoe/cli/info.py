"""``flashmoe info``: what this machine can run, and the command that adds what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata

from .. import __version__
from ..memory import SHARED_MEMORY, format_bytes
from .render import console, show_checks


@dataclass(frozen=True)
class Check:
    """One thing an engine needs or uses."""

    name: str
    present: bool
    detail: str
    """What was found, or what its absence means."""
    remedy: str = ""
    """The command that adds it; empty if there is nothing to do."""


def command() -> int:
    """Show what this machine can run, and the command that adds what is missing."""
    console.print(f"flashmoe {__version__}, Python {platform.python_version()}, {platform.machine()}")
    console.print()
    console.print("cpu engine", style="bold")
    show_checks([_library(), _blas(), _shared_memory(), _cores(), _torch()])
    console.print()
    console.print("cuda engine (this version has none yet; what it will need)", style="bold")
    show_checks([_gpu(), _nvcc(), _nvshmem()])
    return 0


def _library() -> Check:
    try:
        from .. import _ffi

        _ffi.layout_fields({})
    except Exception as error:
        return Check("engine library", False, f"cannot be loaded: {error}", "pip install --force-reinstall flashmoe")
    return Check("engine library", True, "loads")


def _blas() -> Check:
    version = _version("scipy-openblas32")
    if version is None:
        return Check("BLAS", False, "the engine's OpenBLAS is missing", "pip install scipy-openblas32")
    return Check("BLAS", True, f"OpenBLAS {version}")


def _shared_memory() -> Check:
    """The symmetric heaps live there, so its free space bounds the group."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        return Check("shared memory", False, f"{SHARED_MEMORY}: {error.strerror}; only one rank can run")
    small = usage.free < 256 << 20
    remedy = f"mount -o remount,size=2G {SHARED_MEMORY}    (in a container: docker run --shm-size=2g ...)"
    detail = f"{SHARED_MEMORY}: {format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    return Check("shared memory", not small, detail, remedy if small else "")


def _cores() -> Check:
    return Check("cores", True, f"{len(os.sched_getaffinity(0))} for this process")


def _torch() -> Check:
    """Read from the package's metadata: importing torch takes seconds and is not needed to know it."""
    version = _version("torch")
    if version is None:
        return Check("PyTorch", False, "optional: for torch tensors and flashmoe.nn", "pip install 'flashmoe[torch]'")
    return Check("PyTorch", True, version)


def _gpu() -> Check:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    found = _output(query)
    if not found:
        return Check("NVIDIA GPU", False, "none found by nvidia-smi")
    return Check("NVIDIA GPU", True, "; ".join(found.splitlines()))


def _nvcc() -> Check:
    on_path = shutil.which("nvcc")
    if on_path:
        release = _output([on_path, "--version"]).rpartition("release ")[2].partition(",")[0]
        return Check("nvcc", True, f"{release} ({on_path})")
    version = _version("nvidia-cuda-nvcc")
    if version:
        return Check("nvcc", True, f"{version} (package nvidia-cuda-nvcc)")
    return Check("nvcc", False, "compiles the kernel", "pip install nvidia-cuda-nvcc")


def _nvshmem() -> Check:
    version = _version("nvidia-nvshmem-cu13")
    if version is None:
        return Check("NVSHMEM", False, "maps the ranks' heaps", "pip install nvidia-nvshmem-cu13")
    return Check("NVSHMEM", True, f"{version} (package nvidia-nvshmem-cu13)")


def _version(package: str) -> str | None:
    """The version of an installed package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(arguments: list[str]) -> str:
    """What a program prints; empty if it is not there, fails or hangs."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
