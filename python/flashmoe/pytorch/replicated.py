"""Tokens that several ranks hold alike: each rank brings its share of them to a call, and all ranks get all results."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .moving import place_in


class Replicas:
    """The ranks of a process group of ``torch.distributed`` that hold the same tokens. (None: all ranks.)"""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank, self.count = place_in(group, "token_group")

    def most(self, tokens: int) -> int:
        """The most tokens that a rank brings, of T."""
        return -(-tokens // self.count)

    def share(self, tokens: int) -> slice:
        """Which of T tokens this rank brings. The last ranks may bring fewer tokens than others, or none."""
        rows = self.most(tokens)
        return slice(min(self.rank * rows, tokens), min((self.rank + 1) * rows, tokens))

    def gathered(self, part: Tensor, tokens: int) -> Tensor:
        """The rows [T, ...] of all T tokens, from all ranks' parts, each of which has the rows of one rank's share.
        Collective."""
        return part if self.count == 1 else _Gathered.apply(part, self, tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        """The same object, because copies of a layer share the group."""
        return self


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, replicas: Replicas, tokens: int) -> Tensor:
        rows = replicas.most(tokens)
        padded = torch.nn.functional.pad(part, (0, 0, 0, rows - len(part)))
        whole = part.new_empty(rows * replicas.count, part.shape[1])
        dist.all_gather_into_tensor(whole, padded.contiguous(), group=replicas.group)
        return whole[:tokens]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Each rank would have the gradients of its share alone, and no rank the whole gradient of the router.
        raise NotImplementedError(
            "flashmoe.nn.MoE: FlashMoE has no backward pass for tokens that several ranks hold alike "
            "(tokens='replicated'); call the layer under torch.no_grad(), or give each rank its own tokens"
        )
