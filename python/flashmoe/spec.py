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
"""Of what rows are in."""

WEIGHT_SCALES = ("none", "tensor", "row", "block")
"""What numbers of a quantised matrix share a scale: all, a row's, or those of a block (`Encoding.block`)."""

SCALE_BLOCK = 128
"""Elements of a quantised row that share a scale."""


@dataclass(frozen=True)
class Encoding:
    """How quantised matrices are stored: the one place that knows it (C++: include/flashmoe/spec/encoding.h)."""

    dtype: str
    """Element type of weights."""
    name: str
    """The same in short."""
    suffixes: tuple[str, str]
    """What follows the name of merged experts' matrices in those of the tensors that have their elements and scales."""
    stored: str
    """Element type of the tensor that has the elements."""
    packed: int
    """Length of the last axis of that tensor, a block's, with one of blocks before it; 0: it has the matrix's axes."""
    block: tuple[int, int]
    """Rows and columns of a matrix that share a scale, where scales are those of blocks."""
    scale: str
    """Element type of the scales."""
    kinds: tuple[str, ...]
    """Those of `WEIGHT_SCALES` that it has."""
    rows_quantised: bool
    """Whether the rows that it is multiplied with are quantised, too (docs/fp8.md); else they are of y's type."""
    whole_blocks: bool
    """Whether the columns of a matrix are a multiple of a block's; else the last block may be smaller."""

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
        """Scales of a row of blocks."""
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
"""By the element type of weights."""
STORED_AS = {encoding.stored: dtype for dtype, encoding in ENCODINGS.items()}
"""The element type of weights, by that of the tensor that has their elements."""

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
"""By name: its `PLAIN` and its title."""

ACTIVATIONS = tuple(_ACTIVATIONS)

PLAIN = {name: plain for name, (plain, _) in _ACTIVATIONS.items()}
"""What an activation does with each column of the first product; or, where it is another one's name, with the gate."""

GATED = tuple(name for name, plain in PLAIN.items() if name != plain)
"""Activations with a gate, which have two columns of the first product for each of their own."""

BY_GATE = {PLAIN[name]: name for name in GATED if name != "clamped_swiglu"}
"""Those of them without numbers of their own, by what they do with the gate."""

TITLES = {name: title for name, (_, title) in _ACTIVATIONS.items()}
"""What activations are called in messages."""

SCORES = ("softmax", "sigmoid")
"""What a router makes of its logits: their softmax over all E, or the sigmoid of each."""

ROUTINGS = ("given", *SCORES)
"""Where a token's experts come from: the caller, or the largest of the router's scores."""

RETURN_MODES = ("direct", "reduced")

RETURN_CHOICES = (*RETURN_MODES, "auto")
"""What a caller may ask for; ``auto`` leaves the choice to the context."""

# What the C++ types hold: tokens 20 bits of a signal, tasks' columns 24 bits, an entry's k 16 bits.
MAX_TOKENS = 2**20 - 1
MAX_RANKS = 1024
MAX_EXPERTS = 8192
MAX_WIDTH = 2**20  # H and I
MAX_SLICES = 1023  # width of a shared expert, in I (protocol/task.h)
MAX_GROUPS = 32  # of experts: a lane of a warp each
# What the CUDA kernel's shared memory holds.
MAX_CUDA_TOKENS = 65536
MAX_CUDA_EXPERTS = 1024
MAX_CUDA_TOP_K = 32
MAX_CUDA_RANKS = 32


def halves_of(activation: str, interleaved: bool) -> int:
    """In how many parts, one behind the other, an expert's first matrix is: gate rows and up rows, or all of them."""
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
    """E, of all ranks."""
    top_k: int
    """K: experts of a token."""
    slices: int = 1
    """Into how many slices an expert is cut, each of width I and with a place of its own."""
    activation: str = "swiglu"
    """One of `ACTIVATIONS`."""
    limit: float = math.inf
    """Of ``clamped_swiglu``: the gate is at most this, and up within plus and minus this."""
    alpha: float = 1.0
    """Of ``clamped_swiglu``: the gate is multiplied by the sigmoid of alpha times itself."""
    up_offset: float = 0.0
    """Of ``clamped_swiglu``: added to up, once it is clamped."""
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
    """With a router: whether its logits are rounded to y_type, as those of a linear layer are."""
    routed_scale: float = 1.0
    """With a router: a token's K weights are multiplied by this, in the end."""
    shared: int = 0
    """Slices of width I that the shared expert, an FFN of every token, is cut into; 0: there is none."""
    shared_gate: bool = False
    """Whether the shared expert's result is multiplied by the sigmoid of a row's product with x."""
    groups: int = 1
    """With a router: E / groups neighbouring experts are a group."""
    top_groups: int = 1
    """Only experts of so many groups are chosen from: those whose two best experts have the largest sum."""
    choice_bias: bool = False
    """Whether E numbers are added to the scores for the choice of experts, but not for their weights."""
    router_bias: bool = False
    """Whether the router has a bias [E]."""
    gate_up_bias: bool = False
    """Whether the experts have a bias [El, 2I], or [El, I] without a gate, before the activation."""
    down_bias: bool = False
    """Whether the experts have a bias [El, H] behind the second product."""
    x_type: str = "bfloat16"
    """Element type of x [T, H] as it is given: that of y, or with weights of `FP8` that."""
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
    """One of `RETURN_MODES`: each expert's row travels home, or a rank's sum of a token's rows. Of what a context is
    made for also ``auto``."""
    capacity_factor: float = 0.0
    """An expert keeps ceil(capacity_factor * (T * K) / E) of each rank's (token, k) pairs; 0: all of them."""

    @property
    def parts(self) -> int:
        """The slices of all experts: what a placement has entries for."""
        return self.experts * self.slices

    @property
    def choices(self) -> int:
        """The slices of a token's experts: what is computed for it."""
        return self.top_k * self.slices

    @property
    def gated(self) -> bool:
        """Whether the activation has a gate, so that an expert's first matrix has 2I rows."""
        return self.activation in GATED

    @property
    def halves(self) -> int:
        """As `halves_of`."""
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
    """Bytes of a row. One of `FP8` has scales in float32 behind its elements, both aligned to 16 bytes
    (include/flashmoe/spec/rows.h)."""
    if dtype != FP8:
        return elements * ELEMENT_BYTES[dtype]
    return sum(-(-size // 16) * 16 for size in (elements, 4 * scale_blocks(elements)))


def scale_blocks(elements: int) -> int:
    """Scales of a quantised row, or of a row of blocks of weights: the last may be of fewer than `SCALE_BLOCK`."""
    return -(-elements // SCALE_BLOCK)


def element_types(dtype: str, weights: str = "", x: str = "") -> dict[str, str]:
    """The element types of a `LayerSpec` whose y is of `dtype`, by the names of its fields: those that the engines
    have. `weights`: `dtype`, the default, or one of `ENCODINGS`; `x`, as given: `dtype`, the default, or `FP8`."""
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
    """`value`, an integer of any type, as an int in [low, high]; raises `InvalidArgument`. `symbol`: what `high` is."""
    try:
        number = operator.index(value)
    except Exception:  # whatever a foreign type's __index__ raises
        number = low - 1
    if not low <= number <= high or isinstance(value, bool):
        raise InvalidArgument(f"{name}: expected an integer in [{low}, {symbol}{high}], got {value!r}")
    return number


def one_of(name: str, value: Any, known: tuple[str, ...]) -> Any:
    """`value`, once it is one of `known`; raises `InvalidArgument`."""
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
"""The least above 0."""


def finite(name: str, value: Any) -> float:
    """`value` as a float that is a number in float32, in which the engines compute; raises `InvalidArgument`."""
    try:
        number = float(value)
    except Exception:  # too large, or whatever a foreign type's __float__ raises
        number = math.nan
    # A comparison: torch.compile traces no math.isfinite of a number that it takes for a variable.
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
