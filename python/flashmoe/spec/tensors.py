"""The tensors of a call: the one place that says each tensor's name, part in the call, and text.

From this table are made: `Tensors`, which calls carry; the signature and the help of `flashmoe.moe`; the schema of
PyTorch's operator; and docs/options.md. `arguments` checks the shapes and types of the tensors.
"""

# No `from __future__ import annotations`: the table's annotations are read as objects.
from collections import namedtuple
from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypedDict

from .options import OperatorOptions, Options

WEIGHT, SCALE, OF_X, ROUTING, WRITTEN_TO = "weight", "scale", "of x", "routing", "written to"


class CallTensor(NamedTuple):
    """What is known of a tensor besides its name."""

    part: str
    """`WEIGHT` or `SCALE`: stays the same from call to call. `OF_X`: comes with x. `ROUTING`: given routing.
    `WRITTEN_TO`: the call writes to it."""
    text: str


class CallTensors(TypedDict, total=False):
    """What `flashmoe.moe` takes besides x, gate_up_proj and down_proj.

    Scales belong to quantised tensors: float32 for FP8 (docs/fp8.md), uint8 for MXFP4 (docs/mxfp4.md), contiguous. The
    tensors that the call writes to are contiguous and on the device of x. On a GPU the kernel writes to them, also in a
    replayed graph. If PyTorch sees the call as an operator, operations after this operator write to them. Their
    contents are undefined after a call that fails.
    """

    router: Annotated[
        Any,
        CallTensor(
            WEIGHT,
            "[E, H]. Router weights. A token's experts are those with its `top_k` largest logits in fp32 (with groups "
            "or `choice_bias`: scores); if these are equal, the experts with the lower numbers come first.",
        ),
    ]
    router_bias: Annotated[Any, CallTensor(WEIGHT, "[E]. Added to the router's logits.")]
    choice_bias: Annotated[
        Any,
        CallTensor(
            WEIGHT,
            "[E] float32. With a router: added to the scores for the choice of experts alone. It has no gradient.",
        ),
    ]
    gate_up_bias: Annotated[Any, CallTensor(WEIGHT, "[El, 2I], or [El, I] without a gate.")]
    down_bias: Annotated[Any, CallTensor(WEIGHT, "[El, H].")]
    shared_gate_up: Annotated[
        Any,
        CallTensor(
            WEIGHT,
            "[2Is, H], or [Is, H] without a gate. The shared expert, whole on every rank: an FFN of width Is, a "
            "multiple of I, whose result is added for each of this rank's tokens.",
        ),
    ]
    shared_down: Annotated[Any, CallTensor(WEIGHT, "[H, Is]. The shared expert's second matrix.")]
    shared_gate: Annotated[
        Any,
        CallTensor(WEIGHT, "[1, H]. The shared expert's result is multiplied by ``sigmoid(shared_gate @ x[t])``."),
    ]
    shared_up: Annotated[
        Any,
        CallTensor(
            WEIGHT,
            "[Is, H]. The shared expert's up matrix, where it is a matrix of its own: shared_gate_up is then the gate "
            "alone, [Is, H]. The call reads both matrices where they are, and each has its own gradient. Refused, by "
            "`InvalidArgument`, with an activation without a gate, with quantised weights, with `interleaved` and with "
            "`transposed`.",
        ),
    ]
    gate_up_scale: Annotated[
        Any,
        CallTensor(
            SCALE,
            "If gate_up_proj is in float8_e4m3fn: its scales, by which its elements are multiplied, in float32. "
            "down_proj and the shared expert's matrices must then be in float8_e4m3fn too. There is one scale for each "
            "block of 128 rows and columns, [El, 2 ceil(I / 128), ceil(H / 128)] (without a gate ceil(I / 128) instead "
            "of 2 ceil(I / 128)), as ``_scale_inv`` of checkpoints; or one for each row, [El, 2I or I, 1]; or one for "
            "each matrix, [El, 1, 1]. All scales of a layer are of one kind. With gate_up_proj in MXFP4, [El, 2I or I, "
            "H / 32, 16] uint8, the scales are e8m0, [El, 2I or I, H / 32].",
        ),
    ]
    down_scale: Annotated[
        Any,
        CallTensor(
            SCALE,
            "Scales of down_proj, of the same kinds: [El, ceil(H / 128), ceil(I / 128)], [El, H, 1] or [El, 1, 1]; for "
            "MXFP4 [El, H, I / 32].",
        ),
    ]
    shared_gate_up_scale: Annotated[
        Any,
        CallTensor(SCALE, "Scales of shared_gate_up: the shapes of gate_up_scale without El, and with Is for I."),
    ]
    shared_down_scale: Annotated[
        Any, CallTensor(SCALE, "Scales of shared_down: the shapes of down_scale without El, and with Is for I.")
    ]
    x_scale: Annotated[
        Any,
        CallTensor(
            OF_X,
            "[T, ceil(H / 128)]. If x is in float8_e4m3fn: its scales, in float32. The experts' matrices must then be "
            "in float8_e4m3fn too, and the routing must be given; y is bfloat16.",
        ),
    ]
    topk_ids: Annotated[
        Any,
        CallTensor(
            ROUTING,
            "[T, K] int32 or int64. Given routing, instead of `router`: distinct experts of each token; -1: none. E is "
            "the number of experts of `placement`. Without `placement`, it is the number in a lone rank's weights or, "
            "with several ranks, that of the context's placement.",
        ),
    ]
    topk_weights: Annotated[Any, CallTensor(ROUTING, "[T, K] float32, or of x's type. The weights of `topk_ids`.")]
    load: Annotated[
        Any,
        CallTensor(
            WRITTEN_TO,
            "[E] int64. The call adds to each element how many of this rank's pairs (token, k) chose the expert, "
            "including pairs that a capacity then drops. The shared expert has no element. A group's load is the sum "
            "of its ranks' loads.",
        ),
    ]
    router_logits: Annotated[
        Any,
        CallTensor(
            WRITTEN_TO,
            "[T, E] float32. With a router: the logits from which scores are computed, with `router_bias`, and rounded "
            "if `round_logits` is set.",
        ),
    ]


REQUIRED = ("x", "gate_up_proj", "down_proj")
OPTIONAL: Mapping[str, CallTensor] = {
    name: next(iter(each.__metadata__)) for name, each in CallTensors.__annotations__.items()
}
"""The other tensors, by name."""


def _of(*parts: str) -> tuple[str, ...]:
    return tuple(name for name, each in OPTIONAL.items() if each.part in parts)


PARAMETERS = ("gate_up_proj", "down_proj", *(name for name in _of(WEIGHT) if name != "choice_bias"))
"""Weights and biases that have gradients. `choice_bias` has none, because it only changes the choice of experts."""
SCALES = _of(SCALE, OF_X)
FLOATS = (*REQUIRED, *_of(WEIGHT, SCALE, OF_X))
"""x, weights and biases, and scales, in the order in which the CPU engine's library takes them."""
OF_LAYER = ("gate_up_proj", "down_proj", *_of(WEIGHT, SCALE))
"""Weights, their scales and biases. They stay the same from call to call."""
READ = (*REQUIRED, *_of(WEIGHT, SCALE, OF_X, ROUTING))
"""All that a call reads."""
WRITTEN = {"load": ("[E] int64", "int64"), "router_logits": ("[T, E] float32", "float32")}
"""For each tensor that a call writes to: its shape and type in words, and its element type."""


class Tensors(namedtuple("_Tensors", (*REQUIRED, *OPTIONAL), defaults=[None] * len(OPTIONAL))):
    """The tensors of a call, as its caller gives them; None for a tensor that is not given."""

    __slots__ = ()

    @property
    def floats(self) -> tuple[Any, ...]:
        """The tensors that `FLOATS` names."""
        return _floats(self)

    @property
    def read(self) -> tuple[Any, ...]:
        """The tensors that `READ` names."""
        return _read(self)

    @property
    def of_layer(self) -> tuple[Any, ...]:
        """The tensors that `OF_LAYER` names."""
        return _of_layer(self)

    @property
    def written(self) -> tuple[Any, Any]:
        """The tensors that `WRITTEN` names."""
        return self.load, self.router_logits


# These functions serve the properties above. Every call uses them, and attrgetter is the fastest way.
_floats, _read, _of_layer = attrgetter(*FLOATS), attrgetter(*READ), attrgetter(*OF_LAYER)


class Given(CallTensors, OperatorOptions, total=False):
    """The tensors and options that `flashmoe.moe` and its reference take by keyword."""


_NAMES = frozenset(Tensors._fields)


def parted(x: Any, gate_up_proj: Any, down_proj: Any, given: Mapping[str, Any]) -> tuple[Tensors, Options]:
    """The arguments of a call, parted into its tensors and its options. All names must have been checked before."""
    tensors = {name: each for name, each in given.items() if name in _NAMES}
    options = {name: each for name, each in given.items() if name not in _NAMES}
    return Tensors(x, gate_up_proj, down_proj, **tensors), Options(**options)
