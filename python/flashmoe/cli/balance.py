"""``flashmoe balance``: how even the ranks' loads become with copies of busy experts and another placement."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ..checkpoint import shipped_layer
from ..errors import InvalidArgument
from ..placement import balanced, contiguous, rank_loads
from ..spec import MAX_EXPERTS, MAX_RANKS, bounded
from ..system.foreign import REFUSALS, clipped, read, reason
from . import options
from .console import console, count, working
from .render import show_balance

_MOST_BYTES = 64 * MAX_EXPERTS
"""The most bytes of a file with a number for each expert."""


def command(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Text with a number for each expert: how many tokens chose it.  [default: the routing of the passage "
            "that the package ships, by its trained layer]"
        ),
    ] = None,
    ranks: options.Ranks = 8,
    copies: Annotated[
        int | None, typer.Option(help="How many experts there may be besides the E.  [default: an eighth of these]")
    ] = None,
) -> int:
    """Place experts by a recorded load, and show what each rank would have to compute.

    The last line that is printed is the placement, in the form that `flashmoe.Context` and `flashmoe.moe` take.
    """
    ranks = bounded("--ranks", ranks, 1, MAX_RANKS)
    if file is None:
        with working("the shipped layer routes its passage"):
            load = _shipped_load(ranks)
        of = "the shipped passage, dealt out evenly"
    else:
        load = _recorded_load(file)
        of = f"{file}, taken for alike on all ranks"
    in_all = load.sum(axis=0) if load.ndim == 2 else load
    experts = len(in_all)
    most = experts * (ranks - 1)
    copies = min(experts // 8, most) if copies is None else bounded("--copies", copies, 0, most)
    placement = balanced(in_all, ranks, copies)
    console.print(f"{count(experts, 'expert')}, {count(ranks, 'rank')}, {count(copies, 'copy', 'copies')}; load: {of}")
    console.print(f"busiest expert: {in_all.max() / in_all.mean():.2f} times the mean")
    default = contiguous(experts, ranks)
    show_balance([(each, rank_loads(each, load, ranks)) for each in (default, placement)])
    console.print(f"placement: {json.dumps(placement)}", soft_wrap=True)
    return 0


def _shipped_load(ranks: int) -> np.ndarray:
    """[R, E]: how many of each rank's tokens choose each expert."""
    from .. import Context, moe  # loads the engine's library

    layer, states = shipped_layer()
    sizes = {"hidden": layer.hidden, "intermediate": layer.intermediate, "experts": layer.experts, "top_k": layer.top_k}
    with Context(max_tokens=len(states), **sizes, dtype=layer.dtype.name) as context:
        moe(context, states, **layer.tensors(), **layer.rule())
        parts = np.array_split(context.last_call.topk_ids, ranks)
    return np.array([np.bincount(part.ravel(), minlength=layer.experts) for part in parts])


def _recorded_load(file: Path) -> np.ndarray:
    """The numbers of a file, between which there may be spaces, line ends, commas and brackets."""
    try:
        words = re.split(r"[\s,\[\]]+", read(file, _MOST_BYTES).decode().strip(" \t\r\n,[]"))
        numbers = [float(word) for word in words]
    except REFUSALS as error:  # raised also if the file is no text
        raise InvalidArgument(
            f"FILE: expected {clipped(file)} to have a number for each expert, got {clipped(reason(error))}"
        ) from None
    if len(numbers) > MAX_EXPERTS or not all(0.0 <= each < math.inf for each in numbers) or not any(numbers):
        raise InvalidArgument(
            f"FILE: expected 1 to {MAX_EXPERTS} numbers in {file}, none below 0 and not all 0, got {len(numbers)}"
        )
    return np.array(numbers)
