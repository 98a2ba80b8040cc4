"""`moe`: the operator as a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _ffi
from . import placement as placements
from .context import RETURN_MODES, Context
from .errors import HeapError, InvalidArgument
from .report import TASK_KINDS, CallReport
from .tensors import DTYPES, Operand, as_view, empty_like, operand
from .trace import Event

ACTIVATIONS = ("relu", "gelu", "silu", "swiglu")
"""In the order of ``Activation`` in csrc/cpu/types.h."""

_PHASES = ("gate", "dispatch", "gemm0", "gemm1", "reduce", "combine", "wait", "schedule")
_ENTRY_BYTES = 12
_SIGNAL_BYTES = 8


def moe(
    ctx: Context,
    x: Any,
    gate_up_proj: Any,
    down_proj: Any,
    *,
    router: Any = None,
    topk_ids: Any = None,
    topk_weights: Any = None,
    top_k: int | None = None,
    activation: str = "swiglu",
    renormalize: bool = True,
    router_bias: Any = None,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    placement: Sequence[int] | None = None,
    capacity_factor: float | None = None,
    return_mode: str | None = None,
    trace: bool = False,
) -> Any:
    """One Mixture-of-Experts layer over the ranks of `ctx`; every rank must call it.

    ``y[t] = sum_k w[t, k] * (down_proj[e] @ act(gate_up_proj[e] @ x[t] + gate_up_bias[e]) + down_bias[e])``
    with ``e = topk_ids[t, k]`` (FlashDMoE, equations 5.1 to 5.3). For ``"swiglu"``, ``act`` is ``silu(gate) * up`` of
    the two halves of ``gate_up_proj[e] @ x[t]``.

    Tensors are NumPy arrays or PyTorch tensors in host memory, contiguous, of one element type: float32, bfloat16
    (NumPy: ``ml_dtypes.bfloat16``) or float16. T may differ from rank to rank and may be 0.

    Parameters
    ----------
    x: [T, H]
        This rank's tokens.
    gate_up_proj: [El, 2I, H] for ``"swiglu"`` (gate rows, then up rows), else [El, I, H]
    down_proj: [El, H, I]
        Weights of this rank's El experts, by ascending expert id.
    router: [E, H]
        Router weights: softmax over all E in fp32, the `top_k` largest, ties to the lower expert.
    topk_ids, topk_weights: [T, K] int32 or int64, [T, K] float32
        Given routing, instead of `router`; the experts of a token are distinct.
    top_k:
        K, with `router`.
    activation:
        ``"relu"``, ``"gelu"`` (by erf), ``"silu"`` or ``"swiglu"``.
    renormalize:
        With `router`: whether a token's K weights are divided by their sum.
    router_bias, gate_up_bias, down_bias: [E], [El, 2I] or [El, I], [El, H]
        Optional biases.
    placement:
        E ranks: who holds which expert. Default: the context's for its E, else contiguous shares.
    capacity_factor:
        None: dropless. Else each rank keeps, per expert, the first ``ceil(capacity_factor * (T * K) / E)`` of its
        (token, k) pairs in token order (GShard, section 2.2); the others contribute nothing.
    return_mode:
        ``"direct"``, ``"reduced"`` or ``"auto"``; default: the context's. See `Context`.
    trace:
        Record what every actor did when, in ``ctx.last_call.events``.

    Returns
    -------
    [T, H], of x's library and type. Intermediate activations and each weighted expert row are rounded to that type,
    with ``"reduced"`` also a rank's partial sum; all accumulation is in fp32 in a fixed order, so the bits do not
    depend on timing, and with ``"direct"`` not on R either.

    Inference only: gradients do not flow through it. Inside ``torch.compile`` use `flashmoe.nn.MoE` or
    ``torch.ops.flashmoe.moe``, which call this.

    Raises
    ------
    InvalidArgument
        A tensor or option is outside its domain. Where only the values show it (ids, a non-finite router logit), every
        rank raises it and the context is broken.
    HeapError
        The call exceeds the context's limits.
    GroupError
        The ranks disagree on H, I, E, K, dtype, activation, return mode, capacity factor or placement.
    PeerTimeout
        The group made no progress for the context's timeout. The message names who holds it up.
    """
    handle = ctx._checked_handle()
    tensors = _float_operands(
        x=x,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        router=router,
        router_bias=router_bias,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
    sizes = _sizes(ctx, tensors, activation, top_k, topk_ids, topk_weights, placement)
    tensors |= _given_routing(sizes, topk_ids, topk_weights)
    owners = _owners(ctx, placement, sizes["experts"])
    local = owners.count(ctx.rank)
    _check_shapes(tensors, sizes, local, activation)
    mode = _return_mode(ctx, return_mode, sizes["top_k"])
    _check_limits(ctx, sizes, tensors["x"].dtype, local, mode)
    capacity = _capacity(capacity_factor)

    out = empty_like(x)
    tensors["out"] = operand("out", out, "", DTYPES)
    ids = np.empty((sizes["tokens"], sizes["top_k"]), np.int32)
    weights = np.empty((sizes["tokens"], sizes["top_k"]), np.float32)
    options = {
        **sizes,
        "dtype": DTYPES.index(tensors["x"].dtype),
        "activation": ACTIVATIONS.index(activation),
        "renormalize": int(bool(renormalize)),
        "return_mode": RETURN_MODES.index(mode),
        # With `reduced`, column by column: the first columns travel while the last are computed.
        "gemm1_by_column": int(mode == "reduced"),
        # Threads get the cores in slices: the OS actor may be off its core for milliseconds, and tasks must last.
        "window": 16 * ctx.processors,
        "trace": int(bool(trace)),
        "perturbation": ctx._perturbation,
    }
    raw = _ffi.library().context_call(
        handle,
        options,
        capacity,
        list(owners),
        {name: each.view for name, each in tensors.items()},
        as_view(ids),
        as_view(weights),
    )
    ctx.last_call = _report(ctx, raw, sizes, mode, tensors["x"].dtype, ids, weights)
    return out


def _float_operands(**given: Any) -> dict[str, Operand]:
    """The float tensors that are given, checked to be of one element type: that of x."""
    wanted = f"a {', '.join(DTYPES)} tensor"
    operands = {"x": operand("x", given.pop("x"), wanted, DTYPES)}
    for name, tensor in given.items():
        if tensor is None and name not in ("gate_up_proj", "down_proj"):
            continue
        each = operand(name, tensor, wanted, DTYPES)
        if each.dtype != operands["x"].dtype:
            raise InvalidArgument(
                f"{name}: expected {operands['x'].dtype}, the type of x, got {list(each.shape)} {each.dtype}"
            )
        operands[name] = each
    return operands


def _expect(name: str, each: Operand, symbols: str, shape: tuple[int, ...]) -> None:
    if each.shape != shape:
        raise InvalidArgument(f"{name}: expected [{symbols}] {each.dtype}, got {list(each.shape)} {each.dtype}")


def _sizes(
    ctx: Context,
    tensors: dict[str, Operand],
    activation: str,
    top_k: int | None,
    topk_ids: Any,
    topk_weights: Any,
    placement: Sequence[int] | None,
) -> dict[str, int]:
    """T, H, I, E and K of the call, from the shapes that define them."""
    if activation not in ACTIVATIONS:
        raise InvalidArgument(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
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
        shape = tuple(getattr(topk_ids, "shape", ()))
        if len(shape) != 2:
            raise InvalidArgument(f"topk_ids: expected [T, K] int32 or int64, got {list(shape)}")
        if top_k is not None and top_k != shape[1]:
            raise InvalidArgument(f"top_k: expected {shape[1]}, the columns of topk_ids, got {top_k!r}")
        top_k = int(shape[1])
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= experts:
        raise InvalidArgument(f"top_k: expected an integer in [1, E={experts}], got {top_k!r}")
    tokens, hidden = tensors["x"].shape
    return {
        "tokens": tokens,
        "hidden": hidden,
        "intermediate": tensors["down_proj"].shape[2],
        "experts": experts,
        "top_k": top_k,
    }


def _given_routing(sizes: dict[str, int], topk_ids: Any, topk_weights: Any) -> dict[str, Operand]:
    """Given ids and weights as operands; empty if the router decides. The engine takes ids as int32."""
    if topk_ids is None:
        return {}
    pairs = f"[T={sizes['tokens']}, K={sizes['top_k']}]"
    ids = operand("topk_ids", topk_ids, f"{pairs} int32 or int64", ("int32", "int64"))
    weights = operand("topk_weights", topk_weights, f"{pairs} float32", ("float32",))
    for name, each in (("topk_ids", ids), ("topk_weights", weights)):
        _expect(name, each, pairs[1:-1], (sizes["tokens"], sizes["top_k"]))
    array = np.from_dlpack(ids.view)
    outside = np.argwhere((array < 0) | (array >= sizes["experts"]))
    if len(outside):
        token, k = outside[0]
        raise InvalidArgument(
            f"topk_ids: expected ids in [0, E={sizes['experts']}), got {array[token, k]} at [{token}, {k}]"
        )
    if ids.dtype == "int64":
        ids = operand("topk_ids", array.astype(np.int32), "", ("int32",))
    return {"topk_ids": ids, "topk_weights": weights}


def _owners(ctx: Context, placement: Sequence[int] | None, experts: int) -> tuple[int, ...]:
    """The call's placement: the given one, else the context's where it fits, else the default."""
    if placement is None and experts == len(ctx.placement):
        return ctx.placement
    return placements.checked(placement, experts, ctx.ranks)


def _check_shapes(tensors: dict[str, Operand], sizes: dict[str, int], local: int, activation: str) -> None:
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


def _return_mode(ctx: Context, return_mode: str | None, top_k: int) -> str:
    """Resolves the default and ``auto``: the mode that sends fewer rows. A token's rows number K with `direct`, and at
    most min(K, R) with `reduced`, which costs one more pass over them."""
    mode = ctx.return_mode if return_mode is None else return_mode
    if mode not in RETURN_MODES:
        raise InvalidArgument(f"return_mode: expected one of {', '.join(RETURN_MODES)}, got {mode!r}")
    if mode == "auto":
        if ctx.return_mode != "auto":
            return ctx.return_mode
        return "reduced" if 1 < ctx.ranks < top_k else "direct"
    if ctx.return_mode not in ("auto", mode):
        raise InvalidArgument(f"return_mode: expected {ctx.return_mode!r}, the context's, got {mode!r}")
    return mode


def _check_limits(ctx: Context, sizes: dict[str, int], dtype: str, local: int, mode: str) -> None:
    """The call against what the context's memory was made for."""
    limits = ctx.limits
    used = {
        "max_tokens": sizes["tokens"],
        "hidden": sizes["hidden"],
        "intermediate": sizes["intermediate"],
        "experts": sizes["experts"],
        "max_local_experts": local,
        "top_k": sizes["top_k"],
        "elem_bytes": 4 if dtype == "float32" else 2,
        "return_slots": sizes["top_k"] if mode == "direct" else ctx.ranks,
    }
    for name, value in used.items():
        if value > limits[name]:
            raise HeapError(f"{name}: expected at most {limits[name]}, the context's limit, got {value}")


def _capacity(factor: float | None) -> float:
    if factor is None:
        return 0.0
    try:
        value = float(factor)
    except (TypeError, ValueError):
        value = -1.0
    if not 0.0 < value < float("inf"):
        raise InvalidArgument(f"capacity_factor: expected a number > 0 or None, got {factor!r}")
    return value


def _report(
    ctx: Context,
    raw: Any,
    sizes: dict[str, int],
    mode: str,
    dtype: str,
    ids: np.ndarray,
    weights: np.ndarray,
) -> CallReport:
    """The library's figures as a `CallReport`."""
    row_bytes = sizes["hidden"] * (4 if dtype == "float32" else 2)
    ns = dict(zip(_PHASES, raw["ns"], strict=True))
    count = dict(zip(_PHASES, raw["count"], strict=True))
    tasks = {kind: int(count[kind]) for kind in TASK_KINDS}
    phase_ns = {kind: int(spent) for kind, spent in ns.items() if kind not in ("wait", "schedule")}
    phase_ns["idle"] = max(0, int(raw["wall_ns"]) * ctx.processors - sum(phase_ns.values()))
    rows_sent, returned = int(raw["rows_sent"]), int(raw["return_rows_sent"])
    padded = _padded_rows(ctx, sizes, ids)
    return CallReport(
        tokens=sizes["tokens"],
        return_mode=mode,
        topk_ids=ids,
        topk_weights=weights,
        dropped=int(raw["dropped"]),
        tasks=tasks,
        tiles=int(raw["tiles"]),
        tile_rows=int(raw["tile_rows"]),
        rows_sent=rows_sent,
        return_rows_sent=returned,
        bytes_sent=(rows_sent + returned) * row_bytes
        + int(raw["entries_sent"]) * _ENTRY_BYTES
        + tasks["gate"] * (ctx.ranks - 1) * _SIGNAL_BYTES,
        padded_rows=padded,
        padded_bytes=padded * row_bytes,
        phase_ns=phase_ns,
        wall_ns=int(raw["wall_ns"]),
        processors=ctx.processors,
        events=_events(raw["events"]),
    )


def _padded_rows(ctx: Context, sizes: dict[str, int], ids: np.ndarray) -> int:
    """Rows that an all-to-all would send which pads every expert to the largest share that one of them gets of this
    rank's tokens, there and back: what a capacity-based layer needs in order to drop nothing."""
    if ids.size == 0 or ctx.ranks == 1:
        return 0
    largest = int(np.bincount(ids[ids >= 0], minlength=1).max(initial=0))
    remote = sum(owner != ctx.rank for owner in placements.contiguous(sizes["experts"], ctx.ranks))
    return 2 * largest * remote


def _events(flat: Sequence[int]) -> list[Event]:
    rows = np.array(list(flat), np.int64).reshape(-1, 6).tolist()
    return [
        Event("os" if actor == 0 else f"processor {actor - 1}", _PHASES[phase], start, end, index, column)
        for actor, phase, start, end, index, column in rows
    ]
