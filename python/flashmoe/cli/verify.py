"""Is what the engine computed right? Compared with the float64 reference, against a derived bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ..checkpoint import MoELayer
from ..reference import check_topk, moe_reference, router_logits, weigh
from ..tolerance import call_error, relative_error, router_error
from .device import SeededLayer, layer_on_host

_MOST_WEIGHTS = 1 << 28
"""Elements of the experts whose float64 reference the host computes: a few GB, some seconds."""


@dataclass(frozen=True)
class Verdict:
    """What the comparison found."""

    error: float
    """Frobenius norm of the result's error, relative to the norm of the terms it sums."""
    bound: float
    """The most that rounding explains, in the same measure; `flashmoe.tolerance` derives it."""
    misrouted: int
    """Tokens whose experts are not a top-k of the float64 logits, within rounding of the logits."""
    tokens: int
    """How many tokens' results were compared."""
    of_tokens: int
    """How many there are; the routing of all of them was checked."""

    @property
    def passed(self) -> bool:
        """Whether result and routing are right; a NaN is not."""
        return self.error <= self.bound and self.misrouted == 0


def verify(
    layer: MoELayer | SeededLayer,
    x: np.ndarray,
    y: np.ndarray,
    topk_ids: np.ndarray,
    *,
    placement: Sequence[int],
    return_mode: str,
    gpu: bool = False,
) -> Verdict:
    """Judge y [T, H], the layer's result for x [T, H], and the routing topk_ids [T, K] that led to it.

    Two nearly equal logits may be told apart differently in float32 and in float64, which changes the result
    by much more than rounding. So the reference takes the engine's experts, once they are shown to be a
    top-k, and computes their weights and everything after that itself.

    Of a layer whose experts are not in host memory, only a few are fetched, and the results judged are those of the
    tokens that chose no others; the routing judged is that of all.

    `gpu`: tensor cores computed the experts, with float32 factors truncated to the 10 bits of mantissa of TF32, and
    the router's logits unless they are float32.
    """
    misrouted = _misrouted(layer.router, x, topk_ids, gpu)
    if not _exist(topk_ids, layer.router).all():  # a reference cannot be computed with them
        return Verdict(float("nan"), float("nan"), misrouted, 0, len(x))
    most = layer.experts
    if isinstance(layer, SeededLayer):
        each = prod(layer.gate_up_proj.shape[1:]) + prod(layer.down_proj.shape[1:])
        most = max(layer.top_k, _MOST_WEIGHTS // each)
    experts = _few_experts(topk_ids, most)
    sample = np.nonzero(np.isin(topk_ids, experts).all(axis=1))[0]
    few, owners = layer_on_host(layer.with_experts(experts)), np.asarray(placement)[experts]
    error, bound = _judge(few, experts, x[sample], y[sample], topk_ids[sample], owners, return_mode, gpu)
    return Verdict(error, bound, misrouted, len(sample), len(x))


def _few_experts(topk_ids: np.ndarray, most: int) -> np.ndarray:
    """Ids, ascending, of at most `most` experts: those of the first tokens whose experts fit."""
    chosen: set[int] = set()
    for row in topk_ids.tolist():
        if len(chosen | set(row)) <= most:
            chosen |= set(row)
    return np.array(sorted(chosen))


def _exist(topk_ids: np.ndarray, router: np.ndarray) -> np.ndarray:
    return (topk_ids >= 0) & (topk_ids < len(router))


def _misrouted(router: np.ndarray, x: np.ndarray, topk_ids: np.ndarray, gpu: bool) -> int:
    """Tokens whose ids are no top-k."""
    exist = _exist(topk_ids, router).all(axis=1)
    if not exist.all():
        return int((~exist).sum())
    logits = router_logits(x, router)
    slack, _ = router_error(x, router, None, topk_ids, weigh(logits, topk_ids), renormalize=True)
    if gpu and x.dtype != np.float32:
        # Tensor cores truncate their sums, at least 8 products apart, by at most one part in 2^23.
        squares = np.asarray(x, np.float64) ** 2 @ np.asarray(router, np.float64).T ** 2
        sums = np.sqrt((squares + logits**2).max(axis=1))
        slack = slack + 2.0 * (x.shape[1] / 8.0) * 2.0**-23 * sums
    return int((~check_topk(logits, topk_ids, slack)).sum())


def _judge(
    layer: MoELayer,
    experts: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    topk_ids: np.ndarray,
    placement: np.ndarray,
    return_mode: str,
    gpu: bool,
) -> tuple[float, float]:
    """Error and bound, as in `Verdict`. The layer has the weights of `experts`, ascending, which `placement` places."""
    weights = weigh(router_logits(x, layer.router), topk_ids, layer.renormalize)
    _, variance = router_error(x, layer.router, None, topk_ids, weights, renormalize=layer.renormalize)
    arrays, local_ids = (x, layer.gate_up_proj, layer.down_proj), np.searchsorted(experts, topk_ids)
    reference = moe_reference(*arrays, topk_ids=local_ids, topk_weights=weights, activation=layer.activation)
    allowed = call_error(
        *arrays,
        local_ids,
        weights,
        return_mode=return_mode,
        placement=placement.tolist(),
        activation=layer.activation,
        weight_variance=variance,
    )
    bound = allowed.bound
    if gpu and x.dtype == np.float32:
        # Truncated factors make all products smaller, which does not average out. What that does to the operands given
        # is known; of the intermediate it takes less than 2^-10.
        seen = moe_reference(
            *map(_truncated, arrays), topk_ids=local_ids, topk_weights=weights, activation=layer.activation
        )
        bound += float(np.linalg.norm(seen.y - reference.y)) + 2.0**-10 * reference.scale
    error = relative_error(y, reference.y, reference.scale)
    return error, bound / reference.scale if reference.scale else 0.0


def _truncated(array: np.ndarray) -> np.ndarray:
    """float32 without the 13 low bits of its mantissa."""
    return (np.ascontiguousarray(array).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
