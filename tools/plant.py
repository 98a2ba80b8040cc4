"""Checks that if an epilogue is wrong, the GPU tests that tools/stale.py then names find the fault.

    python tools/plant.py [--minutes M] [--only NAME ...] [--out FILE.json] [--commit COMMIT]

Each fault is planted into a copy of the sources and of the installed package. Files of tests that are stale with the
fault, and are not stale without it, are run there, the shortest first, until a test fails. Exits with 1 if for some
fault no test fails. Needs a GPU; compiling the kernels of each file takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flashmoe
from flashmoe.bench.origin import commit_option, nvidia_smi, write
from gpu_evidence.collect import collected
from gpu_evidence.digests import Tree
from gpu_evidence.plan import Unit, units
from gpu_evidence.records import Evidence, read

ROOT = Path(__file__).resolve().parents[1]

COPIED = ("include", "csrc", "python", "tests", "tools", "benchmarks")


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str


FAULTS = (
    Fault(
        "every second token of a narrow tile has its neighbour's weight",
        "include/flashmoe/sm90/epilogue/features.cuh",
        "v[1] = (v[1] + bias[m].low) * w.y;",
        "v[1] = (v[1] + bias[m].low) * w.x;",
    ),
    Fault(
        "every second column of a few tokens' rows has no weight",
        "include/flashmoe/sm90/decode/gemms.cuh",
        "Dtype::narrow(high * weight)};",
        "Dtype::narrow(high)};",
    ),
)


def planted(fault: Fault, folder: Path) -> None:
    """Copies the sources and the installed package into `folder`, with the fault in both."""
    ignored = shutil.ignore_patterns("__pycache__", "results")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copytree(ROOT / "benchmarks" / "results" / "tests", folder / "benchmarks" / "results" / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    package = Path(flashmoe.__file__).parent
    shutil.copytree(package, folder / "site" / "flashmoe", ignore=ignored)
    for path in (folder / fault.file, folder / "site" / "flashmoe" / "cuda" / fault.file):
        text = path.read_text()
        assert text.count(fault.old) == 1, (path, fault.old)
        path.write_text(text.replace(fault.old, fault.new))


def named(evidence: Evidence, folder: Path) -> list[Unit]:
    """The files of tests that the fault in `folder` makes stale, the shortest first. `evidence` is of the sources
    without the fault."""
    before = {(unit.place, unit.file) for unit in units(evidence)}
    after = units(evidence.of(Tree(folder)))
    found = [unit for unit in after if (unit.place, unit.file) not in before]
    return sorted(found, key=lambda unit: unit.seconds)


def run(evidence: Evidence, fault: Fault, folder: Path, minutes: float) -> dict[str, Any]:
    """Plants the fault and runs tests. Returns which files of tests were named, which ran, and which tests failed."""
    planted(fault, folder)
    candidates = [unit for unit in named(evidence, folder) if unit.place in ("alone", "undisturbed")]
    found: dict[str, Any] = {"fault": fault.name, "file": fault.file, "named": [unit.file for unit in candidates]}
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    for unit in candidates:
        out = folder / "out"
        command = [sys.executable, "tools/test_gpu.py", "--minutes", str(minutes), "--place", unit.place, unit.file]
        command += ["--commit", "planted", "--out", str(out)]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        )
        print(done.stdout[-1500:], done.stderr[-500:], flush=True)
        ran = [json.loads(each.read_text())["files"][unit.file] for each in out.glob("*.json")]
        failures = [test for each in ran for test in each["failures"]]
        found.setdefault("ran", []).append(unit.file)
        shutil.rmtree(out, ignore_errors=True)
        if failures:
            return found | {"found_by": failures[:5], "failures": len(failures)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for each file")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="faults whose names begin so")
    parser.add_argument("--out", type=Path)
    commit_option(parser)
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if not args.only or fault.name.startswith(tuple(args.only))]
    evidence, results = Evidence(collected(), read(), Tree()), []
    for fault in faults:
        with tempfile.TemporaryDirectory(prefix="flashmoe-planted-") as folder:
            results.append(run(evidence, fault, Path(folder), args.minutes))
        said = results[-1]
        print(f"{fault.name}: {said.get('failures', 0)} failures in {', '.join(said.get('ran', [])) or 'nothing'}")
    if args.out:
        device = nvidia_smi("name").splitlines()[0]
        result = {"device": device, "commit": args.commit, "command": "python tools/plant.py", "faults": results}
        write(args.out, result)
    return 0 if all(each.get("failures") for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
