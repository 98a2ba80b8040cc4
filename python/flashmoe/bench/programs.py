"""The programs of ``benchmarks/``, whose functions suites call."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).with_name("programs")
"""Where an installed package has them; CMakeLists.txt puts them there."""


def program(name: str) -> ModuleType:
    """One of them, as a module. They import one another by these names, as programs of one folder do, so that their
    folder is put on the path of this process, which is a rank's or the command's."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
