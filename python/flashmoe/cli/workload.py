"""What ``flashmoe run`` runs: the shipped layer, a checkpoint's layer or a random one, and every rank's tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import models
from ..checkpoint import MoELayer, load_layer, shipped_layer
from ..contexts.memory import check_fits, plan_memory
from ..errors import InvalidArgument
from ..placement import contiguous
from ..spec import DTYPES, ENCODINGS
from . import device
from .console import working

DEFAULT_TOKENS = 512
"""Tokens per rank, if neither the user nor given hidden states set the number."""


@dataclass(frozen=True)
class Request:
    """What the user asked for, apart from the layer."""

    ranks: int
    tokens: int | None
    """Tokens per rank; None: as many as the workload has by default."""
    dtype: str | None
    """None: the dtype of the layer's source."""
    return_mode: str
    engine: str = "cpu"
    """``cpu`` or ``cuda``."""


@dataclass(frozen=True, eq=False)
class Workload:
    """A layer and every rank's tokens."""

    title: str
    layer: MoELayer | device.SeededLayer
    tokens: list[np.ndarray]
    """Hidden states of each rank: [T_p, H], the layer's dtype."""
    placement: tuple[int, ...]
    """The rank of each expert."""
    limits: dict[str, Any]
    """Arguments of `flashmoe.Context`: the sizes, the types and the return mode."""
    notes: list[str]
    """What a reader must know about the data."""
    engine: str
    """``cpu`` or ``cuda``."""


def random_workload(shape: models.ModelShape, request: Request, seed: int, skew: float) -> Workload:
    """Random weights and tokens in a published shape."""
    dtype, tokens = request.dtype or "bfloat16", request.tokens or DEFAULT_TOKENS
    limits = _limits(shape, request, tokens, dtype)
    with working(f"random weights of {shape.name}"):
        make = device.random_layer if request.engine == "cuda" else models.random_layer
        layer, states = make(shape, request.ranks * tokens, seed=seed, skew=skew, dtype=dtype)
    notes = [f"random weights and tokens, seed {seed}, skew {skew:g}"]
    if shape.shared:
        notes.append(f"without the model's shared experts ({shape.shared})")
    if shape.differs:
        notes.append(f"plain softmax and top-k; not emulated: {shape.differs}")
    return _deal(shape.name, layer, states, limits, notes, request)


def file_workload(path: Path, number: int | None, request: Request, seed: int) -> Workload:
    """A checkpoint's layer with random tokens."""
    layer = _cast(load_layer(path, number), request.dtype)
    if layer.own_router:
        raise InvalidArgument(
            f"--checkpoint: expected a router that flashmoe.moe computes, got {layer.own_router} in {layer.name}; its "
            "experts can be called from Python, with topk_ids and topk_weights"
        )
    tokens = request.tokens or DEFAULT_TOKENS
    limits = _limits(layer, request, tokens, layer.dtype.name)
    states = np.random.default_rng(seed).standard_normal((request.ranks * tokens, layer.hidden), np.float32)
    notes = [f"weights from {path}; random tokens, seed {seed}"]
    if layer.left_out:
        notes.append(f"without the model's {' and '.join(layer.left_out)}, whose width is no multiple of the experts'")
    return _deal(layer.name, layer, states.astype(layer.dtype), limits, notes, request)


def shipped_workload(request: Request) -> Workload:
    """The shipped layer with the hidden states that reached it: the first ranks * tokens of them, or all."""
    layer, states = shipped_layer()
    wanted = len(states) if request.tokens is None else request.ranks * request.tokens
    if wanted > len(states):
        raise InvalidArgument(
            f"--tokens: expected at most {len(states) // request.ranks} for {request.ranks} ranks (there are "
            f"{len(states)} shipped hidden states), got {request.tokens}"
        )
    layer = _cast(layer, request.dtype)
    limits = _limits(layer, request, -(-wanted // request.ranks), layer.dtype.name)
    notes = ["trained weights and real hidden states, shipped with the package"]
    title = f"tiny-qwen3-moe {layer.name}"
    return _deal(title, layer, states[:wanted].astype(layer.dtype), limits, notes, request)


def _limits(sized: models.ModelShape | MoELayer, request: Request, tokens: int, dtype: str) -> dict[str, Any]:
    """The context's sizes, after a check that they fit into memory.

    The check is of all ranks together, before anything is allocated, because a process that writes to a full /dev/shm
    is killed. Whether they fit into a GPU's memory is checked later, by the context.
    """
    limits = {
        "max_tokens": tokens,
        "hidden": sized.hidden,
        "intermediate": sized.intermediate,
        "experts": sized.experts,
        "top_k": sized.top_k,
        "dtype": dtype,
        "weight_dtype": getattr(sized, "weight_dtype", dtype),  # random layers are not quantised
        "return_mode": request.return_mode,
        "shared_intermediate": getattr(sized, "shared_intermediate", 0),  # random layers have none
    }
    if request.engine == "cuda" and limits["weight_dtype"] in ENCODINGS:
        raise InvalidArgument(f"--engine cuda: weights: expected {', '.join(DTYPES)}, got {limits['weight_dtype']}")
    plan = plan_memory(engine=request.engine, ranks=request.ranks, **limits)
    if request.engine == "cpu":
        check_fits(plan)
    elif sized.hidden % 8 or sized.intermediate % 8:
        raise InvalidArgument(
            f"--engine cuda: expected H and I multiples of 8, got H {sized.hidden} and I {sized.intermediate}"
        )
    return limits


def _cast(layer: MoELayer, dtype: str | None) -> MoELayer:
    """The layer in another dtype; as it is for None."""
    if dtype is None:
        return layer
    if dtype not in models.DTYPES:
        raise InvalidArgument(f"--dtype: expected one of {', '.join(models.DTYPES)}, got {dtype!r}")
    if layer.gate_up_scale is not None:
        raise InvalidArgument(f"--dtype: expected none with {layer.name}, whose experts are quantised, got {dtype!r}")
    arrays = {"router": layer.router, **layer.tensors()}
    arrays.pop("choice_bias", None)  # float32 whatever the others are
    return replace(layer, **{name: array.astype(models.DTYPES[dtype]) for name, array in arrays.items()})


def _deal(
    title: str,
    layer: MoELayer | device.SeededLayer,
    states: np.ndarray,
    limits: dict[str, Any],
    notes: list[str],
    request: Request,
) -> Workload:
    """Deal tokens and experts out, contiguously and as evenly as possible."""
    tokens = np.array_split(states, request.ranks)
    return Workload(title, layer, tokens, contiguous(layer.experts, request.ranks), limits, notes, request.engine)
