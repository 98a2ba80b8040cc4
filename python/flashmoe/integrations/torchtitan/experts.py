"""Torchtitan's routed experts as one call of the operator, with torchtitan's parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from ...contexts.context import context_id
from ...contexts.growing import GrowingContext, Shape, growing_context, rounded_tokens
from ...errors import InvalidArgument
from ...pytorch.autocast import type_of_products
from ...pytorch.operator import call, moe_backward, moe_kept
from ...spec import Options
from ...spec.tensors import Tensors
from ..operands import as_taken
from ..rooms import GroupRoom, room_of

_NAMES = ("x", "gate_up_proj", "down_proj", "topk_ids", "topk_weights")


class FlashMoEExperts(GroupedExperts):
    """The parameters of torchtitan's `GroupedExperts`: `w1_EFD` (gate), `w3_EFD` (up), `w2_EDF` (down), with the
    initial weights and shardings that torchtitan gives them. The operator is called in this module's forward. So if
    this module alone is wrapped, for example by FSDP2, the wrapper has gathered the parameters when the operator reads
    them."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, number: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The result [T, D] for x [T, D], computed in x's type, with ids [T, K] among all E experts and weights [T,
        K]."""
        w1, w2, w3 = (_local(each).to(x.dtype) for each in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        if torch.is_grad_enabled() and any(each.requires_grad for each in (x, weights, w1, w2, w3)):
            return _Merged.apply(number, x, w1, w3, w2, ids, weights)
        return call(number, Tensors(x, torch.cat([w1, w3], 1), w2, topk_ids=ids, topk_weights=weights), Options())


class FlashMoERoutedExperts(RoutedExperts):
    """Takes the place of torchtitan's `RoutedExperts`, with its arguments, shardings and parameters. The token
    dispatcher of the configuration is not made, and the choice of dispatcher makes no difference."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def __init__(self, config: Config) -> None:
        super(RoutedExperts, self).__init__()
        if type(config.inner_experts) is not FlashMoEExperts.Config:
            # A converter has changed the configuration. FlashMoE would compute the experts without this change.
            got = type(config.inner_experts)
            raise refusal("inner_experts", FlashMoEExperts.Config.__qualname__, f"{got.__module__}.{got.__qualname__}")
        self.inner_experts = config.inner_experts.build()
        self._intermediate = config.inner_experts.hidden_dim
        self._group: Any = None
        self._ranks = 1
        self._room: GroupRoom | GrowingContext | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """As torchtitan's: shards the parameters, and spreads experts over the mesh ``ep``, if there is one."""
        super(RoutedExperts, self).parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is None and parallel_dims.tp_enabled:
            raise refusal("tensor_parallel_degree", "1 without expert parallelism", parallel_dims.tp)
        if mesh is not None and mesh.size() > 1:
            self._group, self._ranks = mesh.get_group(), mesh.size()

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """The results [B, L, D] for this rank's tokens. Every rank of ``ep`` must call, with the same number of tokens.
        The numbers of tokens by expert are not read. Within ``torch.autocast``, x and the weights are cast as those of
        `torch.nn.Linear` are; scores in float32 stay so.

        Raises
        ------
        InvalidArgument, HeapError, GroupError, PeerTimeout, FlashMoEError, NotImplementedError
            As `flashmoe.moe`.
        """
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "compile: expected blocks with FlashMoE's experts to run in eager mode, got torch.compile; "
                "leave 'model' out of compile.components"
            )
        x = x_BLD.reshape(-1, x_BLD.shape[-1]).to(type_of_products(x_BLD)).contiguous()
        ids, scores = (each.reshape(len(x), each.shape[-1]) for each in (topk_expert_ids_BLK, topk_scores_BLK))
        number = self._context_number(x, ids.shape[1])
        y = self.inner_experts(number, x, ids.contiguous(), as_taken(scores, x.dtype).contiguous())
        return y.view(x_BLD.shape)

    def _context_number(self, x: Tensor, top_k: int) -> int:
        """The number of the context for a call with x, which all layers of a shape share: a context of this rank alone,
        or of the group."""
        experts, device = self.inner_experts, x.device.index if x.is_cuda else None
        dtype = str(x.dtype).removeprefix("torch.")
        shape = Shape(device, dtype, x.shape[1], self._intermediate, experts.num_experts, top_k)
        alone = self._ranks == 1
        if self._room is None or self._room.shape != shape:
            self._room = growing_context(shape) if alone else room_of(self._group, shape)
        return self._room.number if alone else context_id(self._room.context(rounded_tokens(len(x), device)))


class _Merged(torch.autograd.Function):
    """A call with w1 and w3 joined into one tensor, as the operator reads them. The backward pass joins them once more.
    If the joined tensor were kept instead, every layer would hold a copy of weights that FSDP frees."""

    @staticmethod
    def forward(
        ctx: Any, number: int, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        y, *_, kept, counted = moe_kept(number, x, torch.cat([w1, w3], 1), w2, topk_ids=ids, topk_weights=weights)
        ctx.number = number
        ctx.save_for_backward(kept, counted, x, w1, w3, w2, ids, weights)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *of_call, x, w1, w3, w2, ids, weights = ctx.saved_tensors
        _, of_x, of_w1, of_w3, of_w2, _, of_weights = ctx.needs_input_grad
        inputs = [x, torch.cat([w1, w3], 1), w2, ids, weights]
        needed = dict(zip(_NAMES, (of_x, of_w1 or of_w3, of_w2, False, of_weights), strict=True))
        wanted = [name for name, is_needed in needed.items() if is_needed]
        results = dict(zip(wanted, moe_backward(ctx.number, grad, None, *of_call, inputs, _NAMES, wanted), strict=True))
        gate, up = results["gate_up_proj"].chunk(2, 1) if "gate_up_proj" in results else (None, None)
        return None, results.get("x"), gate, up, results.get("down_proj"), None, results.get("topk_weights")


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def refusal(name: str, expected: str, got: object) -> InvalidArgument:
    return InvalidArgument(
        f"{name}: expected {expected}, got {got}; FlashMoE does not compute these experts of torchtitan"
    )
