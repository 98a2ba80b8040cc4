"""The arguments of `flashmoe.moe`, checked: what the engines ask of them in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import _ffi
from . import placement as placements
from .context import ELEMENT_BYTES, MAX_EXPERTS, RETURN_MODES, Context, bounded, checked_capacity_factor
from .errors import HeapError, InvalidArgument
from .tensors import ACTIVATIONS, DTYPES, Described

AsOperand = Callable[[str, Any, str, tuple[str, ...]], Described]
"""(name, tensor, what is expected of it in words, its element types) -> operand; raises `InvalidArgument`."""


@dataclass(frozen=True)
class Arguments:
    """A call's arguments as an engine takes them."""

    tensors: dict[str, Any]
    """Those that are given, by name, as the engine's operands."""
    sizes: dict[str, int]
    """tokens, hidden, intermediate, experts, top_k."""
    owners: tuple[int, ...]
    """Owner rank of each expert."""
    return_mode: str
    """direct or reduced."""
    capacity_factor: float
    """0: dropless."""


def check(
    ctx: Context,
    as_operand: AsOperand,
    floats: dict[str, Any],
    *,
    topk_ids: Any,
    topk_weights: Any,
    top_k: int | None,
    activation: str,
    placement: Sequence[int] | None,
    capacity_factor: float | None,
    return_mode: str | None,
) -> Arguments:
    """Everything that can be told without looking at a value. `floats`: the float tensors, None where not given."""
    tensors = _float_operands(as_operand, floats)
    sizes = _sizes(ctx, tensors, activation, top_k, topk_ids, topk_weights, placement)
    if topk_ids is not None:
        tensors |= _given_routing(as_operand, sizes, topk_ids, topk_weights)
    owners = owners_of(ctx, placement, sizes["experts"])
    local = owners.count(ctx.rank)
    _check_shapes(tensors, sizes, local, activation)
    mode = resolved_return_mode(ctx, return_mode, sizes["top_k"])
    check_limits(ctx, sizes, tensors["x"].dtype, owners, mode)
    return Arguments(tensors, sizes, owners, mode, checked_capacity(ctx, capacity_factor, sizes, owners))


def as_plain_values(options: dict[str, Any]) -> dict[str, Any]:
    """`moe`'s options with values of the types that PyTorch's operator takes. Raises `InvalidArgument`."""
    _check_activation(options["activation"])
    mode, factor, placement = options["return_mode"], options["capacity_factor"], options["placement"]
    if mode is not None:
        _check_return_mode(mode)
    return {
        **options,
        "top_k": None if options["top_k"] is None else bounded("top_k", options["top_k"], 1, MAX_EXPERTS),
        "placement": None if placement is None else placements.as_ints(placement),
        "capacity_factor": None if factor is None else checked_capacity_factor(factor, None),
    }


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise InvalidArgument(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def _check_return_mode(mode: str) -> None:
    if mode not in RETURN_MODES:
        raise InvalidArgument(f"return_mode: expected one of {', '.join(RETURN_MODES)}, got {mode!r}")


def owners_of(ctx: Context, placement: Sequence[int] | None, experts: int) -> tuple[int, ...]:
    """The call's placement: the given one, else the context's where it fits, else the default."""
    if placement is None and experts == len(ctx.placement):
        return ctx.placement
    return placements.checked(placement, experts, ctx.ranks)


def resolved_return_mode(ctx: Context, return_mode: str | None, top_k: int) -> str:
    """Resolves the default and ``auto``: the context's mode, if it has one (that of the CUDA engine always has), else
    the one that sends fewer rows. A token's rows number K with `direct`, and at most min(K, R) with `reduced`, which
    costs one more pass over them."""
    mode = ctx.return_mode if return_mode is None else return_mode
    _check_return_mode(mode)
    if mode == "auto":
        if ctx.return_mode != "auto":
            return ctx.return_mode
        return "reduced" if 1 < ctx.ranks < top_k else "direct"
    if ctx.return_mode not in ("auto", mode):
        raise InvalidArgument(f"return_mode: expected {ctx.return_mode!r}, the context's, got {mode!r}")
    return mode


def check_limits(ctx: Context, sizes: dict[str, int], dtype: str, owners: Sequence[int], mode: str) -> None:
    """The call against what the memory of the ranks' contexts was made for. Alike on all ranks but for T, H to K."""
    limits = ctx.limits
    for name, size in (
        ("max_tokens", "tokens"),
        ("hidden", "hidden"),
        ("intermediate", "intermediate"),
        ("experts", "experts"),
        ("top_k", "top_k"),
    ):
        if sizes[size] > limits[name]:
            raise HeapError(f"{name}: expected at most {limits[name]}, the context's limit, got {sizes[size]}")
    if ELEMENT_BYTES[dtype] > limits["elem_bytes"]:
        raise HeapError(
            f"x: expected at most {limits['elem_bytes']} bytes an element (the context's dtype is {ctx.dtype}), "
            f"got {dtype}"
        )
    most = placements.most_local(owners, ctx.ranks)
    if most > limits["max_local_experts"]:
        raise HeapError(
            f"placement: expected at most {limits['max_local_experts']} experts on a rank, the context's limit, "
            f"got {most}"
        )
    slots = sizes["top_k"] if mode == "direct" else ctx.ranks
    if slots > limits["return_slots"]:
        raise HeapError(
            f"return_mode: expected one that returns at most {limits['return_slots']} rows for a token, the context's "
            f"limit, got {slots} with {mode!r}"
        )


def checked_capacity(ctx: Context, factor: float | None, sizes: dict[str, int], owners: Sequence[int]) -> float:
    """The capacity factor as the engines take it: 0 for None."""
    value = checked_capacity_factor(factor, ctx.capacity_factor)
    if ctx.capacity_factor is not None:
        _check_rows(ctx, value, sizes, owners)
    return value


def _check_rows(ctx: Context, factor: float, sizes: dict[str, int], owners: Sequence[int]) -> None:
    """The rows that the call may keep against what the context has room for, on any rank.

    Of one rank's tokens an expert keeps at most C = ceil(f T K / E) rows, and a rank's El experts El C; the context has
    room for the El C of its own f, T, K, E and El. A call's f, T and K are no larger than these. Nor is its C if it has
    as many experts; with fewer, C grows as E shrinks, and El C with the largest share El / E of the experts that a rank
    holds (and by rounding: C is a whole number). So the product decides, here: for the rank that holds most experts and
    for as many tokens as any may have, since the rows come from all ranks; and all ranks decide alike.
    """
    library, limits = _ffi.library(), ctx.limits
    experts, top_k = sizes["experts"], sizes["top_k"]
    local = placements.most_local(owners, ctx.ranks)
    capacity = library.expert_capacity(factor, limits["max_tokens"], top_k, experts)
    rows = library.rows_of_rank({**limits, "max_local_experts": local, "top_k": top_k, "capacity": capacity})
    room = library.rows_of_rank(limits)
    if rows > room:
        raise HeapError(
            f"capacity_factor: expected one that keeps at most {room} rows of a rank on another, which the context has "
            f"memory for, got {rows} ({local} of {experts} experts with {capacity} each); give the context a larger one"
        )


def _float_operands(as_operand: AsOperand, floats: dict[str, Any]) -> dict[str, Described]:
    """The float tensors that are given, checked to be of one element type: that of x."""
    wanted = f"a {', '.join(DTYPES)} tensor"
    operands: dict[str, Described] = {}
    for name, tensor in floats.items():
        if tensor is None and name not in ("x", "gate_up_proj", "down_proj"):
            continue
        each = operands[name] = as_operand(name, tensor, wanted, DTYPES)
        if each.dtype != operands["x"].dtype:
            raise InvalidArgument(
                f"{name}: expected {operands['x'].dtype}, the type of x, got {list(each.shape)} {each.dtype}"
            )
    return operands


def _expect(name: str, each: Described, symbols: str, shape: tuple[int, ...]) -> None:
    if each.shape != shape:
        raise InvalidArgument(f"{name}: expected [{symbols}] {each.dtype}, got {list(each.shape)} {each.dtype}")


def _sizes(
    ctx: Context,
    tensors: dict[str, Described],
    activation: str,
    top_k: int | None,
    topk_ids: Any,
    topk_weights: Any,
    placement: Sequence[int] | None,
) -> dict[str, int]:
    """T, H, I, E and K of the call, from the shapes that define them."""
    _check_activation(activation)
    for name, rank in (("x", 2), ("down_proj", 3), ("gate_up_proj", 3), ("router", 2)):
        if name in tensors and len(tensors[name].shape) != rank:
            symbols = {"x": "T, H", "down_proj": "El, H, I", "gate_up_proj": "El, 2I or I, H", "router": "E, H"}[name]
            raise InvalidArgument(f"{name}: expected [{symbols}], got {list(tensors[name].shape)}")
    if "router" in tensors:
        if topk_ids is not None or topk_weights is not None:
            raise InvalidArgument("router: expected either router or topk_ids and topk_weights, got both")
        experts = tensors["router"].shape[0]
        if top_k is None:
            raise InvalidArgument("top_k: expected an integer with router, got None")
    else:
        if topk_ids is None or topk_weights is None:
            missing = "topk_ids" if topk_ids is None else "topk_weights"
            raise InvalidArgument(f"{missing}: expected a tensor, since router is not given, got None")
        experts = len(placement) if placement is not None else ctx.experts
        shape = getattr(topk_ids, "shape", None)
        if shape is None or len(shape) != 2:
            got = type(topk_ids).__name__ if shape is None else list(shape)
            raise InvalidArgument(f"topk_ids: expected [T, K] int32 or int64, got {got}")
        if top_k is not None and bounded("top_k", top_k, 1, experts, "E=") != shape[1]:
            raise InvalidArgument(f"top_k: expected {shape[1]}, the columns of topk_ids, got {top_k!r}")
        top_k = int(shape[1])
    top_k = bounded("top_k", top_k, 1, experts, "E=")
    tokens, hidden = tensors["x"].shape
    return {
        "tokens": tokens,
        "hidden": hidden,
        "intermediate": tensors["down_proj"].shape[2],
        "experts": experts,
        "top_k": top_k,
    }


def _given_routing(
    as_operand: AsOperand, sizes: dict[str, int], topk_ids: Any, topk_weights: Any
) -> dict[str, Described]:
    """Given ids and weights as operands."""
    pairs = f"[T={sizes['tokens']}, K={sizes['top_k']}]"
    ids = as_operand("topk_ids", topk_ids, f"{pairs} int32 or int64", ("int32", "int64"))
    weights = as_operand("topk_weights", topk_weights, f"{pairs} float32", ("float32",))
    for name, each in (("topk_ids", ids), ("topk_weights", weights)):
        _expect(name, each, pairs[1:-1], (sizes["tokens"], sizes["top_k"]))
    return {"topk_ids": ids, "topk_weights": weights}


def _check_shapes(tensors: dict[str, Described], sizes: dict[str, int], local: int, activation: str) -> None:
    """Every tensor against the call's sizes."""
    hidden, inner, experts = sizes["hidden"], sizes["intermediate"], sizes["experts"]
    if hidden < 1 or inner < 1:
        raise InvalidArgument(f"down_proj: expected H >= 1 and I >= 1, got H={hidden} and I={inner}")
    gated = activation == "swiglu"
    rows = 2 * inner if gated else inner
    rows_symbol = f"2I={rows}" if gated else f"I={rows}"
    expected = {
        "gate_up_proj": (f"El={local}, {rows_symbol}, H={hidden}", (local, rows, hidden)),
        "down_proj": (f"El={local}, H={hidden}, I={inner}", (local, hidden, inner)),
        "router": (f"E={experts}, H={hidden}", (experts, hidden)),
        "router_bias": (f"E={experts}", (experts,)),
        "gate_up_bias": (f"El={local}, {rows_symbol}", (local, rows)),
        "down_bias": (f"El={local}, H={hidden}", (local, hidden)),
    }
    for name, (symbols, shape) in expected.items():
        if name in tensors:
            _expect(name, tensors[name], symbols, shape)
    if "router_bias" in tensors and "router" not in tensors:
        raise InvalidArgument("router_bias: expected router with it, got None")
