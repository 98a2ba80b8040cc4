"""Fetch NVSHMEM's headers, to compile kernels that put with: of two releases, side by side.

    python tools/nvshmem_headers.py

They go to <this Python environment>/nvshmem/<release>, 3 MB in all. For these, whole packages are downloaded (60 and
182 MB); their libraries, 330 MB, are not kept: nothing here runs them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# One of the oldest minor release that python/flashmoe/nvshmem.py accepts, and one of the newest.
RELEASES = ("3.4.5", "3.8.0")

_PACKAGE = "nvidia-nvshmem-cu13"
_FOLDER = Path(sys.prefix) / "nvshmem"
_INCLUDE = "nvidia/nvshmem/include"


def folder(release: str) -> Path:
    """Where the headers of a release are, once they are fetched."""
    return _FOLDER / release / _INCLUDE


def fetch(release: str) -> None:
    """Download them; their folder appears when it is whole."""
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
