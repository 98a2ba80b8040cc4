"""What a layer is: sizes, activation, routing, biases, element types, and how its results come home.

`LayerSpec` is what both engines, the memory planner and the modules mean by a layer. C++ has the same struct
(include/flashmoe/spec/layer.h), and takes it by the names of its fields; the values of its options are those of
include/flashmoe/spec/enums.h, which tests/test_spec.py compares with the tuples here.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from .errors import InvalidArgument

DTYPES = ("float32", "bfloat16", "float16")
"""Element types."""

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

ACTIVATIONS = ("relu", "gelu", "silu", "swiglu")

ROUTINGS = ("given", "softmax")
"""Where a token's experts come from: the caller, or the largest of the router's scores after a softmax over all E."""

RETURN_MODES = ("direct", "reduced")

RETURN_CHOICES = (*RETURN_MODES, "auto")
"""What a caller may ask for; ``auto`` leaves the choice to the context."""

# What the C++ types hold: tokens 20 bits of a signal, tasks' columns 24 bits, an entry's k 16 bits.
MAX_TOKENS = 2**20 - 1
MAX_RANKS = 1024
MAX_EXPERTS = 8192
MAX_WIDTH = 2**20  # H and I
# What the CUDA kernel's shared memory holds.
MAX_CUDA_TOKENS = 65536
MAX_CUDA_EXPERTS = 1024
MAX_CUDA_TOP_K = 32
MAX_CUDA_RANKS = 32


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
    activation: str = "swiglu"
    """One of `ACTIVATIONS`."""
    routing: str = "softmax"
    """One of `ROUTINGS`."""
    renormalize: bool = True
    """With a router: whether a token's K weights are divided by their sum."""
    router_bias: bool = False
    """Whether the router has a bias [E]."""
    gate_up_bias: bool = False
    """Whether the experts have a bias [El, 2I], or [El, I] without a gate, before the activation."""
    down_bias: bool = False
    """Whether the experts have a bias [El, H] behind the second product."""
    x_type: str = "bfloat16"
    """One of `DTYPES`: element type of x [T, H], of the rows that go to other ranks, and of y [T, H]."""
    weight_type: str = "bfloat16"
    """Element type of gate_up_proj, down_proj and router, and of the biases."""
    intermediate_type: str = "bfloat16"
    """Element type of the activated rows between the two products."""
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
    def gated(self) -> bool:
        """Whether the activation has a gate, so that an expert's first matrix has 2I rows."""
        return self.activation == "swiglu"

    @property
    def gate_up_rows(self) -> int:
        """Rows of an expert's first matrix."""
        return 2 * self.intermediate if self.gated else self.intermediate

    @property
    def token_row_bytes(self) -> int:
        """Bytes of a token's row."""
        return self.hidden * ELEMENT_BYTES[self.x_type]

    @property
    def return_row_bytes(self) -> int:
        """Bytes of a row that travels home."""
        return self.hidden * ELEMENT_BYTES[self.return_type]

    def to_map(self) -> dict[str, int | float | str]:
        """The fields by name, as the library takes them."""
        return {name: int(value) if value is True or value is False else value for name, value in vars(self).items()}


def of_one_type(dtype: str) -> dict[str, str]:
    """The fields of a `LayerSpec` whose element types are all `dtype`: those that the engines have."""
    return dict.fromkeys(("x_type", "weight_type", "intermediate_type", "return_type"), dtype)


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
