"""Loads the compiled library, and maps the library's errors to this package's exceptions."""

from __future__ import annotations

import ctypes
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import scipy_openblas32

from . import errors
from .system.interrupts import deferred

_LIBRARY = pathlib.Path(__file__).parent / "lib" / "libflashmoe.so"


@functools.cache
def library() -> Any:
    """The loaded library. Raises `FlashMoEError` if the library is missing or cannot be loaded."""
    with deferred():
        import tvm_ffi  # not at the top: where PyTorch is installed, this imports it, which takes seconds

    if not _LIBRARY.exists():
        raise errors.FlashMoEError(
            f"library: expected the compiled {_LIBRARY.name} in {_LIBRARY.parent}; install with: pip install ."
        )
    for kind in (
        errors.FlashMoEError,
        errors.InvalidArgument,
        errors.BadRow,
        errors.HeapError,
        errors.GroupError,
        errors.PeerTimeout,
    ):
        tvm_ffi.register_error(f"flashmoe.{kind.__name__}", kind)
    try:
        # Loaded by its path first: the loader then finds it by name, wherever the two packages are installed.
        ctypes.CDLL(str(pathlib.Path(scipy_openblas32.get_lib_dir()) / "libscipy_openblas.so"))
        return tvm_ffi.load_module(str(_LIBRARY))
    except (OSError, RuntimeError) as error:
        raise errors.FlashMoEError(f"library: cannot load {_LIBRARY}: {error}") from error


def layout_fields(engine: str, limits: dict[str, int], machines: Sequence[int] = ()) -> list[dict[str, Any]]:
    """The fields of heap and workspace that the engine lays out for `limits`, which are
    `flashmoe.contexts.limits.ContextSpec.limits`.

    `machines` has the machine of each rank, by rank; empty: all ranks are on one machine. Each field is a dict of name,
    region ("heap" or "workspace"), shape (a tuple), elem_bytes, bytes, writer and why.
    """
    fields = library().cuda_layout_fields if engine == "cuda" else library().layout_fields
    return [
        {str(key): tuple(value) if key == "shape" else _plain(value) for key, value in row.items()}
        for row in fields(limits, list(machines))
    ]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value
