"""The bounds of float32's gradients on a GPU hold, are not loose, and notice an engine that cuts off one bit too many.

The engine here is plain NumPy in float32. It cuts off low bits of its products' operands, as tensor cores do. Kernels
have to meet the same bounds in tests/gpu/test_training_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from problems import Problem
from training import check, trainable

SIZES = {"hidden": 96, "intermediate": 80, "experts": 6, "top_k": 2, "dtype": "float32", "fused": False}
BIASES = {"biases": (False, True, True)}
LAYERS: dict[str, dict[str, Any]] = {
    "swiglu, biases": BIASES,
    "relu": {"activation": "relu"},
    "weights on the input": BIASES | {"weights_on_input": True},
}
Operand = Callable[[np.ndarray], np.ndarray]


def cut(bits: int) -> Operand:
    """A function that clears the lowest `bits` bits of float32 numbers."""
    mask = np.uint32(0xFFFFFFFF << bits & 0xFFFFFFFF)
    return lambda v: (np.ascontiguousarray(v, np.float32).view(np.uint32) & mask).view(np.float32)


def as_they_are(v: np.ndarray) -> np.ndarray:
    return v


def activations(z: np.ndarray, gated: bool) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """The activated rows a (SwiGLU or relu of z), and a function that turns the gradient of a into that of z."""
    if not gated:
        return np.maximum(z, 0), lambda da: np.where(z > 0, da, np.float32(0))
    gate, up = np.split(z, 2, axis=1)
    s = 1 / (1 + np.exp(-gate))
    slope = s * (1 + gate * (1 - s))
    return gate * s * up, lambda da: np.concatenate([da * up * slope, da * gate * s], axis=1)


def gradients(problem: Problem, dy: np.ndarray, operand: Operand, of_dx: Operand) -> dict[str, np.ndarray]:
    """All gradients of a call of one rank, in float32 (those of biases in float64). `of_dx` is applied to the operands
    of dX's products, and `operand` to those of all other products."""
    x, ids, weights = problem.x[0], problem.topk_ids[0], problem.topk_weights[0]
    up, down = problem.gate_up_proj, problem.down_proj
    found = {"x": np.zeros_like(x), "topk_weights": np.zeros(ids.shape, np.float32)}
    found |= {"gate_up_proj": np.zeros_like(up), "down_proj": np.zeros_like(down)}
    on_input = problem.options.get("weights_on_input", False)
    if problem.gate_up_bias is not None:
        found |= {name: np.zeros_like(getattr(problem, name)) for name in ("gate_up_bias", "down_bias")}
    for e in range(len(up)):
        t, k = np.nonzero(ids == e)
        w = weights[t, k, None].astype(np.float32)
        u = operand(x[t]) @ operand(up[e]).T
        z = w * u if on_input else u
        if problem.gate_up_bias is not None:
            z = z + problem.gate_up_bias[e]
        a, backward = activations(z, problem.options.get("activation", "swiglu") == "swiglu")
        da = operand(dy[t]) @ operand(down[e])
        plain = backward(da if on_input else w * da)  # the gradient of z
        dz, weighted = (w * plain, a) if on_input else (plain, w * a)
        found["topk_weights"][t, k] = (plain * u if on_input else a * da).sum(axis=1)
        found["x"][t] += of_dx(dz) @ of_dx(up[e])
        found["gate_up_proj"][e] = operand(dz).T @ operand(x[t])
        found["down_proj"][e] = operand(dy[t]).T @ operand(weighted)
        if problem.gate_up_bias is not None:
            found["topk_weights"][t, k] += 0.0 if on_input else dy[t] @ problem.down_bias[e]
            found["gate_up_bias"][e] = plain.sum(axis=0, dtype=np.float64)
            found["down_bias"][e] = ((1.0 if on_input else w) * dy[t].astype(np.float64)).sum(axis=0)
    return found


def parts_of_bounds(options: dict[str, Any], exact: bool, operand: Operand, of_dx: Operand) -> dict[str, float]:
    problem, grads = trainable(5, [257], **SIZES | options)
    found = gradients(problem, grads[0], operand, of_dx)
    problem = replace(problem, options=problem.options | {"exact": exact})
    return check(problem, grads, [found], engine="cuda")


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("exact", [False, True])
def test_bounds_hold(options, exact):
    operand = as_they_are if exact else cut(13)
    parts = parts_of_bounds(options, exact, operand, operand)
    # With TF32, most of the bound is the truncation of operands, which can be computed. In exact float32, the bound
    # allows for sums that add one term after the other, but BLAS adds in parts, so its errors are much smaller.
    products = [parts[name] for name in ("x", "gate_up_proj", "down_proj")]
    assert min(products) > (0.02 if exact else 0.5), parts


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_one_bit_too_many_is_noticed(options):
    with pytest.raises(AssertionError, match="bound"):
        parts_of_bounds(options, False, cut(14), cut(14))


def test_one_product_with_too_few_bits_is_noticed():
    with pytest.raises(AssertionError, match="x: error"):
        parts_of_bounds({}, False, cut(13), cut(15))


def test_tf32_is_not_exact():
    with pytest.raises(AssertionError, match="x: error"):
        parts_of_bounds({}, True, as_they_are, cut(13))
