"""Where a figure comes from, and where it is written."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from typing import Any


def _sources() -> pathlib.Path:
    """The folder of the sources: the first that has python/flashmoe, from the current folder upwards, then from this
    file's folder upwards. If none has it: the current folder."""
    here = pathlib.Path.cwd()
    starts = (here, pathlib.Path(__file__).resolve().parent)
    folders = (each for start in starts for each in (start, *start.parents))
    return next((each for each in folders if (each / "python" / "flashmoe").is_dir()), here)


ROOT = _sources()
QUERY = "clocks.sm,clocks.mem,power.draw,driver_version"
"""What `nvidia_smi` asks for."""


def output(*command: str, seconds: float = 30.0) -> str:
    """What a command prints; empty if it fails, is not installed, or takes more than `seconds`. (A driver may keep
    nvidia-smi waiting.)"""
    how: dict[str, Any] = {"capture_output": True, "text": True, "cwd": ROOT, "check": True, "timeout": seconds}
    try:
        return subprocess.run(command, **how).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def head() -> str:
    """The commit that is checked out; empty if git cannot tell it."""
    return output("git", "rev-parse", "HEAD")


def digest_of(
    root: pathlib.Path,
    *folders: str,
    without: Sequence[str] = (),
    read: Callable[[pathlib.Path], bytes] = pathlib.Path.read_bytes,
) -> str:
    """A digest of the names and contents of all files in these folders of `root`. `read` gets a file's content. Files
    that Python has compiled, and files in the folders `without`, are left out."""
    digest = hashlib.sha256()
    left_out = {root / folder for folder in without}
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and left_out.isdisjoint(path.parents):
            content = read(path)
            digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def nvidia_smi(query: str = QUERY) -> str:
    """nvidia-smi's answer to `query`: a line for each GPU; empty if there is no GPU."""
    return output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


def cpu_model() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def without_machine(argument: str) -> str:
    """An argument of a command without the folders of this machine. An absolute path below the sources or below the
    current folder becomes relative to that folder. Any other absolute path loses all that stands before
    ``benchmarks/results``; if it has no such part, only its last part is left. A path may also follow an option and
    ``=``, as in ``--out=PATH``."""
    option, equals, path = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    if not path.startswith("/"):
        return argument
    path = os.path.normpath(path)
    for folder in (str(ROOT), os.getcwd()):
        if path.startswith(f"{folder}/"):
            return option + equals + os.path.relpath(path, folder)
    results = re.search(r"(?<=/)benchmarks/results(/.*)?$", path)
    return option + equals + (results[0] if results else os.path.basename(path))


def as_typed(launcher: str, arguments: Sequence[str]) -> str:
    """The command that made a result, for the result's file: `launcher` and its arguments, without this machine's
    folders."""
    return " ".join([launcher, *map(without_machine, arguments)])


def result_path(suite: str, device: str, gpus: int) -> pathlib.Path:
    """The file of a suite's results on so many GPUs of a device: for 2 GPUs ``NVIDIA H200`` it is ``h200x2.json``."""
    name = re.sub(r"^NVIDIA (\w+).*", r"\1", device)
    return ROOT / "benchmarks" / "results" / suite / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}x{gpus}.json"


def write(path: pathlib.Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def commit_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", default=head(), help="where git is not at hand")
