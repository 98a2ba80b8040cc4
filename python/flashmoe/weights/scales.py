"""The scales of quantised weights: which shapes they have, and what a shape says about which numbers share a scale.

A number of a matrix is its element times a scale. A scale is shared by all numbers of the matrix (``tensor``), by those
of a row (``row``), or by those of a block (``block``), whose rows and columns `flashmoe.spec.Encoding.block` gives.
Blocks are counted from the first row and column, so the last blocks may be smaller. If a matrix has its gate rows
before its up rows, each half has blocks of its own, because checkpoints store the halves apart. If the number of a
block's rows divides I, these are the same blocks as those of the whole matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import InvalidArgument
from ..spec import ENCODINGS, Encoding

SCALE_OF = {
    "gate_up_proj": "gate_up_scale",
    "down_proj": "down_scale",
    "shared_gate_up": "shared_gate_up_scale",
    "shared_down": "shared_down_scale",
}
"""The matrices that may be quantised, and their scales, by the names of `flashmoe.moe`."""


def parts_of(matrix: str, halves: int) -> int:
    """The number of parts, one after the other, of which the matrix of that name consists: `halves` for the first
    matrix of an expert, 1 for the second."""
    return halves if matrix in ("gate_up_proj", "shared_gate_up") else 1


def scale_shape(encoding: Encoding, kind: str, shape: Sequence[int], parts: int) -> tuple[int, ...]:
    """The shape of scales of that kind, for matrices of this shape that consist of `parts` parts, one after the
    other."""
    *lead, rows, columns = shape
    of_blocks = parts * -(-(rows // parts) // encoding.block[0]), encoding.scale_columns(columns)
    return (*lead, *{"block": of_blocks, "row": (rows, 1), "tensor": (1, 1)}[kind])


def common_kind(encoding: Encoding, shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]], halves: int) -> str:
    """What shares a scale in all of a layer's matrices: ``tensor``, ``row`` or ``block``. If the shapes fit several of
    these, the first in the order of `encoding.kinds`. `shapes`: by a matrix's name, its shape and the shape of its
    scale. Raises `InvalidArgument`, which names the scale."""
    found, first = set(encoding.kinds), ""
    for matrix, (shape, given) in shapes.items():
        name = SCALE_OF[matrix]
        of_this = _kinds(encoding, name, tuple(given), tuple(shape), parts_of(matrix, halves))
        if not found & of_this:
            raise InvalidArgument(
                f"{name}: expected a scale for each {' or '.join(sorted(found))}, as {first} has, got {list(given)}"
            )
        found, first = found & of_this, first or name
    return min(found, key=encoding.kinds.index)


def _kinds(encoding: Encoding, name: str, given: tuple[int, ...], shape: tuple[int, ...], parts: int) -> set[str]:
    """Of which kinds (``tensor``, ``row``, ``block``) scales of shape `given` may be, for matrices of shape `shape`.
    For small matrices there may be several."""
    found, words = set(), []
    by_rows, by_columns = encoding.block
    what = {"block": f"{by_rows} x {by_columns}", "row": "row", "tensor": "matrix"}
    for kind in reversed(encoding.kinds):
        whole = scale_shape(encoding, kind, shape, parts)
        short = {"row": [whole[:-1]], "tensor": [whole[:-2], whole[:-1]]}.get(kind, [])
        if given in (whole, *short):
            found.add(kind)
        words.append(f"{list(whole)} ({'a scale ' * (not words)}for each {what[kind]})")
    if found:
        return found
    expected = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    raise InvalidArgument(f"{name}: expected {expected}, got {list(given)}")


def check_slices(dtype: str, name: str, slices: int, width: int) -> None:
    """Raises `InvalidArgument`, which names the argument, if experts with weights of `dtype` are cut into slices of
    `width` columns, and these slices end within a block. Neither blocks of matrices may be cut nor blocks of
    intermediate rows, because the task that computes such a row quantises whole blocks of it."""
    columns = ENCODINGS[dtype].block[1]
    if slices > 1 and width % columns:
        raise InvalidArgument(
            f"{name}: expected slices of a multiple of {columns} columns with weights of {dtype}, whose blocks are "
            f"not cut, got {slices} slices of I={width}"
        )
