"""Makes DLPack capsules with the contents that a test asks for, wrong ones among them."""

from __future__ import annotations

import ctypes
from typing import Any

from flashmoe.calls.capsule import NAME, DLManagedTensor, DLTensor

CPU, CUDA, CUDA_HOST = (1, 0), (2, 0), (3, 0)
TYPES = {"int32": (0, 32, 1), "int64": (0, 64, 1), "float32": (2, 32, 1), "float64": (2, 64, 1)}
"""By name of an element type: DLPack's code, bits and lanes."""

exported: dict[int, Any] = {}
"""What exported tensors need until they are given back, by the address of the `DLManagedTensor`."""

_python = ctypes.PyDLL(None)
_new = _python.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
# A destructor must not make a reference to its capsule, so these two functions take the capsule's address.
_is_valid = _python.PyCapsule_IsValid
_is_valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_pointer = _python.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int) -> None:
    del exported[address]


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    """The destructor of capsules. It releases a tensor that nobody has taken, as DLPack requires of an exporter."""
    if _is_valid(capsule, NAME):
        del exported[_pointer(capsule, NAME)]


def capsule(tensor: DLTensor, alive: Any, name: bytes = NAME, deleter: bool = True) -> Any:
    """A capsule of `tensor`. The object `alive` is kept until the tensor is given back. `deleter`: whether the tensor
    has the function that gives it back."""
    managed = DLManagedTensor(tensor=tensor, deleter=ctypes.cast(_delete, ctypes.c_void_p) if deleter else None)
    address = ctypes.addressof(managed)
    exported[address] = managed, alive, name
    return _new(address, name, ctypes.cast(_destroy, ctypes.c_void_p) if name == NAME else None)
