"""FSDP2 with weights in float32 and products in bfloat16, on two ranks.

Losses and parameters agree with those of eager experts in the same wrapper, up to the noise of tests/loss_noise.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import pytest
import torch
import torch.distributed as dist
from flashmoe import Context
from flashmoe.launch import RankPool
from flashmoe.nn import MoE
from gloo import Gloo
from loss_noise import Run, check_within_noise, parameters_of, run_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytest.importorskip("transformers")

from tiny_moe import tiny_moe

STEPS, SEQUENCES, LENGTH, RANKS = 30, 16, 16, 2
SIZES = {"hidden": 32, "intermediate": 24, "experts": 6, "top_k": 2}


@pytest.fixture
def on_ranks(tmp_path: Path):
    with RankPool(RANKS) as pool:
        yield partial(Gloo(pool, tmp_path), RANKS)


def with_layers(make: Callable[[], MoE]) -> torch.nn.Module:
    """The model with `flashmoe.nn.MoE` in the place of its blocks, with their weights."""
    model = tiny_moe("eager")
    for layer in model.model.layers:
        state = layer.mlp.state_dict()
        layer.mlp = make()
        layer.mlp.load_state_dict(state)
    return model


def sharded(model: torch.nn.Module, apart: bool) -> torch.nn.Module:
    """Wraps the model in FSDP2. `apart`: each rank has experts of its own, and no other rank has a shard of them."""
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    alone = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("replica", "expert"))["replica"]
    wrapped = []
    for layer in model.model.layers:
        if apart:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
            wrapped.append(fully_shard(layer.mlp.experts, mesh=alone, mp_policy=policy))
            wrapped[-1].set_gradient_divide_factor(float(RANKS))
        wrapped.append(fully_shard(layer, **options))
    wrapped.append(fully_shard(model, **options))
    for each in wrapped:
        each.set_force_sum_reduction_for_comms(True)  # gloo cannot reduce to a mean
    return model


def steps(model: torch.nn.Module, rank: int, ranks: int) -> list[float]:
    """Trains on this rank's part of the sequences. Returns the loss of each step, as the mean over all ranks."""
    ids = ((torch.arange(LENGTH)[None] * torch.arange(1, SEQUENCES + 1)[:, None]) % 53 + 1).chunk(ranks)[rank]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def _on_rank(rank: int, how: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    with ExitStack() as opened:
        if how == "nn.MoE over ranks":
            limit = SEQUENCES * LENGTH // RANKS
            ctx = opened.enter_context(Context.from_torch(max_tokens=limit, processors=1, dtype="float32", **SIZES))
            model = with_layers(lambda: MoE(ctx, **SIZES))
        elif how == "nn.MoE":
            model = with_layers(lambda: MoE(**SIZES))
        else:
            model = tiny_moe(how)
        model = sharded(model, apart=how == "nn.MoE over ranks")
        before = parameters_of(model)
        return steps(model, rank, RANKS), before, parameters_of(model)


def run_on_ranks(on_ranks: Callable[..., Any], how: str) -> Run:
    """One run on all ranks. If each rank has experts of its own, the parameters of all ranks are concatenated."""
    by_rank = on_ranks(_on_rank, how)
    losses, *states = by_rank[0]
    assert all(each == losses for each, *_ in by_rank)
    if how == "nn.MoE over ranks":
        for place, state in enumerate(states, 1):
            state |= {name: torch.cat([found[place][name] for found in by_rank]) for name in state if "experts" in name}
    return run_of(losses, *states)


def alone() -> Run:
    """Eager experts in float32, in one process."""
    model = tiny_moe("eager")
    before = parameters_of(model)
    return run_of(steps(model, 0, 1), before, parameters_of(model))


def test_float32_weights_train_in_bfloat16(on_ranks):
    exact, eager = alone(), run_on_ranks(on_ranks, "eager")
    for how in ("flashmoe", "nn.MoE", "nn.MoE over ranks"):
        check_within_noise(run_on_ranks(on_ranks, how), eager, exact)
