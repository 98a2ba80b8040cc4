"""Checks that the arrays of a layer fit one another and the config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import CheckpointError, InvalidArgument
from ..spec import ENCODINGS, STORED_AS, Encoding
from ..system.foreign import checkpoint_error, is_count, shown
from ..weights.scales import SCALE_OF, check_slices, common_kind
from .architectures import Architecture
from .planned import Planned


def checked_encoding(block: str, plan: dict[str, Planned]) -> Encoding | None:
    """The encoding of the experts' matrices; None if they are not quantised. Raises unless all tensors have one dtype,
    or, if the matrices are quantised, unless all matrices have one dtype and all other tensors have one dtype. A router
    may be float32 beside other tensors of 16 bits; scales and `choice_bias` are not compared."""
    matrices = {name: plan[name].dtype for name in SCALE_OF if name in plan}
    quantised = not STORED_AS.keys().isdisjoint(dtype.name for dtype in matrices.values())
    of_router = {name for name in ("router", "router_bias") if name in plan}
    if any(plan[name].dtype != np.float32 for name in of_router):
        of_router = set()
    apart = {"choice_bias", *of_router, *SCALE_OF.values(), *(matrices if quantised else ())}
    stored = one_dtype(f"{block} matrices", matrices.values()) if quantised else None
    if left := [planned.dtype for name, planned in plan.items() if name not in apart]:
        one_dtype(block, left)
    return None if stored is None else ENCODINGS[STORED_AS[stored.name]]


def check_scales(block: str, plan: dict[str, Planned], encoding: Encoding | None, halves: int) -> None:
    """Raises unless the scales of quantised matrices have shapes that `flashmoe.moe` accepts."""
    shapes = {name: (plan[name].numbers, plan[scale].repeated) for name, scale in SCALE_OF.items() if scale in plan}
    try:
        if encoding:
            common_kind(encoding, shapes, halves)
    except InvalidArgument as error:
        raise CheckpointError(f"{block} {error}") from None


def check_whole_blocks(encoding: Encoding, slices: int, inner: int) -> None:
    """Raises `InvalidArgument` unless `slices` slices of experts with I columns consist of whole blocks."""
    width, left = divmod(inner, slices)
    if left:
        raise InvalidArgument(f"slices: expected a divisor of I={inner}, got {slices}")
    check_slices(encoding.dtype, "slices", slices, width)


def one_dtype(name: str, dtypes: Iterable[np.dtype]) -> np.dtype:
    """The dtype that all of `dtypes` are. Raises `CheckpointError` if they differ."""
    found = sorted(set(dtypes), key=str)
    if len(found) != 1:
        raise checkpoint_error(f"{name} dtype", "one dtype", f"mixed {', '.join(map(str, found))}")
    return found[0]


def checked_sizes(block: str, plan: dict[str, Planned], gated: bool, transposed: bool) -> dict[str, int]:
    """E, H and I, after checking that the tensors fit together."""
    experts, hidden = plan["router"].shape
    down = plan["down_proj"].numbers
    order = slice(None, None, -1 if transposed else 1)
    if len(down) != 3 or down[0] != experts or down[1:][order][0] != hidden or 0 in down:
        raise checkpoint_error(
            f"{block} down_proj", f"shape [{experts}, {', '.join([str(hidden), 'I'][order])}]", shown(list(down))
        )
    inner = down[1:][order][1]
    rows = inner * (2 if gated else 1)
    expected = {
        "gate_up_proj": [experts, *[rows, hidden][order]],
        "router_bias": [experts],
        "choice_bias": [experts],
        "gate_up_bias": [experts, rows],
        "down_bias": [experts, hidden],
        "shared_gate": [1, hidden],
    }
    if "shared_down" in plan:
        expected["shared_down"] = [hidden, plan["shared_down"].shape[1]]
    for name, shape in expected.items():
        got = list(plan[name].numbers if name in SCALE_OF else plan[name].shape) if name in plan else shape
        if got != shape:
            raise checkpoint_error(f"{block} {name}", f"shape {shape}", shown(got))
    return {"experts": experts, "hidden": hidden, "inner": inner}


def check_config(
    block: str, row: Architecture, config: dict[str, Any] | None, *, experts: int, hidden: int, inner: int
) -> None:
    """Raises if the config gives one of these sizes, and it differs."""
    config = config or {}
    named = {"hidden_size": hidden, row.width: inner}
    named |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts)
    for key, size in named.items():
        said = config.get(key)
        if said is None:
            continue
        what = key.replace("_", " ")
        if not is_count(said):
            raise checkpoint_error(f"{block} {what}", f"an integer in config.json's {key}", shown(said))
        if said != size:
            raise checkpoint_error(f"{block} {what}", f"{said}, the {key} of config.json", size)
