"""PyTorch's layer as a CUDA graph of one batch.

Among several ranks, the graph is fixed to the numbers of rows that this one batch sends to each rank. A model could not
use such a graph, because its batches differ. So the graph's time is less than what the layer would cost in a model.
"""

from __future__ import annotations

from ..layer import Layer
from ..run import Call
from . import pytorch
from .needs import Needs

NEEDS = Needs(gpu=True, even=True, bfloat16=True)


def call(layer: Layer) -> Call:
    import torch
    import torch.distributed as dist

    x, splits = layer.xs[0], None
    if layer.run.ranks > 1:
        _, ids = pytorch.route(layer, x)
        counts = torch.bincount(ids.flatten(), minlength=layer.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        splits = pytorch.read_splits(layer, counts, theirs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            pytorch.forward(layer, x, splits)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = pytorch.forward(layer, x, splits)

    def replay(_: int) -> torch.Tensor:
        graph.replay()
        return y

    return replay
