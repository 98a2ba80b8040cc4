"""What is released: one version, one wheel for every Python, and an sdist with everything that the wheel is built from.

`make wheel` builds the wheel and the sdist, and tries the wheel; it takes longer than these tests, and needs nvcc.
These tests check how tools/build_release.py judges a wheel, and the records that `make wheel` wrote on the machines
where it ran. tests/test_jit.py tests how the kernels in a wheel are found.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from importlib import metadata
from pathlib import Path

import build_release
import flashmoe
import pytest
from evidence import digest_of
from flashmoe import jit

ROOT = Path(__file__).resolve().parent.parent
TAG = "py3-none-manylinux_2_28_x86_64"
KERNEL = "bf16-swiglu-0123.cubin"


def test_the_changelog_says_what_this_version_is():
    headings = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == flashmoe.__version__ == metadata.version("flashmoe-layer")


def test_one_wheel_serves_every_python():
    assert re.search(r"^Tag: py3-none-", metadata.distribution("flashmoe-layer").read_text("WHEEL"), re.M)
    library = (Path(flashmoe.__file__).parent / "lib" / "libflashmoe.so").read_bytes()
    assert b"TVMFFI" in library  # a name that it links to: such names can be found
    for of_python in (b"libpython", b"PyObject_", b"Py_Initialize", b"PyGILState_"):
        assert of_python not in library


def test_the_library_shows_its_functions_alone():
    """If the C++ library is linked in and its symbols are visible, its operators may be bound to those of another C++
    library in the process."""
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine")
    library = Path(flashmoe.__file__).parent / "lib" / "libflashmoe.so"
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in listed.splitlines()]
    assert names and not [name for name in names if not name.startswith("__tvm_ffi_")]


def test_the_library_names_no_folder_that_it_was_built_in():
    """If the library contained such a name, two builds would differ, because pip makes a folder with another name for
    each build."""
    library = (Path(flashmoe.__file__).parent / "lib" / "libflashmoe.so").read_bytes()
    assert b"tvm/ffi/" in library  # TVM FFI's headers put their own paths into errors
    assert build_release.sources_named(library) == set()


def test_the_sdist_has_what_the_package_is_built_from(tmp_path):
    pytest.importorskip("scikit_build_core", reason="scikit-build-core, which makes the sdist, is not installed")
    program = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    with tarfile.open(tmp_path / done.stdout.splitlines()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        size = sum(member.size for member in archive.getmembers())
    suffixes = {".h", ".cuh", ".cu", ".cpp", ".map", ".py", ".json", ".safetensors"}
    folders = ("include", "csrc", "python", "tests/cpp")
    sources = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes}
    sources |= {ROOT / name for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")}
    assert not {str(path.relative_to(ROOT)) for path in sources} - names
    assert not [name for name in names if name.endswith((".so", ".cubin", ".pyc"))]
    assert size < 2**24


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function that makes a wheel with a given name, tag and kernels. `KERNEL` is the one compiled kernel."""
    monkeypatch.setattr(build_release, "WORK", tmp_path)
    monkeypatch.setattr(build_release, "PLATFORM", "manylinux_2_28_x86_64")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / KERNEL).touch()

    def make(
        of_name: str = TAG,
        of_metadata: str = TAG,
        kernels: tuple[str, ...] = (KERNEL,),
        program: bytes = b"",
        year: int = 1980,
    ) -> Path:
        path = tmp_path / f"flashmoe_layer-{flashmoe.__version__}-{of_name}.whl"
        about = zipfile.ZipInfo("flashmoe_layer-0.dist-info/WHEEL", (year, 1, 1, 0, 0, 0))
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(about, f"Wheel-Version: 1.0\nTag: {of_metadata}\n")
            archive.writestr(zipfile.ZipInfo("flashmoe/cuda/kernels/"), "")
            for each in kernels:
                archive.writestr(zipfile.ZipInfo(f"flashmoe/cuda/kernels/{each}"), program)
        return path

    return make


def test_a_wheel_as_it_is_to_be(made):
    assert build_release.faults(made()) == []


@pytest.mark.parametrize(
    ("of_name", "of_metadata", "kernels", "fault"),
    [
        ("cp311-cp311-manylinux_2_28_x86_64", TAG, (KERNEL,), f"name: expected the tag {TAG}, got flashmoe_layer-"),
        (
            TAG,
            "py3-none-linux_x86_64",
            (KERNEL,),
            "WHEEL: expected no tag but py3-none-manylinux_2_28_x86_64, got Tag:",
        ),
        (TAG, TAG, (), f"kernels: expected {KERNEL}, found none"),
        (TAG, TAG, (KERNEL, "other.cubin"), "kernels: got other.cubin, which was not compiled for this wheel"),
    ],
    ids=["name", "tag", "without a kernel", "another kernel"],
)
def test_a_wheel_that_is_not(made, of_name, of_metadata, kernels, fault):
    [found] = build_release.faults(made(of_name, of_metadata, kernels))
    assert found.startswith(fault)


def test_a_wheel_that_another_build_would_not_give(made):
    [found] = build_release.faults(made(program=b"\x7fELF\0/tmp/pip-build-env-4wsc/tvm/ffi/any.h\0csrc/cuda/moe.cu\0"))
    assert found == f"flashmoe/cuda/kernels/{KERNEL}: names /tmp/pip-build-env-4wsc/tvm/ffi/any.h"
    assert build_release.faults(made(year=2026)) == ["times: expected one for all files, got 2"]


def documented() -> dict[str, str]:
    """The names of the kernels and their sizes in the wheel, in MiB, as the table of docs/installation.md has them."""
    return dict(
        re.findall(r"^\| `([^`]+)` \|.*\| ([0-9.]+) \|$", (ROOT / "docs" / "installation.md").read_text(), re.M)
    )


def test_the_documentation_lists_the_kernels_that_are_carried():
    assert list(documented()) == [variant.title for variant in jit.COMMON]


COMMITTED = sorted((ROOT / "benchmarks" / "results" / "release").glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=[path.stem for path in COMMITTED])
def test_where_a_release_ran(path):
    """A record of other sources than the present ones gives only a warning, because whoever changes the sources need
    not build a release."""
    run = json.loads(path.read_text())
    assert run["wheel"]["name"].endswith(f"-{TAG}.whl")
    assert run["pythons"] and all("kernels found" in each["ran"] for each in run["pythons"])
    if run["sources_sha256"] != digest_of(ROOT, *run["sources"]):
        warnings.warn(f"{path.relative_to(ROOT)}: a wheel of other sources ({run['commit'][:7]})", stacklevel=1)
        return
    assert {title: f"{size['packed'] / 2**20:.2f}" for title, size in run["kernels"].items()} == documented()


def test_a_release_ran_with_and_without_a_gpu():
    assert {path.stem[-2:] for path in COMMITTED} >= {"x0", "x1"}
