"""Foreign tensors for the fuzzer: a description in JSON becomes a DLPack capsule with real memory, which ends at a page
that nobody may touch. So code that reads only what the capsule claims goes on, and code that reads more ends the
process."""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import capsules
from flashmoe.calls.capsule import NAME, DLTensor

PAGE = mmap.PAGESIZE
PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Memory between two pages that cannot be read or written."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self._map = mmap.mmap(-1, self.size + 2 * PAGE)
        self.nowhere = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        """The address of a page that cannot be read."""
        self.begin = self.nowhere + PAGE
        self.end = self.begin + self.size
        for page in (self.nowhere, self.end):
            if _libc.mprotect(ctypes.c_void_p(page), PAGE, PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")

    def fill(self, pattern: bytes) -> None:
        ctypes.memmove(self.begin, (pattern * (self.size // len(pattern) + 1))[: self.size], self.size)


class Foreign:
    """A tensor that is made from its description: a JSON object with

    ``data`` (``end`` or ``start``: next to which unreadable page the tensor lies; null: it has no address), ``shift``
    (bytes between the tensor and that page), ``byte_offset``, ``device`` [type, number], ``type`` [code, bits, lanes],
    ``shape``, ``strides`` (or null), ``ndim`` (if it is not the number of sizes), ``name`` and ``deleter`` of the
    capsule, and ``fill``, the bytes with which the memory is filled, again and again.
    """

    _memory, _sizes, _strides = Guarded(2**16), Guarded(PAGE), Guarded(PAGE)

    def __init__(self, said: dict[str, Any]) -> None:
        shape, strides = said.get("shape"), said.get("strides")
        self.shape = _integers(shape, 64)
        ndim = said.get("ndim")
        self.ndim = _integer(ndim, 32) if type(ndim) is int else len(self.shape)
        code, bits, lanes = [*_integers(said.get("type"), 16), 0, 0, 0][:3]
        self.type = (code & 255, bits & 255, lanes & 65535)
        self.item = -(-self.type[1] * self.type[2] // 8)
        self.name = str(said.get("name", NAME.decode())).encode(errors="replace").replace(b"\0", b"?")
        self.deleter = said.get("deleter") is not False
        self._device = [*_integers(said.get("device"), 32), 0, 0][:2]
        self._offset = _integer(said.get("byte_offset"), 64) % 2**64
        dims = max(0, min(self.ndim, self._sizes.size // 8))
        self.sizes = (self.shape + [1] * dims)[:dims]
        steps = (_integers(strides, 64) + [1] * dims)[:dims] if isinstance(strides, list) else None
        self.first = self._place(said, steps)
        self.null = said.get("data", "end") is None
        self._memory.fill(bytes(each & 255 for each in _integers(said.get("fill"), 64)) or b"\0")
        self._shape_at = _put(self._sizes, self.sizes) if isinstance(shape, list) else None
        self._strides_at = _put(self._strides, steps) if steps is not None else None

    def _place(self, said: dict[str, Any], steps: list[int] | None) -> int:
        """The address of the first element. For a tensor that is larger than the memory, it cannot be read."""
        if steps is None:
            steps = [math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))]
        reach = [(size - 1) * step for size, step in zip(self.sizes, steps, strict=True)]
        low, high = sum(min(0, each) for each in reach), sum(max(0, each) for each in reach) + 1
        if min(self.sizes, default=1) < 1:
            low = high = 0
        shift = _integer(said.get("shift"), 3) % 8
        if (high - low) * self.item + shift > self._memory.size:
            return self._memory.nowhere
        if said.get("data") == "start":
            return self._memory.begin - low * self.item + shift
        return self._memory.end - high * self.item - shift

    @property
    def bytes(self) -> bytes:
        """The bytes of a tensor without gaps."""
        return ctypes.string_at(self.first, math.prod(self.sizes) * self.item)

    def __dlpack__(self, **_: Any) -> Any:
        tensor = DLTensor(data=None if self.null else (self.first - self._offset) % 2**64, ndim=self.ndim)
        tensor.device[:] = self._device
        tensor.code, tensor.bits, tensor.lanes = self.type
        tensor.byte_offset = self._offset
        pointer = ctypes.POINTER(ctypes.c_int64)
        tensor.shape = ctypes.cast(self._shape_at, pointer)
        tensor.strides = ctypes.cast(self._strides_at, pointer)
        return capsules.capsule(tensor, self, self.name, self.deleter)


def _integer(value: Any, bits: int) -> int:
    """`value` as a signed integer of `bits` bits, which may wrap around; 0 if `value` is no integer."""
    value = value if type(value) is int else 0
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def _integers(value: Any, bits: int) -> list[int]:
    return [_integer(each, bits) for each in value] if isinstance(value, list) else []


def _put(at: Guarded, values: list[int]) -> int:
    """Writes the values so that the last one ends at the unreadable page. Returns the address of the first one."""
    array = (ctypes.c_int64 * len(values))(*values)
    address = at.end - ctypes.sizeof(array)
    ctypes.memmove(address, array, ctypes.sizeof(array))
    return address
