"""The layer: routing, capacity, experts, and the weighted sum of a token's experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .activations import GATED, activate
from .quantised import dequantised, quantised_rows, rows_are_quantised, scaled_rows
from .routing import route, scores


@dataclass(frozen=True, eq=False)
class ReferenceResult:
    """The exact result of one rank's call: T tokens, hidden size H, K experts per token."""

    y: np.ndarray
    """float64 [T, H]."""
    topk_ids: np.ndarray
    """int64 [T, K]: the experts chosen; -1 where the capacity dropped the pair, or there is none."""
    topk_weights: np.ndarray
    """float64 [T, K]: the weights of the pairs, including dropped ones."""
    dropped: int
    """(token, k) pairs dropped."""
    scale: float
    """Root of the sum, over all pairs, of the squared norm of the pair's term in y. Terms may cancel in y. An engine's
    error is relative to the terms, and so to this scale (see `flashmoe.tolerance`)."""


def moe_reference(
    x: np.ndarray,
    gate_up_proj: np.ndarray,
    down_proj: np.ndarray,
    *,
    router: np.ndarray | None = None,
    topk_ids: np.ndarray | None = None,
    topk_weights: np.ndarray | None = None,
    top_k: int | None = None,
    activation: str = "swiglu",
    renormalize: bool = True,
    router_bias: np.ndarray | None = None,
    gate_up_bias: np.ndarray | None = None,
    down_bias: np.ndarray | None = None,
    capacity_factor: float | None = None,
    score: str = "softmax",
    choice_bias: np.ndarray | None = None,
    round_logits: bool = False,
    routed_scale: float = 1.0,
    groups: int = 1,
    top_groups: int | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    interleaved: bool = False,
    transposed: bool = False,
    weights_on_input: bool = False,
    shared_gate_up: np.ndarray | None = None,
    shared_down: np.ndarray | None = None,
    shared_gate: np.ndarray | None = None,
    **scales: np.ndarray | None,
) -> ReferenceResult:
    """Mixture of experts for the tokens of one rank, x [T, H], with the weights of all E experts.

    Routing, unless ``topk_ids`` and ``topk_weights`` [T, K] are given; l and g are over all E experts::

        l[t] = router @ x[t] + router_bias                  g[t] = softmax(l[t])
        S[t] = the top_k experts of largest l[t]; of equal ones the lower ids
        w[t,e] = g[t,e] / C[t],  C[t] = sum of g[t,e] over S[t]     (renormalize; otherwise C[t] = 1)

    With ``score="sigmoid"`` g[t,e] is 1 / (1 + exp(-l[t,e])), and 1e-20 is added to C[t]. `choice_values` says how
    `choice_bias` and groups change S. `round_logits`: l is rounded to x's type. `routed_scale` multiplies w. For tokens
    of `no_choice` y[t] is NaN. Given ids of -1 are no experts.

    Experts and combination (``act`` by element; swiglu: silu of the first I rows times the last I rows)::

        f_e(x) = down_proj[e] @ act(gate_up_proj[e] @ x + gate_up_bias[e]) + down_bias[e]
        y[t] = sum over e in S[t] of w[t,e] * f_e(x[t])

    With `weights_on_input` a term is ``f_e(w[t,e] x[t])``. `transposed`: gate_up_proj [E, H, 2I or I] and down_proj
    [E, I, H]; see `activate` for the rest.

    A shared expert (DeepSeekMoE, section 3.2) adds ``sigmoid(shared_gate @ x[t])`` (or 1) times its FFN of x.

    With `scales` (gate_up_scale, down_scale, shared_gate_up_scale, shared_down_scale, x_scale) weights are what
    `dequantised` makes of them. With weights in e4m3, but not in e2m1, the experts' operands are quantised, too: x,
    unless it comes with `x_scale`, and the result of ``act``, both by rows (`quantised_rows`). The router sees x as it
    is given.

    These are equations 5.1 (the expert), 5.2 (C) and 5.3 (the weighted sum) of the FlashDMoE thesis. The capacity is
    that of GShard (Lepikhin et al., 2020, algorithm 1): with ``capacity_factor`` c, an expert takes the first ceil(c T
    K / E) of this rank's tokens that chose it, in token order. Terms of other tokens are left out of the sum; the other
    weights stay as they are.

    Shapes: gate_up_proj [E, 2I, H] with a gate, else [E, I, H]; down_proj [E, H, I]; router [E, H]; router_bias [E];
    gate_up_bias [E, 2I or I]; down_bias [E, H]. Any float dtype; everything is computed in float64.
    """
    x = np.asarray(x)
    if topk_ids is None:
        rule = {"score": score, "choice_bias": choice_bias, "groups": groups, "top_groups": top_groups}
        rule |= {"round_logits": round_logits, "routed_scale": routed_scale, "renormalize": renormalize}
        _, topk_ids, topk_weights = route(x, router, router_bias, top_k, **rule)
    ids = np.array(topk_ids, np.int64)
    given = [x, gate_up_proj, down_proj, shared_gate_up, shared_down]
    halves = 2 if activation in GATED and not interleaved else 1
    rows, gate_up_proj, down_proj, up, down = _numbers(given, transposed, halves, **scales)
    x, quantised = np.asarray(x, np.float64), scales.get("gate_up_scale") is not None and rows_are_quantised(given[1])
    experts = gate_up_proj.shape[0]
    shape = {"interleaved": interleaved, "limit": limit, "alpha": alpha, "up_offset": up_offset}

    weights = np.asarray(topk_weights, np.float64)
    computed = computed_choices(ids.copy(), capacity_factor, experts)

    y, squares = np.zeros(x.shape), 0.0
    for expert in range(experts):
        tokens, choices = np.nonzero(computed == expert)
        weight = weights[tokens, choices, None]
        z = (weight * rows[tokens] if weights_on_input else rows[tokens]) @ gate_up_proj[expert].T
        a = _intermediate(z + _bias(gate_up_bias, expert), activation, quantised, **shape)
        f = a @ down_proj[expert].T + _bias(down_bias, expert)
        terms = f if weights_on_input else weight * f
        y[tokens] += terms
        squares += np.square(terms).sum()
    if down is not None:
        a = _intermediate(rows @ up.T, activation, quantised, **shape)
        terms = _shared_weights(x, shared_gate) * (a @ down.T)
        y += terms
        squares += np.square(terms).sum()
    y[(ids < 0).all(axis=1) & np.isnan(weights).all(axis=1) & (router is not None)] = np.nan
    return ReferenceResult(y, computed, weights, int((computed != ids).sum()), math.sqrt(squares))


def _numbers(
    tensors: list[Any],
    transposed: bool,
    halves: int,
    *,
    gate_up_scale: np.ndarray | None = None,
    down_scale: np.ndarray | None = None,
    shared_gate_up_scale: np.ndarray | None = None,
    shared_down_scale: np.ndarray | None = None,
    x_scale: np.ndarray | None = None,
) -> list[Any]:
    """What the experts see of x, and the four matrices, not transposed, in float64; None for what is not given."""
    rows, *matrices = (None if each is None else np.asarray(each, np.float64) for each in tensors)
    if gate_up_scale is not None:
        x, *given = tensors
        of_matrices = (gate_up_scale, down_scale, shared_gate_up_scale, shared_down_scale)
        both = zip(given, of_matrices, (halves, 1, halves, 1), strict=True)
        matrices = [None if each is None else dequantised(each, scale, parts) for each, scale, parts in both]
        if rows_are_quantised(given[0]):
            rows = quantised_rows(np.asarray(x, np.float32)) if x_scale is None else scaled_rows(x, x_scale)
    return [rows, *(each.swapaxes(-2, -1) if transposed and each is not None else each for each in matrices)]


def _bias(bias: np.ndarray | None, expert: int) -> np.ndarray | float:
    return 0.0 if bias is None else np.asarray(bias[expert], np.float64)


def _intermediate(z: np.ndarray, activation: str, quantised: bool, **shape: Any) -> np.ndarray:
    """What the second product gets from these pre-activations."""
    a = activate(z, activation, **shape)
    return quantised_rows(a) if quantised else a


def _shared_weights(x: np.ndarray, gate: np.ndarray | None) -> np.ndarray:
    """[T, 1]: the weights of the shared expert."""
    return np.ones((len(x), 1)) if gate is None else scores(x @ np.asarray(gate, np.float64).T, "sigmoid")


def computed_choices(ids: np.ndarray, capacity_factor: float | None, experts: int) -> np.ndarray:
    """`ids` with -1 for choices that a capacity drops."""
    if capacity_factor is None:
        return ids
    capacity = max(1, math.ceil(capacity_factor * ids.size / experts))  # the product may be too small for a float
    for expert in range(experts):
        tokens, choices = np.nonzero(ids == expert)
        ids[tokens[capacity:], choices[capacity:]] = -1
    return ids
