"""The router's rule by PyTorch, for a router of another type than x: the operator multiplies those of one type."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Options
from .reference.routing import LEAST_SUM

_OF_ROUTER = ("score", "round_logits", "routed_scale", "groups", "top_groups")
"""The options that are the router's alone."""


class Routed(NamedTuple):
    """Logits [T, E], and ids and weights [T, K], of tokens; all but the ids are float32 and have gradients."""

    logits: Tensor
    ids: Tensor
    weights: Tensor


def route(x: Tensor, router: Tensor, bias: Tensor | None, choice_bias: Tensor | None, options: Options) -> Routed:
    """What `options` say of x [T, H] by router [E, H], in float32. Of experts that are equally good the lower ids are
    chosen, as by the operator."""
    logits = torch.nn.functional.linear(x.float(), router.float(), None if bias is None else bias.float())
    if options.round_logits:
        logits = logits.to(x.dtype).float()
    scores = logits.sigmoid() if options.score == "sigmoid" else logits.softmax(dim=1)
    ids = _chosen(_choice_values(logits, scores, choice_bias, options), options.top_k)
    weights = scores.gather(1, ids)
    if options.renormalize and options.score == "sigmoid":
        weights = weights / (weights.sum(dim=1, keepdim=True) + LEAST_SUM)
    elif options.renormalize:  # by themselves: all scores but the chosen ones may be all of the sum
        weights = logits.gather(1, ids).softmax(dim=1)
    return Routed(logits, ids, (weights * options.routed_scale).contiguous())


def of_given_routing(options: Options) -> Options:
    """`options` without what they say of a router."""
    usual = Options()
    return options._replace(**{name: getattr(usual, name) for name in _OF_ROUTER})


@torch.no_grad()
def _choice_values(logits: Tensor, scores: Tensor, choice_bias: Tensor | None, options: Options) -> Tensor:
    """[T, E]: by what experts are chosen, -inf outside of the best groups."""
    if options.groups == 1 and choice_bias is None:
        return logits
    values = scores if choice_bias is None else scores + choice_bias
    by_group = values.unflatten(1, (options.groups, -1))
    of_group = by_group.topk(min(2, by_group.shape[2]), dim=2).values.sum(dim=2)
    best = _chosen(of_group, options.top_groups or options.groups)
    kept = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, best, True)
    return by_group.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)


def _chosen(values: Tensor, count: int) -> Tensor:
    """The places of the largest of each row, of equal ones the first."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()
