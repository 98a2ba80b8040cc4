"""What `tools/compile_cuda.py --record FOLDER` leaves there, and what of it is of today's sources.

A record is of one machine, commit and nvcc: of each instance that was compiled, a digest of its flags and of all of
ours that it is compiled from, what ptxas said of it, and its faults. Its name is that in records of GPU tests, and
behind it NVSHMEM's release, where it has headers of that. Records of several days together say what is left; what they
have of other sources is history.
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
    """One that is to be compiled."""

    name: str
    digest: str
    """Of today's sources."""


def instance(tree: Tree, of: Variant | Path, nvshmem: str = "") -> Instance:
    """That of a kernel, or of a source without instances. `nvshmem`: the release whose headers it has."""
    if isinstance(of, Path):
        return Instance(str(of.relative_to(tree.root)), tree.source(of))
    ((name, digest),) = tree.kernels([of]).items()
    return Instance(f"{name} (NVSHMEM {nvshmem})" if nvshmem else name, digest)


@dataclass
class Record:
    """That of this run. `path`: where it lies, and where an earlier run of the same `origin` may have begun it."""

    path: Path
    origin: dict[str, str]
    """The device, the commit, nvcc."""
    command: str
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        before = json.loads(self.path.read_text()) if self.path.exists() else {}
        if all(before.get(name) == value for name, value in self.origin.items()):
            self.instances, self.seconds = before["instances"], before["seconds"]

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Written at once, and whole: a run that is killed leaves what it ended."""
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
    """JSON, with a line for each instance."""
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(instances.items())]
    return json.dumps(said, indent=1).removesuffix("\n}") + ',\n "instances": {\n' + ",\n".join(lines) + "\n }\n}\n"


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The records there, the newest last."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda record: record["ended"])


@dataclass(frozen=True)
class Standing:
    """Of the instances that there are, by name, which the records have."""

    current: list[str]
    faulty: dict[str, list[str]]
    """Of today's sources too, with their faults."""
    stale: list[str]
    """They were compiled, of other sources or by another nvcc."""
    missing: list[str]

    @property
    def todo(self) -> list[str]:
        """What nobody has compiled, then what has changed, then what had faults, which may have been the machine's."""
        return [*self.missing, *self.stale, *self.faulty]

    def __str__(self) -> str:
        return (
            f"instances: {len(self.current)} current, {len(self.faulty)} faulty, {len(self.stale)} stale, "
            f"{len(self.missing)} never compiled"
        )


def standing(wanted: Iterable[Instance], records: Iterable[dict[str, Any]], nvcc: str = "") -> Standing:
    """`nvcc`: the release that counts; empty: any."""
    known: set[str] = set()
    faults: dict[Instance, list[str]] = {}  # by the last compilation of these sources
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
