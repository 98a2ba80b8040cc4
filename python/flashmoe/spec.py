"""What a layer is: sizes, activation, routing, biases, element types, and how its results come home.

`LayerSpec` is what both engines, the memory planner and the modules mean by a layer. C++ has the same struct
(include/flashmoe/spec/layer.h), and takes it by the names of its fields; the values of its options are those of
include/flashmoe/spec/enums.h, which tests/test_spec.py compares with the tuples here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import InvalidArgument

DTYPES = ("float32", "bfloat16", "float16")
"""Element types of a layer's x and y, and of weights that are not quantised."""

FP8 = "float8_e4m3fn"
"""Element type of quantised weights and rows."""

MXFP4 = "mxfp4"
"""The other type of quantised weights: e2m1 in blocks of 32, each with a scale in e8m0 (OCP Microscaling Formats)."""

ELEMENT_TYPES = (*DTYPES, FP8, MXFP4)

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
"""Bytes of an element, for the types that rows have."""

WEIGHT_SCALES = ("none", "tensor", "row", "block")
"""What shares a scale in a quantised matrix: all numbers, those of a row, or those of a block (`Encoding.block`)."""

SCALE_BLOCK = 128
"""Elements of a quantised row that share a scale."""


@dataclass(frozen=True)
class Encoding:
    """How quantised matrices are stored. No other place in Python knows this (C++:
    include/flashmoe/spec/encoding.h)."""

    dtype: str
    """Element type of weights."""
    name: str
    """The short name of that type."""
    suffixes: tuple[str, str]
    """The names of the tensors with elements and with scales end so, after the name of merged experts' matrices."""
    stored: str
    """Element type of the tensor that has the elements."""
    packed: int
    """Length of that tensor's last axis, which is one block; the axis before it counts blocks. 0: it has the matrix's
    axes."""
    block: tuple[int, int]
    """Rows and columns of a matrix that share a scale, where scales belong to blocks."""
    scale: str
    """Element type of the scales."""
    kinds: tuple[str, ...]
    """The values of `WEIGHT_SCALES` that the encoding has."""
    rows_quantised: bool
    """Whether the rows that the matrix multiplies are quantised, too (docs/fp8.md); otherwise they have y's type."""
    whole_blocks: bool
    """Whether the columns of a matrix must be a multiple of a block's; otherwise the last block may be smaller."""

    def numbers(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the matrices whose elements are in a tensor of this shape."""
        if not self.packed:
            return tuple(shape)
        *lead, blocks, _ = shape
        return (*lead, blocks * self.block[1])

    def elements(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor that has the elements of matrices of this shape."""
        if not self.packed:
            return tuple(shape)
        *lead, columns = shape
        return (*lead, columns // self.block[1], self.packed)

    def scale_columns(self, columns: int) -> int:
        """The number of scales in a row of blocks."""
        return -(-columns // self.block[1])


ENCODINGS = {
    FP8: Encoding(
        FP8,
        "FP8",
        ("", "_scale_inv"),
        stored=FP8,
        packed=0,
        block=(SCALE_BLOCK, SCALE_BLOCK),
        scale="float32",
        kinds=WEIGHT_SCALES[1:],
        rows_quantised=True,
        whole_blocks=False,
    ),
    MXFP4: Encoding(
        MXFP4,
        "MXFP4",
        ("_blocks", "_scales"),
        stored="uint8",
        packed=16,
        block=(1, 32),
        scale="uint8",
        kinds=("block",),
        rows_quantised=False,
        whole_blocks=True,
    ),
}
"""The encodings, by the element type of weights."""
STORED_AS = {encoding.stored: dtype for dtype, encoding in ENCODINGS.items()}
"""The element type of weights, by the element type of the tensor that has the elements."""

_ACTIVATIONS = {
    "relu": ("relu", "ReLU"),
    "gelu": ("gelu", "GELU"),
    "silu": ("silu", "SiLU"),
    "swiglu": ("silu", "SwiGLU"),
    "geglu": ("gelu", "GeGLU"),
    "relu2": ("relu2", "ReLU2"),
    "clamped_swiglu": ("silu", "clamped SwiGLU"),
    "gelu_tanh": ("gelu_tanh", "tanh GELU"),
    "geglu_tanh": ("gelu_tanh", "tanh GeGLU"),
}
"""For each name, its `PLAIN` and its title."""

ACTIVATIONS = tuple(_ACTIVATIONS)

PLAIN = {name: plain for name, (plain, _) in _ACTIVATIONS.items()}
"""The function that an activation applies to each column of the first product. If this is another activation's name,
the activation has a gate, and the function is applied to the gate."""

GATED = tuple(name for name, plain in PLAIN.items() if name != plain)
"""Activations with a gate. They read two columns of the first product for each column that they make."""

BY_GATE = {PLAIN[name]: name for name in GATED if name != "clamped_swiglu"}
"""Activations with a gate and without parameters, by the function that they apply to the gate."""

TITLES = {name: title for name, (_, title) in _ACTIVATIONS.items()}
"""The names of activations in messages."""

SCORES = ("softmax", "sigmoid")
"""What a router makes of its logits: their softmax over all E, or the sigmoid of each."""

ROUTINGS = ("given", *SCORES)
"""Where a token's experts come from: the caller, or the largest of the router's scores."""

RETURN_MODES = ("direct", "reduced")

RETURN_CHOICES = (*RETURN_MODES, "auto")
"""The return modes that a caller may ask for; ``auto`` leaves the choice to the context."""

# What the C++ types hold: tokens 20 bits of a signal, tasks' columns 24 bits, an entry's k 16 bits.
MAX_TOKENS = 2**20 - 1
MAX_RANKS = 1024
MAX_EXPERTS = 8192
MAX_WIDTH = 2**20  # H and I
MAX_SLICES = 1023  # width of a shared expert, in I (protocol/task.h)
MAX_GROUPS = 32  # groups of experts: each takes a lane of a warp
# What the CUDA kernel's shared memory holds.
MAX_CUDA_TOKENS = 65536
MAX_CUDA_EXPERTS = 1024
MAX_CUDA_TOP_K = 32
MAX_CUDA_RANKS = 32


def halves_of(activation: str, interleaved: bool) -> int:
    """The number of parts, one after the other, of an expert's first matrix: gate rows and up rows, or all rows
    together."""
    return 2 if activation in GATED and not interleaved else 1


@dataclass(frozen=True)
class LayerSpec:
    """A layer of E experts: ``y[t] = sum_k w[t, k] * (down[e] @ act(gate_up[e] @ x[t]))``, see `flashmoe.moe`.

    What a call adds: its tokens, the tensors' addresses, the experts' placement, and whether it is traced.
    """

    hidden: int
    """H: elements of a token's row."""
    intermediate: int
    """I: elements of an expert's intermediate row."""
    experts: int
    """E: experts of all ranks."""
    top_k: int
    """K: experts of a token."""
    slices: int = 1
    """The number of slices into which an expert is cut. Each has width I and a place of its own."""
    activation: str = "swiglu"
    """One of `ACTIVATIONS`."""
    limit: float = math.inf
    """For ``clamped_swiglu``: the gate is at most this, and up lies within plus and minus this."""
    alpha: float = 1.0
    """For ``clamped_swiglu``: the gate is multiplied by the sigmoid of alpha times the gate."""
    up_offset: float = 0.0
    """For ``clamped_swiglu``: added to up after clamping."""
    interleaved: bool = False
    """With a gate: row 2i of gate_up_proj is column i's gate and row 2i + 1 its up, instead of row i and row I + i."""
    transposed: bool = False
    """Whether gate_up_proj is [El, H, 2I or I] and down_proj [El, I, H]."""
    weights_on_input: bool = False
    """Whether a token's weights scale its row before the experts, instead of the experts' results."""
    routing: str = "softmax"
    """One of `ROUTINGS`."""
    renormalize: bool = True
    """With a router: whether a token's K weights are divided by their sum (with ``sigmoid`` plus 1e-20)."""
    round_logits: bool = False
    """With a router: whether its logits are rounded to y_type, as a linear layer rounds its results."""
    routed_scale: float = 1.0
    """With a router: a factor of a token's K weights, applied last."""
    shared: int = 0
    """The number of slices of width I into which the shared expert, an FFN of every token, is cut; 0: there is none."""
    shared_gate: bool = False
    """Whether the shared expert's result is multiplied by the sigmoid of a row's product with x."""
    groups: int = 1
    """With a router: E / groups neighbouring experts are a group."""
    top_groups: int = 1
    """The number of groups from which experts are chosen: the groups whose two best experts have the largest sum."""
    choice_bias: bool = False
    """Whether E numbers are added to the scores for the choice of experts, but not for their weights."""
    router_bias: bool = False
    """Whether the router has a bias [E]."""
    gate_up_bias: bool = False
    """Whether the experts have a bias [El, 2I], or [El, I] without a gate, before the activation."""
    down_bias: bool = False
    """Whether the experts have a bias [El, H] after the second product."""
    x_type: str = "bfloat16"
    """Element type of x [T, H] as it is given: that of y, or `FP8`, which weights of `FP8` allow."""
    token_type: str = "bfloat16"
    """Element type of x's rows as they go to other ranks and are multiplied. Rows of `FP8` have scales
    (`row_bytes`)."""
    weight_type: str = "bfloat16"
    """Element type of gate_up_proj and down_proj, and of the shared expert's."""
    weight_scales: str = "none"
    """One of `WEIGHT_SCALES`; ``none`` where weights are not quantised."""
    intermediate_type: str = "bfloat16"
    """Element type of the activated rows between the two products."""
    y_type: str = "bfloat16"
    """One of `DTYPES`: element type of y [T, H], of the router, the shared expert's gate and all biases."""
    return_type: str = "bfloat16"
    """Element type of the experts' weighted rows, and of a rank's sums of them, on their way home."""
    exact: bool = False
    """CUDA engine, float32: whether products are in float32 instead of the tensor cores' TF32."""
    return_mode: str = "direct"
    """One of `RETURN_MODES`: each expert's row travels home, or a rank's sum of a token's rows. A layer that a context
    is made for may also have ``auto``."""
    capacity_factor: float = 0.0
    """An expert keeps ceil(capacity_factor * (T * K) / E) of each rank's (token, k) pairs; 0: all of them."""

    @property
    def parts(self) -> int:
        """The slices of all experts. A placement has an entry for each."""
        return self.experts * self.slices

    @property
    def choices(self) -> int:
        """The slices of a token's experts. All are computed for the token."""
        return self.top_k * self.slices

    @property
    def gated(self) -> bool:
        """Whether the activation has a gate, so that an expert's first matrix has 2I rows."""
        return self.activation in GATED

    @property
    def halves(self) -> int:
        """See `halves_of`."""
        return halves_of(self.activation, self.interleaved)

    @property
    def gate_up_rows(self) -> int:
        """Rows of an expert's first matrix."""
        return 2 * self.intermediate if self.gated else self.intermediate

    @property
    def shared_experts(self) -> int:
        """1 if there is a shared expert, which is one more choice of every token; else 0."""
        return min(self.shared, 1)

    @property
    def token_row_bytes(self) -> int:
        """Bytes of a token's row, as it goes to another rank."""
        return row_bytes(self.hidden, self.token_type)

    @property
    def encoding(self) -> Encoding | None:
        """How the weights are stored, if they are quantised."""
        return ENCODINGS.get(self.weight_type)

    @property
    def quantised(self) -> bool:
        """Whether rows are quantised, as they are sent and multiplied: with weights of `FP8`."""
        return self.token_type == FP8

    @property
    def return_row_bytes(self) -> int:
        """Bytes of a row that travels home."""
        return row_bytes(self.hidden, self.return_type)

    def to_map(self) -> dict[str, int | float | str]:
        """The fields by name, as the library takes them."""
        return {name: int(value) if value is True or value is False else value for name, value in vars(self).items()}


def row_bytes(elements: int, dtype: str) -> int:
    """Bytes of a row. A row in `FP8` has float32 scales after its elements; both are aligned to 16 bytes
    (include/flashmoe/spec/rows.h)."""
    if dtype != FP8:
        return elements * ELEMENT_BYTES[dtype]
    return sum(-(-size // 16) * 16 for size in (elements, 4 * scale_blocks(elements)))


def scale_blocks(elements: int) -> int:
    """Scales of a quantised row, or of a row of blocks of weights. The last may cover fewer than `SCALE_BLOCK`
    elements."""
    return -(-elements // SCALE_BLOCK)


def element_types(dtype: str, weights: str = "", x: str = "") -> dict[str, str]:
    """The element types of a `LayerSpec` whose y is of `dtype`, by the names of its fields. The engines have only these
    combinations. `weights`: `dtype`, the default, or one of `ENCODINGS`. `x`, as it is given: `dtype`, the default, or
    `FP8`."""
    weights = weights or dtype
    rows = weights if weights == dtype or ENCODINGS[weights].rows_quantised else dtype
    return {
        "x_type": x or dtype,
        "token_type": rows,
        "weight_type": weights,
        "intermediate_type": rows,
        "y_type": dtype,
        "return_type": dtype,
    }


def bounded(name: str, value: Any, low: int, high: int, symbol: str = "") -> int:
    """`value`, an integer of any type, as an int in [low, high]. Raises `InvalidArgument`. `symbol`: what messages call
    `high`."""
    try:
        number = operator.index(value)
    except Exception:  # whatever a foreign type's __index__ raises
        number = low - 1
    if not low <= number <= high or isinstance(value, bool):
        raise InvalidArgument(f"{name}: expected an integer in [{low}, {symbol}{high}], got {value!r}")
    return number


def one_of(name: str, value: Any, known: tuple[str, ...]) -> Any:
    """`value`, checked to be one of `known`. Raises `InvalidArgument`."""
    if not isinstance(value, str) or value not in known:  # a NumPy dtype is equal to its name, an array to nothing
        raise InvalidArgument(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    return value


def truth(name: str, value: Any) -> bool:
    """`value` as a bool; raises `InvalidArgument` for what is neither true nor false, such as an array."""
    try:
        return bool(value)
    except Exception:  # whatever a foreign type's __bool__ raises
        raise InvalidArgument(f"{name}: expected True or False, got {value!r}") from None


MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
MIN_FLOAT32 = 2.0**-149
"""The smallest number above 0."""


def finite(name: str, value: Any) -> float:
    """`value` as a float that is a number in float32, in which the engines compute; raises `InvalidArgument`."""
    try:
        number = float(value)
    except Exception:  # too large, or whatever a foreign type's __float__ raises
        number = math.nan
    # Compared, because torch.compile cannot trace math.isfinite of a number that it takes for a variable.
    if not -MAX_FLOAT32 <= number <= MAX_FLOAT32 or isinstance(value, (str, bytes)):
        raise InvalidArgument(f"{name}: expected a finite number of float32, got {value!r}")
    return number


def positive(name: str, value: Any) -> float:
    """`value` as a float above 0, in float32 too; raises `InvalidArgument`."""
    try:
        number = finite(name, value)
    except InvalidArgument:
        number = 0.0
    if number < MIN_FLOAT32:
        raise InvalidArgument(f"{name}: expected a finite number of float32 > 0, got {value!r}")
    return number
