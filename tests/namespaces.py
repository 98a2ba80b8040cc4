"""Linux's namespaces, entered by the process that calls."""

from __future__ import annotations

import ctypes
import os


def enter(namespace: int) -> None:
    """The one that this descriptor is of, which /proc/PID/ns has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
