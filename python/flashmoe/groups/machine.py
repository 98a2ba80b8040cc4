"""Which ranks can share memory."""

from __future__ import annotations

import os
from pathlib import Path


def identity() -> str:
    """The same text in two processes if they can map each other's memory: they are on one machine that was not
    restarted between them, belong to one user, and have the same /dev/shm (containers may have their own)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = os.uname().nodename
    shared = os.stat("/dev/shm")
    return f"{boot} {shared.st_dev}:{shared.st_ino} {os.geteuid()}"
