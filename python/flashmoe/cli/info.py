"""``flashmoe info``: what this machine can run, and the command that adds what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from rich.table import Table
from rich.text import Text

from .. import __version__, jit, nvshmem
from .._ffi import blas_config, library
from ..contexts.memory import SHARED_MEMORY, format_bytes
from ..errors import FlashMoEError
from ..system import driver, openssl
from .console import console
from .device import loads

REINSTALL = "in the source folder: pip install --force-reinstall ."


@dataclass(frozen=True)
class Check:
    """One thing that an engine needs or uses, and whether this machine has it."""

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
    _show([_library(), _blas(), _shared_memory(), _cores(), _torch(), _openssl()])
    console.print()
    console.print("cuda engine", style="bold")
    _show([_driver(), _gpu(), _torch_cuda(), _nvcc(), _cache(), _nvshmem()])
    return 0


def _show(checks: Iterable[Check]) -> None:
    """What the machine has, and what to do about the rest."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark = Text("yes", style="green") if check.present else Text("no", style="yellow")
        table.add_row(mark, Text(check.name, style="bold"), Text(check.detail))
        if check.remedy:
            table.add_row("", "", Text(check.remedy, style="cyan"))
    console.print(table)


def _library() -> Check:
    try:
        library()
    except Exception as error:
        return Check("engine library", False, f"cannot be loaded: {error}", REINSTALL)
    return Check("engine library", True, "loads")


def _blas() -> Check:
    """The package's own copy of OpenBLAS. It reports its version, and for which processors its kernels are."""
    try:
        return Check("BLAS", True, f"{blas_config()}, in the package")
    except OSError as error:
        return Check("BLAS", False, f"cannot be loaded: {error}", REINSTALL)


def _shared_memory() -> Check:
    """The ranks' heaps lie there, so its free space limits the size of groups."""
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
    """The version is read from the package's metadata, because importing torch takes seconds."""
    version = _version("torch")
    if version is None:
        return Check("PyTorch", False, "optional: for torch tensors and flashmoe.nn", "pip install torch")
    return Check("PyTorch", True, version)


def _openssl() -> Check:
    path = openssl.library()
    if not loads(path):
        return Check("OpenSSL 3", False, f"no {path}; groups on several machines need it", openssl.INSTALL)
    return Check("OpenSSL 3", True, f"{path}, for groups on several machines")


def _driver() -> Check:
    """The driver's library, which the engine loads. The engine loads nothing of a CUDA toolkit."""
    release = driver.cuda_release()
    if release is None:
        found = f"{driver.LIBRARY} is there, but does not work" if loads(driver.LIBRARY) else f"no {driver.LIBRARY}"
        return Check("NVIDIA driver", False, found)
    detail = f"{driver.LIBRARY}, for CUDA {release[0]}.{release[1]}"
    if refused := jit.refused_by_driver():
        detail += f"; of compiled kernels, {refused}"
    return Check("NVIDIA driver", True, detail)


def _gpu() -> Check:
    fields = "name,compute_cap,memory.total,driver_version"
    found = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
    if not found:
        return Check("NVIDIA GPU", False, "none found by nvidia-smi")
    devices = [[field.strip() for field in line.split(",")] for line in found.splitlines()]
    usable = any(device[1:2] == ["9.0"] for device in devices)
    detail = "; ".join(", ".join(device) for device in devices)
    return Check("NVIDIA GPU", usable, detail if usable else f"{detail}: expected compute capability 9.0 (H100, H200)")


def _torch_cuda() -> Check:
    """The engine takes PyTorch's tensors. A build of PyTorch for CPUs is recognised by ``+cpu`` in its version."""
    version = _version("torch")
    if version is None:
        return Check("PyTorch for CUDA", False, "holds the tensors", "pip install torch")
    if "+cpu" in version:
        return Check("PyTorch for CUDA", False, f"{version} is for CPUs", "pip install --force-reinstall torch")
    return Check("PyTorch for CUDA", True, version)


def _nvcc() -> Check:
    """nvcc, found in the same way as by `flashmoe.jit`, which compiles kernels with it."""
    try:
        found = jit.find_nvcc()
    except FlashMoEError:
        what = "compiles kernels that the package does not carry" if jit.shipped_kernels() else "compiles the kernel"
        return Check("nvcc", False, what, jit.remedy())
    release = _output([str(found), "--version"]).rpartition("release ")[2].partition(",")[0]
    return Check("nvcc", bool(release), f"{release} ({found})" if release else f"{found} does not run")


def _cache() -> Check:
    try:
        folder, kernels = jit.compiled_kernels()
    except FlashMoEError as error:
        return Check("kernel cache", False, str(error))
    shipped = len(jit.shipped_kernels())
    hint = "flashmoe compile    (else the first call of a dtype and activation does it)"
    carried = f", {shipped} in the package" if shipped else ""
    return Check("kernel cache", True, f"{folder}: {kernels} compiled{carried}", "" if kernels or shipped else hint)


def _nvshmem() -> Check:
    library = nvshmem.library()
    if not loads(library):
        return Check("NVSHMEM", False, "for several GPUs", nvshmem.INSTALL)
    try:
        headers = nvshmem.headers()
    except FlashMoEError as error:
        return Check("NVSHMEM", True, f"{library}, for several GPUs, but not for transport 'rdma': {error}")
    release = ".".join(map(str, nvshmem.release(headers)))
    return Check("NVSHMEM", True, f"{library}, for several GPUs; headers of {release}, for transport 'rdma'")


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
