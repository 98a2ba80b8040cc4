"""The values that a layer's options may have: their names, their ranges, and the checks that say what was expected.

The names are those of include/flashmoe/spec/enums.h, which tests/test_spec.py compares with the tuples here.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Literal, get_args

import numpy as np

from ..errors import InvalidArgument

Activation = Literal["relu", "gelu", "silu", "swiglu", "geglu", "relu2", "clamped_swiglu", "gelu_tanh", "geglu_tanh"]
"""The activations, as type checkers know them; the other values of options that are names are below."""

_ACTIVATIONS: dict[Activation, tuple[Activation, str]] = {
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

ACTIVATIONS: tuple[str, ...] = get_args(Activation)

PLAIN = {name: plain for name, (plain, _) in _ACTIVATIONS.items()}
"""The function that an activation applies to each column of the first product. If this is another activation's name,
the activation has a gate, and the function is applied to the gate."""

GATED = tuple(name for name, plain in PLAIN.items() if name != plain)
"""Activations with a gate. They read two columns of the first product for each column that they make."""

BY_GATE = {PLAIN[name]: name for name in GATED if name != "clamped_swiglu"}
"""Activations with a gate and without parameters, by the function that they apply to the gate."""

TITLES = {name: title for name, (_, title) in _ACTIVATIONS.items()}
"""The names of activations in messages."""

Score = Literal["softmax", "sigmoid"]
SCORES: tuple[str, ...] = get_args(Score)
"""What a router makes of its logits: their softmax over all E, or the sigmoid of each."""

ROUTINGS = ("given", *SCORES)
"""Where a token's experts come from: the caller, or the largest of the router's scores."""

RETURN_MODES = ("direct", "reduced")

ReturnChoice = Literal["direct", "reduced", "auto"]
RETURN_CHOICES: tuple[str, ...] = get_args(ReturnChoice)
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


def dtype_named(name: str, value: Any, known: tuple[str, ...]) -> str:
    """The name of an element type, one of `known`. `value` is this name, or the type as PyTorch, NumPy or ml_dtypes
    have it. Raises `InvalidArgument`."""
    if not isinstance(value, str) and value is not None:
        of_torch = type(value).__module__ == "torch" and str(value).startswith("torch.")
        try:
            value = str(value).removeprefix("torch.") if of_torch else np.dtype(value).name
        except Exception:  # whatever NumPy, or a foreign type, raises; the message has the value as it was given
            pass
    return one_of(name, value, known)


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
