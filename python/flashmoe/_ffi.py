"""Loads the compiled library, and maps the library's errors to this package's exceptions."""

from __future__ import annotations

import ctypes
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from . import errors
from .system.absent import hidden
from .system.interrupts import deferred

_LIBRARY = pathlib.Path(__file__).parent / "lib" / "libflashmoe.so"
_BLAS = _LIBRARY.with_name("libflashmoe_blas.so")


@functools.cache
def library() -> Any:
    """The loaded library. Raises `FlashMoEError` if the library is missing or cannot be loaded."""
    with deferred(), hidden("torch"):  # TVM FFI would import an installed PyTorch, which takes seconds
        import tvm_ffi

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
        return tvm_ffi.load_module(str(_LIBRARY))
    except (OSError, RuntimeError) as error:
        raise errors.FlashMoEError(f"library: cannot load {_LIBRARY}: {error}") from error


def blas_config() -> str:
    """OpenBLAS's own description of the CPU engine's OpenBLAS: its version, and for which processors its kernels are.
    Raises `OSError` if OpenBLAS cannot be loaded."""
    config = ctypes.CDLL(str(_BLAS)).flashmoe_scipy_openblas_get_config
    config.restype = ctypes.c_char_p
    return config().decode()


def layout_fields(engine: str, limits: dict[str, int], machines: Sequence[int] = ()) -> list[dict[str, Any]]:
    """The fields of heap and workspace that the engine lays out for `limits`, which are
    `flashmoe.contexts.limits.ContextSpec.limits`.

    `machines` has the machine of each rank, by rank; empty: all ranks are on one machine. Each field is a dict with the
    keys name, region ("heap" or "workspace"), shape (a tuple), elem_bytes, bytes, writer and why (its purpose).
    """
    fields = library().cuda_layout_fields if engine == "cuda" else library().layout_fields
    return [
        {str(key): tuple(value) if key == "shape" else _plain(value) for key, value in row.items()}
        for row in fields(limits, list(machines))
    ]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value
