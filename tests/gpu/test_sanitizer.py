"""Small calls under NVIDIA's compute-sanitizer: memory, shared-memory races, barriers, uninitialised reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(0)]

SCRIPT = Path(__file__).resolve().parent / "sanitized.py"
FOUND = 86
"""Exit status for what a tool found."""
LIMIT = 1800
"""Seconds; racecheck slows a kernel a thousandfold."""


def sanitizer() -> str | None:
    """compute-sanitizer of PATH or of a toolkit."""
    if found := shutil.which("compute-sanitizer"):
        return found
    roots = [Path(os.environ["CUDA_HOME"])] if "CUDA_HOME" in os.environ else []
    roots += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    places = [root / folder / "compute-sanitizer" for root in roots for folder in ("bin", "compute-sanitizer")]
    return next((str(place) for place in places if place.is_file()), None)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_sanitizer(tool):
    program = sanitizer()
    if program is None:
        pytest.skip(f"{tool}: no compute-sanitizer on this machine")
    options = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND)]
    if "--kernel-regex" in options and tool != "initcheck":  # PyTorch's own kernels, which write x, are none of ours
        command += ["--kernel-regex", "kns=flashmoe_"]
    # Without PyTorch's cache, an access beyond a tensor is one beyond its allocation.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*command, sys.executable, str(SCRIPT)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=LIMIT,
    )  # fmt: skip
    if "Device not supported" in done.stdout:
        pytest.skip(f"{tool}: compute-sanitizer does not support this machine's device")
    tail = "\n".join(done.stdout.splitlines()[-60:])
    assert done.returncode == 0, tail
    assert "all calls are right" in done.stdout, tail
