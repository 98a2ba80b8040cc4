"""Fetch the headers of two releases of NVSHMEM, with which kernels that put are compiled.

    python tools/nvshmem_headers.py

They go to <this Python environment>/nvshmem/<release>, 3 MB in all. To get them, the whole packages are downloaded (60
and 182 MB). The packages' libraries (330 MB) are not kept, because nothing here runs them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# A release of the oldest minor version that python/flashmoe/nvshmem.py accepts, and one of the newest.
RELEASES = ("3.4.5", "3.8.0")

_PACKAGE = "nvidia-nvshmem-cu13"
_FOLDER = Path(sys.prefix) / "nvshmem"
_INCLUDE = "nvidia/nvshmem/include"


def folder(release: str) -> Path:
    """The folder of a release's headers. It exists once they are fetched."""
    return _FOLDER / release / _INCLUDE


def fetch(release: str) -> None:
    """Download the headers of a release. Their folder appears only when all of them are in it."""
    _FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER, prefix=f"{release}.") as made:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        subprocess.run([*pip, "--no-deps", "--only-binary=:all:", "--dest", made, f"{_PACKAGE}=={release}"], check=True)
        (wheel,) = Path(made).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(f"{_INCLUDE}/")]
            archive.extractall(Path(made) / release, names)
        (Path(made) / release).rename(_FOLDER / release)


def main() -> int:
    for release in RELEASES:
        if not folder(release).exists():
            print(f"fetching the headers of NVSHMEM {release}")
            fetch(release)
    return 0


if __name__ == "__main__":
    sys.exit(main())
