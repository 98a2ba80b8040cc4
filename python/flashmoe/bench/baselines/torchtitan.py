"""torchtitan's routed experts of one rank: rows are sorted by expert, go through three of PyTorch's grouped GEMMs, and
are added up in a fixed order.

Written by reading torchtitan 0.3.0 (``torchtitan/models/common/moe.py``, ``token_dispatcher.py``). torchtitan keeps
gate and up matrices separate. Here they are views of the layer's one matrix; torchtitan's grouped GEMM accepts them.
"""

from __future__ import annotations

from ..layer import TURNS, Layer
from ..run import Call
from .needs import Needs
from .pytorch import route

NEEDS = Needs(("torchtitan", "spmd_types", "triton"), gpu=True, one_rank=True, gated=True, bfloat16=True)


def call(layer: Layer) -> Call:
    import torch
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    sizes = layer.sizes
    with torch.device("meta"):
        routed = RoutedExperts(
            RoutedExperts.Config(
                inner_experts=GroupedExperts.Config(
                    dim=sizes.hidden, hidden_dim=sizes.intermediate, num_experts=sizes.experts
                ),
                token_dispatcher=LocalTokenDispatcher.Config(num_experts=sizes.experts, top_k=sizes.top_k),
            )
        )
    experts = routed.inner_experts
    gate, up = layer.w1.chunk(2, 1)
    for name, matrices in (("w1_EFD", gate), ("w3_EFD", up), ("w2_EDF", layer.w2)):
        setattr(experts, name, torch.nn.Parameter(matrices, requires_grad=False))

    def forward(i: int) -> torch.Tensor:
        x = layer.xs[i % TURNS]
        weights, ids = route(layer, x)
        chosen = torch.zeros(len(x), layer.experts, dtype=torch.bool, device=x.device).scatter_(-1, ids, True)
        with torch.no_grad():
            return routed(x.unsqueeze(0), weights.unsqueeze(0), ids.unsqueeze(0), chosen.sum(0)).squeeze(0)

    return forward
