"""Where NVSHMEM is: its host library, which several GPUs need, and its headers, which kernels that put need."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .errors import FlashMoEError, InvalidArgument

OLDEST, NEWEST = (3, 4), (3, 8)
"""The oldest and the newest release whose headers kernels are compiled with. Other releases are refused, newer ones
too. Parts of NVSHMEM that are not public are inlined into the kernel. If such a part changes, the kernel may compile
and yet move other bytes, or contain a call that costs it most of its speed. Ranks that have each other's memory mapped
need only the host library, of any release of NVSHMEM 3."""

INSTALL = "pip install 'nvidia-nvshmem-cu13>={}.{},<{}.{}'".format(*OLDEST, NEWEST[0], NEWEST[1] + 1)
"""Installs a release whose headers are accepted."""

VERSION_HEADER = Path("non_abi") / "nvshmem_version.h"
"""A file in the folder of headers that names the release."""

_LIBRARY = "libnvshmem_host.so.3"


def package() -> Iterator[Path]:
    """The folders of the Python package nvidia-nvshmem-cu13 (or -cu12), which PyTorch depends on."""
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("nvidia.nvshmem")
        yield from map(Path, (found and found.submodule_search_locations) or ())


def library() -> str:
    """NVSHMEM's host library: the file in the package, else the name that the loader looks for."""
    return next((str(path) for folder in package() if (path := folder / "lib" / _LIBRARY).is_file()), _LIBRARY)


def check_network() -> None:
    """Raises `InvalidArgument` if NVSHMEM is told to open a network on which strangers can write to a rank's memory:
    UCX over TCP carries out the puts of whoever connects to its port (docs/security.md). NVSHMEM opens the network when
    a group forms, even if all memory is mapped."""
    if os.environ.get("NVSHMEM_REMOTE_TRANSPORT", "").lower() != "ucx":
        return
    used = os.environ.get("NVSHMEM_UCX_TLS") or os.environ.get("UCX_TLS") or ""
    names = used.split(",")
    if not used or used.startswith("^") or "all" in names or any(name.startswith("tcp") for name in names):
        raise InvalidArgument(
            "NVSHMEM_REMOTE_TRANSPORT: expected none, ibrc, ibdevx, ibgda or libfabric, or ucx with NVSHMEM_UCX_TLS "
            f"that names transports other than tcp, got ucx with {used or 'all of them'}: whoever connects to UCX's "
            "port of TCP writes to any address of a rank"
        )


def headers() -> Path:
    """The folder of NVSHMEM's headers. Raises `FlashMoEError` if there are no headers, or none of a known release."""
    for folder in package():
        found = folder / "include"
        if (found / VERSION_HEADER).is_file():
            _check(found)
            return found
    raise FlashMoEError(
        "nvshmem: expected its headers, which kernels for transport 'rdma' are compiled with, found none; to install "
        f"them: {INSTALL}"
    )


def release(headers: Path) -> tuple[int, ...]:
    """Major, minor and patch number of these headers. Raises `FlashMoEError` if they do not say."""
    path = headers / VERSION_HEADER
    text = path.read_text()
    found = (re.search(rf"#define NVSHMEM_VENDOR_{part}_VERSION (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH"))
    numbers = tuple(int(number[1]) for number in found if number)
    if len(numbers) != 3:
        raise FlashMoEError(f"nvshmem: expected {path} to define its release (NVSHMEM_VENDOR_MAJOR_VERSION ...)")
    return numbers


def _check(headers: Path) -> None:
    got = release(headers)
    if not OLDEST <= got[:2] <= NEWEST:
        first, last, what = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST, got))
        raise FlashMoEError(
            f"nvshmem: expected {first} to {last}, whose inner parts kernels for transport 'rdma' are compiled with, "
            f"got {what} ({headers}); to install one: {INSTALL}"
        )
