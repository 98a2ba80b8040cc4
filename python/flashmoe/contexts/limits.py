"""What a context is made for, and the limits from which its engine allocates memory.

A context serves any layer that needs no more than the largest layer for which it is made. A `ContextSpec` says what a
caller asks for. A `Room` says what a context can do; `flashmoe.calls.arguments` checks calls against it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

from .. import _ffi
from .. import placement as placements
from ..errors import InvalidArgument
from ..spec import (
    DTYPES,
    ELEMENT_BYTES,
    ENCODINGS,
    MAX_CUDA_EXPERTS,
    MAX_CUDA_RANKS,
    MAX_CUDA_TOKENS,
    MAX_CUDA_TOP_K,
    MAX_EXPERTS,
    MAX_RANKS,
    MAX_SLICES,
    MAX_TOKENS,
    MAX_WIDTH,
    RETURN_CHOICES,
    LayerSpec,
    bounded,
    dtype_named,
    element_types,
    one_of,
    truth,
)

ENGINES = ("cpu", "cuda")
TRANSPORTS = ("auto", "rdma")


@dataclass(frozen=True)
class ContextSpec:
    """What a context is made for."""

    engine: str
    """One of `ENGINES`."""
    ranks: int
    """R, the number of ranks."""
    max_tokens: int
    """Most tokens T of a rank."""
    layer: LayerSpec
    """The largest H, I, E, K and shared expert, the widest element types, the return mode asked for (``auto``: any) and
    the largest capacity factor (0: dropless)."""
    placement: placements.Placed
    """For each of the E experts (each slice, if experts are cut), the rank or ranks that hold it."""
    processors: int
    """Threads or thread blocks; 0 with the CUDA engine: as many as the device has."""
    transport: str
    """One of `TRANSPORTS`."""
    redispatch: bool
    """Whether backward passes may send x again."""

    @property
    def return_mode(self) -> str:
        """The context's return mode. It is ``auto`` only with the CPU engine, where each call chooses its mode."""
        layer, rdma = self.layer, self.transport == "rdma"
        sizes = self.ranks, layer.top_k, layer.intermediate
        return engine_return_mode(self.engine, layer.return_mode, *sizes, rdma, layer.slices)

    def limits(self) -> dict[str, int]:
        """The C++ ``Limits`` (heap_layout.h) with which a context asks its engine for memory, by the fields' names in
        csrc/bindings/codec.h."""
        layer, mode = self.layer, self.return_mode
        rows = layer.choices + layer.shared_experts
        slots = {"direct": rows, "reduced": self.ranks, "auto": max(rows, self.ranks)}
        capacity = _ffi.library().expert_capacity(layer.capacity_factor, self.max_tokens, layer.top_k, layer.experts)
        return {
            "ranks": self.ranks,
            "max_tokens": self.max_tokens,
            "hidden": layer.hidden,
            "intermediate": layer.intermediate,
            "experts": layer.parts,
            "max_local_experts": max(1, placements.most_local(self.placement, self.ranks)),
            "top_k": layer.choices,
            "shared": layer.shared,
            "x_bytes": ELEMENT_BYTES[layer.token_type],
            "intermediate_bytes": ELEMENT_BYTES[layer.intermediate_type],
            "return_bytes": ELEMENT_BYTES[layer.return_type],
            "return_slots": slots[mode],
            "capacity": capacity,
            "redispatch": int(self.redispatch),
            "staging": int(mode != "direct"),
            "rdma": int(self.transport == "rdma"),
            "processors": self.processors,
        }


@dataclass(frozen=True)
class Room:
    """The bounds for calls of a context."""

    rank: int
    layer: LayerSpec
    """The largest layer; its return mode is ``auto`` if calls may use either mode."""
    placement: placements.Placed
    """The placement of the layer's E experts. Calls with as many experts use it, unless they have a placement of their
    own."""
    limits: dict[str, int]
    """The limits from which the ranks' memory was made."""

    @classmethod
    def of(cls, made_for: ContextSpec, rank: int) -> Room:
        """The room of a context that was made as `made_for` says."""
        layer = replace(made_for.layer, return_mode=made_for.return_mode)
        return cls(rank, layer, made_for.placement, made_for.limits())

    @property
    def ranks(self) -> int:
        """R, the number of ranks."""
        return self.limits["ranks"]


def room_alone(**sizes: Any) -> Room:
    """The room of a context that a rank alone would make with these sizes, by the names of `checked_context`. No memory
    is made."""
    alone = {"ranks": 1, "placement": None, "return_mode": "auto", "processors": 1, "capacity_factor": None}
    return Room.of(checked_context(**alone, transport="auto", **sizes), 0)


def checked_context(
    *,
    engine: str,
    ranks: int,
    max_tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    dtype: Any,
    placement: placements.Placement | None,
    return_mode: str,
    processors: int | None,
    capacity_factor: float | None,
    transport: str,
    shared_intermediate: int = 0,
    slices: int = 1,
    weight_dtype: Any = None,
    redispatch: bool = False,
) -> ContextSpec:
    """What a context with these arguments is made for; see `flashmoe.Context`.

    Raises `InvalidArgument` for what no context of the engine can be made for.
    """
    cuda = one_of("engine", engine, ENGINES) == "cuda"
    ranks = bounded("ranks", ranks, 1, MAX_RANKS)
    if cuda and ranks > MAX_CUDA_RANKS:
        raise InvalidArgument(f"ranks: expected at most {MAX_CUDA_RANKS} with the CUDA engine, got {ranks}")
    experts = bounded("experts", experts, 1, MAX_CUDA_EXPERTS if cuda else MAX_EXPERTS)
    top_k = bounded("top_k", top_k, 1, min(experts, MAX_CUDA_TOP_K) if cuda else experts)
    dtype = dtype_named("dtype", dtype, DTYPES)
    weights = dtype if weight_dtype is None else dtype_named("weight_dtype", weight_dtype, (dtype, *ENCODINGS))
    intermediate = bounded("intermediate", intermediate, 1, MAX_WIDTH)
    rdma = checked_transport(transport, engine, ranks) == "rdma"
    slices = checked_slices(slices, experts, top_k, ranks, cuda)
    # Called only for its checks: it raises an error for a return mode that the engine cannot have.
    engine_return_mode(engine, return_mode, ranks, top_k, intermediate, rdma, slices)
    max_tokens = bounded("max_tokens", max_tokens, 1, MAX_CUDA_TOKENS if cuda else MAX_TOKENS)
    factor = checked_capacity_factor(capacity_factor)
    if processors is None:
        processors = 0 if cuda else max(1, (os.cpu_count() or 1) // ranks)
    else:
        processors = bounded("processors", processors, 1, 1024)
    layer = LayerSpec(
        hidden=bounded("hidden", hidden, 1, MAX_WIDTH),
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        slices=slices,
        shared=_slices_of_shared(shared_intermediate, intermediate, experts * slices, top_k * slices, cuda),
        return_mode=return_mode,
        capacity_factor=factor,
        **element_types(dtype, weights),
    )
    placed = placements.checked(placement, layer.parts, ranks)
    return ContextSpec(engine, ranks, max_tokens, layer, placed, processors, transport, truth("redispatch", redispatch))


def checked_slices(slices: Any, experts: int, top_k: int, ranks: int, cuda: bool) -> int:
    """The number of slices into which experts may be cut, checked to fit. Raises `InvalidArgument`."""
    slices = bounded("slices", slices, 1, MAX_EXPERTS)
    if slices > 1 and ranks == 1:
        raise InvalidArgument(f"slices: expected 1 with one rank, got {slices}")
    for symbol, count, most in (
        ("E", experts, MAX_CUDA_EXPERTS if cuda else MAX_EXPERTS),
        ("K", top_k, MAX_CUDA_TOP_K if cuda else MAX_EXPERTS),
    ):
        if slices * count > most:
            raise InvalidArgument(f"slices: expected at most {most // count} with {symbol}={count}, got {slices}")
    return slices


def _slices_of_shared(shared_intermediate: int, intermediate: int, experts: int, top_k: int, cuda: bool) -> int:
    """The number of slices of width I into which a shared expert of width `shared_intermediate` is cut. The CUDA engine
    bounds it, because in the kernel for a few tokens each slice counts as an expert that every token chooses. Raises
    `InvalidArgument`."""
    width = bounded("shared_intermediate", shared_intermediate, 0, MAX_WIDTH)
    slices = -(-width // intermediate)
    most = min(MAX_CUDA_EXPERTS - experts, MAX_CUDA_TOP_K - top_k) if cuda else MAX_SLICES
    if slices > most:
        raise InvalidArgument(
            f"shared_intermediate: expected at most {most} times I={intermediate}, got {width}, {slices} times I"
        )
    return slices


def checked_transport(transport: str, engine: str, ranks: int) -> str:
    """`transport`, checked to be one that a context with this engine and number of ranks can have. Raises
    `InvalidArgument`."""
    one_of("transport", transport, TRANSPORTS)
    if transport == "rdma" and engine != "cuda":
        raise InvalidArgument("transport: expected 'auto' with the CPU engine, got 'rdma'")
    if transport == "rdma" and ranks == 1:
        raise InvalidArgument("transport: expected 'auto' with one GPU, got 'rdma'")
    return transport


def checked_capacity_factor(factor: Any, most: float | None = None) -> float:
    """`factor` as a float; 0 for None. If `most`, the context's factor, is given, `factor` must be a number up to it.

    Raises `InvalidArgument`.
    """
    if factor is None and most is None:
        return 0.0
    try:
        value = float(factor)
    except Exception:  # an integer too large for a float, or any error of another type's __float__
        value = -1.0
    if not 0.0 < value < math.inf or (most is not None and value > most):
        expected = "> 0 or None" if most is None else f"in (0, {most:g}], as the context has memory for"
        raise InvalidArgument(f"capacity_factor: expected a number {expected}, got {factor!r}")
    return value


def engine_return_mode(
    engine: str, return_mode: str, ranks: int, top_k: int, intermediate: int, rdma: bool = False, slices: int = 1
) -> str:
    """The return mode that a context of the engine has if its caller asks for `return_mode`. Raises
    `InvalidArgument`."""
    one_of("return_mode", return_mode, RETURN_CHOICES)
    if slices > 1:
        if return_mode == "direct":
            raise InvalidArgument("return_mode: expected 'reduced' or 'auto' with slices, got 'direct'")
        return "reduced"
    if engine == "cpu":
        return return_mode
    if ranks == 1 and return_mode == "reduced":
        raise InvalidArgument("return_mode: expected 'direct' or 'auto' with one GPU, got 'reduced'")
    if rdma and return_mode == "direct":
        raise InvalidArgument("return_mode: expected 'reduced' or 'auto' with transport 'rdma', got 'direct'")
    if return_mode == "auto":
        return "reduced" if rdma or _ffi.library().cuda_reduces(ranks, top_k, intermediate) else "direct"
    return return_mode
