"""The scales of quantised weights and rows: which shapes they have, and what these say.

A number of a matrix is its element times a scale, which all numbers of the matrix share (``tensor``), those of a row
(``row``), or those of a block of 128 rows by 128 columns (``block``), counted from the first row and column, so that
the last blocks may be smaller. Where a matrix has gate rows and up rows one behind the other, each of the two has
blocks of its own, since checkpoints store them apart: the blocks of the matrix itself wherever 128 divides I.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import InvalidArgument
from .spec import FP8, SCALE_BLOCK, WEIGHT_SCALES, scale_blocks

SCALE_OF = {
    "gate_up_proj": "gate_up_scale",
    "down_proj": "down_scale",
    "shared_gate_up": "shared_gate_up_scale",
    "shared_down": "shared_down_scale",
}
"""The matrices that may be in FP8, by the names of `flashmoe.moe`, and their scales."""


def block_rows(rows: int, halves: int) -> int:
    """Rows of blocks of a matrix, of `halves` parts one behind the other."""
    return halves * scale_blocks(rows // halves)


def parts_of(matrix: str, halves: int) -> int:
    """In how many parts, one behind the other, the matrix of that name is, where first ones have `halves`."""
    return halves if matrix in ("gate_up_proj", "shared_gate_up") else 1


def common_kind(shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]], halves: int) -> str:
    """What shares a scale in all of a layer's matrices: ``tensor``, ``row`` or ``block``, of several that mean the same
    the first. `shapes`: by a matrix's name its own and its scale's. Raises `InvalidArgument`, by the scale's name."""
    found, first = set(WEIGHT_SCALES), ""
    for matrix, (shape, given) in shapes.items():
        name = SCALE_OF[matrix]
        of_this = _kinds(name, tuple(given), tuple(shape), parts_of(matrix, halves))
        if not found & of_this:
            raise InvalidArgument(
                f"{name}: expected a scale for each {' or '.join(sorted(found))}, as {first} has, got {list(given)}"
            )
        found, first = found & of_this, first or name
    return min(found, key=WEIGHT_SCALES.index)


def _kinds(name: str, given: tuple[int, ...], shape: tuple[int, ...], parts: int) -> set[str]:
    """Which kinds scales of shape `given` may be, of matrices of this shape: of small ones several."""
    *lead, rows, columns = shape
    shapes = {
        "block": ((*lead, block_rows(rows, parts), scale_blocks(columns)),),
        "row": ((*lead, rows, 1), (*lead, rows)),
        "tensor": ((*lead, 1, 1), (*lead,), (*lead, 1)),
    }
    if found := {kind for kind, accepted in shapes.items() if given in accepted}:
        return found
    by_block, by_row, by_tensor = (list(accepted[0]) for accepted in shapes.values())
    raise InvalidArgument(
        f"{name}: expected {by_block} (a scale for each 128 x 128), {by_row} (for each row) or {by_tensor} (for each "
        f"matrix), got {list(given)}"
    )


def check_slices(name: str, slices: int, width: int) -> None:
    """Raises `InvalidArgument`, by the argument's name, where experts are cut into slices of so many columns that cut
    blocks: those of a row between the two products are quantised by the task that has them."""
    if slices > 1 and width % SCALE_BLOCK:
        raise InvalidArgument(
            f"{name}: expected slices of a multiple of {SCALE_BLOCK} columns with weights of {FP8}, whose blocks are "
            f"not cut, got {slices} slices of I={width}"
        )
