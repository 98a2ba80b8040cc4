"""Rows of a layer in float64, with which measured layers' results are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def expert_row(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, gated: bool) -> torch.Tensor:
    """One expert's result [H] for one token [H], in fp64."""
    from torch.nn.functional import gelu, silu

    h = w1.double() @ x.double()
    if gated:
        g, u = h.chunk(2)
        h = silu(g) * u
    else:
        h = gelu(h)
    return w2.double() @ h


def reference(x, router, w1, w2, top_k: int, gated: bool, own: Sequence[int]) -> torch.Tensor:
    """The layer's result for the tokens `x` in fp64, after routing in fp32 as in the kernel. Only the terms of the
    experts `own` are summed: w1 and w2 are the weights of these."""
    import torch

    p = torch.softmax(x.float() @ router.float().t(), -1)
    weights, ids = p.topk(top_k, -1)
    weights = (weights / weights.sum(-1, keepdim=True)).double()
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t in range(len(x)):
        for k in range(top_k):
            if (expert := int(ids[t, k])) in own:
                i = own.index(expert)
                out[t] += weights[t, k] * expert_row(x[t], w1[i], w2[i], gated)
    return out


def sampled_error(x, y, router, own, w1, w2, top_k: int, gated: bool) -> float:
    """The largest relative error over the ranks, from up to four tokens of each. For each of these tokens, every rank
    computes the terms of its own experts, and an all-reduce adds the terms up."""
    import torch
    import torch.distributed as dist

    sample = torch.arange(0, len(x), max(1, len(x) // 4), device=x.device)[:4]
    worst = 0.0
    for source in range(dist.get_world_size()):
        rows, results = x[sample].contiguous(), y[sample].contiguous()
        dist.broadcast(rows, source)
        dist.broadcast(results, source)
        expected = reference(rows, router, w1, w2, top_k, gated, own)
        dist.all_reduce(expected)
        worst = max(worst, ((results.double() - expected).norm() / expected.norm()).item())
    return worst
