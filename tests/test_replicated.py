"""Replicated tokens: ranks of a token group hold the same tokens, each computes a share, and all get all results."""

from __future__ import annotations

import copy
import os
from typing import Any

import flashmoe
import pytest
import torch
import torch.distributed as dist
from flashmoe.errors import InvalidArgument
from flashmoe.nn import MoE
from flashmoe.placement import hybrid
from gloo import Gloo
from problems import Problem, random_problem
from test_slices import Sliced

SIZES = {"hidden": 16, "intermediate": 8, "experts": 6, "top_k": 2}


def _results(rank: int, problem: Problem, batches: list[list[torch.Tensor]], slices: int, counts: bool) -> Any:
    """The results of a layer with replicated tokens for each batch, and the layer's load. A batch has the tokens of
    each pair of ranks. Checks that a rank's share has the bits that a layer with `tokens="own"` gives for it."""
    names = [f"replicated-{os.urandom(6).hex()}"]
    dist.broadcast_object_list(names)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    limits = problem.limits() | {"max_tokens": 40}
    with flashmoe.Context(rank=rank, ranks=4, name=names[0], **limits) as ctx, torch.no_grad():
        options = {"slices": slices, "placement": problem.owners(), "count_load": counts}
        layer = MoE(ctx, **SIZES, **options, tokens="replicated", token_group=pairs[rank // 2])
        own = MoE(ctx, **SIZES, **options)
        torch.manual_seed(0)
        for name, each in layer.state_dict().items():
            each.copy_(torch.randn(each.shape) if "gate.w" in name else torch.randn(each.shape) * 0.3)
        own.load_state_dict(layer.state_dict())
        layer = copy.deepcopy(layer)
        outcomes = []
        for of_pairs in batches:
            x = of_pairs[rank // 2]
            rows = -(-len(x) // 2)
            y, logits = layer(x.reshape(1, *x.shape), return_router_logits=True)
            share = slice(rank % 2 * rows, (rank % 2 + 1) * rows)
            assert y.shape == (1, *x.shape) and logits.shape == (1, len(x), 6)
            mine = own(x[share].contiguous())
            assert mine.numpy().tobytes() == y[0][share].numpy().tobytes()
            assert layer(x).numpy().tobytes() == y.numpy().tobytes()
            outcomes.append((y[0].numpy(), logits[0].numpy()))
        load = None if layer.load is None else layer.load.numpy()
    return outcomes, load


@pytest.mark.parametrize("slices", [1, 2])
def test_every_rank_gets_the_results_of_its_group_s_tokens(pool, tmp_path, slices: int):
    whole = random_problem(1, [4] * 4, **SIZES)
    problem = whole if slices == 1 else Sliced.of(whole, 2, hybrid(6, 4, 2))
    generator = torch.Generator().manual_seed(1)
    counts = [(8, 6), (7, 5), (1, 0), (0, 0), (40, 1)]
    batches = [[torch.randn(n, 16, generator=generator) for n in pair] for pair in counts]
    outcomes = Gloo(pool, tmp_path)(4, _results, problem, batches, slices, True)
    for first, second in ((0, 1), (2, 3)):  # the ranks of a pair
        for mine, theirs in zip(outcomes[first][0], outcomes[second][0], strict=True):
            assert mine[0].tobytes() == theirs[0].tobytes() and mine[1].tobytes() == theirs[1].tobytes()
    chosen = sum(sum(pair) for pair in counts) * 2 * 2  # each batch is computed twice, with two experts per token
    assert sum(load for _, load in outcomes).sum() == chosen


def _refused(rank: int, problem: Problem) -> list[str]:
    others = dist.new_group([1])
    messages = []
    with flashmoe.Context(**problem.limits()) as ctx:
        replicated = {"tokens": "replicated", "token_group": others}
        for options in ({"tokens": "all"}, {"token_group": others}, *([replicated] if rank == 0 else [])):
            with pytest.raises(InvalidArgument) as caught:
                MoE(ctx, **SIZES, **options)
            messages.append(str(caught.value))
    return messages


def test_what_is_refused(pool, tmp_path):
    problem = random_problem(2, [4], **SIZES)
    first, second = Gloo(pool, tmp_path)(2, _refused, problem)
    assert second == [
        "tokens: expected one of own, replicated, got 'all'",
        "token_group: expected none with tokens='own', got one",
    ]
    assert first == [*second, "token_group: expected a process group that this rank is in, got another"]
    with (
        flashmoe.Context(**problem.limits()) as ctx,
        pytest.raises(InvalidArgument, match=r"^token_group: expected torch\.distributed to be initialised"),
    ):
        MoE(ctx, **SIZES, tokens="replicated")
