"""The activations between an expert's two products."""

from __future__ import annotations

import math

import numpy as np

GATED = ("swiglu", "geglu", "clamped_swiglu")


def activate(
    z: np.ndarray,
    activation: str,
    *,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> np.ndarray:
    """The activation of pre-activations z [..., I], or [..., 2I] with a gate: gates, then ups, or in turn if
    `interleaved`. `limit`, `alpha` and `up_offset` are of ``clamped_swiglu``. float64."""
    if activation == "relu":
        return np.maximum(z, 0.0)
    if activation == "relu2":
        return np.square(np.maximum(z, 0.0))
    if activation == "gelu":
        return 0.5 * z * _erfc(-z / math.sqrt(2.0))  # = z (1 + erf(z / sqrt 2)) / 2, without its cancellation
    if activation == "silu":
        with np.errstate(over="ignore"):
            return z / (1.0 + np.exp(-z))
    if activation not in GATED:
        known = "relu, relu2, gelu, silu, swiglu, geglu or clamped_swiglu"
        raise ValueError(f"activation: expected {known}, got {activation!r}")
    gate, up = _halves(z, interleaved)
    if activation == "swiglu":
        return activate(gate, "silu") * up
    if activation == "geglu":
        return activate(gate, "gelu") * up
    most = math.inf if limit is None else limit
    return activate(alpha * np.minimum(gate, most), "silu") / alpha * (np.clip(up, -most, most) + up_offset)


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def activate_backward(
    z: np.ndarray,
    grad: np.ndarray,
    activation: str,
    *,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> np.ndarray:
    """The gradient of z [..., I or 2I], for that of ``activate(z)``, [..., I]. Where there is no derivative: 0 of relu
    at 0, that of the inside at a limit. float64."""
    if activation not in GATED:
        return grad * _slope(z, activation)
    gate, up = _halves(z, interleaved)
    if activation == "clamped_swiglu":
        most = math.inf if limit is None else limit
        inside = np.minimum(gate, most)
        act, slope = activate(alpha * inside, "silu") / alpha, _slope(alpha * inside, "silu") * (gate <= most)
        other, passes = np.clip(up, -most, most) + up_offset, np.abs(up) <= most
    else:
        plain = {"swiglu": "silu", "geglu": "gelu"}[activation]
        act, slope, other, passes = activate(gate, plain), _slope(gate, plain), up, np.ones(up.shape, bool)
    parts = grad * slope * other, grad * act * passes
    return np.stack(parts, axis=-1).reshape(z.shape) if interleaved else np.concatenate(parts, axis=-1)


def _halves(z: np.ndarray, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """Gates and ups."""
    return (z[..., ::2], z[..., 1::2]) if interleaved else tuple(np.split(z, 2, axis=-1))


def _slope(z: np.ndarray, activation: str) -> np.ndarray:
    """The derivative of an activation without a gate."""
    if activation == "relu":
        return (z > 0.0).astype(np.float64)
    if activation == "relu2":
        return 2.0 * np.maximum(z, 0.0)
    if activation == "gelu":
        return 0.5 * _erfc(-z / math.sqrt(2.0)) + z * np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    with np.errstate(over="ignore"):
        s = 1.0 / (1.0 + np.exp(-z))
    return s * (1.0 + z * (1.0 - s))
