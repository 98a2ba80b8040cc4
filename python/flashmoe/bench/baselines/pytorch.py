"""The layer as PyTorch has it: softmax, top-k, sort, all-to-all, two grouped GEMMs, all-to-all, weighted sum; eager.

Among several ranks the host reads how many rows go where, as collectives of uneven parts need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layer import TURNS, Layer
from ..run import Call
from .needs import Needs

if TYPE_CHECKING:
    import torch

Splits = tuple[list[int], list[int]]
"""Rows to each rank and from each rank."""

NEEDS = Needs(even=True, bfloat16=True)


def call(layer: Layer) -> Call:
    return lambda i: forward(layer, layer.xs[i % TURNS])


def route(layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids [T, K], by float32's logits."""
    import torch

    if x.is_cuda and x.dtype != torch.float32:
        logits = torch.mm(x, layer.router.t(), out_dtype=torch.float32)
    else:
        logits = x.float() @ layer.router.float().t()
    weights, ids = torch.softmax(logits, -1).topk(layer.top_k, -1)
    return weights / weights.sum(-1, keepdim=True), ids


def experts(layer: Layer, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """This rank's experts on their rows, which lie one expert's behind the other's."""
    import torch
    from torch.nn.functional import gelu, silu

    offsets = counts.cumsum(0).int()
    h = torch._grouped_mm(rows, layer.w1.transpose(1, 2), offs=offsets)
    if layer.sizes.gated:
        gate, up = h.chunk(2, -1)
        h = silu(gate) * up
    else:
        h = gelu(h)
    return torch._grouped_mm(h, layer.w2.transpose(1, 2), offs=offsets)


def forward(layer: Layer, x: torch.Tensor, splits: Splits | None = None) -> torch.Tensor:
    """With `splits` (`read_splits`) the host reads nothing."""
    import torch
    import torch.distributed as dist

    run, hidden = layer.run, x.shape[1]
    weights, ids = route(layer, x)
    choices = ids.flatten()
    order = choices.argsort(stable=True)
    counts = torch.zeros(layer.experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, choices, torch.ones_like(choices))
    rows = x[order // layer.top_k]
    if run.ranks == 1:
        results = experts(layer, rows, counts)
    else:
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = splits or read_splits(layer, counts, theirs)
        arrived = x.new_empty(sum(received), hidden)
        dist.all_to_all_single(arrived, rows, received, sent)
        # By source, then expert: to be sorted by expert.
        of_expert = torch.arange(len(layer.own), device=x.device).repeat(run.ranks)
        of_row = torch.repeat_interleave(of_expert, theirs, output_size=sum(received))
        by_expert = of_row.argsort(stable=True)
        mine = experts(layer, arrived[by_expert], theirs.view(run.ranks, -1).sum(0))
        arrived[by_expert] = mine
        results = torch.empty_like(rows)
        dist.all_to_all_single(results, arrived, sent, received)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return y.index_add_(0, order // layer.top_k, results * weights.flatten()[order].unsqueeze(1)).to(x.dtype)


def read_splits(layer: Layer, counts: torch.Tensor, theirs: torch.Tensor) -> Splits:
    ranks = layer.run.ranks
    return counts.view(ranks, -1).sum(1).tolist(), theirs.view(ranks, -1).sum(1).tolist()
