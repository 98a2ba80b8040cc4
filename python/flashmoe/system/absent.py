"""Hides a package from another package that would import it if it is installed, although nothing needs it yet."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Hidden:
    """A finder of modules that reports one package as missing, in one thread."""

    def __init__(self, package: str) -> None:
        self._package, self._thread = package, threading.get_ident()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._package and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Within the block, and in this thread alone, an import of `package` raises `ModuleNotFoundError`, unless it has
    already been imported. After the block, it can be imported as before."""
    finder = _Hidden(package)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
