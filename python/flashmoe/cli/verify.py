"""Compares an engine's result with the float64 reference: the error must be within a derived bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ..checkpoint import MoELayer
from ..reference import check_topk, choice_values, moe_reference, router_logits, weigh
from ..tolerance import call_error, relative_error, router_error
from .device import SeededLayer, layer_on_host

_MOST_WEIGHTS = 1 << 28
"""The most elements of the experts whose float64 reference the host computes: a few GB, some seconds."""


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
    """How many tokens there are; the routing of all of them was checked."""

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
    tokens: Sequence[int],
    placement: Sequence[int],
    return_mode: str,
    gpu: bool = False,
) -> Verdict:
    """Judge y [T, H], the layer's result for x [T, H], and the routing topk_ids [T, K] that led to it. `tokens`: the
    number of each rank's tokens. The rows of x are those of rank 0, then those of rank 1, and so on.

    Two nearly equal logits may be ordered differently in float32 and in float64, which changes the result by much
    more than rounding does. So the reference takes the experts that the engine chose, after they have been checked
    to be a top-k. It computes the experts' weights, and everything after them, itself.

    If the layer's experts are not in host memory, only a few of them are fetched. Then only the results of the tokens
    that chose none but these are judged, but the routing of all tokens.

    `gpu`: tensor cores computed the experts, with float32 factors truncated to the 10 bits of mantissa of TF32, and
    the router's logits unless they are float32. The kernel for a few tokens rounds the slices of a shared expert one
    by one. It is not known here which kernel ran, so the larger of both kernels' bounds is taken.
    """
    misrouted = _misrouted(layer, x, topk_ids, gpu)
    if not _exist(topk_ids, layer.router).all():  # a reference cannot be computed with them
        return Verdict(float("nan"), float("nan"), misrouted, 0, len(x))
    most = layer.experts
    if isinstance(layer, SeededLayer):
        each = prod(layer.gate_up_proj.shape[1:]) + prod(layer.down_proj.shape[1:])
        most = max(layer.top_k, _MOST_WEIGHTS // each)
    experts = _some_experts(topk_ids, most)
    sample = np.nonzero(np.isin(topk_ids, experts).all(axis=1))[0]
    some, owners = layer_on_host(layer.with_experts(experts)), np.asarray(placement)[experts]
    ranks = np.repeat(np.arange(len(tokens)), tokens)[sample]
    judged = x[sample], y[sample], topk_ids[sample], ranks
    error, bound = _judge(some, experts, *judged, owners, return_mode, gpu)
    return Verdict(error, bound, misrouted, len(sample), len(x))


def _some_experts(topk_ids: np.ndarray, most: int) -> np.ndarray:
    """Ids, ascending, of at most `most` experts: those of the first tokens whose experts fit."""
    chosen: set[int] = set()
    for row in topk_ids.tolist():
        if len(chosen | set(row)) <= most:
            chosen |= set(row)
    return np.array(sorted(chosen))


def _exist(topk_ids: np.ndarray, router: np.ndarray) -> np.ndarray:
    return (topk_ids >= 0) & (topk_ids < len(router))


def _misrouted(layer: MoELayer | SeededLayer, x: np.ndarray, topk_ids: np.ndarray, gpu: bool) -> int:
    """The number of tokens whose ids are no top-k of their logits. If any id names no expert, only such tokens
    count."""
    exist = _exist(topk_ids, layer.router).all(axis=1)
    if not exist.all():
        return int((~exist).sum())
    exact = router_logits(x, layer.router, layer.router_bias)
    further = 0.0
    if gpu and x.dtype != np.float32:
        # Tensor cores add at least 8 products at a time, and truncate each such sum by at most one part in 2^23.
        squares = np.asarray(x, np.float64) ** 2 @ np.asarray(layer.router, np.float64).T ** 2
        further = (x.shape[1] / 8.0) * 2.0**-23 * np.sqrt((squares + exact**2).max(axis=1))
    logits = _as_rounded(layer, x, exact)
    slack, _ = _router_error(layer, x, topk_ids, logits, further)
    values = choice_values(logits, choice_bias=layer.choice_bias, **layer.rule())
    return int((~check_topk(values, topk_ids, slack)).sum())


def _as_rounded(layer: MoELayer | SeededLayer, x: np.ndarray, logits: np.ndarray) -> np.ndarray:
    return logits.astype(x.dtype).astype(np.float64) if layer.options.get("round_logits") else logits


def _router_error(
    layer: MoELayer | SeededLayer, x: np.ndarray, topk_ids: np.ndarray, logits: np.ndarray, further: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray]:
    """`tolerance.router_error` of the layer's router."""
    biases = {"router_bias": layer.router_bias, "choice_bias": layer.choice_bias}
    weights = _weights(layer, logits, topk_ids)
    return router_error(
        x,
        layer.router,
        topk_ids=topk_ids,
        topk_weights=weights,
        further=further,
        **biases,
        **layer.rule(),
    )


def _weights(layer: MoELayer | SeededLayer, logits: np.ndarray, topk_ids: np.ndarray) -> np.ndarray:
    return weigh(logits, topk_ids, **layer.rule())


def _judge(
    layer: MoELayer,
    experts: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    topk_ids: np.ndarray,
    ranks: np.ndarray,
    placement: np.ndarray,
    return_mode: str,
    gpu: bool,
) -> tuple[float, float]:
    """Error and bound, as in `Verdict`. The layer has only the weights of `experts`, in ascending order; `placement`
    has their ranks. `ranks` [T] are the tokens' home ranks, which compute the shared expert for them."""
    logits = _as_rounded(layer, x, router_logits(x, layer.router, layer.router_bias))
    weights = _weights(layer, logits, topk_ids)
    _, variance = _router_error(layer, x, topk_ids, logits, 0.0)
    arrays, local_ids = (x, layer.gate_up_proj, layer.down_proj), np.searchsorted(experts, topk_ids)
    how = layer.rule() | {"gate_up_bias": layer.gate_up_bias, "down_bias": layer.down_bias} | layer.shared()
    how |= {name: getattr(layer, name) for name in ("gate_up_scale", "down_scale")}
    reference = moe_reference(*arrays, topk_ids=local_ids, topk_weights=weights, **how)
    bound = 0.0
    if layer.shared_down is None or return_mode == "direct":  # then the bound does not depend on a token's home rank
        ranks = np.zeros_like(ranks)
    for rank in np.unique(ranks):
        own = ranks == rank
        allowed = max(
            call_error(
                x[own],
                *arrays[1:],
                local_ids[own],
                weights[own],
                return_mode=return_mode,
                placement=placement.tolist(),
                weight_variance=variance[own],
                rank=int(rank),
                shared_in_slices=in_slices,
                **how,
            ).bound
            for in_slices in ((False, True) if gpu and layer.shared_down is not None else (False,))
        )
        bound = float(np.hypot(bound, allowed))
    if gpu and x.dtype == np.float32:
        # Truncated factors make all products smaller, and these errors do not average out. The effect of truncating the
        # given operands is computed here. Truncating an intermediate element takes away less than 2^-10 of it.
        shared = {name: None if each is None else _truncated(each) for name, each in layer.shared().items()}
        seen = moe_reference(*map(_truncated, arrays), topk_ids=local_ids, topk_weights=weights, **how | shared)
        bound += float(np.linalg.norm(seen.y - reference.y)) + 2.0**-10 * reference.scale
    error = relative_error(y, reference.y, reference.scale)
    return error, bound / reference.scale if reference.scale else 0.0


def _truncated(array: np.ndarray) -> np.ndarray:
    """float32 without the 13 low bits of its mantissa."""
    return (np.ascontiguousarray(array).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
