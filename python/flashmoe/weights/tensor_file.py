"""Tensors in a safetensors file: a JSON header that says what each tensor is and where it lies, then the tensors'
bytes.

This module reads the file itself, without the library safetensors, for three reasons. If memory is missing, the library
panics instead of raising an exception of Python. It maps the file, so the process ends if another process shortens the
file. And of several tensors that have the same name, it takes the last.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from ..system.foreign import is_count, length, opened, parsed, shown

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""The dtypes that are read, by their names in a safetensors file."""

QUANTISED = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}
"""The dtypes of weights that have scales."""

WEIGHTS = DTYPES | QUANTISED
"""The dtypes of weights that have one element for each number."""

BYTES = {"U8": np.dtype(np.uint8)}
"""The dtype of packed elements of weights, and of their scales."""

READ = WEIGHTS | BYTES
"""All dtypes that are read."""

MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_PREFIX = 8
"""Bytes that say how long the header is."""


class Stored(NamedTuple):
    """A tensor in a file that is not read yet."""

    name: str
    dtype: str
    """The dtype's name in the file: one of `READ`, or another."""
    shape: tuple[int, ...]
    path: Path
    offset: int
    """Where the tensor begins, in bytes from the file's beginning."""
    bytes: int

    def read_into(self, array: np.ndarray) -> None:
        """Read the tensor into a contiguous array of its dtype and shape. Raises `foreign.REFUSALS`."""
        with opened(self.path) as file:
            file.seek(self.offset)
            if file.readinto(array.reshape(-1).view(np.uint8)) != self.bytes:
                raise self._too_short()

    def read_box_into(self, array: np.ndarray, box: tuple[slice, ...]) -> None:
        """Read the part of the tensor that `box` gives, and no other byte, into an array of its dtype and of that
        part's shape. Raises `foreign.REFUSALS`."""
        size = READ[self.dtype].itemsize
        shape = [each.stop - each.start for each in box]
        whole = len(box)  # from this axis on, the box has all of the tensor's elements, which follow one another
        while whole > 0 and shape[whole - 1] == self.shape[whole - 1]:
            whole -= 1
        apart = max(whole - 1, 0)  # each combination of the indices of the axes before this one is a run of its own
        strides = [size * math.prod(self.shape[axis + 1 :]) for axis in range(len(box))]
        inner = sum(each.start * stride for each, stride in zip(box[apart:], strides[apart:], strict=True))
        part = array if array.flags.c_contiguous else np.empty(shape, array.dtype)
        runs = memoryview(part.reshape(-1).view(np.uint8))
        length, to = size * math.prod(shape[apart:]), 0
        with opened(self.path) as file:
            for at in itertools.product(*(range(each.start, each.stop) for each in box[:apart])):
                outer = sum(index * stride for index, stride in zip(at, strides, strict=False))
                self._read(file, self.offset + outer + inner, runs[to : to + length])
                to += length
        if part is not array:
            array[...] = part

    def _read(self, file: BinaryIO, offset: int, to: memoryview) -> None:
        while len(to):
            got = os.preadv(file.fileno(), [to], offset)
            if got == 0:
                raise self._too_short()
            offset, to = offset + got, to[got:]

    def _too_short(self) -> ValueError:
        return ValueError(f"a file that ends within {shown(self.name)}")


@dataclass(frozen=True)
class TensorFile:
    """What the header of a file says."""

    metadata: dict[str, str]
    tensors: dict[str, Stored]


def read_header(path: Path) -> TensorFile:
    """What a file holds, after checking that it is consistent: each tensor of `READ` has the bytes of its shape, and
    together the tensors fill the file, without gaps and without shared bytes. Raises `foreign.REFUSALS`."""
    with opened(path) as file:
        begin, header = _header(file)
        end = length(file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ that is no object of strings")
    tensors = {name: _stored(path, begin, name, said) for name, said in header.items()}
    _check_filled(begin, end, tensors)
    return TensorFile(metadata, tensors)


def _header(file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and the header."""
    has, prefix = length(file), file.read(_PREFIX)
    if len(prefix) < _PREFIX:
        raise ValueError(f"{len(prefix)} bytes")
    size = int.from_bytes(prefix, "little")
    if size > MOST_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes, which are more than {MOST_HEADER_BYTES}")
    if _PREFIX + size > has:
        raise ValueError(f"a header of {size} bytes in a file of {has}")
    header = parsed(file.read(size))
    if not isinstance(header, dict):
        raise ValueError(f"a header that is no object: {shown(header)}")
    return _PREFIX + size, header


def _stored(path: Path, begin: int, name: str, said: Any) -> Stored:
    """What the header says of a tensor. Whether the file has the bytes is not checked here."""
    said = said if isinstance(said, dict) else {}
    dtype, shape, offsets = said.get("dtype"), said.get("shape"), said.get("data_offsets")
    if not isinstance(dtype, str):
        raise ValueError(f"{shown(name)} of dtype {shown(dtype)}")
    if not isinstance(shape, list) or not all(map(is_count, shape)):
        raise ValueError(f"{shown(name)} of shape {shown(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)) or offsets[0] > offsets[1]:
        raise ValueError(f"{shown(name)} with data_offsets {shown(offsets)}")
    size = offsets[1] - offsets[0]
    if dtype in READ and size != _count(shape, size) * READ[dtype].itemsize:
        raise ValueError(f"{shown(name)} of {dtype} {shown(shape)} in {size} bytes")
    return Stored(name, dtype, tuple(shape), path, begin + offsets[0], size)


def _count(shape: list[int], most: int) -> int:
    """The number of elements of a shape. For a shape with more than `most` elements, some number above `most`, because
    the product of all sizes might have millions of digits."""
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count > most:
            break
    return count


def _check_filled(begin: int, end: int, tensors: dict[str, Stored]) -> None:
    """Raise unless the tensors follow one another from `begin` to the file's end."""
    for each in sorted(tensors.values(), key=lambda each: (each.offset, each.bytes)):
        if each.offset != begin:
            raise ValueError(f"{shown(each.name)} from byte {each.offset} on, where tensors have ended at {begin}")
        begin += each.bytes
    if begin != end:
        raise ValueError(f"{end} bytes, where tensors end at {begin}")
