"""Checks what a DLPack capsule says, before any code follows its pointers.

The library that takes the capsule believes everything in it: it reads as many sizes as the number of dimensions says,
even if the pointer to the sizes is null, and it accepts an address that is only an offset from a null pointer.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

MOST_DIMENSIONS = 64
"""The most dimensions of a tensor that is looked at: NumPy's limit. No operand has more than four dimensions."""


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


NAME = b"dltensor"
"""The name of a capsule whose tensor no library has taken yet."""

# Not ctypes.pythonapi: all modules share its functions, and any module may change the types of their arguments.
_python = ctypes.PyDLL(None)
_is_valid = _python.PyCapsule_IsValid
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_pointer = _python.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def exported(tensor: Any) -> Any:
    """The capsule that `tensor` exports, checked to describe a tensor in memory. Raises `ValueError`, and whatever the
    exporter raises. Only the exporter knows whether the memory exists; this is not checked."""
    capsule = tensor.__dlpack__()
    if not _is_valid(capsule, NAME):
        raise ValueError(f"expected a capsule named {NAME.decode()}")
    said = DLManagedTensor.from_address(_pointer(capsule, NAME)).tensor
    if not 0 <= said.ndim <= MOST_DIMENSIONS:
        raise ValueError(f"expected at most {MOST_DIMENSIONS} dimensions, got {said.ndim}")
    if said.ndim and not said.shape:
        raise ValueError(f"expected {said.ndim} sizes, got a null pointer")
    shape = said.shape[: said.ndim] if said.ndim else []
    if any(size < 0 for size in shape):
        raise ValueError(f"expected sizes of 0 or more, got {shape}")
    if said.lanes != 1:  # the library gives types of 0 and 65535 lanes the name of a type of 1 lane
        raise ValueError(f"expected elements of one lane, got {said.lanes}")
    if 0 not in shape:
        _check_address(said.data or 0, said.byte_offset, math.prod(shape) * said.bits // 8, said.bits // 8)
    return capsule


def _check_address(data: int, offset: int, size: int, alignment: int) -> None:
    """Raises `ValueError` unless `size` bytes, aligned to `alignment`, can lie at the address `data + offset`."""
    if not data:
        raise ValueError(f"expected a tensor in memory, got one at a null pointer with offset {offset}")
    if data + offset + size > 2**64:
        raise ValueError(f"expected a tensor in memory, got {size} bytes from {data:#x} + {offset} on")
    if alignment > 1 and (data + offset) % alignment:
        raise ValueError(f"expected an address that is a multiple of {alignment}, got {data + offset:#x}")
