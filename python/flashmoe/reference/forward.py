"""The layer: routing, capacity, experts, and the weighted sum of a token's experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from ..spec.options import LayerOptions, Options
from ..spec.tensors import WRITTEN, Given, Tensors, parted
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
    """The number of (token, k) pairs that the capacity dropped."""
    scale: float
    """Root of the sum, over all pairs, of the squared norm of the pair's term in y. Terms may cancel in y. An engine's
    error is relative to the terms, and so to this scale (see `flashmoe.tolerance`)."""


def moe_reference(
    x: np.ndarray,
    gate_up_proj: np.ndarray,
    down_proj: np.ndarray,
    **given: Unpack[Given],
) -> ReferenceResult:
    """Mixture of experts for the tokens of one rank, x [T, H], with the weights of all E experts. `given`: the tensors
    and options of `flashmoe.moe`, by its names.

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

    With scales (gate_up_scale, down_scale, shared_gate_up_scale, shared_down_scale, x_scale) weights are what
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
    t, o = given_tensors(x, gate_up_proj, down_proj, given)
    how, topk_ids, topk_weights = o.of_layer(), t.topk_ids, t.topk_weights
    if topk_ids is None:
        _, topk_ids, topk_weights = route(t.x, t.router, t.router_bias, o.top_k, choice_bias=t.choice_bias, **how)
    ids, weights = np.array(topk_ids, np.int64), np.asarray(topk_weights, np.float64)
    rows, gate_up_proj, down_proj, up, down = _numbers(t, o)
    x, quantised = np.asarray(x, np.float64), t.gate_up_scale is not None and rows_are_quantised(t.gate_up_proj)
    experts = gate_up_proj.shape[0]
    computed = computed_choices(ids.copy(), o.capacity_factor, experts)

    y, squares = np.zeros(x.shape), 0.0
    for expert in range(experts):
        tokens, choices = np.nonzero(computed == expert)
        weight = weights[tokens, choices, None]
        z = (weight * rows[tokens] if o.weights_on_input else rows[tokens]) @ gate_up_proj[expert].T
        a = _intermediate(z + _bias(t.gate_up_bias, expert), quantised, how)
        f = a @ down_proj[expert].T + _bias(t.down_bias, expert)
        terms = f if o.weights_on_input else weight * f
        y[tokens] += terms
        squares += np.square(terms).sum()
    if down is not None:
        a = _intermediate(rows @ up.T, quantised, how)
        terms = _shared_weights(x, t.shared_gate) * (a @ down.T)
        y += terms
        squares += np.square(terms).sum()
    y[(ids < 0).all(axis=1) & np.isnan(weights).all(axis=1) & (t.router is not None)] = np.nan
    return ReferenceResult(y, computed, weights, int((computed != ids).sum()), math.sqrt(squares))


def given_tensors(x: Any, gate_up_proj: Any, down_proj: Any, given: Given) -> tuple[Tensors, Options]:
    """The arguments of a reference. Raises `ValueError` for a tensor that references do not take."""
    tensors, options = parted(np.asarray(x), gate_up_proj, down_proj, given)
    for name in ("shared_up", *WRITTEN):
        if getattr(tensors, name) is not None:
            raise ValueError(f"{name}: expected none in a reference, got one")
    return tensors, options


def _numbers(t: Tensors, o: Options) -> list[Any]:
    """The rows of x as the experts multiply them, and the four matrices, not transposed: all in float64, None for a
    matrix that is not given."""
    given = t.gate_up_proj, t.down_proj, t.shared_gate_up, t.shared_down
    rows, *matrices = (None if each is None else np.asarray(each, np.float64) for each in (t.x, *given))
    if t.gate_up_scale is not None:
        scales = t.gate_up_scale, t.down_scale, t.shared_gate_up_scale, t.shared_down_scale
        halves = 2 if o.activation in GATED and not o.interleaved else 1
        both = zip(given, scales, (halves, 1, halves, 1), strict=True)
        matrices = [None if each is None else dequantised(each, scale, parts) for each, scale, parts in both]
        if rows_are_quantised(t.gate_up_proj):
            rows = quantised_rows(np.asarray(t.x, np.float32)) if t.x_scale is None else scaled_rows(t.x, t.x_scale)
    return [rows, *(each.swapaxes(-2, -1) if o.transposed and each is not None else each for each in matrices)]


def _bias(bias: np.ndarray | None, expert: int) -> np.ndarray | float:
    return 0.0 if bias is None else np.asarray(bias[expert], np.float64)


def _intermediate(z: np.ndarray, quantised: bool, how: LayerOptions) -> np.ndarray:
    """What the second product gets from these pre-activations."""
    a = activate(z, **how)
    return quantised_rows(a) if quantised else a


def _shared_weights(x: np.ndarray, gate: np.ndarray | None) -> np.ndarray:
    """[T, 1]: the weights of the shared expert."""
    return np.ones((len(x), 1)) if gate is None else scores(x @ np.asarray(gate, np.float64).T, "sigmoid")


def computed_choices(ids: np.ndarray, capacity_factor: float | None, experts: int) -> np.ndarray:
    """`ids` with -1 for choices that a capacity drops."""
    if capacity_factor is None:
        return ids
    capacity = max(1, math.ceil(capacity_factor * ids.size / experts))  # 1 also if the product underflows to 0
    for expert in range(experts):
        tokens, choices = np.nonzero(ids == expert)
        ids[tokens[capacity:], choices[capacity:]] = -1
    return ids
