"""Queries to this machine's NVIDIA driver that use no GPU."""

from __future__ import annotations

import ctypes

LIBRARY = "libcuda.so.1"


def cuda_release() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports; None where there is no driver, or none that works."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL(LIBRARY).cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10
