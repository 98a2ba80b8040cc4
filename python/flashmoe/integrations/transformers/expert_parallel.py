"""Transformers' own expert parallelism, in which FlashMoE sends the tokens: ``ep_implementation="flashmoe"``.

Transformers spreads the experts over ranks, by ``DistributedConfig(ep_size=...)``. On every rank it calls this
implementation with what the rank's router has chosen. Only releases from 5.23 on have this interface.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from ...contexts.context import Context, context_id
from ...contexts.growing import Shape, rounded_tokens
from ...pytorch.operator import call
from ...pytorch.replicated import Replicas
from ..rooms import GroupRoom, room_of
from .experts import NAME, mark_as_share, options_of, routed_operands
from .recognise import recognise


def register() -> None:
    """Makes the implementation known to Transformers. Idempotent."""
    EPImplementationInterface.register(NAME, ExpertParallel)


class ExpertParallel(EPImplementation):
    """Computes the experts of one module, whose tensors are this rank's share, by calls of all ranks of `ep_mesh`.

    Ranks of one `tp_mesh` hold the same batch: each brings its slice of the batch, and all get the whole result. Other
    ranks bring batches of any size, also empty ones.

    Raises `InvalidArgument` for experts that `flashmoe.integrations.transformers.recognise` does not take.
    """

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        mark_as_share(experts, self.num_local_experts)
        recognise(experts, is_share=True)
        self._experts = experts
        self._replicas = Replicas(tp_mesh.get_group()) if tp_mesh.size() > 1 else None
        self._room: GroupRoom | None = None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H]: results for hidden_states [T, H], the batch of this rank's `tp_mesh`.

        top_k_index [T, K] has ids among all E experts; top_k_weights [T, K] is as in `experts_forward`. Every rank must
        call.
        """
        tokens, replicas = len(hidden_states), self._replicas
        share = slice(0, tokens) if replicas is None else replicas.share(tokens)
        rows = tokens if replicas is None else replicas.most(tokens)
        mine = [each[share] for each in (hidden_states, top_k_index, top_k_weights)]
        options = recognise(self._experts, is_share=True)
        tensors = routed_operands(self._experts, options, *mine)
        context = self._context(options.sizes(self._experts), mine, rows)
        y = call(context_id(context), tensors, options_of(self._experts, options))
        return y if replicas is None else replicas.gathered(y, tokens)

    def _context(self, sizes: tuple[int, int], mine: list[Tensor], rows: int) -> Context:
        """The group's context, with room for the most tokens that any rank brings to this call."""
        x, index, _ = mine
        if not self.shares_batch:  # if all ranks share a batch, they know its number of tokens already
            most = torch.tensor(rows, device=x.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.ep_mesh.get_group())
            rows = int(most)
        device = x.device.index if x.device.type == "cuda" else None
        experts = self.num_local_experts * self.ep_mesh.size()
        shape = Shape(device, str(x.dtype).removeprefix("torch."), *sizes, experts, index.shape[1])
        if self._room is None or self._room.shape != shape:
            self._room = room_of(self.ep_mesh.get_group(), shape)
        return self._room.context(rounded_tokens(rows, device))
