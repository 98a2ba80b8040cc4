"""Tensors as the engines take them. The CPU engine takes tensors of any library that exports them by DLPack (NumPy,
PyTorch, ...), the CUDA engine those of PyTorch.

NumPy has neither bfloat16 nor FP8 of its own: arrays of ``ml_dtypes`` are handed over as integers of the same size.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from ..errors import InvalidArgument
from ..spec import ENCODINGS, FP8
from ..system.foreign import clipped
from .capsule import exported

if TYPE_CHECKING:  # for annotations only, because importing TVM FFI may take seconds: see _ffi.library
    import tvm_ffi


_HOST = ("cpu", "cuda_host", "rocm_host")
"""DLPack's names of memory that a CPU can read directly."""

_WORDS = {np.dtype(ml_dtypes.bfloat16): np.uint16, np.dtype(ml_dtypes.float8_e4m3fn): np.uint8}
"""Types whose arrays NumPy does not export, each with the type as which their memory is exported."""

_PACKED = tuple(encoding.stored for encoding in ENCODINGS.values() if encoding.packed)
"""Stored types of packed weights. A row of such a tensor is its last two axes: blocks, and the bytes of a block."""


class Described(Protocol):
    """What the operands of both engines have."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def of_numbers(self, shape: tuple[int, ...], dtype: str) -> Described:
        """The same memory, described by the shape and the type of the numbers that are packed in it."""
        ...


class Operand(NamedTuple):
    """A contiguous tensor in host memory, as far as it is known without reading a value. See also `host_view`."""

    shape: tuple[int, ...]
    dtype: str

    def of_numbers(self, shape: tuple[int, ...], dtype: str) -> Operand:
        return Operand(shape, dtype)


@dataclass(frozen=True)
class DeviceOperand:
    """A tensor in a GPU's memory. There may be gaps between its rows, and between its matrices. This object does not
    keep the memory alive."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    row_bytes: int
    """Bytes from one row to the next."""
    matrix_bytes: int
    """Bytes from one matrix to the next; for a single matrix, its extent."""

    def of_numbers(self, shape: tuple[int, ...], dtype: str) -> DeviceOperand:
        return replace(self, shape=shape, dtype=dtype)


def dtype_name(tensor: Any) -> str:
    """The element type's name as NumPy and PyTorch both spell it, such as ``bfloat16``."""
    return str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")


def believed(name: str, tensor: Any) -> Any:
    """`tensor` as an object whose attributes are sure to describe the memory that an engine reads: an array of NumPy or
    a tensor of PyTorch, not of a subclass; for any other type, a tensor of TVM FFI, made from the DLPack capsule that
    the object exports, because the object's own attributes may differ from the capsule. None, objects that export
    nothing, and PyTorch tensors that are not in host memory stay as they are.

    Raises `InvalidArgument` for a tensor that is not dense or cannot be exported, and for a capsule that describes no
    tensor in memory.
    """
    if tensor is None or type(tensor) is np.ndarray:
        return tensor
    if isinstance(tensor, np.ndarray):
        return np.ndarray.view(tensor, np.ndarray)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        refuse_hollow(name, tensor)
        refuse_unstored(name, tensor)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            return tensor
        tensor = tensor.detach().resolve_neg()
    if not hasattr(tensor, "__dlpack__"):
        return tensor
    try:
        view = as_view(exported(tensor))
        _ = view.device.type, view.dtype  # an unknown device or type raises an error
    except Exception as error:  # another library's exporter may raise anything
        raise InvalidArgument(
            f"{name}: expected a tensor that can be exported by DLPack, got {type(tensor).__name__}: {clipped(error)}"
        ) from error
    return view


def refuse_hollow(name: str, tensor: Any) -> None:
    """Raises `InvalidArgument` for a tensor of PyTorch that is sparse or nested: no strides say where its elements
    lie."""
    import torch

    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"{name}: expected a dense tensor, got one of layout {tensor.layout}")
    if tensor.is_nested:
        raise InvalidArgument(f"{name}: expected a dense tensor, got a nested one")


def refuse_unstored(name: str, tensor: Any) -> None:
    """Raises `InvalidArgument` for a dense tensor of PyTorch whose storage ends before its elements do, for example
    because the storage was freed. FSDP frees parameters between their uses, by ``resize_(0)``, and they keep their
    shape."""
    stored = tensor.untyped_storage().nbytes()
    if stored >= tensor.storage_offset() * tensor.itemsize + tensor.nbytes and tensor.is_contiguous():
        return
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
    if stored < needed:
        raise InvalidArgument(
            f"{name}: expected {needed} bytes of storage, which its elements reach into, got {stored}: it has been "
            "freed or cut short"
        )


def refuse_unwritable(name: str, tensor: Any) -> None:
    """Raises `InvalidArgument` for a NumPy array that is read-only or misaligned, and for a PyTorch view that negates
    what is in memory."""
    if isinstance(tensor, np.ndarray) and not tensor.flags.behaved:
        raise InvalidArgument(f"{name}: expected an array that can be written to, got a read-only or misaligned one")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor) and tensor.is_neg():
        raise InvalidArgument(f"{name}: expected a tensor that can be written to, got a view that negates its values")


def operand(name: str, tensor: Any, expected: str, dtypes: tuple[str, ...]) -> Operand:
    """`tensor` as an operand. Raises `InvalidArgument` if it is no tensor, not in host memory, not contiguous, or of
    none of `dtypes`; `expected` says in words what is expected. `tensor` must be a result of `believed`."""
    if not hasattr(tensor, "__dlpack__"):
        raise InvalidArgument(f"{name}: expected {expected}, got {type(tensor).__name__}")
    shape, dtype = _shape_and_dtype(name, tensor, expected, dtypes)
    kind = getattr(getattr(tensor, "device", None), "type", "cpu")
    if kind not in _HOST:
        raise InvalidArgument(
            f"{name}: expected a tensor in host memory (the context's engine is cpu), got device {kind}"
        )
    if not _is_contiguous(tensor):
        raise InvalidArgument(f"{name}: expected a contiguous tensor, got a strided one; call .contiguous() on it")
    return Operand(shape, dtype)


def host_view(tensor: Any) -> tvm_ffi.Tensor:
    """The memory of a tensor that `operand` accepts. The view keeps the memory alive."""
    if isinstance(tensor, np.ndarray):
        if tensor.dtype in _WORDS:
            tensor = tensor.view(_WORDS[tensor.dtype])
        return as_view(_writeable(tensor))
    if hasattr(tensor, "detach"):
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.is_neg():  # DLPack has no views that are negated when they are read
            tensor = tensor.resolve_neg()
        if tensor.itemsize == 1 and dtype_name(tensor) == FP8:  # the size first, because making the name is slow
            import torch

            tensor = tensor.view(torch.uint8)
    return as_view(tensor)


def signature(tensor: Any, first: int = 0) -> Hashable:
    """A key that is equal for tensors that `operand` treats alike. The sizes of the first `first` dimensions are left
    out of it.

    For NumPy and PyTorch; raises `AttributeError` or `TypeError` for others.
    """
    if isinstance(tensor, np.ndarray):
        return tensor.dtype, tensor.shape[first:], tensor.flags.c_contiguous
    return type(tensor), tensor.dtype, tensor.shape[first:], tensor.device, tensor.is_contiguous()


def device_operand(name: str, tensor: Any, expected: str, dtypes: tuple[str, ...], device: int) -> DeviceOperand:
    """`tensor` as an operand of the CUDA engine. Raises `InvalidArgument` if it is no PyTorch tensor of CUDA device
    `device`, of none of `dtypes`, or not contiguous. Vectors, scales and the routing must be contiguous as a whole,
    matrices in their rows. `expected` says in words what is expected."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"{name}: expected {expected}, a PyTorch one, got {type(tensor).__name__}")
    refuse_hollow(name, tensor)
    refuse_unstored(name, tensor)
    shape, dtype = _shape_and_dtype(name, tensor, expected, dtypes)
    if tensor.device.type != "cuda" or tensor.device.index != device:
        raise InvalidArgument(f"{name}: expected a tensor of cuda:{device}, the context's device, got {tensor.device}")
    if tensor.is_neg():
        raise InvalidArgument(f"{name}: expected values in memory, got a view that negates them; resolve_neg()")
    address = tensor.data_ptr()
    if len(shape) < 2 or name.startswith("topk_") or name.endswith(("_bias", "_logits", "_scale")):
        if not tensor.is_contiguous():
            raise InvalidArgument(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")
        return DeviceOperand(address, shape, dtype, 0, 0)
    size = tensor.element_size()
    # The stride of a dimension of size 1 means nothing. Without elements, no stride means anything.
    strides = [
        stride if length > 1 and tensor.numel() else None for stride, length in zip(tensor.stride(), shape, strict=True)
    ]
    lengths, packed = list(shape), dtype in _PACKED and len(shape) > 2
    if strides[-1] not in (None, 1) or (packed and strides[-2] not in (None, shape[-1])):
        raise InvalidArgument(f"{name}: expected rows without gaps, got strides {list(tensor.stride())}")
    if packed:  # make one axis of the last two, which are a row
        lengths[-2:], strides[-2:] = [shape[-2] * shape[-1]], [1]
    row_bytes = size * (lengths[-1] if strides[-2] is None else strides[-2])
    matrix_bytes = row_bytes * lengths[-2]
    if len(lengths) > 2 and strides[-3] is not None:
        matrix_bytes = size * strides[-3]
    return DeviceOperand(address, shape, dtype, row_bytes, matrix_bytes)


def _is_contiguous(tensor: Any) -> bool:
    if isinstance(tensor, np.ndarray):
        return tensor.flags.c_contiguous
    return tensor.is_contiguous() if hasattr(tensor, "is_contiguous") else True


def _shape_and_dtype(name: str, tensor: Any, expected: str, dtypes: tuple[str, ...]) -> tuple[tuple[int, ...], str]:
    """The tensor's shape and dtype. Raises `InvalidArgument` if the dtype is none of `dtypes`."""
    shape, dtype = tuple(int(size) for size in tensor.shape), dtype_name(tensor)
    if dtype not in dtypes:
        raise InvalidArgument(f"{name}: expected {expected}, got {list(shape)} {dtype}")
    return shape, dtype


def as_view(tensor: Any) -> tvm_ffi.Tensor:
    """The memory of a tensor, or of a DLPack capsule, as the library takes it."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)


def _writeable(array: np.ndarray) -> np.ndarray:
    """The same memory as a writable array. By default NumPy's export refuses read-only arrays, such as memory-mapped
    weights, although the engine only reads them."""
    if array.flags.writeable:
        return array
    interface = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=array))


def empty_like(tensor: Any) -> Any:
    """An uninitialised contiguous y for x: a tensor of the same library, shape and type, or of bfloat16 for x in
    FP8."""
    quantised = dtype_name(tensor) == FP8
    if isinstance(tensor, np.ndarray):
        return np.empty(tensor.shape, ml_dtypes.bfloat16 if quantised else tensor.dtype)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        dtype = torch.bfloat16 if quantised else tensor.dtype
        return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)
    raise InvalidArgument(f"x: expected a NumPy array or a PyTorch tensor, got {type(tensor).__name__}")
