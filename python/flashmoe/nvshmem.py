"""Where NVSHMEM is, which several GPUs need: its host library, and the headers of kernels that put."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from .errors import FlashMoEError

VERSION_HEADER = Path("non_abi") / "nvshmem_version.h"
"""In the folder of headers; its content names the release."""

_LIBRARY = "libnvshmem_host.so.3"


def package() -> Iterator[Path]:
    """The folders of the Python package nvidia-nvshmem-cu13 (or -cu12), which PyTorch depends on."""
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("nvidia.nvshmem")
        yield from map(Path, (found and found.submodule_search_locations) or ())


def library() -> str:
    """NVSHMEM's host library: that of the package, else the name that the loader looks for."""
    return next((str(path) for folder in package() if (path := folder / "lib" / _LIBRARY).is_file()), _LIBRARY)


def headers() -> Path:
    """The folder of NVSHMEM's headers. Raises `FlashMoEError` if there is none."""
    for folder in package():
        if (folder / "include" / VERSION_HEADER).is_file():
            return folder / "include"
    raise FlashMoEError(
        "nvshmem: expected its headers, which kernels for transport 'rdma' are compiled with, found none; to install "
        "them: pip install nvidia-nvshmem-cu13"
    )
