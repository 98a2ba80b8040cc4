"""Backward passes of several ranks: which received rows a rank keeps, or has sent again, and what the kernels are told
of these rows."""

from __future__ import annotations

import json

import flashmoe
import pytest
import torch
from fake_gpu import SIZES, E, H, I, K, OnGpu, driver, launched, on_gpu
from fake_group import kept_by_halves, on_ranks, pretend, rows_of_halves
from flashmoe import jit
from flashmoe.engines.base import Gradients
from flashmoe.placement import hybrid
from flashmoe.spec import Options
from flashmoe.spec.tensors import Tensors


@pytest.mark.parametrize("redispatch", [False, True])
def test_ranks_that_train(cubin, redispatch):
    """What each of two ranks keeps, where its rows are moved, and what its backward pass is told. With `redispatch`,
    the backward pass sends x again, and no received rows of x are kept."""
    found = on_ranks(train_on_rank, [(cubin, redispatch)] * 2)
    tokens = [100, 37]
    for rank, (compiled, counted, size, forward, move, kept, backward) in enumerate(found):
        rows, received = rows_of_halves(tokens, rank)
        room = [rows, received * (not redispatch), max(tokens)]
        assert counted == [rows, received, 1, *room]
        assert compiled == [jit.Variant(keeps=True, group=True), jit.Variant(backward=True, group=True)]
        at_x, at_numbers, at_first, at_ids = kept_by_halves(room)
        tiles = rows // 256 + min(E // 2, rows)
        at = [kept, 0 if redispatch else kept + at_x, kept + at_numbers, kept + at_first]
        assert move == [*at, *room, 132 + tiles]
        assert size == at_ids + 8 * tokens[rank] * K
        assert backward["keepers"] > 0 and forward["keepers"] == (0 if redispatch else backward["keepers"])
        assert (forward["config_groups"] >> 30, backward["config_groups"] >> 30) == (0, 3 if redispatch else 2)
        of, group = backward["backward"], backward["group"]
        assert (of["kept"], of["kept_ids"]) == (kept, kept + at_ids)
        at_received = of["weighted"] + tiles * 256 * 2 * I
        at_gather = at_received + 2 * H * received * (1 + redispatch)
        x = at_received + 2 * H * received if redispatch else kept + at_x
        assert group[:8] == [
            at_received, kept + at_numbers, max(tokens), rows, received, x, kept + at_first, at_gather,
        ]  # fmt: skip
        assert of["weight_parts"] == at_gather + 4 * 256 * tiles
        assert group[10] == 4 * K
        assert (group[9] > 2 * H * 100) == redispatch
    first, second = found
    assert first[3]["config"] == second[3]["config"] and first[6]["config"] == second[6]["config"]
    assert first[3]["config"] != first[6]["config"]


def train_on_rank(rank, ranks, name, environment, cubin, redispatch):
    """Makes a call that keeps, and its backward pass. Returns the kernels, sizes, and what the kernels were told."""
    compiled = pretend([rank], cubin, environment)
    tokens = (100, 37)[rank]
    who = {"device": rank, "rank": rank, "ranks": ranks, "name": name, "redispatch": redispatch}
    with flashmoe.Context(engine="cuda", timeout=20.0, **who, **SIZES) as made:
        tensors = Tensors(
            x=on_gpu(tokens, H),
            gate_up_proj=on_gpu(E // ranks, 2 * I, H),
            down_proj=on_gpu(E // ranks, H, I),
            topk_ids=on_gpu(tokens, K, dtype=torch.int32),
            topk_weights=on_gpu(tokens, K, dtype=torch.float32),
        )
        options = Options(placement=made.placement)
        _, kept, counted = made._engine.call_and_keep(tensors, options)
        forward, move = launched(), json.loads(driver.fake_last_move())
        named = {each: tensor for each, tensor in tensors._asdict().items() if tensor is not None}
        wanted = {each: torch.empty(named[each].shape, dtype=named[each].dtype).as_subclass(OnGpu) for each in named}
        del wanted["topk_ids"]
        made._engine.backward(kept, counted, options, Gradients(named | {"y": on_gpu(tokens, H)}, wanted, False))
        return compiled, counted.tolist(), kept.numel(), forward, move, kept.data_ptr(), launched()


def test_ranks_that_train_a_shared_expert_and_slices(cubin):
    """Routed experts and a shared expert in two slices each. Tiles of the shared expert's second slice are the last."""
    for compiled, counted, size, backward, ids_at, tokens in on_ranks(train_in_slices, [(cubin,)] * 2):
        how = {"group": True, "sliced": True}
        assert compiled == [jit.Variant(keeps=True, **how), jit.Variant(backward=True, **how)]
        assert size - ids_at == 8 * tokens * (2 * K + 1)
        tiles = backward["slice_tiles"]
        own_rows = counted[0] - tokens
        assert tiles == own_rows // 256 + E + 1 and own_rows >= tokens
        assert backward["intermediate_rows"]["dims"] == [I, (tiles + -(-tokens // 256)) * 256]


def train_in_slices(rank, ranks, name, environment, cubin):
    """Like train_on_rank(), with experts in two slices of I / 2 columns, and a shared expert in two such slices."""
    compiled = pretend([rank], cubin, environment)
    tokens = (100, 300)[rank]
    settings = {**SIZES, "slices": 2, "shared_intermediate": 2 * I, "timeout": 20.0}
    with flashmoe.Context(engine="cuda", device=rank, rank=rank, ranks=ranks, name=name, **settings) as made:
        tensors = Tensors(
            x=on_gpu(tokens, H),
            gate_up_proj=on_gpu(E, I, H),
            down_proj=on_gpu(E, H, I // 2),
            topk_ids=on_gpu(tokens, K, dtype=torch.int32),
            topk_weights=on_gpu(tokens, K, dtype=torch.float32),
            shared_gate_up=on_gpu(2 * I, H),
            shared_down=on_gpu(H, I),
        )
        options = Options(slices=2, placement=hybrid(E, 2, 2))
        _, kept, counted = made._engine.call_and_keep(tensors, options)
        named = {each: tensor for each, tensor in tensors._asdict().items() if tensor is not None}
        made._engine.backward(
            kept, counted, options, Gradients(named | {"y": on_gpu(tokens, H)}, {"x": on_gpu(tokens, H)}, False)
        )
        seen = launched()
        at = seen["backward"]["kept_ids"] - kept.data_ptr()
        return compiled, counted.tolist(), kept.numel(), seen, at, tokens
