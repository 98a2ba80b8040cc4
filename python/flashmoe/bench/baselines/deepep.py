"""DeepEP's dispatch and combine (version 1) around PyTorch's grouped GEMMs.

Written by reading its source (``deep_ep/buffer.py``, ``tests/test_intranode.py``). Dispatch sends a row once to each
rank that has experts of its token, and says for which of the rank's experts the row is. The code below sums the results
of these experts, and DeepEP's combine then adds up the sums of the ranks. This baseline has not been run here: no
machine of ours has had several GPUs and DeepEP at once.
"""

from __future__ import annotations

from ..layer import TURNS, Layer
from ..run import Call
from .needs import Needs
from .pytorch import experts, route

BUFFER_BYTES = 1 << 30
NEEDS = Needs(("deep_ep",), gpu=True, several_ranks=True, even=True, bfloat16=True)


def call(layer: Layer) -> Call:
    import deep_ep
    import torch
    import torch.distributed as dist

    buffer = deep_ep.Buffer(dist.group.WORLD, BUFFER_BYTES, 0)
    own = len(layer.own)

    def forward(i: int) -> torch.Tensor:
        x = layer.xs[i % TURNS]
        weights, ids = route(layer, x)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, layer.experts)
        rows, chosen, of_row, counts, handle, _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        # chosen is [rows, K], with -1 for experts of other ranks. `order` has the (row, k) of this rank's experts,
        # sorted by expert.
        order = torch.where(chosen < 0, own, chosen).flatten().argsort(stable=True)[: sum(counts)]
        source = order // layer.top_k
        results = experts(layer, rows[source], torch.tensor(counts, device=x.device))
        summed = torch.zeros(rows.shape, dtype=torch.float32, device=x.device)
        summed.index_add_(0, source, results * of_row.flatten()[order].unsqueeze(1))
        y, _, _ = buffer.combine(summed.to(x.dtype), handle)
        return y

    return forward
