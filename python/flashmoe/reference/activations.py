"""The activations between an expert's two products."""

from __future__ import annotations

import math

import numpy as np


def activate(z: np.ndarray, activation: str) -> np.ndarray:
    """The activation of pre-activations z [..., I], or [..., 2I] for ``swiglu``; float64."""
    if activation == "relu":
        return np.maximum(z, 0.0)
    if activation == "gelu":
        return 0.5 * z * _erfc(-z / math.sqrt(2.0))  # = z (1 + erf(z / sqrt 2)) / 2, without its cancellation
    if activation == "silu":
        with np.errstate(over="ignore"):
            return z / (1.0 + np.exp(-z))
    if activation == "swiglu":
        gate, up = np.split(z, 2, axis=-1)
        return activate(gate, "silu") * up
    raise ValueError(f"activation: expected relu, gelu, silu or swiglu, got {activation!r}")


_erfc = np.vectorize(math.erfc, otypes=[np.float64])
