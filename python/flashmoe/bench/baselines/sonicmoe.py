"""SonicMoE's layer, with a given routing.

Written by reading its source (``sonicmoe/functional/__init__.py``, `moe_general_routing_inputs`): token indices ascend,
matrices are [2I, H, E] and [H, I, E] with E outermost in memory, gate and up rows alternate. It has not been run here:
no machine of ours has had a GPU and SonicMoE at once.
"""

from __future__ import annotations

from ..layer import TURNS, Layer
from ..run import Call
from .needs import Needs
from .pytorch import route

NEEDS = Needs(("sonicmoe",), gpu=True, one_rank=True, gated=True)


def call(layer: Layer) -> Call:
    import torch
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    gate, up = layer.w1.chunk(2, 1)
    in_turn = torch.stack([gate, up], 2).flatten(1, 2)  # a copy, made once
    w1, w2 = in_turn.permute(1, 2, 0), layer.w2.permute(1, 2, 0)
    tokens = torch.arange(layer.sizes.tokens, dtype=torch.int32, device=layer.run.device)
    tokens = tokens.repeat_interleave(layer.top_k)
    stream = torch.cuda.current_stream().cuda_stream

    def forward(i: int) -> torch.Tensor:
        x = layer.xs[i % TURNS]
        weights, ids = route(layer, x)
        chosen = ids.flatten().int()
        with torch.no_grad():
            y, _ = moe_general_routing_inputs(
                x,
                weights.flatten(),
                tokens,
                chosen,
                w1,
                None,
                w2,
                None,
                layer.experts,
                stream,
                ActivationType.SWIGLU,
                True,
            )
        return y

    return forward
