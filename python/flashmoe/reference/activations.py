"""The activations between an expert's two products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Unpack

import numpy as np

from ..spec.options import LayerOptions, Options

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _gelu(z: np.ndarray) -> np.ndarray:
    return 0.5 * z * _erfc(-z / math.sqrt(2.0))  # = z (1 + erf(z / sqrt 2)) / 2, without the cancellation


def _gelu_slope(z: np.ndarray) -> np.ndarray:
    return 0.5 * _erfc(-z / math.sqrt(2.0)) + z * np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)


def _silu(z: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return z / (1.0 + np.exp(-z))


def _silu_slope(z: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        s = 1.0 / (1.0 + np.exp(-z))
    return s * (1.0 + z * (1.0 - s))


def _gelu_tanh(z: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return z / (1.0 + np.exp(-_twice_the_argument(z)))  # = z (1 + tanh(..)) / 2, without the cancellation


def _gelu_tanh_slope(z: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        s = 1.0 / (1.0 + np.exp(-_twice_the_argument(z)))
    return s * (1.0 + z * (1.0 - s) * math.sqrt(8.0 / math.pi) * (1.0 + 3.0 * 0.044715 * z**2))


def _twice_the_argument(z: np.ndarray) -> np.ndarray:
    """Twice the argument of tanh."""
    return math.sqrt(8.0 / math.pi) * (z + 0.044715 * z**3)


Function = Callable[[np.ndarray], np.ndarray]
_PLAIN: dict[str, tuple[Function, Function]] = {
    "relu": (lambda z: np.maximum(z, 0.0), lambda z: (z > 0.0).astype(np.float64)),
    "relu2": (lambda z: np.square(np.maximum(z, 0.0)), lambda z: 2.0 * np.maximum(z, 0.0)),
    "gelu": (_gelu, _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "silu": (_silu, _silu_slope),
}
"""Activations without a gate, each with its derivative."""

GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "clamped_swiglu": "silu"}
"""Activations with a gate, each with the function that is applied to the gate."""


def activate(z: np.ndarray, activation: str, **options: Unpack[LayerOptions]) -> np.ndarray:
    """The activation of pre-activations z [..., I], or [..., 2I] with a gate: gates first and then ups, or alternating
    if `interleaved`. float64."""
    if activation in _PLAIN:
        return _PLAIN[activation][0](z)
    if activation not in GATED:
        raise ValueError(f"activation: expected one of {', '.join((*_PLAIN, *GATED))}, got {activation!r}")
    function, _ = _PLAIN[GATED[activation]]
    shape = Options(activation=activation, **options)
    gate, up = _halves(z, shape.interleaved)
    if activation != "clamped_swiglu":
        return function(gate) * up
    most = math.inf if shape.limit is None else shape.limit
    act = function(shape.alpha * np.minimum(gate, most)) / shape.alpha
    return act * (np.clip(up, -most, most) + shape.up_offset)


def activate_backward(z: np.ndarray, grad: np.ndarray, activation: str, **options: Unpack[LayerOptions]) -> np.ndarray:
    """The gradient of z [..., I or 2I], from that of ``activate(z)``, [..., I]. Where there is no derivative: 0 for
    relu at 0, and at a limit the derivative from inside. float64."""
    if activation in _PLAIN:
        return grad * _PLAIN[activation][1](z)
    function, slope_of = _PLAIN[GATED[activation]]
    shape = Options(activation=activation, **options)
    gate, up = _halves(z, shape.interleaved)
    if activation == "clamped_swiglu":
        most = math.inf if shape.limit is None else shape.limit
        inside = shape.alpha * np.minimum(gate, most)
        act, slope = function(inside) / shape.alpha, slope_of(inside) * (gate <= most)
        other, passes = np.clip(up, -most, most) + shape.up_offset, np.abs(up) <= most
    else:
        act, slope, other, passes = function(gate), slope_of(gate), up, np.ones(up.shape, bool)
    parts = grad * slope * other, grad * act * passes
    return np.stack(parts, axis=-1).reshape(z.shape) if shape.interleaved else np.concatenate(parts, axis=-1)


def _halves(z: np.ndarray, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """Gates and ups."""
    return (z[..., ::2], z[..., 1::2]) if interleaved else tuple(np.split(z, 2, axis=-1))
