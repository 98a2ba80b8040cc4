"""What the benchmarks share: where a figure comes from, the shapes, the timer, trees of two versions of the package.

Nothing here imports flashmoe, and PyTorch only where it is used, so that a worker can measure any version of the
package, and the CPU engine be measured without PyTorch.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent

SHAPES = {  # H, I, E, K, activation, token counts
    "paper-E64": (2048, 2048, 64, 2, "gelu", (16384,)),
    "paper-E8": (2048, 2048, 8, 2, "gelu", (16384,)),
    "paper-E16": (2048, 2048, 16, 2, "gelu", (16384,)),
    "paper-E32": (2048, 2048, 32, 2, "gelu", (16384,)),
    "paper-E128": (2048, 2048, 128, 2, "gelu", (16384,)),
    "qwen3-30b": (2048, 768, 128, 8, "swiglu", (8192, 1024, 64, 1)),
    "mixtral": (4096, 14336, 8, 2, "swiglu", (8192,)),
    "qwen2-moe": (2048, 1408, 64, 4, "swiglu", (8192,)),
    "phi3.5": (4096, 6400, 16, 2, "swiglu", (8192,)),
}

BUSY_CYCLES = 1_000_000  # about half a millisecond: longer than it takes to launch any of what is timed
QUERY = "clocks.sm,clocks.mem,power.draw,driver_version"
"""What `nvidia_smi` asks for."""


# ---- where a figure comes from ---------------------------------------------------------------------------------------


def output(*command: str) -> str:
    """What a command prints, empty if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def head() -> str:
    """The commit that is checked out; empty where git does not know."""
    return output("git", "rev-parse", "HEAD")


def nvidia_smi(query: str = QUERY) -> str:
    """A line of figures for each GPU; empty where there is none."""
    return output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


def cpu_model() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def write(path: pathlib.Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


# ---- the timer -------------------------------------------------------------------------------------------------------


def milliseconds(call: Callable[[int], Any], repeats: int, busy: bool = True) -> list[float]:
    """Times of single calls, by events; with `busy` behind work that keeps the GPU from waiting for the launch."""
    import torch

    times = []
    for i in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if busy:
            torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        call(i)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times[3:]


# ---- two versions of the package -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """A folder that holds an importable `flashmoe`: a site-packages, or what a wheel was unpacked into."""

    folder: pathlib.Path
    commit: str
    """Empty where nobody knows."""
    digest: str
    """Of the package's files: tells trees apart whatever is said of their commits."""

    @classmethod
    def at(cls, folder: pathlib.Path, commit: str = "") -> Tree:
        folder = folder.resolve()
        package = folder / "flashmoe"
        if not (package / "__init__.py").is_file():
            raise SystemExit(f"--trees: expected a folder that holds flashmoe/__init__.py, got {folder}")
        digest = hashlib.sha256()
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = path.read_bytes()
                digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
        return cls(folder, commit, digest.hexdigest()[:16])

    def environment(self) -> dict[str, str]:
        """For processes that are to import this tree's package, and keep its kernels apart from any other's."""
        caches = pathlib.Path(tempfile.gettempdir()) / f"flashmoe-kernels-{os.getuid()}" / self.digest
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        return {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "FLASHMOE_CACHE": str(caches),
            "FLASHMOE_PROFILES": str(caches / "none.json"),  # the built-in order, whatever this machine has stored
            "OPENBLAS_NUM_THREADS": "1",
        }

    def described(self) -> dict[str, str]:
        return {"folder": str(self.folder), "commit": self.commit, "package_sha256": self.digest}


def compile_kernels(trees: Sequence[Tree], variants: Sequence[Sequence[str]]) -> None:
    """Runs `flashmoe compile` with each of these arguments for each tree, all at once up to the cores there are."""
    from concurrent.futures import ThreadPoolExecutor

    script = "import sys; from flashmoe.cli import main; sys.exit(main(sys.argv[1:]))"

    def compile_one(job: tuple[Tree, Sequence[str]]) -> None:
        tree, arguments = job
        command = [sys.executable, "-c", script, "compile", *arguments]
        done = subprocess.run(command, env=tree.environment(), capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"flashmoe compile {' '.join(arguments)}, {tree.folder}: {done.stdout}{done.stderr}")

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, [(tree, arguments) for tree in trees for arguments in variants]))
