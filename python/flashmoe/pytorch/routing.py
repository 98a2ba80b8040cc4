"""The router's rule in PyTorch, for a router whose type differs from that of x, because the operator only multiplies
tensors of one type."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..reference.routing import LEAST_SUM
from ..spec import Options


class Routed(NamedTuple):
    """The routing of tokens: logits [T, E], ids and weights [T, K]. Logits and weights are float32 and have
    gradients."""

    logits: Tensor
    ids: Tensor
    weights: Tensor


def route(x: Tensor, router: Tensor, bias: Tensor | None, choice_bias: Tensor | None, options: Options) -> Routed:
    """The routing of x [T, H] by router [E, H], in float32, as `options` say. Among experts with equal values, those
    with the lower ids are chosen, as by the operator."""
    logits = torch.nn.functional.linear(x.float(), router.float(), None if bias is None else bias.float())
    if options.round_logits:
        logits = logits.to(x.dtype).float()
    scores = logits.sigmoid() if options.score == "sigmoid" else logits.softmax(dim=1)
    ids = _chosen(_choice_values(logits, scores, choice_bias, options), options.top_k)
    weights = scores.gather(1, ids)
    if options.renormalize and options.score == "sigmoid":
        weights = weights / (weights.sum(dim=1, keepdim=True) + LEAST_SUM)
    elif options.renormalize:  # from logits, because the chosen scores may all round to 0 beside others
        weights = logits.gather(1, ids).softmax(dim=1)
    return Routed(logits, ids, (weights * options.routed_scale).contiguous())


@torch.no_grad()
def _choice_values(logits: Tensor, scores: Tensor, choice_bias: Tensor | None, options: Options) -> Tensor:
    """[T, E]: the values by which experts are chosen. They are -inf outside of the best groups, and where a logit is
    -inf, whatever the expert's `choice_bias`."""
    if options.groups == 1 and choice_bias is None:
        return logits
    values = scores if choice_bias is None else scores + choice_bias
    values = values.masked_fill(logits == -torch.inf, -torch.inf)
    by_group = values.unflatten(1, (options.groups, -1))
    of_group = by_group.topk(min(2, by_group.shape[2]), dim=2).values.sum(dim=2)
    best = _chosen(of_group, options.top_groups or options.groups)
    kept = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, best, True)
    return by_group.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)


def _chosen(values: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest values of each row; among equal values, the first columns."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()
