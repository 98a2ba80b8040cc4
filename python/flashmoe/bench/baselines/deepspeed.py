"""DeepSpeed's `MoE`: rows are gathered into slots, and experts run one after the other. Each expert has as many slots
as the fullest expert needs.

Written by reading DeepSpeed 0.19.8 (``deepspeed/moe/layer.py``, ``sharded_moe.py``). The options below drop no token,
draw no second expert at random, and add no noise to logits. The caller gives the experts' modules: here two matrix
products, and the activation between them.
"""

from __future__ import annotations

from ..layer import TURNS, Layer
from ..run import Call
from .needs import Needs

NEEDS = Needs(("deepspeed",), one_rank=True)


def call(layer: Layer) -> Call:
    import torch
    from deepspeed.moe.layer import MoE
    from torch.nn.functional import gelu, linear, silu

    class Expert(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = (torch.nn.Parameter(torch.empty(0), requires_grad=False) for _ in range(2))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            h = linear(rows, self.w1)
            if layer.sizes.gated:
                gate, up = h.chunk(2, -1)
                return linear(silu(gate) * up, self.w2)
            return linear(gelu(h), self.w2)

    moe = MoE(
        layer.sizes.hidden,
        Expert(),
        num_experts=layer.experts,
        k=layer.top_k,
        min_capacity=0,
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    ).eval()
    gate, experts = moe.deepspeed_moe.gate, moe.deepspeed_moe.experts.deepspeed_experts
    gate.wg.weight.data = layer.router.float()  # the gate multiplies in float32
    for expert, w1, w2 in zip(experts, layer.w1, layer.w2, strict=True):
        expert.w1.data, expert.w2.data = w1, w2

    def forward(i: int) -> torch.Tensor:
        with torch.no_grad():
            return moe(layer.xs[i % TURNS])[0]

    return forward
