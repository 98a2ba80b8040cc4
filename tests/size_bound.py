"""How far a result may be off, from the sizes of a layer alone."""

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
    """Bound of `relative_error` from the sizes alone, for many tokens of data that are random in this sense:

    dot products about as large as their products' norm, and terms of a token in unrelated directions. It adds
    the variances of the roundings 1 to 4 and of the two dot products (n/2 each; the first counts once per
    factor of the activation), each at the mantissa that is worst for it, u / sqrt 3. Mantissas are in fact
    spread, which makes the error about two thirds of the bound; an engine whose roundings are one bit worse
    exceeds it. `call_error` is sharper, and holds for any data.
    """
    several = top_k > 1
    roundings = 2 + several + (several and return_mode == "reduced")
    factors = 2 if activation in (*GATED, "relu2") else 1
    roundings32 = (factors * (hidden + 1) + (intermediate + 1) + several * (top_k + 1)) / 2
    roundings32 += _FUNCTION_ROUNDINGS**2
    return math.sqrt(roundings * UNIT_ROUNDOFF[dtype] ** 2 / 3.0 + roundings32 * _VARIANCE32)
