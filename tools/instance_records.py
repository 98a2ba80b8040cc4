"""The records that `tools/compile_cuda.py --record FOLDER` writes, and which of their entries are of today's sources.

A record is of one machine, commit and nvcc. For each instance that was compiled, it has a digest of its flags and of
all files of this project that it is compiled from, what ptxas reported, and the faults. An instance has the same name
as in records of GPU tests; if it needs headers of NVSHMEM, their release follows. The records of several days together
show which instances are still to be compiled. Entries of other sources than today's do not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from flashmoe.jit import Variant
from gpu_evidence.digests import ROOT, Tree

RESULTS = ROOT / "benchmarks" / "results" / "cuda_instances"


class Instance(NamedTuple):
    """An instance that is to be compiled."""

    name: str
    digest: str
    """The digest of its flags and of its sources as they are today."""


def instance(tree: Tree, of: Variant | Path, nvshmem: str = "") -> Instance:
    """The instance for a build of a kernel, or for a source without options. `nvshmem`: the release of NVSHMEM whose
    headers it is compiled with; empty: none."""
    if isinstance(of, Path):
        return Instance(str(of.relative_to(tree.root)), tree.source(of))
    ((name, digest),) = tree.kernels([of]).items()
    return Instance(f"{name} (NVSHMEM {nvshmem})" if nvshmem else name, digest)


@dataclass
class Record:
    """The record of this run. If an earlier run of the same `origin` has written to `path`, this run adds to its
    record."""

    path: Path
    origin: dict[str, str]
    """The device, the commit and the release of nvcc."""
    command: str
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        before = json.loads(self.path.read_text()) if self.path.exists() else {}
        if all(before.get(name) == value for name, value in self.origin.items()):
            self.instances, self.seconds = before["instances"], before["seconds"]

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Adds an instance, and writes the whole record at once: if the run is killed, what it has compiled is kept."""
        self.instances[name] = entry
        said = {
            **self.origin,
            "command": self.command,
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(self.seconds + time.monotonic() - self._start),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(as_text(said, self.instances))
        part.replace(self.path)


def as_text(said: dict[str, Any], instances: Mapping[str, dict[str, Any]]) -> str:
    """A record as JSON, with a line for each instance."""
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(instances.items())]
    return json.dumps(said, indent=1).removesuffix("\n}") + ',\n "instances": {\n' + ",\n".join(lines) + "\n }\n}\n"


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The records in a folder, the newest last."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda record: record["ended"])


@dataclass(frozen=True)
class Standing:
    """All instances, by name, divided by what the records have of them. `current`: they were compiled from today's
    sources, without faults. `missing`: they were never compiled."""

    current: list[str]
    faulty: dict[str, list[str]]
    """Compiled from today's sources, with these faults."""
    stale: list[str]
    """Compiled only from other sources, or by another nvcc."""
    missing: list[str]

    @property
    def todo(self) -> list[str]:
        """What is to be compiled, in this order: first instances that never were, then those whose sources or nvcc have
        changed, then those with faults, because the machine may have caused the faults."""
        return [*self.missing, *self.stale, *self.faulty]

    def __str__(self) -> str:
        return (
            f"instances: {len(self.current)} current, {len(self.faulty)} faulty, {len(self.stale)} stale, "
            f"{len(self.missing)} never compiled"
        )


def standing(wanted: Iterable[Instance], records: Iterable[dict[str, Any]], nvcc: str = "") -> Standing:
    """What the records have of the instances `wanted`. `nvcc`: the release whose compilations count; empty: any."""
    known: set[str] = set()
    faults: dict[Instance, list[str]] = {}  # of the last compilation with this name and digest
    for record in records:
        known |= record["instances"].keys()
        if nvcc in ("", record["nvcc"]):
            faults |= {Instance(name, each["digest"]): each["faults"] for name, each in record["instances"].items()}
    found = Standing([], {}, [], [])
    for each in wanted:
        if each not in faults:
            (found.stale if each.name in known else found.missing).append(each.name)
        elif faults[each]:
            found.faulty[each.name] = faults[each]
        else:
            found.current.append(each.name)
    return found
