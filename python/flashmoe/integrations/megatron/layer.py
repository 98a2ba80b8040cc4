"""`FlashMoELayer`, which takes the place of Megatron-Core's `MoELayer`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from ...calls.arguments import layer_of
from ...contexts.context import context_id
from ...contexts.growing import GrowingContext, Shape, growing_context
from ...errors import InvalidArgument
from ...spec import DTYPES, Options, checked_values, element_types
from ..operands import as_taken
from ..rooms import GroupRoom, room_of
from . import recognise
from .experts import Experts


class FlashMoELayer(MoELayer):
    """Megatron-Core's layer with its own router and shared experts, and the operator for everything between.

    Parameters
    ----------
    config, submodules, layer_number, pg_collection:
        As of `MoELayer`. `submodules.experts` is not used: see `experts` for the parameters.
    max_tokens:
        The most tokens S B that a rank of the expert-parallel group brings to a call. Needed and used only if that
        group has several ranks, since the group's memory is made once.
    more:
        Arguments that only later releases of Megatron-Core pass: `is_mtp_layer`, `name`.

    Raises
    ------
    InvalidArgument
        The configuration asks for what the operator does not compute (see `recognise`).
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        max_tokens: int | None = None,
        **more: Any,
    ) -> None:
        recognise.check(config)
        self.submodules = submodules
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        name = more.pop("name", None)
        super(MoELayer, self).__init__(config=config, layer_number=layer_number, pg_collection=groups, **more)
        self._check_groups(groups, max_tokens)
        recomputed = config.recompute_modules if config.recompute_granularity == "selective" else ()
        self.moe_layer_recompute = "moe" in recomputed
        self.shared_experts_recompute = "shared_experts" in recomputed
        self.tp_group = groups.tp
        self.router = submodules.router(config=config, pg_collection=groups, **more)

        self._options = checked_values(Options(**recognise.options_of(config)))
        self._max_tokens = max_tokens
        self._room: GroupRoom | GrowingContext | None = None
        dtype = str(config.params_dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise recognise.refusal("params_dtype", f"one of {', '.join(DTYPES)}", dtype)
        layer = layer_of(
            self._options,
            {"gate_up_bias", "down_bias"} if config.add_bias_linear else (),
            hidden=config.hidden_size,
            intermediate=config.moe_ffn_hidden_size,
            shared=0,
            experts=config.num_moe_experts,
            top_k=config.moe_router_topk,
            **element_types(dtype),
        )
        self.experts = Experts(
            self.local_expert_indices,
            layer,
            bias=config.add_bias_linear,
            config=config,
            replica=groups.expt_dp.rank(),
            device=torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device()),
        )
        if self.use_shared_expert:
            self.shared_experts = _shared_experts(submodules.shared_experts, config, groups, name)

    def _check_groups(self, groups: Any, max_tokens: int | None) -> None:
        if (got := groups.expt_tp.size()) != 1:
            raise recognise.refusal("expert_tensor_parallel_size", "1", got)
        if self.ep_group.size() > 1 and max_tokens is None:
            raise InvalidArgument(
                "max_tokens: expected the most tokens S B of a rank in a call, since experts are spread over "
                f"{self.ep_group.size()} ranks, got None"
            )

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """The layer's output [S, B, H], and no bias. Every rank of the expert-parallel group must call.

        Parameters
        ----------
        hidden_states: [S, B, H]
            Of the parameters' dtype, and on their device.
        intermediate_tensors:
            Must be None: a call is not cut into parts.
        padding_mask: [B, S]
            As Megatron's router takes it: which tokens its losses count. All tokens are computed.

        Raises
        ------
        InvalidArgument, HeapError, GroupError, PeerTimeout, FlashMoEError, NotImplementedError
            As `flashmoe.moe`.
        """
        if intermediate_tensors is not None:
            raise recognise.refusal("intermediate_tensors", "None", type(intermediate_tensors).__name__)
        recognise.check_padding(self.config)
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise recognise.refusal("sequence_parallel", "True where tensor parallelism trains", "False")
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self._compute, False, hidden_states, padding_mask), None
        return self._compute(hidden_states, padding_mask), None

    def _compute(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.router(hidden_states, padding_mask)
        x = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        topk_ids, topk_weights = chosen(probs, routing_map, self.config.moe_router_topk)
        routing = {"topk_ids": topk_ids, "topk_weights": as_taken(topk_weights, x.dtype)}
        adds = bool(self.config.gradient_accumulation_fusion) and hasattr(self.experts.down_proj, "main_grad")
        y = self.experts(self._context_number(x), {"x": x, **routing}, self._options, adds)
        if adds:
            y = _AddedToMainGrad.apply(y, list(self.experts.parameters()))
        y = y.view(hidden_states.shape)
        return y if shared is None else y + shared

    def _context_number(self, x: Tensor) -> int:
        """The number of the context for a call with x, which all layers of a shape share: a context of this rank alone,
        or of the group."""
        config = self.config
        device = x.device.index if x.is_cuda else None
        sizes = (config.hidden_size, config.moe_ffn_hidden_size, config.num_moe_experts, config.moe_router_topk)
        shape = Shape(device, str(x.dtype).removeprefix("torch."), *sizes)
        alone = self.ep_group.size() == 1
        if self._room is None or self._room.shape != shape:
            self._room = growing_context(shape) if alone else room_of(self.ep_group, shape)
        return self._room.number if alone else context_id(self._room.context(self._max_tokens))

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Does nothing for experts: their gradients are made with the others (`delay_wgrad_compute` is refused)."""


def chosen(probs: Tensor, routing_map: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """A token's K experts and their weights, [T, K] each, from what Megatron's router returns: probabilities and the
    map of choices, [T, E] each.

    Ids ascend, so that equal maps give results that are equal bit by bit. If the router has dropped choices, a token
    has fewer than K experts; other experts, with weight 0, fill its row up.
    """
    ids = routing_map.to(torch.uint8).topk(top_k, dim=-1).indices.sort(dim=-1).values
    return ids, probs.gather(-1, ids)


def _shared_experts(spec: Any, config: Any, groups: Any, name: str | None) -> torch.nn.Module:
    options = {"config": config, "pg_collection": groups, "gate": config.moe_shared_expert_gate}
    if isinstance(spec, (ModuleSpec, type)):
        return build_module(spec, **options)
    return spec(**options, name=None if name is None else f"{name}.shared_experts")


class _AddedToMainGrad(torch.autograd.Function):
    """In the backward pass, marks the experts' parameters as Megatron's fused accumulation does: Megatron need not add
    their gradients, because the operator's backward pass, which follows, adds them to `main_grad`.

    Megatron's hooks, which run after that pass, may require that a parameter has a gradient. So each parameter gets one
    of zeros, which has no memory of its own.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, parameters: list[Tensor]) -> Tensor:
        ctx.parameters = parameters
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for parameter in ctx.parameters:
            if parameter.requires_grad and hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = True
                parameter.grad = parameter.new_zeros(()).expand(parameter.shape)
        return grad, None
