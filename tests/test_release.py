"""What is released: one version, a wheel for every Python, an sdist with all that it is built from.

`make wheel` builds both, and tries the wheel; that takes longer, and needs nvcc.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import flashmoe
import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_changelog_says_what_this_version_is():
    headings = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == flashmoe.__version__ == metadata.version("flashmoe")


def test_one_wheel_serves_every_python():
    assert re.search(r"^Tag: py3-none-", metadata.distribution("flashmoe").read_text("WHEEL"), re.M)
    library = (Path(flashmoe.__file__).parent / "lib" / "libflashmoe.so").read_bytes()
    assert b"TVMFFI" in library  # names that it links to are in it
    for of_python in (b"libpython", b"PyObject_", b"Py_Initialize", b"PyGILState_"):
        assert of_python not in library


def test_the_library_shows_its_functions_alone():
    """Else operators of C++ might be bound to those of another C++ library, where the library has its own."""
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine")
    library = Path(flashmoe.__file__).parent / "lib" / "libflashmoe.so"
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in listed.splitlines()]
    assert names and not [name for name in names if not name.startswith("__tvm_ffi_")]


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
