"""Install the wheel of dist/ in a clean environment, without compilers, and use it.

    python tools/check_wheel.py [PYTHON ...]         (after tools/build_release.py; default: this Python)

In each environment: `flashmoe run` on two ranks of the CPU engine, whose results it compares with a reference; and, of
the CUDA engine, that each of the common kernels is found and is whole, with no nvcc to compile it. No GPU is needed, so
none of them is launched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

DIST = Path(__file__).resolve().parent.parent / "dist"

# Of the CUDA engine, where there is neither nvcc nor anything in a cache.
FIND_KERNELS = """
from flashmoe import jit
assert len(jit.shipped_kernels()) == len(jit.COMMON)
for variant in jit.COMMON:
    kernel = jit.kernel(variant).read_bytes()
    assert kernel[:4] == b"\\x7fELF" and int.from_bytes(kernel[18:20], "little") == 190, variant  # EM_CUDA
    assert b"flashmoe_few" in kernel, variant
try:
    jit.kernel(jit.Variant(activation="relu2"))
except jit.FlashMoEError as error:
    assert str(error).startswith("FLASHMOE_NVCC: expected the path of nvcc")
else:
    raise AssertionError("a kernel was made from nothing")
print(f"{len(jit.COMMON)} kernels found")
"""


def check(wheel: Path, python: str, folder: Path) -> None:
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", "--only-binary=:all:", wheel], check=True)
    hidden = ("CUDA_HOME", "PYTHONPATH", "CC", "CXX")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PATH": str(programs), "FLASHMOE_NVCC": "/none", "FLASHMOE_CACHE": str(folder / "cache")}

    def run(*command: str | Path) -> None:
        subprocess.run(command, check=True, cwd=folder, env=environment)

    run(programs / "python", "-c", "import sys, flashmoe; print(sys.version.split()[0], flashmoe.__file__)")
    run(programs / "flashmoe", "run", "--engine", "cpu", "--ranks", "2", "--out", folder / "out")
    run(programs / "python", "-c", FIND_KERNELS)


def main(*pythons: str) -> None:
    [wheel] = DIST.glob("*.whl")
    for python in pythons or (sys.executable,):
        with tempfile.TemporaryDirectory(prefix="flashmoe-wheel-") as folder:
            check(wheel, python, Path(folder))
    print(f"{wheel.name} runs with {len(pythons) or 1} Python(s), without compilers")


if __name__ == "__main__":
    main(*sys.argv[1:])
