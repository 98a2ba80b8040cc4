"""The layer in plain PyTorch, eager: softmax, top-k, sort, all-to-all, two grouped GEMMs, all-to-all, weighted sum.

Among several ranks, the host reads how many rows go to each rank, because an all-to-all of uneven parts needs these
numbers. Gradients come from autograd. Two that PyTorch lacks are written here: the gradient of an all-to-all of uneven
parts, and the gradient of a product of 16-bit factors whose result is in float32 (the logits).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..layer import TURNS, Layer
from ..run import Call
from .needs import Needs

if TYPE_CHECKING:
    import torch

Splits = tuple[list[int], list[int]]
"""Numbers of rows: to each rank, and from each rank."""

NEEDS = Needs(even=True, bfloat16=True)


def call(layer: Layer) -> Call:
    return lambda i: forward(layer, layer.xs[i % TURNS])


def route(layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids [T, K], from float32 logits."""
    import torch

    if x.is_cuda and x.dtype != torch.float32:
        logits = _functions()["logits"](x, layer.router)
    else:
        logits = x.float() @ layer.router.float().t()
    weights, ids = torch.softmax(logits, -1).topk(layer.top_k, -1)
    return weights / weights.sum(-1, keepdim=True), ids


def experts(layer: Layer, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The results of this rank's experts for `rows`, which are sorted by expert: `counts` says how many each expert
    has."""
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
    """The layer's result for x. With `splits` (`read_splits`) the host reads nothing."""
    import torch
    import torch.distributed as dist

    run = layer.run
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
        arrived = _functions()["exchange"](rows, sent, received)
        # The rows arrive sorted by source rank, then by expert. The grouped GEMMs need them sorted by expert.
        of_expert = torch.arange(len(layer.own), device=x.device).repeat(run.ranks)
        of_row = torch.repeat_interleave(of_expert, theirs, output_size=sum(received))
        by_expert = of_row.argsort(stable=True)
        mine = experts(layer, arrived[by_expert], theirs.view(run.ranks, -1).sum(0))
        arrived[by_expert] = mine
        results = _functions()["exchange"](arrived, received, sent)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return y.index_add_(0, order // layer.top_k, results * weights.flatten()[order].unsqueeze(1)).to(x.dtype)


def read_splits(layer: Layer, counts: torch.Tensor, theirs: torch.Tensor) -> Splits:
    ranks = layer.run.ranks
    return counts.view(ranks, -1).sum(1).tolist(), theirs.view(ranks, -1).sum(1).tolist()


@functools.cache
def _functions() -> dict[str, Callable[..., torch.Tensor]]:
    """Functions with gradients of their own. They are made here because this module imports PyTorch only when used."""
    import torch
    import torch.distributed as dist

    class Exchange(torch.autograd.Function):
        """Sends `sent[q]` rows to rank q, and receives `received[q]` from it. The gradients go the other way."""

        @staticmethod
        def forward(ctx, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
            ctx.splits = sent, received
            arrived = rows.new_empty(sum(received), rows.shape[1])
            dist.all_to_all_single(arrived, rows, received, sent)
            return arrived

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            sent, received = ctx.splits
            returned = gradient.new_empty(sum(sent), gradient.shape[1])
            dist.all_to_all_single(returned, gradient.contiguous(), sent, received)
            return returned, None, None

    class Logits(torch.autograd.Function):
        """Logits in float32, from factors of 16 bits."""

        @staticmethod
        def forward(ctx, x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, router)
            return torch.mm(x, router.t(), out_dtype=torch.float32)

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, router = ctx.saved_tensors
            gradient = gradient.to(x.dtype)
            return gradient @ router, gradient.t() @ x

    return {"exchange": Exchange.apply, "logits": Logits.apply}
