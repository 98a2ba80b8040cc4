"""The scales of quantised weights and rows: which shapes they have, and what these say.

A number of a matrix is its element times a scale, which all numbers of the matrix share (``tensor``), those of a row
(``row``), or those of a block of 128 rows by 128 columns (``block``), counted from the first row and column, so that
the last blocks may be smaller. Where a matrix has gate rows and up rows one behind the other, each of the two has
blocks of its own, since checkpoints store them apart: the blocks of the matrix itself wherever 128 divides I.
"""

from __future__ import annotations

from .errors import InvalidArgument
from .spec import FP8, SCALE_BLOCK, scale_blocks


def block_rows(rows: int, halves: int) -> int:
    """Rows of blocks of a matrix, of `halves` parts one behind the other."""
    return halves * scale_blocks(rows // halves)


def kinds(
    name: str, given: tuple[int, ...], lead: tuple[int, ...], rows: int, columns: int, halves: int = 1
) -> set[str]:
    """Which of ``tensor``, ``row`` and ``block`` scales of shape `given` may be, of matrices [*lead, rows, columns]: of
    small ones several, which then mean the same. Raises `InvalidArgument`, by the tensor's name, if there is none.
    """
    blocks = block_rows(rows, halves), scale_blocks(columns)
    shapes = {
        "block": ((*lead, *blocks),),
        "row": ((*lead, rows, 1), (*lead, rows)),
        "tensor": ((*lead, 1, 1), lead, (*lead, 1)),
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
