"""Is what the engine computed right? Compared with the float64 reference, against a derived bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..checkpoint import MoELayer
from ..reference import check_topk, moe_reference, router_logits, weigh
from ..tolerance import call_error, relative_error, router_error


@dataclass(frozen=True)
class Verdict:
    """What the comparison found."""

    error: float
    """Frobenius norm of the result's error, relative to the norm of the terms it sums."""
    bound: float
    """The most that rounding explains, in the same measure; `flashmoe.tolerance` derives it."""
    misrouted: int
    """Tokens whose experts are not a top-k of the float64 logits, within rounding of the logits."""

    @property
    def passed(self) -> bool:
        """Whether result and routing are right; a NaN is not."""
        return self.error <= self.bound and self.misrouted == 0


def verify(
    layer: MoELayer,
    x: np.ndarray,
    y: np.ndarray,
    topk_ids: np.ndarray,
    *,
    placement: Sequence[int],
    return_mode: str,
) -> Verdict:
    """Judge y [T, H], the layer's result for x [T, H], and the routing topk_ids [T, K] that led to it.

    Two nearly equal logits may be told apart differently in float32 and in float64, which changes the result
    by much more than rounding. So the reference takes the engine's experts, once they are shown to be a
    top-k, and computes their weights and everything after that itself.
    """
    logits = router_logits(x, layer.router)
    experts_exist = ((topk_ids >= 0) & (topk_ids < layer.experts)).all(axis=1)
    if not experts_exist.all():  # a reference cannot be computed with them
        return Verdict(float("nan"), float("nan"), int((~experts_exist).sum()))
    weights = weigh(logits, topk_ids, layer.renormalize)
    slack, weight_variance = router_error(x, layer.router, None, topk_ids, weights, renormalize=layer.renormalize)
    valid = check_topk(logits, topk_ids, slack)
    reference = moe_reference(
        x,
        layer.gate_up_proj,
        layer.down_proj,
        topk_ids=topk_ids,
        topk_weights=weights,
        activation=layer.activation,
    )
    allowed = call_error(
        x,
        layer.gate_up_proj,
        layer.down_proj,
        topk_ids,
        weights,
        return_mode=return_mode,
        placement=placement,
        activation=layer.activation,
        weight_variance=weight_variance,
    )
    error = relative_error(y, reference.y, reference.scale)
    bound = allowed.bound / reference.scale if reference.scale else 0.0
    return Verdict(error, bound, int((~valid).sum()))
