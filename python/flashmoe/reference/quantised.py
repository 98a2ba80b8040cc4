"""Quantised weights and rows: the numbers they stand for, in float64, and how rows are quantised.

Here e4m3 and e2m1 are lists of their numbers. Rounding looks the nearest number up in the list, and uses no library's
conversion. Matrices of bytes are e2m1 in blocks of 32, by the OCP Microscaling Formats; others are e4m3.
"""

from __future__ import annotations

import numpy as np

BLOCK = 128
"""Elements of a row, and rows and columns of weights, that share a scale."""
LEAST_SCALE = 2.0**-126

_NUMBERS = np.array(
    [fraction * 2.0**-9 for fraction in range(8)]
    + [(8 + fraction) * 2.0 ** (exponent - 10) for exponent in range(1, 16) for fraction in range(8)][:-1]
)
"""The 127 magnitudes of e4m3, ascending: 8 subnormal ones, then 8 in each binade up to 448, where the last would be
NaN."""
_MIDDLES = (_NUMBERS[1:] + _NUMBERS[:-1]) / 2.0

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The 16 numbers of e2m1, by their codes."""
_E8M0 = np.append(2.0 ** np.arange(-127.0, 128.0), np.nan)
"""The 256 scales of e8m0, by their codes."""


def rounded(values: np.ndarray) -> np.ndarray:
    """The nearest numbers of e4m3; of two equally near, the one with an even fraction; 448 for everything beyond.
    float64."""
    magnitude = np.abs(np.asarray(values, np.float64))
    below = np.searchsorted(_MIDDLES, magnitude, side="left")  # for a midpoint: the number below it
    tied = (below < len(_MIDDLES)) & (magnitude == _MIDDLES[np.minimum(below, len(_MIDDLES) - 1)])
    nearest = _NUMBERS[below + (tied & (below % 2 == 1))]
    return np.where(np.isnan(magnitude), np.nan, np.copysign(nearest, values))


def row_scales(rows: np.ndarray) -> np.ndarray:
    """[T, ceil(n / 128)]: the scales of rows [T, n], in the rows' type, float32 or float64."""
    blocks = _in_blocks(rows)
    return np.maximum(np.abs(blocks).max(axis=-1) / rows.dtype.type(448.0), rows.dtype.type(LEAST_SCALE))


def quantised_rows(rows: np.ndarray) -> np.ndarray:
    """The numbers of rows [T, n] after they are quantised, in float64. For float32 rows every engine must make exactly
    these, in float32, bit for bit. For float64 rows they are what engines approximate."""
    scale = row_scales(rows)
    scaled = _in_blocks(rows) * (rows.dtype.type(1.0) / scale)[..., None]
    numbers = rounded(scaled) * np.asarray(scale, np.float64)[..., None]
    return numbers.reshape(len(rows), numbers.shape[1] * BLOCK)[:, : rows.shape[1]]


def scaled_rows(elements: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The numbers that quantised rows [T, n] with scales [T, ceil(n / 128)] stand for."""
    return elements.astype(np.float64) * np.asarray(scale, np.float64)[:, np.arange(elements.shape[1]) // BLOCK]


def rows_are_quantised(matrices: np.ndarray) -> bool:
    """Whether the rows that multiply matrices of this type are quantised, too: for e4m3 they are, for e2m1 not."""
    return matrices.dtype != np.uint8


def unpacked(blocks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The numbers [..., n] that weights in e2m1 [..., n / 32, 16] uint8, with scales [..., n / 32] in e8m0, stand for.
    A byte has two elements, the first in its low bits."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    numbers = _E2M1[codes] * _E8M0[scale][..., None]
    return numbers.reshape(*blocks.shape[:-2], -1)


def dequantised(elements: np.ndarray, scale: np.ndarray, halves: int = 1) -> np.ndarray:
    """The numbers that weights [..., rows, columns] stand for, with a scale for each block [..., blocks, blocks], row
    [..., rows, 1] or [..., rows], or matrix [..., 1, 1] or [...]. `halves`: 2 where gate rows and up rows have blocks
    of their own. For e2m1 see `unpacked`."""
    if not rows_are_quantised(elements):
        return unpacked(elements, scale)
    *lead, rows, columns = elements.shape
    scale = np.asarray(scale, np.float64)
    scale = scale.reshape(*lead, *(*scale.shape[len(lead) :], 1, 1)[:2])
    half = rows // halves
    row, column = np.arange(rows), np.arange(columns) // BLOCK
    block = row // half * -(-half // BLOCK) + row % half // BLOCK
    if scale.shape[-2:] != (block[-1] + 1, column[-1] + 1):  # scales of rows or of the matrix
        block, column = (row if scale.shape[-2] == rows else np.zeros_like(row)), np.zeros_like(column)
    return elements.astype(np.float64) * scale[..., block[:, None], column]


def _in_blocks(rows: np.ndarray) -> np.ndarray:
    """Rows as [T, ceil(n / 128), 128], with zeros at the end."""
    count = -(-rows.shape[1] // BLOCK)
    return np.pad(rows, ((0, 0), (0, count * BLOCK - rows.shape[1]))).reshape(len(rows), count, BLOCK)
