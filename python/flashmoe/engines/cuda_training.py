"""Gradients on a GPU: which layers have them, what a call keeps, and what PyTorch's operators add to the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import jit
from ..arguments import Options, Tensors
from ..reference.routing import LEAST_SUM
from ..spec import ELEMENT_BYTES
from ..tensors import dtype_name


MOST_KEPT = 1 << 36
"""Bytes that a call keeps at most: the backward pass numbers 16 of them at a time, in 32 bits."""


def missing(tensors: Tensors, options: Options, ranks: int) -> str | None:
    """What of a call there are no gradients of on a GPU, in words; None: there are."""
    if ranks != 1:
        return f"several ranks (R={ranks})"
    if tensors.gate_up_scale is not None or dtype_name(tensors.x) not in jit.TRAINED:
        return f"x of {dtype_name(tensors.x)} with weights of {dtype_name(tensors.gate_up_proj)}"
    if tensors.shared_down is not None:
        return "a shared expert"
    if options.weights_on_input:
        return "weights_on_input"
    if options.slices != 1:
        return f"slices={options.slices}"
    return None


def kept_bytes(tensors: Tensors, options: Options) -> int:
    """Bytes that a call keeps of a token: pre-activations, experts and weights of choices, a router's logits."""
    router, ids = tensors.router, tensors.topk_ids
    choices = options.top_k if ids is None else ids.shape[1]
    columns = tensors.gate_up_proj.shape[2 if options.transposed else 1]
    logits = 0 if router is None else router.shape[0]
    return choices * (columns * ELEMENT_BYTES[dtype_name(tensors.x)] + 8) + 4 * logits


def kept_logits(kept: Any, tensors: Tensors) -> Any:
    """Of a call of these tensors the router's logits, [T, E] float32, which come last; None without a router."""
    import torch

    if tensors.router is None:
        return None
    tokens, experts = tensors.x.shape[0], tensors.router.shape[0]
    return kept[kept.shape[0] - 4 * tokens * experts :].view(torch.float32).view(tokens, experts)


def kept_routing(kept: Any, end: int, tokens: int, choices: int) -> tuple[Any, Any]:
    """Experts and weights, [T, K] int32 and float32, which end `end` bytes behind the beginning."""
    import torch

    each = 4 * tokens * choices
    ids, weights = kept[end - 2 * each : end - each], kept[end - each : end]
    return ids.view(torch.int32).view(tokens, choices), weights.view(torch.float32).view(tokens, choices)


class Computed(NamedTuple):
    """What the kernel of a backward pass has computed, and what it was told of the routing."""

    x: Any
    """[T, H]: what the experts owe to x."""
    weights: Any
    """[T, K] float32: gradients of combine weights, but for what biases owe to them; 0 where a choice was dropped."""
    ids: Any
    """[T, K] int32: chosen experts, ``~expert`` where dropped."""
    logits: Any
    """[T, E] float32; None without a router."""


def finish(
    tensors: Tensors, options: Options, given: Mapping[str, Any], wanted: Mapping[str, Any], computed: Computed
) -> None:
    """Writes what is wanted of x, of combine weights and of the router. `given` as in `Engine.backward`."""
    of_weights = computed.weights
    if tensors.router is not None or tensors.down_bias is not None:
        chosen = computed.ids.where(computed.ids >= 0, ~computed.ids).long()
    if tensors.down_bias is not None:  # a weight's gradient is dY . (down a + bias)
        of_bias = given["y"].double() @ tensors.down_bias.double().T
        of_weights = of_weights + of_bias.gather(1, chosen).where(computed.ids >= 0, 0.0)
    if "topk_weights" in wanted and of_weights is not wanted["topk_weights"]:
        wanted["topk_weights"].copy_(of_weights)
    if tensors.router is None:
        if "x" in wanted and computed.x is not wanted["x"]:
            wanted["x"].copy_(computed.x)
        return
    rule = {"score": options.score, "renormalize": options.renormalize, "routed_scale": options.routed_scale}
    grad = logit_gradients(computed.logits, chosen, of_weights.double(), **rule).float()
    if "router_logits" in given:
        grad = grad + given["router_logits"]
    grad = grad.double()
    if "x" in wanted:
        wanted["x"].copy_(computed.x + grad @ tensors.router.double())
    if "router" in wanted:
        wanted["router"].copy_(grad.T @ tensors.x.double())
    if "router_bias" in wanted:
        wanted["router_bias"].copy_(grad.sum(0))


def logit_gradients(
    logits: Any, ids: Any, of_weights: Any, *, score: str, renormalize: bool, routed_scale: float
) -> Any:
    """The gradients of logits [T, E] in float64, for those of the weights [T, K] of the chosen experts `ids` [T, K],
    dropped ones among them. As csrc/cpu/router_backward.cpp has it: nothing large cancels where a score is near 1."""
    sigmoid = score == "sigmoid"
    scores = logits.double().sigmoid() if sigmoid else logits.double().softmax(1)
    chosen = scores.gather(1, ids)
    weighted = (chosen * of_weights).sum(1, keepdim=True)
    of_chosen = of_weights
    if renormalize:
        total = chosen.sum(1, keepdim=True) + (LEAST_SUM if sigmoid else 0.0)
        of_chosen = (of_weights - weighted / total) / total
    slope = chosen * (1.0 - chosen) if sigmoid else chosen
    moved = -scores * (0.0 if sigmoid or renormalize else weighted)
    # A token has an expert once: so nothing is added up in an order that changes.
    return routed_scale * moved.scatter(1, ids, moved.gather(1, ids) + slope * of_chosen)
