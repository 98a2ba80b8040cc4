"""Lets the calling process enter a namespace of Linux."""

from __future__ import annotations

import ctypes
import os


def enter(namespace: int) -> None:
    """Enters the namespace of an open file of /proc/PID/ns, whose descriptor is `namespace`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
