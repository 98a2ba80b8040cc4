"""The layer's gradients, written out by hand: the chain rule for what `moe_reference` computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from .activations import activate, activate_backward
from .forward import computed_choices
from .routing import LEAST_SUM, route, scores


def moe_gradients(
    grad: np.ndarray,
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
    logits_grad: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """The gradients of one rank's call: float64, by the names of the arguments that have a gradient and are given, each
    with the shape of its argument. `grad` [T, H] is the gradient of y. `logits_grad` [T, E] is an additional gradient
    of router_logits.

    The arguments are those of `moe_reference`, without scales. Each of R ranks has its own part of the weights'
    gradients; the parts add up. Which experts a token has is taken as fixed: neither choice nor drop has a derivative.
    With `round_logits`, rounding is taken for the identity, which it nearly is.
    """
    x, logits = np.asarray(x), None
    rule = {"renormalize": renormalize, "score": score, "routed_scale": routed_scale}
    if topk_ids is None:
        choice = {"choice_bias": choice_bias, "groups": groups, "top_groups": top_groups, "round_logits": round_logits}
        logits, topk_ids, topk_weights = route(x, router, router_bias, top_k, **choice, **rule)
    grad, x = np.asarray(grad, np.float64), x.astype(np.float64)
    up, down, shared_up, shared_down_ = (
        _untransposed(each, transposed) for each in (gate_up_proj, down_proj, shared_gate_up, shared_down)
    )
    shape = {"interleaved": interleaved, "limit": limit, "alpha": alpha, "up_offset": up_offset}
    weights = np.asarray(topk_weights, np.float64)
    computed = computed_choices(np.array(topk_ids, np.int64), capacity_factor, len(up))

    found = _experts(grad, x, up, down, gate_up_bias, down_bias, computed, weights, weights_on_input, activation, shape)
    of_weights = found.pop("topk_weights")
    if logits is None:
        found["topk_weights"] = of_weights
    else:
        by_logit = of_logits(logits, np.asarray(topk_ids), of_weights, **rule)
        if logits_grad is not None:
            by_logit = by_logit + logits_grad
        found["router"] = by_logit.T @ x
        found["router_bias"] = by_logit.sum(axis=0)
        found["x"] += by_logit @ np.asarray(router, np.float64)
    if shared_down is not None:
        found |= _shared(grad, x, shared_up, shared_down_, shared_gate, activation, shape, found["x"])
    for name in ("gate_up_proj", "down_proj", "shared_gate_up", "shared_down"):
        if name in found:
            found[name] = _untransposed(found[name], transposed)
    absent = {"router_bias": router_bias, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    return {name: each for name, each in found.items() if name not in absent or absent[name] is not None}


def _untransposed(matrix: np.ndarray | None, transposed: bool) -> np.ndarray | None:
    if matrix is None:
        return None
    matrix = np.asarray(matrix, np.float64)
    return matrix.swapaxes(-2, -1) if transposed else matrix


def _experts(
    grad: np.ndarray,
    x: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    up_bias: np.ndarray | None,
    down_bias: np.ndarray | None,
    computed: np.ndarray,
    weights: np.ndarray,
    on_input: bool,
    activation: str,
    shape: dict[str, Any],
) -> dict[str, np.ndarray]:
    """The gradients of x (as far as they come through the experts), of the experts' tensors, and of the weights of
    choices."""
    found = {
        "x": np.zeros(x.shape),
        "gate_up_proj": np.zeros(up.shape),
        "down_proj": np.zeros(down.shape),
        "gate_up_bias": np.zeros(up.shape[:2]),
        "down_bias": np.zeros(down.shape[:2]),
        "topk_weights": np.zeros(weights.shape),
    }
    for expert in range(len(up)):
        tokens, choices = np.nonzero(computed == expert)
        weight, dy = weights[tokens, choices, None], grad[tokens]
        rows = weight * x[tokens] if on_input else x[tokens]
        z = rows @ up[expert].T + (0.0 if up_bias is None else np.asarray(up_bias[expert], np.float64))
        a = activate(z, activation, **shape)
        df = dy if on_input else weight * dy
        dz = activate_backward(z, df @ down[expert], activation, **shape)
        drows = dz @ up[expert]
        found["down_proj"][expert] = df.T @ a
        found["down_bias"][expert] = df.sum(axis=0)
        found["gate_up_proj"][expert] = dz.T @ rows
        found["gate_up_bias"][expert] = dz.sum(axis=0)
        if on_input:
            found["topk_weights"][tokens, choices] = (drows * x[tokens]).sum(axis=1)
        else:
            f = a @ down[expert].T + (0.0 if down_bias is None else np.asarray(down_bias[expert], np.float64))
            found["topk_weights"][tokens, choices] = (dy * f).sum(axis=1)
        found["x"][tokens] += weight * drows if on_input else drows
    return found


def of_logits(
    logits: np.ndarray, ids: np.ndarray, of_weights: np.ndarray, *, renormalize: bool, score: str, routed_scale: float
) -> np.ndarray:
    """[T, E]: the gradients of logits, from those of the weights of the chosen experts `ids`, all of which count in the
    weights' sum."""
    g = scores(logits, score)
    chosen = np.take_along_axis(g, ids, axis=1)
    of_chosen = routed_scale * of_weights
    if renormalize:
        total = chosen.sum(axis=1, keepdims=True) + (LEAST_SUM if score == "sigmoid" else 0.0)
        of_chosen = of_chosen / total - (of_chosen * chosen).sum(axis=1, keepdims=True) / total**2
    of_scores = np.zeros(g.shape)
    np.put_along_axis(of_scores, ids, of_chosen, axis=1)
    if score == "sigmoid":
        return of_scores * g * (1.0 - g)
    return g * (of_scores - (of_scores * g).sum(axis=1, keepdims=True))


def _shared(
    grad: np.ndarray,
    x: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    gate: np.ndarray | None,
    activation: str,
    shape: dict[str, Any],
    of_x: np.ndarray,
) -> dict[str, np.ndarray]:
    """The gradients of the shared expert's tensors. The part of x's gradient that comes through the shared expert is
    added to `of_x`."""
    weight = np.ones((len(x), 1)) if gate is None else scores(x @ np.asarray(gate, np.float64).T, "sigmoid")
    z = x @ up.T
    a = activate(z, activation, **shape)
    dz = activate_backward(z, weight * (grad @ down), activation, **shape)
    of_x += dz @ up
    found = {"shared_gate_up": dz.T @ x, "shared_down": (weight * grad).T @ a}
    if gate is not None:
        of_gate = (grad * (a @ down.T)).sum(axis=1, keepdims=True) * weight * (1.0 - weight)
        of_x += of_gate @ np.asarray(gate, np.float64)
        found["shared_gate"] = of_gate.T @ x
    return found
