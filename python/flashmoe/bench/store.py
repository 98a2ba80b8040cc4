"""The files of runs: one for each suite, device and number of GPUs, with an entry for each point.

An entry says from which sources its point was measured. A point with an entry from the present sources is not measured
again, so a run continues where the run before it stopped.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import InvalidArgument
from .origin import as_typed, cpu_model, digest_of, nvidia_smi, result_path
from .plan import ENGINES, Machine, Point, Suite

PREFIX = "bench_"
"""The beginning of the names of these files' folders. It tells them from results of the scripts of ``benchmarks/``."""
PACKAGES = (
    *("torch", "numpy", "transformers", "triton", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13"),
    *("vllm", "sonic-moe", "deep_ep", "tutel", "deepspeed", "megatron-core", "liger-kernel"),
)
"""Packages whose versions are recorded, if they are installed."""


_NUMBERS = re.compile(r"\[[-+\d.eE,\s]+\]")
"""Matches an array of numbers."""


def detected(engine: str | None) -> tuple[Machine, str]:
    """This machine, and its device's name. If `engine` is None, it is ``cuda`` if there is a GPU, else ``cpu``."""
    if engine not in (None, *ENGINES):
        raise InvalidArgument(f"--engine: expected {' or '.join(ENGINES)}, got {engine!r}")
    names = [] if engine == "cpu" else _gpus()
    if engine == "cpu" or (engine is None and not names):
        return Machine("cpu", 0), cpu_model()
    shared = len(names) == 1 and int(os.environ.get("FLASHMOE_SHARE_GPUS") or 1) > 1
    return Machine("cuda", len(names), shared), names[0] if names else cpu_model()


def _gpus() -> list[str]:
    """Names of the GPUs that this process may use. They come from nvidia-smi, so that this process opens no GPU."""
    names = nvidia_smi("name").splitlines()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([each for each in visible.split(",") if each.strip()])]


@functools.cache
def sources_digest() -> str:
    """The digest of the installed package's sources: its Python, its library, and the kernels' sources."""
    return digest_of(Path(__file__).resolve().parents[1], ".")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "flashmoe": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


class Results:
    """The file of one suite."""

    def __init__(self, folder: Path, suite: Suite, machine: Machine, device: str, commit: str) -> None:
        kind = PREFIX + suite.name.replace("-", "_")
        self.path = folder / kind / result_path(kind, device, machine.gpus).name
        self._origin = {
            "device": f"{device} x{machine.gpus}",
            "engine": machine.engine,
            "suite": suite.name,
            "commit": commit,
            "sources_sha256": sources_digest(),
            "command": as_typed("flashmoe", sys.argv[1:]),
            "versions": versions(),
        }
        if machine.engine == "cuda":
            self._origin["driver"] = nvidia_smi("driver_version").partition("\n")[0]
        self._entries: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self._entries = {entry["name"]: entry for entry in read(self.path)["points"]}

    def has(self, point: Point) -> bool:
        """Whether the point has been measured from these sources, with these sizes."""
        entry = self._entries.get(point.name, {})
        same = entry.get("sources_sha256") == sources_digest() and entry.get("sizes") == point.sizes
        return same and "voided" not in entry and "failed" not in entry

    def put(self, point: Point, measured: dict[str, Any]) -> None:
        """Adds the point's results. The file is complete at any time, also if the run is stopped."""
        origin = {name: self._origin[name] for name in ("commit", "sources_sha256")}
        self._entries[point.name] = {
            "name": point.name,
            "ranks": point.ranks,
            "sizes": point.sizes,
            **origin,
            **measured,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(written({**self._origin, "points": list(self._entries.values())}))
        partial.replace(self.path)


def written(result: dict[str, Any]) -> str:
    """The file's JSON. The times of a call are on one line, with six digits: no timer is more accurate."""
    rounded = json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.6g}"))
    text = json.dumps(rounded, indent=1)
    return _NUMBERS.sub(lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text) + "\n"


def read(path: Path) -> dict[str, Any]:
    """The content of a file. Raises `InvalidArgument` if this module has not written it."""
    try:
        result = json.loads(path.read_text())
        if {"device", "suite", "points"} <= result.keys():
            return result
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"{path}: expected a file that flashmoe bench has written, got {error}") from None
    raise InvalidArgument(f"{path}: expected a file that flashmoe bench has written, got another one")
