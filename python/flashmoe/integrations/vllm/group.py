"""The context of vLLM's expert-parallel group, and which tokens a rank brings to its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.envs as envs
from vllm.distributed import get_ep_group, get_tp_group
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager, determine_expert_map

from ...contexts.context import Context
from ...contexts.growing import GrowingContext, Result, Shape
from ...errors import GroupError
from ...pytorch.replicated import Replicas


class GroupContext(GrowingContext):
    """A context of all ranks of vLLM's expert-parallel group, for layers of one shape. It does not grow.

    Making one is collective. Its number follows from the shape, so code that vLLM has compiled and keeps on disk holds
    the same number in every process. A call that fails breaks the context for good, and vLLM's engine ends: the ranks
    could not agree on another context, because vLLM does not tell them at which call one of them failed.
    """

    def __init__(self, group: Any, shape: Shape, most_tokens: int, placement: tuple[int, ...]) -> None:
        self._kind = ("vllm's group", most_tokens, *placement)
        super().__init__(shape)
        self._context = Context.from_torch(
            group,
            max_tokens=most_tokens,
            placement=placement,
            # A token's result has the same bits however the router spreads its batch.
            return_mode="direct",
            # Ranks may reach their first call far apart: one compiles what another finds on disk.
            timeout=float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS),
            **shape._asdict(),
        )

    def with_room_for(self, tokens: int) -> Context:
        """The context, whatever T. Raises `GroupError` in a forked process, which is no rank of the group."""
        if self._context is None:
            raise GroupError(
                "context: expected a call in the process that made the context, got one in a forked process"
            )
        return self._context

    def use(self, tokens: int, call: Callable[[Context], Result]) -> Result:
        return call(self.with_room_for(tokens))


def replicas_of(moe: FusedMoEConfig) -> Replicas | None:
    """The ranks that hold the same tokens as this rank, and bring a share of them each: those of its tensor-parallel
    group, unless the model spreads tokens over them (vLLM's sequence parallelism). None: this rank brings all that it
    holds."""
    group = get_tp_group() if moe.use_ep and not moe.is_sequence_parallel else None
    return None if group is None or group.world_size == 1 else Replicas(group.cpu_group)


_known: dict[tuple[Shape, int, tuple[int, ...]], GroupContext] = {}
"""vLLM has one expert-parallel group in a process, from its start to its end."""


def group_context(shape: Shape, moe: FusedMoEConfig, experts: ExpertMapManager) -> GroupContext:
    """The context for layers of that shape, whose experts are spread as vLLM's `experts` says. Collective where there
    is none yet: the ranks load the same layers in the same order."""
    spread = [
        determine_expert_map(moe.ep_size, rank, moe.num_experts, experts.placement_strategy)[1]
        for rank in range(moe.ep_size)
    ]
    owners = tuple((torch.stack(spread) >= 0).int().argmax(dim=0).tolist())
    replicas = replicas_of(moe)
    key = shape, moe.max_num_tokens if replicas is None else replicas.most(moe.max_num_tokens), owners
    if key not in _known:
        _known[key] = GroupContext(get_ep_group().cpu_group, *key)
    return _known[key]
