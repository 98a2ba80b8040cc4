"""The worked example of docs/extending.md on a GPU: the kernel and the engine's host side compiled with its program."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flashmoe import jit

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "-DFLASHMOE_PROGRAM=kForwardAndOuter"
INCLUDES = ["-I", str(ROOT / "include"), "-I", str(ROOT / "csrc")]
TYPES = {"bf16": "bfloat16", "fp16": "float16"}

pytestmark = pytest.mark.gpu


def run(command: list[str | Path]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def host_program(folder: Path) -> Path:
    """The CUDA engine's host side and the test's main()."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    csrc = ROOT / "csrc"
    sources = [ROOT / "tests" / "gpu" / "extending" / "main.cpp", csrc / "cpu" / "types.cpp"]
    for part in ("host", "cuda", "cuda/transport"):
        sources += sorted((csrc / part).glob("*.cpp"))

    def compiled(source: Path) -> Path:
        to = folder / f"{source.parent.name}-{source.stem}.o"
        run([compiler, "-std=c++20", "-O2", PROGRAM, *INCLUDES, "-c", source, "-o", to])
        return to

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    program = folder / "extending"
    run([compiler, *objects, "-ldl", "-lpthread", "-o", program])
    return program


def kernel(folder: Path, dtype: str) -> Path:
    cubin = folder / f"{dtype}.cubin"
    flags = jit.Variant(TYPES[dtype], "swiglu").flags
    run([jit.find_nvcc(), *flags, PROGRAM, *INCLUDES, ROOT / "csrc" / "cuda" / "entry" / "moe.cu", "-o", cubin])
    return cubin


@pytest.mark.timeout(1200)
def test_extending(tmp_path: Path) -> None:
    program = host_program(tmp_path)
    for dtype in TYPES:
        shown = run([program, kernel(tmp_path, dtype), dtype])
        assert shown.count("calls") == 4
