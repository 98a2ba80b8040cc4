"""A bound of a result's error, from the sizes of a layer alone."""

from __future__ import annotations

import math

from flashmoe.spec import GATED
from flashmoe.tolerance import _FUNCTION_ROUNDINGS, _VARIANCE32, UNIT_ROUNDOFF


def error_bound(
    dtype: str,
    hidden: int,
    intermediate: int,
    top_k: int,
    return_mode: str,
    *,
    activation: str = "swiglu",
) -> float:
    """Bound of `relative_error` from the sizes alone, for calls with many tokens of random data.

    Random means here: dot products are about as large as the norm of their products, and the terms of a token have
    unrelated directions. The bound adds the variances of the roundings 1 to 4 of `flashmoe.tolerance`, and of dot
    products (n/2 roundings for n products; GEMM0's count twice if the activation has two factors). For each rounding,
    it takes the mantissa with the largest relative error, which has a root mean square of u / sqrt 3. Real mantissas
    vary, so the error is about two thirds of the bound. An engine whose roundings are one bit worse exceeds the bound.
    `call_error` is sharper, and holds for any data.
    """
    several = top_k > 1
    roundings = 2 + several + (several and return_mode == "reduced")
    factors = 2 if activation in (*GATED, "relu2") else 1
    roundings32 = (factors * (hidden + 1) + (intermediate + 1) + several * (top_k + 1)) / 2
    roundings32 += _FUNCTION_ROUNDINGS**2
    return math.sqrt(roundings * UNIT_ROUNDOFF[dtype] ** 2 / 3.0 + roundings32 * _VARIANCE32)
