"""The arguments of `flashmoe.moe`: the checks that both engines share, and the layer that the arguments describe."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .. import _ffi
from .. import placement as placements
from ..contexts.limits import Room, checked_capacity_factor
from ..errors import InvalidArgument, LimitExceeded
from ..spec import (
    DTYPES,
    ELEMENT_BYTES,
    ENCODINGS,
    FP8,
    GATED,
    MAX_EXPERTS,
    RETURN_CHOICES,
    SCALE_BLOCK,
    STORED_AS,
    LayerSpec,
    Options,
    bounded,
    checked_values,
    element_types,
    one_of,
    refuse_of_router,
    scale_blocks,
)
from ..spec.tensors import FLOATS, REQUIRED, WRITTEN, Tensors
from ..weights.scales import SCALE_OF, check_slices, common_kind
from .tensors import Described

AsOperand = Callable[[str, Any, str, tuple[str, ...]], Described]
"""(name, tensor, the expectation in words, the allowed element types) -> operand. Raises `InvalidArgument`."""

_MOST_PROMISED = 2**16
"""From this number on, `most_tokens` changes nothing for the engines. (They keep it in 16 bits.)"""


@dataclass(frozen=True)
class Arguments:
    """A call's arguments as an engine takes them."""

    operands: dict[str, Any]
    """The given tensors by name, as the engine's operands."""
    tokens: int
    """T, the number of this rank's tokens."""
    layer: LayerSpec
    placement: placements.Placed


def check(room: Room, as_operand: AsOperand, tensors: Tensors, options: Options) -> Arguments:
    """The arguments of a call, after all checks that need no value of a tensor. Raises `InvalidArgument` and
    `LimitExceeded`."""
    options = checked_values(options)
    operands = _float_operands(as_operand, tensors, options.transposed)
    operands |= _given_routing(as_operand, tensors, y_type(operands["x"].dtype))
    for name, (expected, dtype) in WRITTEN.items():
        if (tensor := getattr(tensors, name)) is not None:
            operands[name] = as_operand(name, tensor, expected, (dtype,))
    layer = layer_of_operands(operands, options, *_experts_and_top_k(room, operands, options))
    tokens = operands["x"].shape[0]
    placement = placement_of(room, options.placement, layer.parts)
    local = len(placements.local_experts(placement, room.rank))
    _check_shapes(operands, layer, tokens, local)
    layer = replace(layer, weight_scales=_weight_scales(operands, layer))
    return Arguments(operands, tokens, resolved(room, layer, options, placement, tokens), placement)


def resolved(room: Room, layer: LayerSpec, options: Options, placement: placements.Placement, tokens: int) -> LayerSpec:
    """The layer with the return mode and the capacity factor of its calls, after checking that they fit the context.

    Raises `InvalidArgument` and `LimitExceeded`.
    """
    redispatches(room, options)
    mode = resolved_return_mode(room, options.return_mode, layer.top_k, layer.slices)
    check_tokens(room, options, tokens)
    check_limits(room, layer, mode, placement)
    factor = checked_capacity(room, options.capacity_factor, layer, placement)
    promised = options.most_tokens or 0
    if room.ranks == 1 or not promised < min(room.limits["max_tokens"], _MOST_PROMISED):
        promised = 0
    return replace(layer, return_mode=mode, capacity_factor=factor, most_tokens=promised)


def check_tokens(room: Room, options: Options, tokens: int) -> None:
    """Raises `LimitExceeded` if a call of T = `tokens` is larger than the context was made for, and `InvalidArgument`
    if it is larger than `most_tokens` promises."""
    most = room.limits["max_tokens"]
    if tokens > most:
        raise beyond_limit("max_tokens", most, tokens)
    if options.most_tokens is not None and tokens > options.most_tokens:
        raise InvalidArgument(f"x: expected at most most_tokens={options.most_tokens} tokens, got {tokens}")


def redispatches(room: Room, options: Options) -> bool:
    """Whether a call that keeps what its gradients need does not keep the rows of other ranks' tokens, so that its
    backward pass sends x again. Raises `InvalidArgument` if the context has no memory for this."""
    has = bool(room.limits["redispatch"])
    if room.ranks == 1:
        return False
    if options.redispatch and not has:
        raise InvalidArgument("redispatch: expected a context made with redispatch=True, got one without")
    return has if options.redispatch is None else options.redispatch


def as_plain_values(options: Options) -> Options:
    """`options` with values of the types that PyTorch's operator takes; the placement too is in the operator's form.
    Raises `InvalidArgument`."""
    options = checked_values(options)
    top_k, mode, factor, placement = options.top_k, options.return_mode, options.capacity_factor, options.placement
    if mode is not None:
        one_of("return_mode", mode, RETURN_CHOICES)
    return options._replace(
        top_k=None if top_k is None else bounded("top_k", top_k, 1, MAX_EXPERTS),
        placement=None if placement is None else placements.flat(placements.as_placed(placement)),
        capacity_factor=None if factor is None else checked_capacity_factor(factor, None),
    )


def placement_of(room: Room, placement: placements.Placement | None, experts: int) -> placements.Placed:
    """The call's placement of E experts, or of all their slices: the given one, else the context's if its length is
    right, else the default."""
    if placement is None and experts == len(room.placement):
        return room.placement
    return placements.checked(placement, experts, room.ranks)


def resolved_return_mode(room: Room, return_mode: str | None, top_k: int, slices: int = 1) -> str:
    """The return mode of a call: `return_mode`, or if this is None, the context's mode. ``auto`` stands for the
    context's mode. If that is ``auto`` too (never with the CUDA engine), it stands for the mode that sends fewer rows:
    K for a token with `direct`, at most min(K, R) with `reduced`. If these are equal, the mode is `direct`, because
    `reduced` costs one more pass over the rows. Slices need `reduced`."""
    has = room.layer.return_mode
    mode = has if return_mode is None else return_mode
    one_of("return_mode", mode, RETURN_CHOICES)
    if slices > 1 and room.ranks == 1:
        raise InvalidArgument(f"slices: expected 1 with one rank, got {slices}")
    if slices > 1 and "direct" in (has, mode):
        raise InvalidArgument("return_mode: expected 'reduced' with slices, got 'direct'")
    if mode == "auto":
        if has != "auto":
            return has
        return "reduced" if slices > 1 or 1 < room.ranks < top_k else "direct"
    if has not in ("auto", mode):
        raise InvalidArgument(f"return_mode: expected {has!r}, the context's, got {mode!r}")
    return mode


def check_limits(room: Room, layer: LayerSpec, mode: str, placement: placements.Placement) -> None:
    """Raises `LimitExceeded` if a call of `layer` with return mode `mode` and this placement is larger than the context
    was made for."""
    limits = room.limits
    for name, size in (
        ("hidden", layer.hidden),
        ("intermediate", layer.intermediate),
        ("experts", layer.parts),
        ("top_k", layer.choices),
    ):
        if size > limits[name]:
            raise beyond_limit(name, limits[name], size)
    if layer.shared > limits["shared"]:
        raise LimitExceeded(
            f"shared_down: expected an Is of at most {limits['shared']} I={layer.intermediate}, as the context's "
            f"shared_intermediate allows, got {layer.shared} I"
        )
    widest = room.layer.y_type
    if ELEMENT_BYTES[layer.y_type] > ELEMENT_BYTES[widest]:
        raise LimitExceeded(
            f"x: expected at most {ELEMENT_BYTES[widest]} bytes an element (the context's dtype is {widest}), "
            f"got {layer.y_type}"
        )
    if layer.encoding != room.layer.encoding:
        expected = ", ".join(DTYPES) if room.layer.encoding is None else room.layer.weight_type
        raise LimitExceeded(
            f"gate_up_proj: expected {expected}, which the context's memory is made for (see its weight_dtype), got "
            f"{layer.weight_type}"
        )
    most = placements.most_local(placement, room.ranks)
    if most > limits["max_local_experts"]:
        raise LimitExceeded(
            f"placement: expected at most {limits['max_local_experts']} experts on a rank, the context's limit, "
            f"got {most}"
        )
    slots = layer.choices + layer.shared_experts if mode == "direct" else room.ranks
    if slots > limits["return_slots"]:
        raise LimitExceeded(
            f"return_mode: expected one that returns at most {limits['return_slots']} rows for a token, the context's "
            f"limit, got {slots} with {mode!r}"
        )


def beyond_limit(name: str, most: int, got: int) -> LimitExceeded:
    """The error of a call that exceeds the context's limit of that name."""
    if name == "max_tokens":
        return LimitExceeded(f"x: expected at most max_tokens={most} tokens, the context's limit, got T={got}")
    return LimitExceeded(f"{name}: expected at most {most}, the context's limit, got {got}")


def checked_capacity(room: Room, factor: float | None, layer: LayerSpec, placement: placements.Placement) -> float:
    """The capacity factor as the engines take it: 0 for None."""
    most = room.layer.capacity_factor or None
    value = checked_capacity_factor(factor, most)
    if most is not None:
        _check_rows(room, value, layer, placement)
    return value


def _check_rows(room: Room, factor: float, layer: LayerSpec, placement: placements.Placement) -> None:
    """Raises `LimitExceeded` if any rank might have to store more rows in this call than the context has memory for.

    With the capacity factor f, an expert takes at most C = ceil(f T K / E) rows of one rank's tokens, so the El experts
    of a rank take at most El C. The context has memory for El C rows, computed from its own f, T, K, E and El. The
    call's f, T and K are at most the context's, so with the same E the call's C is at most the context's too. With
    fewer experts, C grows as E shrinks, and El C grows with the largest share El / E of the experts that a rank holds
    (and by rounding, since C is a whole number). So this function compares the products El C. It takes El of the rank
    with the most experts, and `max_tokens` for T because any rank may send so many: thus all ranks decide alike.
    """
    library, limits = _ffi.library(), room.limits
    experts, top_k = layer.experts, layer.top_k
    local = placements.most_local(placement, room.ranks)
    capacity = library.expert_capacity(factor, limits["max_tokens"], top_k, experts)
    rows = library.rows_of_rank({**limits, "max_local_experts": local, "top_k": layer.choices, "capacity": capacity})
    most = library.rows_of_rank(limits)
    if rows > most:
        raise LimitExceeded(
            f"capacity_factor: expected one by which a rank keeps at most {most} rows of another rank, the context's "
            f"limit, got {rows} ({local} of {experts} experts with {capacity} each); give the context a larger one"
        )


def y_type(x_type: str) -> str:
    """The element type of y, and of everything that is not quantised."""
    return "bfloat16" if x_type == FP8 else x_type


def _float_operands(as_operand: AsOperand, tensors: Tensors, transposed: bool) -> dict[str, Described]:
    """The given float tensors, as operands. They must have the element type of x (of y, if x is in FP8), except
    `choice_bias`, which is float32 as scores are, quantised tensors, and scales."""
    known = (*DTYPES, FP8)
    operands: dict[str, Described] = {}
    scale_type = "float32"
    for name, tensor in zip(FLOATS, tensors.floats, strict=True):
        if tensor is None and name not in REQUIRED:
            continue
        if name == "choice_bias":
            operands[name] = as_operand(name, tensor, "[E] float32", ("float32",))
            continue
        if name.endswith("_scale"):
            of_this = "float32" if name == "x_scale" else scale_type
            operands[name] = as_operand(name, tensor, f"{of_this} scales", (of_this,))
            continue
        if name == "shared_up" and operands["gate_up_proj"].dtype in ENCODINGS:
            raise InvalidArgument(
                f"shared_up: expected none with weights of {operands['gate_up_proj'].dtype}, whose shared_gate_up has "
                "both, got one"
            )
        types = (*DTYPES, *STORED_AS) if name in SCALE_OF else known
        each = operands[name] = _numbers(name, as_operand(name, tensor, f"a {', '.join(types)} tensor", types))
        expected, of = y_type(operands["x"].dtype), "the type of " + ("y" if operands["x"].dtype == FP8 else "x")
        if name in SCALE_OF and operands["gate_up_proj"].dtype in ENCODINGS:
            expected, of = operands["gate_up_proj"].dtype, "the type of gate_up_proj"
            scale_type = ENCODINGS[expected].scale
        if name != "x" and each.dtype != expected:
            raise InvalidArgument(f"{name}: expected {expected}, {of}, got {list(each.shape)} {each.dtype}")
    _check_scales_given(operands)
    for name, symbols in (
        ("x", "T, H"),
        ("down_proj", "El, H, I" if not transposed else "El, I, H"),
        ("gate_up_proj", "El, 2I or I, H" if not transposed else "El, H, 2I or I"),
        ("router", "E, H"),
        ("shared_gate_up", "2Is or Is, H" if not transposed else "H, 2Is or Is"),
        ("shared_down", "H, Is" if not transposed else "Is, H"),
        ("shared_gate", "1, H"),
        ("shared_up", "Is, H"),
    ):
        if name in operands and len(operands[name].shape) != symbols.count(",") + 1:
            raise InvalidArgument(f"{name}: expected [{symbols}], got {list(operands[name].shape)}")
    return operands


def _numbers(name: str, each: Described) -> Described:
    """The operand, described as matrices of numbers: if it is packed, with the shape and the type of the numbers that
    are packed in it, instead of its own. Raises `InvalidArgument`."""
    encoding = ENCODINGS.get(STORED_AS.get(each.dtype, ""))
    if encoding is None or not encoding.packed:
        return each
    axes = 3 if name.startswith("shared_") else 4
    if len(each.shape) != axes or each.shape[-1] != encoding.packed:
        symbols = ", ".join(["El", "rows", f"columns / {encoding.block[1]}", str(encoding.packed)][-axes:])
        raise InvalidArgument(f"{name}: expected [{symbols}] {each.dtype}, got {list(each.shape)}")
    return each.of_numbers(encoding.numbers(each.shape), STORED_AS[each.dtype])


def _check_scales_given(operands: dict[str, Described]) -> None:
    """Checks that quantised tensors have scales, and that no other tensors have any. With x in FP8 the weights must be
    in FP8 too, and there must be no router and no shared gate, which need x as it was before it was quantised."""
    for name, scale in ({"x": "x_scale"} | SCALE_OF).items():
        quantised = name in operands and operands[name].dtype in ENCODINGS
        if quantised and scale not in operands:
            raise InvalidArgument(f"{scale}: expected a tensor with {name} of {operands[name].dtype}, got None")
        if scale in operands and not quantised:
            got = operands[name].dtype if name in operands else "None"
            types = FP8 if name == "x" else " or ".join(ENCODINGS)
            raise InvalidArgument(f"{scale}: expected {name} of {types} with it, got {got}")
    if "x_scale" not in operands:
        return
    if operands["gate_up_proj"].dtype != FP8:
        of = "these" if operands["gate_up_proj"].dtype in DTYPES else operands["gate_up_proj"].dtype
        raise InvalidArgument(f"x: expected {', '.join(DTYPES)} with weights of {of}, got {FP8}")
    for name in ("router", "shared_gate"):
        if name in operands:
            raise InvalidArgument(f"{name}: expected none with x of {FP8}, since it would read the rounded x, got one")


def _expect(name: str, each: Described, symbols: str, shape: tuple[int, ...]) -> None:
    if each.shape != shape:
        raise InvalidArgument(f"{name}: expected [{symbols}] {each.dtype}, got {list(each.shape)} {each.dtype}")


def _given_routing(as_operand: AsOperand, tensors: Tensors, x_type: str) -> dict[str, Described]:
    """The given ids and weights as operands. Without given routing, because there is a router, the dict is empty."""
    given = {"topk_ids": tensors.topk_ids, "topk_weights": tensors.topk_weights}
    missing = [name for name, tensor in given.items() if tensor is None]
    if tensors.router is not None:
        if len(missing) < 2:
            raise InvalidArgument("router: expected either router or topk_ids and topk_weights, got both")
        return {}
    if len(missing) == 2:
        raise InvalidArgument("router: expected a router, or topk_ids and topk_weights, got none of them")
    if missing:
        raise InvalidArgument(f"{missing[0]}: expected a tensor, since router is not given, got None")
    ids = as_operand("topk_ids", tensors.topk_ids, "[T, K] int32 or int64", ("int32", "int64"))
    if len(ids.shape) != 2:
        raise InvalidArgument(f"topk_ids: expected [T, K] int32 or int64, got {list(ids.shape)}")
    allowed = tuple(dict.fromkeys(("float32", x_type)))
    weights = as_operand("topk_weights", tensors.topk_weights, f"[T, K] {' or '.join(allowed)}", allowed)
    return {"topk_ids": ids, "topk_weights": weights}


def _experts_and_top_k(room: Room, operands: dict[str, Described], options: Options) -> tuple[int, int]:
    """E and K: from the router and the option, or from the given routing. With given routing, a rank that is alone
    holds all E experts. One of several ranks cannot see how many experts all ranks hold, so the placement gives E."""
    top_k = options.top_k
    if "router" in operands:
        experts = operands["router"].shape[0]
        if top_k is None:
            raise InvalidArgument("top_k: expected an integer with router, got None")
        return experts, bounded("top_k", top_k, 1, experts, "E=")
    if options.placement is not None:
        parts = len(options.placement)
    elif room.ranks == 1:
        parts = operands["gate_up_proj"].shape[0]
    else:
        parts = len(room.placement)
    experts, left = divmod(parts, options.slices)
    if left:
        raise InvalidArgument(
            f"placement: expected a multiple of slices={options.slices} entries, one for each slice, got {parts}"
        )
    columns = operands["topk_ids"].shape[1]
    if top_k is not None and bounded("top_k", top_k, 1, experts, "E=") != columns:
        raise InvalidArgument(f"top_k: expected {columns}, the columns of topk_ids, got {top_k!r}")
    return experts, bounded("top_k", columns, 1, experts, "E=")


def layer_of_operands(operands: Mapping[str, Described], options: Options, experts: int, top_k: int) -> LayerSpec:
    """The layer of these operands and options. The return mode and the capacity factor are not set yet."""
    x_type, weight_type = operands["x"].dtype, operands["gate_up_proj"].dtype
    inner = -2 if options.transposed else -1
    intermediate = operands["down_proj"].shape[inner]
    layer = layer_of(
        options,
        operands,
        hidden=operands["x"].shape[1],
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        shared=_slices(operands, intermediate, inner),
        **element_types(y_type(x_type), weight_type, x_type),
    )
    check_quantised(layer)
    return layer


def check_quantised(layer: LayerSpec) -> None:
    """Raises `InvalidArgument` for options and sizes that a layer of quantised weights cannot have."""
    encoding, dtype = layer.encoding, layer.weight_type
    if encoding is None:
        return
    if layer.transposed:
        raise InvalidArgument(f"transposed: expected False with weights of {dtype}, got True")
    for name, count in (("slices", layer.slices), ("shared_down", layer.shared)):
        check_slices(dtype, name, count, layer.intermediate)
    for name, columns in (("hidden", layer.hidden), ("intermediate", layer.intermediate)):
        if encoding.whole_blocks and columns % encoding.block[1]:
            raise InvalidArgument(
                f"{name}: expected a multiple of {encoding.block[1]} with weights of {dtype}, got {columns}"
            )


def _slices(operands: Mapping[str, Described], intermediate: int, inner: int) -> int:
    """The number of slices of width I into which the shared expert is cut; 0 if there is none."""
    given = [name for name in ("shared_gate_up", "shared_down", "shared_gate", "shared_up") if name in operands]
    if not given:
        return 0
    for name in ("shared_gate_up", "shared_down"):
        if name not in operands:
            raise InvalidArgument(f"{name}: expected a tensor beside {given[0]}, got None")
    width = operands["shared_down"].shape[inner]
    if width < 1 or intermediate < 1 or width % intermediate:
        raise InvalidArgument(f"shared_down: expected Is a multiple of I={intermediate}, got Is={width}")
    return width // intermediate


def layer_of(options: Options, given: Container[str], **fields: Any) -> LayerSpec:
    """The layer that has these checked options, these sizes and element types (`fields`), and the tensors whose names
    are in `given`. The return mode and the capacity factor are not set yet."""
    _check_shared(given, options)
    return LayerSpec(
        **fields,
        **options.in_layer(),
        **_router(given, options, fields["experts"], fields["top_k"]),
        limit=math.inf if options.limit is None else options.limit,
        router_bias="router_bias" in given,
        gate_up_bias="gate_up_bias" in given,
        down_bias="down_bias" in given,
        shared_gate="shared_gate" in given,
    )


def _check_shared(given: Container[str], options: Options) -> None:
    """Raises `InvalidArgument` for combinations with a shared expert that no published model has and no engine
    computes."""
    if "shared_down" not in given:
        return
    for name in ("gate_up_bias", "down_bias"):
        if name in given:
            raise InvalidArgument(f"{name}: expected none beside a shared expert, got one")
    if "shared_gate" in given and options.weights_on_input:
        raise InvalidArgument("shared_gate: expected none with weights_on_input, got one")
    if "shared_up" not in given:
        return
    if options.activation not in GATED:
        raise InvalidArgument(f"shared_up: expected none with {options.activation!r}, which has no gate, got one")
    for name in ("interleaved", "transposed"):
        if getattr(options, name):
            raise InvalidArgument(f"shared_up: expected none with {name}, whose shared_gate_up has both, got one")


def _router(given: Container[str], options: Options, experts: int, top_k: int) -> dict[str, Any]:
    """The fields of the layer that say how experts are chosen, except those that `Options.in_layer` gives."""
    if "router" not in given:
        refuse_of_router(options)
        return {"routing": "given"}
    groups = options.groups
    top_groups = groups if options.top_groups is None else options.top_groups
    if experts % groups:
        raise InvalidArgument(f"groups: expected a divisor of E={experts}, got {groups}")
    if top_groups > groups:
        raise InvalidArgument(f"top_groups: expected at most groups={groups}, got {top_groups}")
    if top_k > top_groups * (experts // groups):
        raise InvalidArgument(
            f"top_k: expected at most {top_groups * (experts // groups)}, the experts of {top_groups} of {groups} "
            f"groups, got {top_k}"
        )
    return {
        "routing": options.score,
        "top_groups": top_groups,
        "choice_bias": "choice_bias" in given,
    }


def _check_shapes(operands: dict[str, Described], layer: LayerSpec, tokens: int, local: int) -> None:
    """Checks every tensor's shape against the layer's sizes."""
    hidden, inner, experts = layer.hidden, layer.intermediate, layer.experts
    _check_width(operands, layer)
    if hidden < 1 or inner < 1:
        raise InvalidArgument(f"down_proj: expected H >= 1 and I >= 1, got H={hidden} and I={inner}")
    rows = layer.gate_up_rows
    rows_symbol = f"2I={rows}" if layer.gated else f"I={rows}"
    up_symbols, up_shape = (rows_symbol, f"H={hidden}"), (rows, hidden)
    down_symbols, down_shape = (f"H={hidden}", f"I={inner}"), (hidden, inner)
    width = layer.shared * inner
    together = layer.gated and "shared_up" not in operands
    shared_symbols = (f"2Is={2 * width}" if together else f"Is={width}", f"H={hidden}")
    shared_shape = (2 * width if together else width, hidden)
    step = -1 if layer.transposed else 1
    expected = {
        "gate_up_proj": (", ".join((f"El={local}", *up_symbols[::step])), (local, *up_shape[::step])),
        "down_proj": (", ".join((f"El={local}", *down_symbols[::step])), (local, *down_shape[::step])),
        "router": (f"E={experts}, H={hidden}", (experts, hidden)),
        "shared_gate_up": (", ".join(shared_symbols[::step]), shared_shape[::step]),
        "shared_down": (", ".join((f"H={hidden}", f"Is={width}")[::step]), (hidden, width)[::step]),
        "shared_gate": (f"1, H={hidden}", (1, hidden)),
        "shared_up": (f"Is={width}, H={hidden}", (width, hidden)),
        "router_bias": (f"E={experts}", (experts,)),
        "choice_bias": (f"E={experts}", (experts,)),
        "gate_up_bias": (f"El={local}, {rows_symbol}", (local, rows)),
        "down_bias": (f"El={local}, H={hidden}", (local, hidden)),
        "topk_ids": (f"T={tokens}, K={layer.top_k}", (tokens, layer.top_k)),
        "topk_weights": (f"T={tokens}, K={layer.top_k}", (tokens, layer.top_k)),
        "load": (f"E={experts}", (experts,)),
        "router_logits": (f"T={tokens}, E={experts}", (tokens, experts)),
        "x_scale": (f"T={tokens}, H/{SCALE_BLOCK}={scale_blocks(hidden)}", (tokens, scale_blocks(hidden))),
    }
    for name, (symbols, shape) in expected.items():
        if name in operands:
            _expect(name, operands[name], symbols, shape)
    for name in ("router_bias", "choice_bias", "router_logits"):
        if name in operands and "router" not in operands:
            raise InvalidArgument(f"{name}: expected router with it, got None")


def _check_width(operands: dict[str, Described], layer: LayerSpec) -> None:
    """Raises `InvalidArgument` that names x, not a matrix, if the experts' matrices agree on H and x has another H."""
    x, first, down = (operands[name] for name in ("x", "gate_up_proj", "down_proj"))
    axes = (1, 2) if layer.transposed else (2, 1)
    widths = {each.shape[axis] for each, axis in zip((first, down), axes, strict=True)}
    if len(widths) == 1 and layer.hidden not in widths:
        expected = f"[T, H={widths.pop()}] {x.dtype}, as gate_up_proj and down_proj have it"
        raise InvalidArgument(f"x: expected {expected}, got {list(x.shape)} {x.dtype}")


def _weight_scales(operands: dict[str, Described], layer: LayerSpec) -> str:
    """The kind of the scales, ``tensor``, ``row`` or ``block``: which elements of a matrix share a scale. It must be
    the same for all quantised matrices. The shapes of the matrices have been checked before."""
    shapes = {
        name: (operands[name].shape, operands[scale].shape) for name, scale in SCALE_OF.items() if scale in operands
    }
    return common_kind(layer.encoding, shapes, layer.halves) if shapes else "none"
