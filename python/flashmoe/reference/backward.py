"""The layer's gradients, written out by hand: the chain rule for what `moe_reference` computes."""

from __future__ import annotations

from typing import Unpack

import numpy as np

from ..spec.options import LayerOptions, Options
from ..spec.tensors import Given
from .activations import activate, activate_backward
from .forward import computed_choices, given_tensors
from .routing import LEAST_SUM, route, scores


def moe_gradients(
    grad: np.ndarray,
    x: np.ndarray,
    gate_up_proj: np.ndarray,
    down_proj: np.ndarray,
    *,
    logits_grad: np.ndarray | None = None,
    **given: Unpack[Given],
) -> dict[str, np.ndarray]:
    """The gradients of one rank's call: float64, by the names of the arguments that have a gradient and are given, each
    with the shape of its argument. `grad` [T, H] is the gradient of y. `logits_grad` [T, E] is an additional gradient
    of router_logits.

    The arguments are those of `moe_reference`, without scales. Each of R ranks has its own part of the weights'
    gradients; the parts add up. A token's experts are taken as fixed, because neither the choice of experts nor what a
    capacity drops has a derivative. With `round_logits`, the derivative of rounding is taken to be 1.
    """
    t, o = given_tensors(x, gate_up_proj, down_proj, given)
    how, logits, topk_ids, topk_weights = o.of_layer(), None, t.topk_ids, t.topk_weights
    if topk_ids is None:
        chosen = route(t.x, t.router, t.router_bias, o.top_k, choice_bias=t.choice_bias, **how)
        logits, topk_ids, topk_weights = chosen
    grad, x = np.asarray(grad, np.float64), t.x.astype(np.float64)
    up, down, shared_up, shared_down = (
        _untransposed(each, o.transposed) for each in (gate_up_proj, down_proj, t.shared_gate_up, t.shared_down)
    )
    weights = np.asarray(topk_weights, np.float64)
    computed = computed_choices(np.array(topk_ids, np.int64), o.capacity_factor, len(up))

    found = _experts(grad, x, up, down, t.gate_up_bias, t.down_bias, computed, weights, o)
    of_weights = found.pop("topk_weights")
    if logits is None:
        found["topk_weights"] = of_weights
    else:
        by_logit = of_logits(logits, np.asarray(topk_ids), of_weights, **how)
        if logits_grad is not None:
            by_logit = by_logit + logits_grad
        found["router"] = by_logit.T @ x
        found["router_bias"] = by_logit.sum(axis=0)
        found["x"] += by_logit @ np.asarray(t.router, np.float64)
    if shared_down is not None:
        found |= _shared(grad, x, shared_up, shared_down, t.shared_gate, how, found["x"])
    for name in ("gate_up_proj", "down_proj", "shared_gate_up", "shared_down"):
        if name in found:
            found[name] = _untransposed(found[name], o.transposed)
    absent = {name for name in ("router_bias", "gate_up_bias", "down_bias") if getattr(t, name) is None}
    return {name: each for name, each in found.items() if name not in absent}


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
    options: Options,
) -> dict[str, np.ndarray]:
    """The gradients of x (as far as they come through the experts), of the experts' tensors, and of the weights of
    choices."""
    how, on_input = options.of_layer(), options.weights_on_input
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
        a = activate(z, **how)
        df = dy if on_input else weight * dy
        dz = activate_backward(z, df @ down[expert], **how)
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
    logits: np.ndarray, ids: np.ndarray, of_weights: np.ndarray, **options: Unpack[LayerOptions]
) -> np.ndarray:
    """[T, E]: the gradients of logits, from `of_weights`, those of the weights of the chosen experts `ids`. All chosen
    experts, dropped ones too, count in the sum that divides the weights."""
    rule = Options(**options)
    g = scores(logits, rule.score)
    chosen = np.take_along_axis(g, ids, axis=1)
    of_chosen = rule.routed_scale * of_weights
    if rule.renormalize:
        total = chosen.sum(axis=1, keepdims=True) + (LEAST_SUM if rule.score == "sigmoid" else 0.0)
        of_chosen = of_chosen / total - (of_chosen * chosen).sum(axis=1, keepdims=True) / total**2
    of_scores = np.zeros(g.shape)
    np.put_along_axis(of_scores, ids, of_chosen, axis=1)
    if rule.score == "sigmoid":
        return of_scores * g * (1.0 - g)
    return g * (of_scores - (of_scores * g).sum(axis=1, keepdims=True))


def _shared(
    grad: np.ndarray,
    x: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    gate: np.ndarray | None,
    how: LayerOptions,
    of_x: np.ndarray,
) -> dict[str, np.ndarray]:
    """The gradients of the shared expert's tensors. The part of x's gradient that comes through the shared expert is
    added to `of_x`."""
    weight = np.ones((len(x), 1)) if gate is None else scores(x @ np.asarray(gate, np.float64).T, "sigmoid")
    z = x @ up.T
    a = activate(z, **how)
    dz = activate_backward(z, weight * (grad @ down), **how)
    of_x += dz @ up
    found = {"shared_gate_up": dz.T @ x, "shared_down": (weight * grad).T @ a}
    if gate is not None:
        of_gate = (grad * (a @ down.T)).sum(axis=1, keepdims=True) * weight * (1.0 - weight)
        of_x += of_gate @ np.asarray(gate, np.float64)
        found["shared_gate"] = of_gate.T @ x
    return found
