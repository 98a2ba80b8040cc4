"""The programs of ``benchmarks/``. Suites call their functions."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).with_name("programs")
"""Where an installed package has the programs; CMakeLists.txt puts them there."""


def program(name: str) -> ModuleType:
    """One of the programs, as a module. Programs import one another by these names, because they are in one folder. So
    the folder is put on the path of this process, which is a rank's or the command's."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
