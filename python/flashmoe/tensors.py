"""Tensors of any library that speaks DLPack (NumPy, PyTorch, ...), as the engine takes them.

NumPy has no bfloat16 of its own: arrays of ``ml_dtypes.bfloat16`` are handed over as 16-bit words.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .errors import InvalidArgument

if TYPE_CHECKING:  # its import takes seconds: see _ffi.library
    import tvm_ffi

DTYPES = ("float32", "bfloat16", "float16")
"""Element types of the layer's tensors, in the order of ``DType`` in csrc/cpu/types.h."""


@dataclass(frozen=True)
class Operand:
    """A contiguous tensor in host memory. `view` is what the engine reads; it keeps the memory alive."""

    view: tvm_ffi.Tensor
    shape: tuple[int, ...]
    dtype: str


def dtype_name(tensor: Any) -> str:
    """The element type's name as NumPy and PyTorch both spell it, such as ``bfloat16``."""
    return str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")


def operand(name: str, tensor: Any, expected: str, dtypes: tuple[str, ...]) -> Operand:
    """`tensor` as an operand. Raises `InvalidArgument` if it is no tensor, elsewhere than in host memory, not
    contiguous, or of none of `dtypes`; `expected` words the expectation."""
    if not hasattr(tensor, "__dlpack__") or not hasattr(tensor, "shape"):
        raise InvalidArgument(f"{name}: expected {expected}, got {type(tensor).__name__}")
    shape = tuple(int(size) for size in tensor.shape)
    dtype = dtype_name(tensor)
    if dtype not in dtypes:
        raise InvalidArgument(f"{name}: expected {expected}, got {list(shape)} {dtype}")
    kind = getattr(getattr(tensor, "device", None), "type", "cpu")
    if kind != "cpu":
        raise InvalidArgument(f"{name}: expected a tensor in host memory (the CPU engine), got device {kind}")
    if isinstance(tensor, np.ndarray):
        contiguous = tensor.flags.c_contiguous
        if tensor.dtype == ml_dtypes.bfloat16:
            tensor = tensor.view(np.uint16)
        tensor = _writeable(tensor)
    else:
        contiguous = tensor.is_contiguous() if hasattr(tensor, "is_contiguous") else True
        tensor = tensor.detach() if hasattr(tensor, "detach") else tensor
    if not contiguous:
        raise InvalidArgument(f"{name}: expected a contiguous tensor, got a strided one; call .contiguous() on it")
    return Operand(as_view(tensor), shape, dtype)


def as_view(tensor: Any) -> tvm_ffi.Tensor:
    """The tensor's memory as the library takes it."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)


def _writeable(array: np.ndarray) -> np.ndarray:
    """The same memory as a writable array: DLPack as NumPy exports it by default refuses read-only ones, such as
    memory-mapped weights, although the engine only reads."""
    if array.flags.writeable:
        return array
    interface = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=array))


def empty_like(tensor: Any) -> Any:
    """An uninitialised contiguous tensor of the same library, shape and type."""
    if isinstance(tensor, np.ndarray):
        return np.empty(tensor.shape, tensor.dtype)
    import torch

    if isinstance(tensor, torch.Tensor):
        return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
    raise InvalidArgument(f"x: expected a NumPy array or a PyTorch tensor, got {type(tensor).__name__}")
