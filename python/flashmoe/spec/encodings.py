"""Element types, and how quantised matrices and rows are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DTYPES = ("float32", "bfloat16", "float16")
"""Element types of a layer's x and y, and of weights that are not quantised."""

FP8 = "float8_e4m3fn"
"""One of the two types of quantised weights, and the type of quantised rows."""

MXFP4 = "mxfp4"
"""The other type of quantised weights: e2m1 in blocks of 32, each with a scale in e8m0 (OCP Microscaling Formats)."""

ELEMENT_TYPES = (*DTYPES, FP8, MXFP4)

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
"""Bytes of an element, for the types that rows can have."""

WEIGHT_SCALES = ("none", "tensor", "row", "block")
"""Which numbers of a quantised matrix share a scale: all, those of a row, or those of a block (`Encoding.block`)."""

SCALE_BLOCK = 128
"""Elements of a quantised row that share a scale."""


@dataclass(frozen=True)
class Encoding:
    """How quantised matrices are stored. No other place in Python knows this (C++:
    include/flashmoe/spec/encoding.h)."""

    dtype: str
    """Element type of weights."""
    name: str
    """The short name of that type."""
    suffixes: tuple[str, str]
    """What stands behind the name of merged experts' matrices in the names of two tensors: the one with the elements,
    and the one with the scales."""
    stored: str
    """Element type of the tensor that has the elements."""
    packed: int
    """The length of that tensor's last axis if it is packed: this axis has the bytes of one block, and the axis before
    it counts blocks. 0: the tensor is not packed, and has the axes of the matrices."""
    block: tuple[int, int]
    """Rows and columns of a matrix that share a scale, where scales belong to blocks."""
    scale: str
    """Element type of the scales."""
    kinds: tuple[str, ...]
    """The values of `WEIGHT_SCALES` that the encoding has."""
    rows_quantised: bool
    """Whether the rows that the matrix multiplies are quantised, too (docs/fp8.md); otherwise they have y's type."""
    whole_blocks: bool
    """Whether a matrix must consist of whole blocks of columns; otherwise the last block may be smaller."""

    def numbers(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the matrices whose elements are in a tensor of this shape."""
        if not self.packed:
            return tuple(shape)
        *lead, blocks, _ = shape
        return (*lead, blocks * self.block[1])

    def elements(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor that has the elements of matrices of this shape."""
        if not self.packed:
            return tuple(shape)
        *lead, columns = shape
        return (*lead, columns // self.block[1], self.packed)

    def scale_columns(self, columns: int) -> int:
        """The number of scales in a row of blocks, for a matrix with so many columns."""
        return -(-columns // self.block[1])


ENCODINGS = {
    FP8: Encoding(
        FP8,
        "FP8",
        ("", "_scale_inv"),
        stored=FP8,
        packed=0,
        block=(SCALE_BLOCK, SCALE_BLOCK),
        scale="float32",
        kinds=WEIGHT_SCALES[1:],
        rows_quantised=True,
        whole_blocks=False,
    ),
    MXFP4: Encoding(
        MXFP4,
        "MXFP4",
        ("_blocks", "_scales"),
        stored="uint8",
        packed=16,
        block=(1, 32),
        scale="uint8",
        kinds=("block",),
        rows_quantised=False,
        whole_blocks=True,
    ),
}
"""The encodings, by the element type of weights."""
STORED_AS = {encoding.stored: dtype for dtype, encoding in ENCODINGS.items()}
"""The element type of weights, by the element type of the tensor that has the elements."""


def row_bytes(elements: int, dtype: str) -> int:
    """Bytes of a row. A row in `FP8` has float32 scales after its elements; both are aligned to 16 bytes
    (include/flashmoe/spec/rows.h)."""
    if dtype != FP8:
        return elements * ELEMENT_BYTES[dtype]
    return sum(-(-size // 16) * 16 for size in (elements, 4 * scale_blocks(elements)))


def scale_blocks(elements: int) -> int:
    """The number of scales of a quantised row, or of a row of blocks of weights, in FP8. The last scale may cover fewer
    than `SCALE_BLOCK` elements."""
    return -(-elements // SCALE_BLOCK)


def element_types(dtype: str, weights: str = "", x: str = "") -> dict[str, str]:
    """The element types of a `LayerSpec` whose y is of `dtype`, by the names of its fields. The engines support only
    the combinations that this function returns. `weights`: `dtype`, the default, or one of `ENCODINGS`. `x`, as the
    caller gives it: `dtype`, the default, or `FP8`."""
    weights = weights or dtype
    rows = weights if weights == dtype or ENCODINGS[weights].rows_quantised else dtype
    return {
        "x_type": x or dtype,
        "token_type": rows,
        "weight_type": weights,
        "intermediate_type": rows,
        "y_type": dtype,
        "return_type": dtype,
    }
