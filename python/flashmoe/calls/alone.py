"""Calls without a context: the shapes of their tensors decide which kept context they use."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from ..contexts.growing import Shape
from ..contexts.kept import KeptContext, kept_context, known
from ..contexts.limits import Room, room_alone
from ..errors import InvalidArgument
from ..spec import (
    ENCODINGS,
    MAX_CUDA_EXPERTS,
    MAX_CUDA_TOKENS,
    MAX_CUDA_TOP_K,
    MAX_EXPERTS,
    MAX_SLICES,
    MAX_TOKENS,
    MAX_WIDTH,
    STORED_AS,
    Options,
)
from ..spec.tensors import Tensors
from .arguments import check, y_type
from .refusals import traces
from .tensors import believed, device_operand, dtype_name, operand

_found: dict[Hashable, KeptContext] = {}
"""The kept contexts that earlier calls have found, by `_key`. A call with the same key needs no second search."""
_MOST_FOUND = 1024


def number_of(tensors: Tensors, options: Options) -> int:
    """The number by which ``torch.ops.flashmoe.moe`` finds the kept context of such calls; see `context_of`."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        from ..pytorch.constants import kept_number

        return kept_number(*map(_as_constant, _shape(tensors, options)))
    return context_of(tensors, options).number


def _as_constant(each: Any) -> Any:
    """`each`; a size becomes a constant of the code that PyTorch compiles. With dynamic shapes PyTorch takes sizes for
    variables, but the end of a range must be a constant there."""
    return len(range(each)) if isinstance(each, int) else each


def context_of(tensors: Tensors, options: Options) -> KeptContext:
    """The kept context for calls with such tensors and options. It takes memory when it is first used. Raises what a
    call with a context raises for wrong arguments, and `InvalidArgument` if the tensors have only a share of the
    router's experts, as on one rank of a group."""
    try:
        key = _key(tensors, options)
        found = _found.get(key)
    except (AttributeError, IndexError, TypeError):  # wrong tensors, which `_check` refuses, or another library's
        key = found = None
    if found is not None:
        return found
    _refuse_share(tensors)
    shape = _shape(tensors, options)
    if known(shape) is None and not traces(tensors.x):
        _check(tensors, options, shape.device)  # so that nothing is kept for shapes that are wrong
    found = kept_context(shape)
    if key is not None:
        if len(_found) >= _MOST_FOUND:
            _found.clear()
        _found[key] = found
    return found


def _key(tensors: Tensors, options: Options) -> Hashable:
    """A key for `_found`. Calls with equal keys have the same `_shape`."""
    x, up, router, shared = tensors.x, tensors.gate_up_proj, tensors.router, tensors.shared_down
    return (
        x.dtype,
        x.device,
        x.shape[1],
        up.dtype,
        up.shape[0],
        tensors.down_proj.shape,
        options.transposed,
        tensors.topk_ids.shape[1] if router is None else (router.shape[0], options.top_k),
        None if shared is None else shared.shape,
    )


def _refuse_share(tensors: Tensors) -> None:
    """Raises `InvalidArgument` if gate_up_proj has fewer experts than the router, as it has on a rank of a group."""
    router, up = (getattr(each, "shape", ()) for each in (tensors.router, tensors.gate_up_proj))
    if len(router) != 2 or len(up) < 3:
        return
    experts, local = router[0], up[0]
    if local < experts:
        raise InvalidArgument(
            f"ctx: expected a flashmoe.Context, since gate_up_proj has {local} of the router's {experts} experts, as "
            "on a rank of a group, got none"
        )


def _shape(tensors: Tensors, options: Options) -> Shape:
    """The shape for which the call's context is made. If a tensor lacks an axis, the size is 1, and `check` refuses the
    tensor."""
    x, up, down = tensors.x, tensors.gate_up_proj, tensors.down_proj
    inner, stored = (1 if options.transposed is True else 2), dtype_name(up)
    encoding = ENCODINGS.get(STORED_AS.get(stored, ""))
    packed = 1 if encoding is None or not encoding.packed else encoding.block[1]
    shared = 0 if tensors.shared_down is None else _size(tensors.shared_down, inner - 1) * packed
    device = getattr(x, "device", None)
    return Shape(
        device=device.index if getattr(device, "type", "cpu") == "cuda" else None,
        dtype=y_type(dtype_name(x)),
        hidden=_size(x, 1),
        intermediate=_size(down, inner) * packed,
        experts=_size(up, 0),
        top_k=_size(tensors.topk_ids, 1) if tensors.router is None else options.top_k,
        shared_intermediate=shared,
        weight_dtype=None if encoding is None else STORED_AS[stored],
    )


def _size(tensor: Any, axis: int) -> int:
    try:
        return tensor.shape[axis]
    except (AttributeError, IndexError, TypeError):
        return 1


def _check(tensors: Tensors, options: Options, device: int | None) -> None:
    """Raises what the engine would raise for wrong arguments, although there is no context yet."""
    weights = STORED_AS.get(dtype_name(tensors.gate_up_proj))
    if device is None:
        check(_room("cpu", weights), operand, Tensors(*map(believed, Tensors._fields, tensors)), options)
    else:
        check(_room("cuda", weights), partial(device_operand, device=device), tensors, options)


@cache
def _room(engine: str, weights: str | None) -> Room:
    """The room of a context with the largest limits that the engine allows. No memory is allocated for it."""
    cuda = engine == "cuda"
    room = room_alone(
        engine=engine,
        max_tokens=MAX_CUDA_TOKENS if cuda else MAX_TOKENS,
        hidden=MAX_WIDTH,
        intermediate=MAX_WIDTH,
        experts=MAX_CUDA_EXPERTS if cuda else MAX_EXPERTS,
        top_k=MAX_CUDA_TOP_K if cuda else MAX_EXPERTS,
        dtype="float32" if weights is None else "bfloat16",
        weight_dtype=weights,
    )
    return replace(room, limits=room.limits | {"shared": MAX_SLICES, "return_slots": MAX_EXPERTS + MAX_SLICES})
