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
"""The names of the activations, as type checkers know them. `Score` and `ReturnChoice` below are names like these."""

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
"""For each activation, its entry of `PLAIN` and its entry of `TITLES`."""

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
"""How a router computes scores from its logits: by the softmax over all E experts, or by the sigmoid of each logit."""

ROUTINGS = ("given", *SCORES)
"""Where a token's experts come from: the caller gives them, or a router chooses them by scores of one of `SCORES`."""

RETURN_MODES = ("direct", "reduced")

ReturnChoice = Literal["direct", "reduced", "auto"]
RETURN_CHOICES: tuple[str, ...] = get_args(ReturnChoice)
"""The return modes that a caller may ask for; ``auto`` leaves the choice to the context."""

# Limits of the C++ types: tokens have 20 bits of a signal, columns of tasks 24 bits, and k of an entry 16 bits.
MAX_TOKENS = 2**20 - 1
MAX_RANKS = 1024
MAX_EXPERTS = 8192
MAX_WIDTH = 2**20  # H and I
MAX_SLICES = 1023  # slices of width I of a shared expert (protocol/task.h)
MAX_GROUPS = 32  # groups of experts: each takes a lane of a warp
# Limits of the CUDA kernel's shared memory.
MAX_CUDA_TOKENS = 65536
MAX_CUDA_EXPERTS = 1024
MAX_CUDA_TOP_K = 32
MAX_CUDA_RANKS = 32


def halves_of(activation: str, interleaved: bool) -> int:
    """The number of parts that lie one after the other in an expert's first matrix: 2 if all gate rows come before all
    up rows, else 1."""
    return 2 if activation in GATED and not interleaved else 1


def bounded(name: str, value: Any, low: int, high: int, symbol: str = "") -> int:
    """`value`, an integer of any type, as an int in [low, high]. Raises `InvalidArgument`. `symbol`: what messages call
    `high`."""
    try:
        number = operator.index(value)
    except Exception:  # another type's __index__ may raise anything
        number = low - 1
    if not low <= number <= high or isinstance(value, bool):
        raise InvalidArgument(f"{name}: expected an integer in [{low}, {symbol}{high}], got {value!r}")
    return number


def one_of(name: str, value: Any, known: tuple[str, ...]) -> Any:
    """`value`, checked to be one of `known`. Raises `InvalidArgument`."""
    if not isinstance(value, str) or value not in known:  # the type is checked because a NumPy dtype equals its name
        raise InvalidArgument(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    return value


def dtype_named(name: str, value: Any, known: tuple[str, ...]) -> str:
    """The name of an element type, one of `known`. `value` is this name, or the type as PyTorch, NumPy or ml_dtypes
    have it. Raises `InvalidArgument`."""
    if not isinstance(value, str) and value is not None:
        of_torch = type(value).__module__ == "torch" and str(value).startswith("torch.")
        try:
            value = str(value).removeprefix("torch.") if of_torch else np.dtype(value).name
        except Exception:  # NumPy or another type may raise anything; the message shows the given value
            pass
    return one_of(name, value, known)


def truth(name: str, value: Any) -> bool:
    """`value` as a bool; raises `InvalidArgument` for what is neither true nor false, such as an array."""
    try:
        return bool(value)
    except Exception:  # another type's __bool__ may raise anything
        raise InvalidArgument(f"{name}: expected True or False, got {value!r}") from None


MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
MIN_FLOAT32 = 2.0**-149
"""The smallest number of float32 above 0."""


def finite(name: str, value: Any) -> float:
    """`value` as a float that is a number in float32, in which the engines compute; raises `InvalidArgument`."""
    try:
        number = float(value)
    except Exception:  # an integer too large for a float, or any error of another type's __float__
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
