"""Calls of the CUDA engine: what the host does between two kernels.

It is little, since an inference step of a model is hundreds of kernels: a layer's tensors and options are checked and
prepared once, and a call finds them again by address, shape, strides, type and device. Nothing here waits for the
device, but for reports and traces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _ffi, arguments, jit
from .context import RETURN_MODES
from .errors import HeapError, InvalidArgument
from .report import TASK_KINDS, CallReport, expert_load, traffic
from .tensors import ACTIVATIONS, DTYPES, DeviceOperand, as_view, device_operand
from .trace import Event

if TYPE_CHECKING:
    from .context import Context

_MOST_LAYERS = 4096  # prepared at a time; a few kilobytes each
_ALIGNMENT = 16  # of a row's address: what its copies move at a time
_REACH = 32 << 30  # bytes of x's extent: the kernel counts in 16-byte units, in 31 bits

PHASES = ("gate", "dispatch", "gemm0", "gemm1", "reduce", "combine", "wait", "schedule", "epilogue")
"""In the order of ``TracePhase`` in include/flashmoe/gpu/kernel_args.h."""
_EVENT = np.dtype(
    [("start", "<u8"), ("end", "<u8"), ("kind", "<u4"), ("index", "<u4"), ("column", "<u4"), ("pad", "<u4")]
)


@dataclass(frozen=True)
class Layer:
    """What calls of one layer share, as the library knows it."""

    number: int
    dtype: str
    element_bytes: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    return_mode: str
    gated: bool
    given_routing: bool
    owners: tuple[int, ...]


def call(
    ctx: Context, floats: dict[str, Any], options: dict[str, Any], renormalize: bool, trace: bool, exact: bool
) -> Any:
    """A call of `flashmoe.moe`: launches the kernel and returns [T, H], which is there when the kernel is done."""
    import torch

    handle = ctx._checked_handle()
    key = _key(floats, options, renormalize, trace, exact)
    x = floats["x"]
    layer = ctx._layers.get(key)
    if layer is None:
        layer = _add_layer(ctx, floats, options, renormalize, trace, exact)
        if key is not None:
            _remember(ctx, key, layer)
    tokens = x.shape[0]
    if tokens > ctx.limits["max_tokens"]:
        raise HeapError(f"max_tokens: expected at most {ctx.limits['max_tokens']}, the context's limit, got {tokens}")
    address, row_bytes = _rows(ctx, x, layer)
    ids = weights = 0
    if layer.given_routing:
        ids, weights = _routing(ctx, options, tokens, layer)
    out = torch.empty_like(x, memory_format=torch.contiguous_format, requires_grad=False)
    stream = current_stream(ctx.device)
    _ffi.library().cuda_call(handle, layer.number, stream, tokens, address, row_bytes, out.data_ptr(), ids, weights)
    ctx._unread = layer, tokens
    if trace:
        ctx._report = _traced(ctx, ctx.last_call)
    return out


def current_stream(device: int) -> int:
    """PyTorch's current stream of the device, as the driver's handle."""
    import torch

    return torch.cuda.current_stream(device).cuda_stream


def _key(floats: dict[str, Any], options: dict[str, Any], *flags: bool) -> Any:
    """Equal for calls that differ in nothing but their tokens; None if there is something in them that has no place in
    memory, which the checks will refuse."""
    x, ids = floats["x"], options["topk_ids"]
    try:
        parts = [
            (each.data_ptr(), each.shape, each.stride(), each.dtype, each.device) if each is not None else None
            for name, each in floats.items()
            if name != "x"
        ]
        parts += (x.shape[1:], x.dtype, x.device)
        if ids is not None:
            weights = options["topk_weights"]
            parts += (ids.shape[1:], ids.dtype, ids.device, weights.dtype, weights.device)
        key = (*parts, options["top_k"], options["activation"], options["capacity_factor"])
        key = (*key, options["return_mode"], options["placement"], ids is None, options["topk_weights"] is None, *flags)
        hash(key)
        return key
    except (AttributeError, TypeError):
        return None


def _remember(ctx: Context, key: Any, layer: Layer) -> None:
    if len(ctx._layers) >= _MOST_LAYERS:
        oldest = next(iter(ctx._layers))
        _ffi.library().cuda_remove_layer(ctx._handle, ctx._layers.pop(oldest).number)
    ctx._layers[key] = layer


def _add_layer(
    ctx: Context, floats: dict[str, Any], options: dict[str, Any], renormalize: bool, trace: bool, exact: bool
) -> Layer:
    """Checks everything that `_key` looks at, and prepares the layer."""
    args = arguments.check(ctx, partial(device_operand, device=ctx.device), floats, **options)
    sizes, tensors = args.sizes, args.tensors
    for name, symbol, value in (
        ("x", "H", sizes["hidden"]),
        ("down_proj", "I", sizes["intermediate"]),
    ):
        if value % 8:
            raise InvalidArgument(
                f"{name}: expected {symbol} a multiple of 8 (16-byte rows for the copy engine), got {value}"
            )
    dtype, activation = tensors["x"].dtype, options["activation"]
    variant = jit.Variant(
        dtype, activation, bool(trace), bool(exact) and dtype == "float32", rdma=ctx.transport == "rdma"
    )
    numbers = {
        **{name: sizes[name] for name in ("hidden", "intermediate", "experts", "top_k")},
        "dtype": DTYPES.index(dtype),
        "activation": ACTIVATIONS.index(activation),
        "renormalize": int(bool(renormalize)),
        "return_mode": RETURN_MODES.index(args.return_mode),
        "topk_ids_64": int("topk_ids" in tensors and tensors["topk_ids"].dtype == "int64"),
        "trace": int(bool(trace)),
    }
    for name in ("gate_up_proj", "down_proj", "router"):
        if name in tensors:
            numbers |= _matrix(name, _aligned(name, tensors[name]))
    for name in ("gate_up_bias", "down_bias", "router_bias"):
        if name in tensors:
            numbers[name] = tensors[name].address
    number = _ffi.library().cuda_add_layer(
        ctx._handle,
        numbers,
        args.capacity_factor,
        list(args.owners),
        str(jit.kernel(variant)),
        current_stream(ctx.device),
    )
    return Layer(
        number=number,
        dtype=dtype,
        element_bytes=4 if dtype == "float32" else 2,
        hidden=sizes["hidden"],
        intermediate=sizes["intermediate"],
        experts=sizes["experts"],
        top_k=sizes["top_k"],
        return_mode=args.return_mode,
        gated=activation == "swiglu",
        given_routing="topk_ids" in tensors,
        owners=args.owners,
    )


def _aligned(name: str, each: DeviceOperand) -> DeviceOperand:
    """`each`, a matrix, once its rows are known to begin where the kernel can copy them from."""
    for what, count in (
        ("row stride", each.row_bytes),
        ("matrix stride", each.matrix_bytes),
        ("address", each.address),
    ):
        if count % _ALIGNMENT:
            raise InvalidArgument(
                f"{name}: expected rows that begin at multiples of {_ALIGNMENT} bytes, as the copy engine needs, got "
                f"the {what} {count} in bytes"
            )
    return each


def _matrix(name: str, each: DeviceOperand) -> dict[str, int]:
    return {name: each.address, f"{name}_row_bytes": each.row_bytes, f"{name}_expert_bytes": each.matrix_bytes}


def _rows(ctx: Context, x: Any, layer: Layer) -> tuple[int, int]:
    """Address of x's first row, and bytes from one to the next. Its type, width and device are checked."""
    address = x.data_ptr()
    stride, step = x.stride()
    row_bytes = stride * layer.element_bytes
    if step != 1 or (address | row_bytes) % _ALIGNMENT:  # a single row, or not as it must be
        operand = _aligned("x", device_operand("x", x, "", DTYPES, ctx.device))
        address, row_bytes = operand.address, operand.row_bytes
    if row_bytes * x.shape[0] >= _REACH:
        raise InvalidArgument(
            f"x: expected rows within {_REACH >> 30} GiB, got {x.shape[0]} rows {row_bytes} bytes apart"
        )
    return address, row_bytes


def _routing(ctx: Context, options: dict[str, Any], tokens: int, layer: Layer) -> tuple[int, int]:
    """Addresses of given ids and weights; their types and devices are checked."""
    ids, weights = options["topk_ids"], options["topk_weights"]
    expected = (tokens, layer.top_k)
    for name, each in (("topk_ids", ids), ("topk_weights", weights)):
        if tuple(each.shape) != expected or not each.is_contiguous():
            raise InvalidArgument(
                f"{name}: expected [T={tokens}, K={layer.top_k}], contiguous, got {list(each.shape)} with strides "
                f"{list(each.stride())}"
            )
    return ids.data_ptr(), weights.data_ptr()


# ---- reports -----------------------------------------------------------------------------------------------------


def report(ctx: Context, layer: Layer, tokens: int) -> CallReport:
    """Waits for the call, reads its routing and what other ranks have sent here, and counts what follows from that.
    Times only a trace would know."""
    ctx.synchronize()
    ids = np.empty((tokens, layer.top_k), np.int32)
    weights = np.empty((tokens, layer.top_k), np.float32)
    library, handle = _ffi.library(), ctx._checked_handle()
    library.cuda_read_routing(handle, as_view(ids), as_view(weights))
    if ctx.ranks == 1:
        load, returned = expert_load([ids], layer.experts), 0
    else:
        received = np.zeros((ctx.ranks, layer.owners.count(ctx.rank)), np.int32)
        returned = library.cuda_read_received(handle, layer.number, as_view(received))
        load = received.sum(axis=0)
    # Every tile of an expert but the last is full.
    tiles = int((-(-load // ctx._tile_rows)).sum())
    block = library.cuda_token_block(tokens, layer.experts, layer.top_k, ctx.processors)
    blocks = -(-tokens // block)
    features = ctx._tile_features
    columns0 = -(-layer.intermediate // (features // 2 if layer.gated else features))
    columns1 = -(-layer.hidden // features)
    counts = {"gate": blocks, "gemm0": tiles * columns0, "gemm1": tiles * columns1, "reduce": 0, "combine": blocks}
    owners = np.array([*layer.owners, ctx.rank])[ids]  # a dropped pair, -1, goes nowhere
    others = [q for q in range(ctx.ranks) if q != ctx.rank]
    return CallReport(
        tokens=tokens,
        return_mode=layer.return_mode,
        topk_ids=ids,
        topk_weights=weights,
        dropped=int((ids < 0).sum()),
        tasks={kind: counts[kind] for kind in TASK_KINDS},
        tiles=tiles,
        tile_rows=int(load.sum()),
        **traffic(
            ids,
            layer.owners,
            ctx.rank,
            layer.hidden * layer.element_bytes,
            rows=sum(int((owners == q).any(axis=1).sum()) for q in others),
            returned=returned,
            pairs=int((owners != ctx.rank).sum()),
            packets=blocks * len(others),
        ),
        phase_ns={},
        wall_ns=0,
        processors=ctx.processors,
    )


def _traced(ctx: Context, untimed: CallReport) -> CallReport:
    """`untimed` with what the thread blocks recorded in that call, which is over."""
    if untimed.tokens == 0 and ctx.ranks == 1:
        return untimed
    library, handle = _ffi.library(), ctx._checked_handle()
    raw = np.empty(library.cuda_trace_bytes(handle), np.uint8)
    library.cuda_read_trace(handle, as_view(raw))
    events = trace_events(raw, ctx.processors)
    spent = dict.fromkeys(("gate", "dispatch", *TASK_KINDS[1:]), 0)
    for event in events:
        if event.kind in spent:  # what lies within those is not counted twice
            spent[event.kind] += event.end_ns - event.start_ns
    wall = max((e.end_ns for e in events), default=0) - min((e.start_ns for e in events), default=0)
    spent["idle"] = max(0, wall * ctx.processors - sum(spent.values()))
    return replace(untimed, phase_ns=spent, wall_ns=wall, events=events)


def trace_events(raw: np.ndarray, blocks: int) -> list[Event]:
    """The events in the trace memory of `blocks` thread blocks, as uint8: for each, how many there are (64 bits, in a
    header as long as an event), and the first of them, as many as fit."""
    per_block = raw.reshape(blocks, -1).view(_EVENT)
    events = []
    for block in range(blocks):
        count = int(per_block[block, 0]["start"])
        for start, end, kind, index, column, _ in per_block[block, 1 : 1 + count].tolist():
            name = PHASES[kind]
            actor = "os" if name == "schedule" else f"processor {block}"
            events.append(Event(actor, name, start, end, index, column))
    return events
