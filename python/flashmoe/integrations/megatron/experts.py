"""The parameters of a layer's experts, as the operator reads them and as Megatron-Core trains and saves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from torch import Tensor

from ... import nn
from ...spec import LayerSpec
from .recognise import refusal

KEYS = {
    "gate_up_proj": "linear_fc1.weight",
    "down_proj": "linear_fc2.weight",
    "gate_up_proj_bias": "linear_fc1.bias",
    "down_proj_bias": "linear_fc2.bias",
}
"""The names of the parameters in distributed checkpoints of Megatron's `SequentialMLP`. There the tensors are those of
all experts, [E, ...], with the shapes of the parameters here."""


class Experts(nn.Experts):
    """Parameters named as in `flashmoe.nn.Experts`. The configuration's functions draw their values. If experts are
    spread over ranks, Megatron learns this from the parameters' attribute `allreduce`, which is then False."""

    def __init__(
        self, ids: list[int], layer: LayerSpec, *, bias: bool, config: Any, replica: int, device: torch.device
    ) -> None:
        self._config, self._replica = config, replica
        with device:
            super().__init__(ids, layer, bias=bias, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1

    def reset_parameters(self) -> None:
        """Draws new weights, and clears the biases.

        On a GPU, the weights come from Megatron's generator for experts, and each rank has its own. On a CPU, they come
        from PyTorch's generator, and every rank draws the weights of all E experts, so that a layer has the same
        weights on any number of ranks.
        """
        config = self._config
        if not config.perform_initialization:
            return
        on_gpu = self.down_proj.is_cuda
        generator = get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()) if on_gpu else nullcontext()
        with torch.no_grad(), generator:
            drawn = self.ids if on_gpu else range(self.total)
            for name, init in (("gate_up_proj", config.init_method), ("down_proj", config.output_layer_init_method)):
                for place in self._places(getattr(self, name), drawn):
                    init(place)
        for bias in (self.gate_up_proj_bias, self.down_proj_bias):
            if bias is not None:
                torch.nn.init.zeros_(bias)

    def _places(self, parameter: Tensor, experts: Any) -> Iterator[Tensor]:
        """For each of `experts`, the matrix into which its weights are drawn. For an expert of another rank, this is a
        matrix that nobody uses."""
        for expert in experts:
            yield parameter[self.ids.index(expert)] if expert in self.ids else torch.empty_like(parameter[0])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """This rank's part of the tensors that `SequentialMLP` saves for all experts, under the same keys."""
        if (metadata or {}).get("singleton_local_shards", False):
            raise refusal("singleton_local_shards", "False in a distributed checkpoint's metadata", "True")
        axis, share = len(sharded_offsets), len(self.ids)
        place = (axis, self.ids[0] // share, self.total // share)
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{KEYS[name]}",
                parameter,
                *sharded_offsets,
                place,
                replica_id=(0, 0, self._replica),
                prepend_axis_num=axis,
            )
            for name, parameter in self.named_parameters(recurse=False)
        }
