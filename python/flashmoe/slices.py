"""Experts that are cut into slices, which different ranks may hold: tensor parallelism within expert parallelism.

An expert of width I is ``sum over n of down[:, n] @ act(gate_up[n] @ x)``, where slice n has I / slices of the columns
of the expert's intermediate row. So a slice is an expert of that smaller width. If a router chooses an expert for a
token, the token gets all slices of that expert, each with the expert's weight. ``flashmoe.moe(..., slices=n)`` takes
the tensors of slices as it takes those of experts: the tensors of this rank's slices, ascending. Slice i of expert e
has the number ``e * slices + i``, and a placement has an entry for each slice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .calls.tensors import dtype_name
from .errors import InvalidArgument
from .spec import ENCODINGS, STORED_AS, bounded, halves_of
from .weights.scales import check_slices, common_kind


def cut(
    slices: int,
    gate_up_proj: Any,
    down_proj: Any,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    gate_up_scale: Any = None,
    down_scale: Any = None,
    *,
    activation: str = "swiglu",
    interleaved: bool = False,
    transposed: bool = False,
) -> dict[str, Any]:
    """The tensors of experts [E, ...] as tensors of their slices [E slices, ...], by the names of `flashmoe.moe`.

    Tensors are of NumPy or PyTorch, and stored as the options say. Of an expert's slices, the first gets `down_bias`,
    and the others get zeros. Raises `InvalidArgument` unless `slices` divides I. If matrices have scales, slices must
    also consist of whole blocks: of 128 columns, or of 32 in MXFP4.
    """
    dtype = None if down_scale is None else STORED_AS.get(dtype_name(down_proj))
    if down_scale is not None and dtype is None:
        raise InvalidArgument(
            f"down_scale: expected down_proj of {' or '.join(STORED_AS)}, got {dtype_name(down_proj)}"
        )
    shapes = gate_up_proj.shape, down_proj.shape
    if dtype is not None:
        shapes = tuple(ENCODINGS[dtype].numbers(shape) for shape in shapes)
    experts, width = len(down_proj), shapes[1][1 if transposed else 2]
    if width % bounded("slices", slices, 1, width):
        raise InvalidArgument(f"slices: expected a divisor of I={width}, got {slices}")
    if dtype is not None:
        check_slices(dtype, "slices", slices, width // slices)
    halves = halves_of(activation, interleaved)
    parts = {
        "gate_up_proj": _columns(slices, gate_up_proj, 2 if transposed else 1, halves),
        "down_proj": _columns(slices, down_proj, 1 if transposed else 2, 1),
    }
    if gate_up_bias is not None:
        parts["gate_up_bias"] = _columns(slices, gate_up_bias, 1, halves)
    if down_bias is not None:
        shape = experts, slices, down_bias.shape[1]
        in_parts = np.zeros(shape, down_bias.dtype) if isinstance(down_bias, np.ndarray) else down_bias.new_zeros(shape)
        in_parts[:, 0] = down_bias
        parts["down_bias"] = in_parts.reshape(experts * slices, -1)
    if dtype is not None:
        parts |= cut_scales(dtype, slices, gate_up_scale, down_scale, *(each[1:] for each in shapes), halves)
    return parts


def cut_scales(
    dtype: str,
    slices: int,
    gate_up_scale: Any,
    down_scale: Any,
    first: tuple[int, ...],
    down: tuple[int, ...],
    halves: int,
) -> dict[str, Any]:
    """As `cut`, for scales alone. An expert's matrices are in `dtype` and have the shapes `first` and `down`; `halves`:
    see `flashmoe.spec.halves_of`."""
    experts = len(down_scale)
    shapes = {
        "gate_up_proj": ((experts, *first), gate_up_scale.shape),
        "down_proj": ((experts, *down), down_scale.shape),
    }
    # If the scales' shapes fit several kinds, it does not matter which is found: these kinds are cut in the same way.
    kind = common_kind(ENCODINGS[dtype], shapes, halves)
    repeated, of_down = _repeated(gate_up_scale, slices), _repeated(down_scale, slices)
    return {
        "gate_up_scale": repeated if kind == "tensor" else _columns(slices, gate_up_scale, 1, halves),
        "down_scale": _columns(slices, down_scale, 2, 1) if kind == "block" else of_down,
    }


def _columns(slices: int, tensor: Any, axis: int, of: int) -> Any:
    """`tensor` [E, ...] of experts as a tensor [E slices, ...] of their slices, cut along `axis`, the axis of
    intermediate columns. This axis consists of `of` parts, one after the other; a slice gets its share of each."""
    shape = tuple(tensor.shape)
    apart = tensor.reshape(*shape[:axis], of, slices, shape[axis] // (of * slices), *shape[axis + 1 :])
    in_front = _moved(apart, axis + 1)
    return in_front.reshape(shape[0] * slices, *shape[1:axis], shape[axis] // slices, *shape[axis + 1 :])


def _repeated(tensor: Any, times: int) -> Any:
    """`tensor` with each entry of its first axis repeated `times` times."""
    return tensor.repeat_interleave(times, 0) if hasattr(tensor, "repeat_interleave") else tensor.repeat(times, 0)


def _moved(tensor: Any, axis: int) -> Any:
    """`tensor` with `axis` moved behind the first axis."""
    order = [0, axis, *(each for each in range(1, tensor.ndim) if each != axis)]
    return tensor.permute(order) if hasattr(tensor, "permute") else tensor.transpose(order)
