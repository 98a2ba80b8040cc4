"""Where UCX is, which groups on several machines need: its library libucp, from 1.13 on."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from pathlib import Path

INSTALL = "pip install libucx-cu13, or a system's package libucx0"
_LIBRARY = "libucp.so.0"


def library() -> str:
    """The library: what ``FLASHMOE_UCX`` names, that of a Python package (libucx-cu13, libucx-cu12), else the name that
    the loader looks for."""
    if given := os.environ.get("FLASHMOE_UCX"):
        return given
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        found = importlib.util.find_spec("libucx")
        for folder in (found and found.submodule_search_locations) or ():
            if (path := Path(folder) / "lib" / _LIBRARY).is_file():
                return str(path)
    return _LIBRARY
